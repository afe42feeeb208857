"""Tars that are cut into chunks have the rows that one pass finds."""

import io
import json
import random
import tarfile
from itertools import chain

import fsspec
import pytest

from mmray.data.formats import webdataset
from mmray.data.formats.webdataset import WebDatasetSource
from mmray.data.rows import NOTICES, BadRow
from mmray.errors import DataError
from mmray.storage.paths import copy_file, to_path

LINK, FOLDER = "a link", "a folder"
COUNTS = (2, 3, 7, 16, 25)
MEMBERS = {
    "plain": [
        (f"{number:03d}.{suffix}", size)
        for number in range(40)
        for suffix, size in (("jpg", 700), ("txt", 9))
    ],
    "long names": [
        (f"{'n' * (80 + number)}/é{number}.{suffix}", 600)
        for number in range(40)
        for suffix in ("jpg", "json", "txt")
    ],
    "other members": [
        (name, size)
        for number in range(30)
        for name, size in (
            (f"part{number % 3}", FOLDER),
            (f"part{number % 3}/._{number}.jpg", 100),
            (f"part{number % 3}/{number}.jpg", 900),
            (f"part{number % 3}/._{number}.txt", 100),
            (f"part{number % 3}/{number}.txt", LINK if number % 7 == 0 else 20),
        )
    ],
    "samples over several chunks": [
        (f"{number:03d}.{suffix}", size)
        for number in range(12)
        for suffix, size in (("jpg", 700), ("mp4", 30_000 if number % 3 == 1 else 5), ("txt", 9))
    ],
    "members twice": [("a.jpg", 9), ("b.jpg", 700), ("b.txt", 9), ("b.jpg", 9), ("b.txt", 9)] * 5,
}


