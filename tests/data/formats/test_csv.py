"""CSV: records equal those of Python's csv, for any quotes and newlines."""

import csv
import io

from hypothesis import given, settings
from hypothesis import strategies as st

from mmray.data.formats.rows import BadRow
from mmray.data.formats.text_lines import BOM, CsvSource
from mmray.storage.storage import Storage

NAMES = ["image", "text", "id"]
FIELDS = st.lists(st.text('ab",\n\r é', min_size=1, max_size=6), min_size=3, max_size=3)
ENDS = ["\n", "\r\n", "\r\r\n"]  # the last one is what csv writes on Windows into a file opened without newline=""
PLAIN = st.text('ab"é ', min_size=1, max_size=6).filter(lambda text: not text.startswith('"') and text.strip())


def rows_of(folder, data, rows_per_chunk=2):
    """Records of a CSV with these bytes: lists of fields, or BadRow."""
    (folder / "a.csv").write_bytes(data)
    source = CsvSource(Storage(str(folder)), "a.csv", {})
    items = [item.values for chunk in source.scan(rows_per_chunk, ()) for item in source.read(chunk)]
    return [item if isinstance(item, BadRow) else [item.get(name, "") for name in NAMES] for item in items]


def written(rows, **options):
    out = io.StringIO(newline="")
    csv.writer(out, **options).writerows([NAMES, *rows])
    return out.getvalue().encode()


@settings(deadline=None)
@given(rows=st.lists(FIELDS, max_size=6), quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
def test_csv_output_is_read_back(tmp_path_factory, rows, quoting):
    assert rows_of(tmp_path_factory.mktemp("csv"), written(rows, quoting=quoting)) == rows


@settings(deadline=None)
@given(rows=st.lists(st.lists(PLAIN, min_size=3, max_size=3), max_size=6), end=st.sampled_from(ENDS))
def test_unquoted_fields_parse_like_python_csv(tmp_path_factory, rows, end):
    text = "".join(",".join(row) + end for row in [NAMES, *rows])
    assert [row for row in csv.reader(io.StringIO(text, newline="")) if row][1:] == rows
    assert rows_of(tmp_path_factory.mktemp("csv"), text.encode()) == rows


def test_stray_quotes_in_captions_lose_no_row(tmp_path):
    captions = [f'a 5" pipe {number}' if number in (2, 6) else f"row {number}" for number in range(10)]
    data = "image,text,id\n" + "".join(f"{number}.png,{text},{number}\n" for number, text in enumerate(captions))
    assert [row[1] for row in rows_of(tmp_path, data.encode())] == captions


def test_byte_order_mark_before_quoted_column_name_is_dropped(tmp_path):
    data = BOM + b'"image","text\n","id"\n0.png,"two\nlines",0\n'
    assert rows_of(tmp_path, data) == [["0.png", "two\nlines", "0"]]


def test_carriage_return_in_a_field_is_reported(tmp_path):
    good, bad = rows_of(tmp_path, b"image,text,id\n0.png,x,0\n1.png,one\rtwo,1\n")
    assert good == ["0.png", "x", "0"]
    assert (bad.stage, bad.reason) == ("parse", "csv")
    assert "carriage return" in bad.detail


def test_missing_quote_costs_at_most_one_megabyte(tmp_path):
    data = b'image,text,id\n0.png,"open,0\n' + b"1.png,x,1\n" * 200_000
    bad, *rest = rows_of(tmp_path, data, 10**6)
    assert bad.reason == "csv" and 90_000 < len(rest) < 100_000
