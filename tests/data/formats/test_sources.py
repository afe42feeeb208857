"""JSONL and CSV in chunks, strict parsing of rows, and images restricted to their folder."""

import csv
import io
import json
import os
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmray.data.formats import text_lines as lines_module
from mmray.data.formats.delimited import CsvSource
from mmray.data.formats.source import Scan
from mmray.data.formats.text_lines import JsonlSource, parse_json
from mmray.data.images import read as files
from mmray.data.images.read import read_file
from mmray.data.rows import BadRow
from mmray.data.source_row import parse_row
from mmray.errors import DataError


def parse_line(data, location):
    return parse_row(parse_json(data), location)


def write(folder, data, name="a.jsonl"):
    (folder / name).write_bytes(data)
    return folder, name


class Lines(JsonlSource):
    """Any lines, also of an empty file."""

    def check(self, name):
        pass


def scan(place, name, rows, earlier=()):
    source = Lines(place, name, {})
    source.earlier = Scan(chunks=earlier)
    return source.scan(rows)


def lines_of(place, name, chunks):
    return [
        (int(location.rpartition(":")[2]), data)
        for chunk in chunks
        for location, data in Lines(place, name, {}).records(chunk)
    ]


@given(
    lines=st.lists(st.sampled_from([b"", b"  ", b"{}", b'{"a":1}', b"x" * 40, b"\r"]), max_size=30),
    last=st.sampled_from([b"", b"{}", b"\n"]),
    rows=st.integers(1, 7),
    bom=st.booleans(),
)
def test_chunks_cover_the_file_and_keep_line_numbers(tmp_path_factory, lines, last, rows, bom):
    data = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + b"\n" for line in lines) + last
    place, name = write(tmp_path_factory.mktemp("scan"), data)
    chunks = list(scan(place, name, rows))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.start for chunk in chunks][:1] in ([], [0])
    assert all(one.stop == two.start for one, two in pairwise(chunks))
    assert (chunks[-1].stop if chunks else 0) == len(data)
    plain = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [(number, line) for number, line in enumerate(plain, 1) if line.strip()]
    assert [
        (number, line.rstrip(b"\n")) for number, line in lines_of(place, name, chunks)
    ] == expected
    assert sum(chunk.num_rows for chunk in chunks) == len(expected)


class Records(Lines):
    """Lines that are scanned one at a time, as records of formats in which lines may continue."""

    def iter_records(self, name, lines):
        return super().iter_records(name, lines)


@given(
    lines=st.lists(st.sampled_from([b"", b" \t", b"{}", b" x", b"x" * 40, b"\x01"]), max_size=30),
    last=st.sampled_from([b"", b"{}", b" ", b"x" * 40]),
    rows=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    bom=st.booleans(),
    piece_bytes=st.sampled_from([4, 9, 64]),
)
def test_lines_are_counted_as_they_are_read(tmp_path_factory, lines, last, rows, bom, piece_bytes):
    data = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + b"\n" for line in lines) + last
    place, name = write(tmp_path_factory.mktemp("scan"), data)
    earlier = list(scan(place, name, rows[0]))[1::2]
    one_at_a_time = Records(place, name, {})
    one_at_a_time.earlier = Scan(chunks=earlier)
    with patch.object(lines_module, "_PIECE_BYTES", piece_bytes):
        counted = list(scan(place, name, rows[1], earlier))
    assert counted == list(one_at_a_time.scan(rows[1]))


def test_appended_file_keeps_its_chunks(tmp_path):
    old = b"".join(b'{"n":%d}\n' % number for number in range(25))
    place, name = write(tmp_path, old)
    before = list(scan(place, name, 10))
    write(tmp_path, old + b'{"n":25}\n' * 12)
    after = list(scan(place, name, 10, before))
    assert after[:3] == before
    assert [chunk.num_rows for chunk in after] == [10, 10, 5, 10, 2]