def add_member(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def make_tar(file, members, tar_format):
    with tarfile.open(file, "w", format=tar_format) as tar:
        for number, (name, size) in enumerate(members):
            member = tarfile.TarInfo(name)
            if size is FOLDER:
                member.type = tarfile.DIRTYPE
            elif size is LINK:
                member.type = tarfile.SYMTYPE
                member.linkname = "elsewhere"
            else:
                member.size = size
            data = (str(number) * member.size).encode()[: member.size]
            tar.addfile(member, io.BytesIO(data))


def rows_of(folder):
    """Return the number of chunks, and of each row its location and its data or reason."""
    source = WebDatasetSource(folder, "a.tar", {})
    chunks = list(source.scan(512))
    rows = []
    for location, record in chain.from_iterable(map(source.records, chunks)):
        if isinstance(record, BadRow):
            rows.append((location, record.reason))
        else:
            rows.append((location, {name: each.data for name, each in record.items()}))
    return len(chunks), rows


def check_rows(folder, monkeypatch):
    monkeypatch.setattr(webdataset, "_CHUNK_BYTES", 1 << 40)
    num_chunks, expected = rows_of(folder)
    assert num_chunks == 1 and len(expected) > 1
    for count in COUNTS:
        assert rows_in_chunks(folder, monkeypatch, count) == (count, expected)
    return expected


def rows_in_chunks(folder, monkeypatch, count):
    size = (folder / "a.tar").stat().st_size
    monkeypatch.setattr(webdataset, "_CHUNK_BYTES", size // count)
    return rows_of(folder)


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS.keys())
@pytest.mark.parametrize(
    "tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_chunks_have_the_rows_of_one_pass(tmp_path, monkeypatch, members, tar_format):
    make_tar(tmp_path / "a.tar", members, tar_format)
    check_rows(tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_of_any_tar_have_the_rows_of_one_pass(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    members = []
    for number in range(rng.randrange(20, 60)):
        folder = "f" * rng.choice([0, 3, 90, 140])
        name = f"{folder}/{number}".lstrip("/")
        if rng.random() < 0.2:
            members.append((rng.choice([folder or "g", f"{name}.d"]), FOLDER))
        for suffix in rng.sample(["jpg", "txt", "json", "a.png", "wav"], rng.randrange(1, 5)):
            size = rng.choice([0, 1, 511, 512, 513, 1024, 3000, 20_000, LINK])
            members.append((f"{name}.{suffix}", size))
    make_tar(tmp_path / "a.tar", members, rng.choice([0, 1, 2]))
    check_rows(tmp_path, monkeypatch)


def test_chunks_on_a_store_have_the_rows_of_one_on_a_disk(tmp_path, monkeypatch):
    make_tar(tmp_path / "a.tar", MEMBERS["long names"], tarfile.PAX_FORMAT)
    _, expected = rows_in_chunks(tmp_path, monkeypatch, 1)
    store = to_path(f"memory://{tmp_path.name}")
    try:
        copy_file(tmp_path / "a.tar", store / "a.tar")
        assert rows_of(store) == (1, expected)
        monkeypatch.setattr(webdataset, "_CHUNK_BYTES", (tmp_path / "a.tar").stat().st_size // 9)
        assert rows_of(store) == (9, expected)
    finally:
        fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_files_of_a_sample_in_two_chunks_are_never_one_row(tmp_path, monkeypatch, tar_format):
    """In one chunk they are refused; otherwise each is a row, and lacks an image or a text."""
    members = sorted(MEMBERS["plain"], key=lambda member: member[0].endswith("txt"))
    make_tar(tmp_path / "a.tar", members, tar_format)
    for count in (1, 2):
        with pytest.raises(DataError, match=r"a\.tar: the files of the sample 0.. are not adj"):
            rows_in_chunks(tmp_path, monkeypatch, count)
    count, rows = rows_in_chunks(tmp_path, monkeypatch, 16)
    assert count == 16 and len(rows) == 80 and all(len(sample) == 1 for _, sample in rows)


def test_tar_in_a_tar_is_refused_only_where_a_chunk_ends(tmp_path, monkeypatch):
    make_tar(tmp_path / "inner", MEMBERS["plain"][:10], tarfile.USTAR_FORMAT)
    size = (tmp_path / "inner").stat().st_size
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(8):
            add_member(tar, f"{number}.jpg", bytes(size))
        tar.add(tmp_path / "inner", "7.frames.tar")
        for number in range(8, 16):
            add_member(tar, f"{number}.jpg", bytes(size))
    _, expected = rows_in_chunks(tmp_path, monkeypatch, 1)
    assert len(expected) == 16
    refused = 0
    for count in range(2, 40):
        try:
            assert rows_in_chunks(tmp_path, monkeypatch, count)[1] == expected
        except DataError as error:
            refused += 1
            assert "a.tar: the member '7.frames.tar' contains a tar" in str(error)
    assert 0 < refused < 38


def test_member_whose_size_is_before_a_boundary_is_refused(tmp_path, monkeypatch):
    """As of a member over 8 GiB, whose size is in the extended header alone."""
    data = bytes(1024)
    size = tarfile.TarInfo("size")
    size.type = tarfile.XHDTYPE
    size.size = len(b"13 size=1024\n")
    headers = size.tobuf() + b"13 size=1024\n".ljust(512, b"\0")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(9):
            tar.fileobj.write(headers + tarfile.TarInfo(f"{number}.jpg").tobuf() + data)
            tar.offset += len(headers) + 512 + len(data)
    num_bytes = (tmp_path / "a.tar").stat().st_size
    monkeypatch.setattr(WebDatasetSource, "cut", lambda *_: [(0, num_bytes, None)])
    expected = rows_of(tmp_path)[1]
    assert len(expected) == 9
    num_member_bytes = len(headers) + 512 + len(data)
    start = 4 * num_member_bytes
    for place in range(start, start + num_member_bytes, 512):
        parts = [(0, place, None), (place, num_bytes, None)]
        monkeypatch.setattr(WebDatasetSource, "cut", lambda *_, parts=parts: parts)
        if start < place <= start + len(headers):
            with pytest.raises(DataError, match=r"a\.tar: the member '4\.jpg' .* has over 8 GiB"):
                rows_of(tmp_path)
        else:
            assert rows_of(tmp_path) == (2, expected)


def test_conversation_without_its_image_is_counted(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "0.json", json.dumps({"messages": turns}).encode())
    source = WebDatasetSource(tmp_path, "a.tar", {})
    [row] = chain.from_iterable(map(source.read, source.scan(512)))
    assert row.values[NOTICES] == ["a sample of a tar has no image, audio or video"]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_tar_is_one_bad_row(tmp_path, monkeypatch, share):
    make_tar(tmp_path / "a.tar", MEMBERS["plain"], tarfile.PAX_FORMAT)
    data = (tmp_path / "a.tar").read_bytes().rstrip(b"\0")
    (tmp_path / "a.tar").write_bytes(data[: int(len(data) * share)])
    rows = check_rows(tmp_path, monkeypatch)
    assert rows[-1][1] == "truncated"


@pytest.mark.parametrize(("number", "damage"), [(2, 512), (40, 512), (40, 1), (78, 1)])
def test_rows_after_damaged_header_are_kept(tmp_path, monkeypatch, number, damage):
    monkeypatch.setattr(webdataset, "_BUFFER_BYTES", 512)
    members = [(f"{n:03d}.{suffix}", 700) for n in range(27) for suffix in ("jpg", "json", "txt")]
    make_tar(tmp_path / "a.tar", members, tarfile.USTAR_FORMAT)
    _, whole = rows_of(tmp_path)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    with tarfile.open(tmp_path / "a.tar") as tar:
        start = tar.getmembers()[number].offset
    data[start : start + damage] = bytes(damage)
    (tmp_path / "a.tar").write_bytes(data)
    rows = check_rows(tmp_path, monkeypatch)
    assert [location for location, reason in rows if reason == "truncated"] == ["a.tar/"]
    assert [row for row in whole if row not in rows] == [whole[number // 3]]


@pytest.mark.parametrize("end", [None, 1, 2, 20], ids="zeros {}".format)
def test_joined_tars_have_the_rows_of_both(tmp_path, monkeypatch, end):
    rows = []
    parts = []
    for start in (0, 30):
        members = [(f"{n:03d}.{suffix}", 700) for n in range(start, start + 30) for suffix in "ab"]
        make_tar(tmp_path / "a.tar", members, tarfile.GNU_FORMAT)
        rows += rows_of(tmp_path)[1]
        parts.append((tmp_path / "a.tar").read_bytes())
    size = len(parts[0].rstrip(b"\0"))
    first = parts[0][: size + -size % 512] + bytes(512 * (end or 0))
    (tmp_path / "a.tar").write_bytes(first + parts[1])
    assert check_rows(tmp_path, monkeypatch) == rows
