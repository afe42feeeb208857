"""Tars that are cut into chunks have the rows that one pass finds."""

import io
import tarfile
from itertools import chain

import pytest

from mmray.data.formats import webdataset
from mmray.data.formats.webdataset import WebDatasetSource
from mmray.data.rows import BadRow
from mmray.errors import DataError

LINK, FOLDER = "a link", "a folder"
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
}


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
            data = (str(number) * 999).encode()[: member.size]
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
    size = (folder / "a.tar").stat().st_size
    for count in (2, 3, 7, 16):
        monkeypatch.setattr(webdataset, "_CHUNK_BYTES", size // count)
        assert rows_of(folder) == (count, expected)
    return expected


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS.keys())
@pytest.mark.parametrize(
    "tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_chunks_have_the_rows_of_one_pass(tmp_path, monkeypatch, members, tar_format):
    make_tar(tmp_path / "a.tar", members, tar_format)
    check_rows(tmp_path, monkeypatch)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_files_of_a_sample_in_two_chunks_are_refused(tmp_path, monkeypatch, count, tar_format):
    members = sorted(MEMBERS["plain"], key=lambda member: member[0].endswith("txt"))
    make_tar(tmp_path / "a.tar", members, tar_format)
    monkeypatch.setattr(webdataset, "_CHUNK_BYTES", (tmp_path / "a.tar").stat().st_size // count)
    with pytest.raises(DataError, match=r"a\.tar: the files of the sample 0.. are not adjacent"):
        rows_of(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_tar_is_one_bad_row(tmp_path, monkeypatch, share):
    make_tar(tmp_path / "a.tar", MEMBERS["plain"], tarfile.PAX_FORMAT)
    data = (tmp_path / "a.tar").read_bytes().rstrip(b"\0")
    (tmp_path / "a.tar").write_bytes(data[: int(len(data) * share)])
    rows = check_rows(tmp_path, monkeypatch)
    assert rows[-1][1] == "truncated"


@pytest.mark.parametrize("number", [3, 41, 78])
def test_damaged_header_is_one_bad_row(tmp_path, monkeypatch, number):
    make_tar(tmp_path / "a.tar", MEMBERS["plain"], tarfile.USTAR_FORMAT)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    with tarfile.open(tmp_path / "a.tar") as tar:
        data[tar.getmembers()[number].offset + 150] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    rows = check_rows(tmp_path, monkeypatch)
    assert [reason for _, reason in rows].count("truncated") == 1