def test_continued_last_line_changes_its_chunk(tmp_path):
    place, name = write(tmp_path, b"{}\n{}")
    before = list(scan(place, name, 10))
    write(tmp_path, b"{}\n{} \n{}\n")
    assert [chunk.num_rows for chunk in scan(place, name, 10, before)] == [3]


def test_source_changed_while_reading_is_detected(tmp_path):
    place, name = write(tmp_path, b'{"a":1}\n{"b":2}\n')
    [chunk] = scan(place, name, 10)
    write(tmp_path, b'{"a":1}\n{"b":3}\n')
    with pytest.raises(DataError, match="run the same command again"):
        lines_of(place, name, [chunk])


def test_endless_line_costs_one_row_and_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "_PIECE_BYTES", 16)
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 64)
    place, name = write(tmp_path, b"{}\n" + b"x" * 5000 + b"\n{}\n")
    read = lines_of(place, name, scan(place, name, 10))
    assert [number for number, _ in read] == [1, 2, 3]
    assert len(read[1][1]) < 100
    with pytest.raises(BadRow, match="over 64 bytes"):
        parse_line(read[1][1], "a:2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x1f\x8b\x08rest", "is gzip"), (b"PK\x03\x04rest", "zip archive"),
        (b"PAR1rest", "is Parquet"), (b"\xff\xfe{\0", "is UTF-16: convert it with `iconv"),
    ],
)  # fmt: skip
def test_files_other_than_jsonl_are_refused(tmp_path, data, message):
    place, name = write(tmp_path, data)
    for kind in (JsonlSource, CsvSource):
        with pytest.raises(DataError, match=message):
            kind(place, name, {}).check(name)


def test_valid_row_is_parsed():
    row = parse_line(
        b'{"id": 7, "images": ["b/c.jpg"], "texts": ["x", "y"], "label": 3, "split": "train"}\r\n',
        "f:1",
    )
    assert (row.key, row.images[0].name, row.texts, row.label, row.split) == (
        "7",
        "b/c.jpg",
        ["x", "y"],
        3,
        "train",
    )
    row = parse_line(
        b'{"image_path": "a.png", "text": "x", "label": null, "emoji": "#"}',
        "f:9",
    )
    assert (row.key, row.images[0].name, row.texts, row.label) == (
        "f:9",
        "a.png",
        ["x"],
        None,
    )


GOOD = {"image": "a.png", "text": "x"}


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        (b'{"image": "a.png", "text": "x"} {}', "parse json"), (b"[1, 2]", "parse json"),
        (b"[" * 100_000, "parse json"), (b'{"label": ' + b"9" * 5000 + b"}", "parse json"),
        ({"image": None, "text": "x"}, "columns no-image"),
        ({"image": "a.png", "texts": []}, "columns no-text"),
        (GOOD | {"image_path": "b.png"}, "columns ambiguous"),
        (GOOD | {"texts": ["y"]}, "columns ambiguous"),
        (GOOD | {"image": " "}, "columns image"),
        (GOOD | {"image": {"bytes": "x"}}, "columns image"),
        (GOOD | {"image": "\ud800.png"}, "columns path"), (GOOD | {"id": 1.5}, "columns key"),
        (GOOD | {"id": ""}, "columns key"), (GOOD | {"id": "a\nb"}, "columns key"),
        (GOOD | {"label": "cat"}, "columns label"), (GOOD | {"label": True}, "columns label"),
        (GOOD | {"label": 2**63}, "columns label"), (GOOD | {"split": "../x"}, "columns split"),
        (GOOD | {"messages": "\ud800"}, "columns messages"),
    ],
)  # fmt: skip
def test_ambiguous_row_is_refused(line, outcome):
    with pytest.raises(BadRow) as caught:
        parse_line(line if isinstance(line, bytes) else json.dumps(line).encode(), "f:1")
    assert f"{caught.value.stage} {caught.value.reason}" == outcome and caught.value.detail


def test_byte_order_mark_of_a_line_is_skipped():
    """Each of several joined files may have one."""
    row = parse_line(b'\xef\xbb\xbf{"image": "a.png", "text": "x"}', "f:2")
    assert (row.images[0].name, row.texts) == ("a.png", ["x"])


def test_error_after_the_id_has_the_id():
    with pytest.raises(BadRow) as caught:
        parse_line(b'{"id": "k", "text": "x", "emoji": 1}', "f:1")
    assert caught.value.key == "k"
    assert "the row has emoji, id, text" in caught.value.detail


def test_images_outside_the_folder_are_refused(tmp_path):
    inside = tmp_path / "in"
    (inside / "sub").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (inside / "sub" / "👩\u200d🚀.png").write_bytes(b"good")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "up").symlink_to(tmp_path)
    (inside / "near.png").symlink_to(inside / "sub" / "👩\u200d🚀.png")
    os.mkfifo(inside / "pipe.png")
    place = inside
    assert read_file(place, "sub/👩\u200d🚀.png") == b"good"
    assert read_file(place, "near.png") == b"good"
    for name, reason in {
        "link.png": "path", "up/secret.png": "path", "pipe.png": "not-regular-file",
        "sub": "not-regular-file",
        "gone.png": "missing-image", "near.png/x": "missing-image", "x" * 300: "unreadable",
    }.items():  # fmt: skip
        with pytest.raises(BadRow) as caught:
            read_file(place, name)
        assert (caught.value.stage, caught.value.reason) == ("read", reason), name


def test_oversized_image_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_IMAGE_BYTES", 10)
    (tmp_path / "a.png").write_bytes(b"x" * 11)
    with pytest.raises(BadRow, match="over 10"):
        read_file(tmp_path, "a.png")


NAMES = ["image", "text", "id"]
FIELDS = st.lists(st.text('ab",\n\r é', min_size=1, max_size=6), min_size=3, max_size=3)
# the last one is what csv writes on Windows into a file opened without newline=""
ENDS = ["\n", "\r\n", "\r\r\n"]
PLAIN = st.text('ab"é ', min_size=1, max_size=6).filter(
    lambda text: not text.startswith('"') and text.strip()
)


def rows_of(folder, data, rows_per_chunk=2):
    """Records of a CSV with these bytes: lists of fields, or BadRow."""
    (folder / "a.csv").write_bytes(data)
    source = CsvSource(folder, "a.csv", {})
    items = [item.values for chunk in source.scan(rows_per_chunk) for item in source.read(chunk)]
    return [
        item if isinstance(item, BadRow) else [item.get(name, "") for name in NAMES]
        for item in items
    ]


def written(rows, **options):
    out = io.StringIO(newline="")
    csv.writer(out, **options).writerows([NAMES, *rows])
    return out.getvalue().encode()


@given(
    rows=st.lists(FIELDS, max_size=6), quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
)
def test_csv_output_is_read_back(tmp_path_factory, rows, quoting):
    assert rows_of(tmp_path_factory.mktemp("csv"), written(rows, quoting=quoting)) == rows


@given(
    rows=st.lists(st.lists(PLAIN, min_size=3, max_size=3), max_size=6), end=st.sampled_from(ENDS)
)
def test_unquoted_fields_parse_like_python_csv(tmp_path_factory, rows, end):
    text = "".join(",".join(row) + end for row in [NAMES, *rows])
    assert [row for row in csv.reader(io.StringIO(text, newline="")) if row][1:] == rows
    assert rows_of(tmp_path_factory.mktemp("csv"), text.encode()) == rows


def test_carriage_return_in_a_field_is_reported(tmp_path):
    good, bad = rows_of(tmp_path, b"image,text,id\n0.png,x,0\n1.png,one\rtwo,1\n")
    assert good == ["0.png", "x", "0"]
    assert (bad.stage, bad.reason) == ("parse", "csv")
    assert "carriage return" in bad.detail


def test_missing_quote_costs_one_row(tmp_path):
    rows = (b"1.png," + b"x" * 1000 + b",1\n") * 1200  # over MAX_FIELD_BYTES
    bad, *rest = rows_of(tmp_path, b'image,text,id\n0.png,"open,0\n' + rows, 10**6)
    assert bad.reason == "csv" and len(rest) == 1200


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ('4.png,"a dog,4', '11.png,he said hi"'),  # one field until the closing quote
        ('4.png,"a dog,4', '11.png,"he" said,11'),  # an error at the next quote
        ('4.png,"a dog,4', "11.png,x,11"),  # an error at the end of the file
        ('4.png,"a dog,4', None),
    ],
)
def test_stray_quote_swallows_no_lines(tmp_path, opening, closing, rows_per_chunk):
    lines = ["image,text,id", *(f"{number}.png,x,{number}" for number in range(20))]
    lines[3] = '2.png,"two\nlines",2'
    lines[5] = opening
    if closing is not None:
        lines[12] = closing
    read = rows_of(tmp_path, "\n".join(lines).encode(), rows_per_chunk)
    bad = {number: row for number, row in enumerate(read) if isinstance(row, BadRow)}
    assert len(read) == 20 and read[2] == ["2.png", "two\nlines", "2"]
    assert 4 in bad and bad.keys() <= {4, 11}  # a closing line may have a field too few
    assert [row[0] for number, row in enumerate(read) if number not in bad] == [
        f"{number}.png" for number in range(20) if number not in bad
    ]


def test_text_before_the_image_may_have_lines(tmp_path):
    source = CsvSource(tmp_path, "a.csv", {})
    rows = ['"one\ntwo",0.png', '"https://a.example/x.png, a page\n\nof several\nlines",1.png']
    (tmp_path / "a.csv").write_text("\n".join(["text,image", *rows, ""]))
    (chunk,) = source.scan(10)
    assert [row.values["text"].count("\n") for row in source.read(chunk)] == [1, 3]
    # letters whose second byte is a line end in Latin-1
    (tmp_path / "a.csv").write_text('text,image\n"' + "\n" + "а, бх" * 30 + '",0.png\n')
    (row,) = [row.values for chunk in source.scan(10) for row in source.read(chunk)]
    assert row["image"] == "0.png"
    # a stray quote before a row
    (tmp_path / "a.csv").write_text('text,image\n"a dog,0.png\na cat,1.png\nshe said "",2.png\n')
    values = [row.values for chunk in source.scan(10) for row in source.read(chunk)]
    assert isinstance(values[0], BadRow) and "3 lines after a quote opens" in values[0].detail
    assert [each["image"] for each in values[1:]] == ["1.png", "2.png"]


def test_chunks_grow_with_the_rows_before_them(tmp_path, monkeypatch):
    monkeypatch.setattr("mmray.data.formats.source.MAX_SMALL_CHUNKS", 3)
    monkeypatch.setattr("mmray.data.formats.source.MAX_CHUNK_ROWS", 5)
    source = Lines(*write(tmp_path, b"row\n" * 40), {})
    source.grows = True
    sizes = [chunk.num_rows for chunk in source.scan(2)]
    assert sizes == [2, 2, 2, 2, 2, 3, 4, 5, 5, 5, 5, 3]
    write(tmp_path, b"row\n" * 49)
    assert [chunk.num_rows for chunk in source.scan(2)][:11] == sizes[:11]


@pytest.mark.parametrize("is_changed", [False, True])
def test_file_that_grew_is_scanned_from_its_last_chunk(tmp_path, monkeypatch, is_changed):
    place, name = write(tmp_path, b"".join(b"row %d\n" % number for number in range(7)) + b"last")
    source = Lines(place, name, {})
    source.earlier = Scan(chunks=list(source.scan(2)))
    data = (place / name).read_bytes() + b" is continued\nmore\n"
    write(tmp_path, data.replace(b"row 0", b"row X") if is_changed else data)
    scanned = []
    monkeypatch.setattr(
        Lines, "iter_records", lambda _, __, lines: (scanned.append(1) or line for line in lines)
    )
    chunks = list(source.scan(2))
    assert len(scanned) == (9 if is_changed else 3)
    assert chunks == list(scan(place, name, 2))
