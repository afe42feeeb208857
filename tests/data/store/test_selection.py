"""Columns of a source that a set keeps, and the rows that a condition on them selects."""

import csv
import io
import json
import pickle
import shutil
import tarfile
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.data.formats.in_memory import store_rows
from mmray.data.store import selection
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import column_types
from mmray.data.store.selection import RowFilter, select_rows
from mmray.data.stream.order import BlockShuffle, SamplePlan
from mmray.errors import DataError, UsageError
from mmray.storage.paths import to_path
from tests.data.prepare.test_pipeline import LAX, color_image, prepare
from tests.data.prepare.test_pipeline import run as run_fixture

run = run_fixture
SIMILARITY = [0.1, 0.5, None, 0.9, 0.3, 0.31, 0.7, 0.2]
COLUMNS = {
    "similarity": SIMILARITY,
    "width": [100, 200, 300, 200, None, 400, 100, 200],
    "license": ["by", "cc0", "by", None, "nd", "cc0", "by", "nd"],
    "is_safe": [True, True, False, None, True, True, False, True],
}


def make_source(folder, numbers=range(8)):
    """Rows k0, k1, ... with the columns above, as JSON lines, CSV and Parquet."""
    (folder / "raw").mkdir(exist_ok=True)
    rows = []
    for number in numbers:
        image = folder / "raw" / f"{number}.png"
        if not image.exists():
            image.write_bytes(color_image(number))
        row = {"id": f"k{number}", "image": f"{number}.png", "text": f"color {number}"}
        rows.append(row | {name: values[number % 8] for name, values in COLUMNS.items()})
    lines = [json.dumps(row) for row in rows]
    (folder / "raw" / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with (folder / "raw" / "rows.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "raw" / "rows.parquet")


def open_selected(address, where, folder):
    return select_rows(PreparedSet.open(str(address)), where, folder)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
@pytest.mark.parametrize("keep", [tuple(COLUMNS), ("all",)])
def test_kept_columns_have_types_and_a_value_for_each_row(tmp_path, in_process, name, keep):
    make_source(tmp_path)
    manifest = prepare(str(tmp_path / "raw" / name), str(tmp_path / "out"), LAX.replace(keep=keep))
    assert column_types(manifest.columns) == {
        "similarity": "double",
        "width": "int64",
        "license": "string",
        "is_safe": "bool",
    }
    prepared = PreparedSet.open(str(tmp_path / "out"))
    parts = list(prepared.values.read([each.key for each in prepared.shards], list(COLUMNS)))
    assert len(parts) >= 2
    for column, values in COLUMNS.items():
        assert [value for part in parts for value in part[column].to_pylist()] == values


def test_tars_tables_and_groups_keep_columns(tmp_path, in_process):
    def kept(source, **settings):
        prepare(str(source), str(tmp_path / "out"), LAX.replace(**settings))
        prepared = PreparedSet.open(str(tmp_path / "out"))
        [columns] = prepared.values.read([prepared.shards[0].key], ["similarity", "url"])
        shutil.rmtree(tmp_path / "out")
        return {name: values.to_pylist() for name, values in columns.items()}

    expected = {"similarity": [0.5, 0.25], "url": ["http://a", None]}
    values = [{"similarity": 0.5, "url": "http://a"}, {"similarity": 0.25, "url": None}]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, each in enumerate(values):
            for suffix, data in (
                ("png", color_image(number)),
                ("txt", b"color"),
                ("json", json.dumps(each | {"exif": "{}"}).encode()),
            ):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    assert kept(tmp_path / "a.tar", keep=("similarity", "url")) == expected
    assert kept(tmp_path / "a.tar", keep=("all",)) == expected
    rows = [
        {"image": {"bytes": color_image(number)}, "text": "color"} | each
        for number, each in enumerate(values)
    ]
    stored = store_rows(pa.Table.from_pylist(rows), tmp_path / "rows", {}, ("similarity", "url"))
    assert kept(stored, keep=("similarity", "url")) == expected
    with pytest.raises(UsageError, match=r"--keep: the dataset has no column `link`"):
        store_rows(rows, tmp_path / "rows", {}, ("link",))
    (tmp_path / "0.png").write_bytes(color_image(0))
    (tmp_path / "1.png").write_bytes(color_image(1))
    lines = ["path,caption,similarity,url", "0.png,a,0.5,http://a", "0.png,b,9,x", "1.png,c,0.25,"]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    columns = ("image=path", "text=caption")
    assert (
        kept(tmp_path / "rows.csv", keep=("similarity", "url"), columns=columns, group="image")
        == expected
    ), "those of the first row of an image"


def test_values_that_cannot_be_kept_are_named(tmp_path, in_process, run):
    make_source(tmp_path)
    source = tmp_path / "raw" / "rows.jsonl"
    with pytest.raises(UsageError, match=r"--keep: .*`similarty`; did you mean `similarity`"):
        run(keep=("similarty",))
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    source.write_text("\n".join(json.dumps(row | {"tags": ["a"]}) for row in rows))
    with pytest.raises(DataError, match=r"rows.jsonl:1: .* `tags` has a value of type list"):
        run(keep=("all",))
    mixed = [json.dumps(row | {"tags": "a" if row["id"] == "k7" else 1}) for row in rows]
    source.write_text("\n".join(mixed))
    with pytest.raises(DataError, match="`tags` has int64 and string"):
        run(keep=("tags",))


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_large_integers_keep_their_value(tmp_path, in_process, name):
    make_source(tmp_path, range(4))
    posts = [1700000000000000001, 1700000000000000100, 2**53 + 1, None]
    if name == "rows.csv":
        values = [f"{n}.png,{n},{post or ''}\n" for n, post in enumerate(posts)]
        (tmp_path / "raw" / name).write_text("".join(["image,text,post\n", *values]))
    else:
        rows = [{"image": f"{n}.png", "text": str(n), "post": post} for n, post in enumerate(posts)]
        (tmp_path / "raw" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "raw" / "rows.parquet")
    manifest = prepare(
        str(tmp_path / "raw" / name), str(tmp_path / "out"), LAX.replace(keep=("post",))
    )
    assert column_types(manifest.columns) == {"post": "int64"}
    for where in ("post == 1700000000000000001", "post + 0 * 2 == 1700000000000000001"):
        assert open_selected(tmp_path / "out", where, tmp_path).num_rows == 1
    with pytest.raises(UsageError, match="overflow"):
        open_selected(tmp_path / "out", "post * 100 > 0", tmp_path)


@pytest.mark.parametrize("others", ["0.5", "17000000000000000019"])
def test_large_integers_next_to_other_numbers_are_texts_in_csv(tmp_path, in_process, others):
    make_source(tmp_path, range(4))
    posts = ["1700000000000000001", "1700000000000000100", "1", others]
    lines = [f"{n}.png,{n},{post}\n" for n, post in enumerate(posts)]
    (tmp_path / "raw" / "rows.csv").write_text("".join(["image,text,post\n", *lines]))
    settings = LAX.replace(keep=("post",))
    manifest = prepare(str(tmp_path / "raw" / "rows.csv"), str(tmp_path / "out"), settings)
    assert column_types(manifest.columns) == {"post": "string"}
    assert open_selected(tmp_path / "out", f"post == '{posts[0]}'", tmp_path).num_rows == 1
    rows = [
        {"image": f"{n}.png", "text": str(n), "post": post}
        for n, post in enumerate([2**53 + 1, 0.5])
    ]
    (tmp_path / "raw" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="`post` has double and large int64"):
        prepare(str(tmp_path / "raw" / "rows.jsonl"), str(tmp_path / "typed"), settings)


def test_large_integers_are_compared_with_floats():
    columns = {"hash": pa.array([2**62, -(2**62), None])}
    assert RowFilter("hash > 0.5").selected(columns).tolist() == [0]
    assert RowFilter("hash == 4611686018427387904 or hash / 2 < 0").selected(columns).tolist() == [
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("where", "selected"),
    [
        ("similarity > 0.3", [1, 3, 5, 6]),
        ("not similarity > 0.3", [0, 4, 7]),
        ("similarity is None or width is None", [2, 4]),
        ("0.3 <= similarity < 0.7 and is_safe", [1, 4, 5]),
        ("width * 2 - 100 >= 300 / 1", [1, 2, 3, 5, 7]),
        ("-similarity < -0.6", [3, 6]),
        ('license in ["by", "nd"] and width is not None', [0, 2, 6, 7]),
        ('license not in ("by",)', [1, 4, 5, 7]),
        ("is_safe == False", [2, 6]),
        ("width / (width - 200) > 1", [2, 5]),  # no row whose divisor is 0
        ("not width / (width - 200) > 1", [0, 6]),
    ],
)
def test_condition_selects_rows_as_sql_does(where, selected):
    columns = {name: pa.array(values) for name, values in COLUMNS.items()}
    assert RowFilter(where).selected(columns).tolist() == selected


def ranges_of(columns, num_rows):
    """The ranges of shards of so many rows."""
    ends = ({}, {})
    for name, values in columns.items():
        for end, choose in zip(ends, (min, max), strict=True):
            parts = [values[start : start + num_rows] for start in range(0, 8, num_rows)]
            found = [None if None in part else choose(part) for part in parts]
            end[name] = pa.array(found, pa.array(values).type)
    return ends


@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("where", "num_decided"),  # shards of two rows
    [
        ("width > 250", 2),
        ("width > 250 and license == 'nd'", 2),
        ("50 <= width and similarity < 0.95", 2),
        ("not width > 150", 0),
        ("width == 200", 0),
        ("150 < width < 450", 0),
        ("width > 250 or width < 150", 0),
        ("width is None", 0),
        ("width * 2 < 900", 0),
        ("width < similarity", 0),
        ("post > 1700000000000000001", 4),
        ("post >= 1700000000000000000.0", 4),
    ],
)
def test_ranges_decide_only_what_all_rows_of_a_shard_have(where, num_decided, num_rows):
    columns = COLUMNS | {"post": [1700000000000000001 + (number > 5) for number in range(8)]}
    row_filter = RowFilter(where)
    selected = {*row_filter.selected({name: pa.array(columns[name]) for name in columns}).tolist()}
    decided = row_filter.selected_shards(*ranges_of(columns, num_rows))
    for shard, is_selected in enumerate(decided):
        rows = {*range(shard * num_rows, (shard + 1) * num_rows)}
        if is_selected is not None:
            assert rows & selected == (rows if is_selected else set())
    if num_rows == 2:
        assert sum(each is not None for each in decided) == num_decided


def test_second_start_evaluates_nothing_unless_the_set_changed(
    tmp_path, in_process, run, monkeypatch
):
    make_source(tmp_path)
    run(keep=("width",))
    first = open_selected(tmp_path / "out", "width >= 200", tmp_path)
    monkeypatch.setattr(selection, "drop_rows", None)
    second = open_selected(tmp_path / "out", "width >= 200", tmp_path)
    assert second.keys() == first.keys() == ["k1", "k2", "k3", "k5", "k7"]
    for where, keep in (("width >= 300", ("width",)), ("width >= 200", ("width", "is_safe"))):
        run(keep=keep)
        with pytest.raises(TypeError, match="NoneType"):
            open_selected(tmp_path / "out", where, tmp_path)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("similarty > 0.3", r"at `similarty`: no column .*did you mean `similarity`"),
        ("similarity > 0.3 and", "is no condition"),
        ("similarity = 0.3", "is no condition, at `= 0.3`"),
        ("license > 3", "at `3`: is a number, and is compared with a text; write for example"),
        ("width", r"no kernel .*\(`width` is int64\)"),
        ("width + license > 3", "`license` is string, `width` is int64"),
        ("abs(width) > 3", r"at `abs\(width\)`: Call is not supported"),
        ("width == None", "at `None`: not a value; compare with `is None`"),
        ("width in license", "at `license`: `in` needs a list"),
        ("similarity > b'a'", r"at `b'a'`: Constant is not supported"),
        ("[width] == 3", r"at `\[width\]`: not a value"),
        ("__import__('os').system('true')", "is not supported"),
        ("1 < 2", "names no column"),
        ("width < 99999999999999999999", "int too large .*`width` is int64"),
    ],
)
def test_invalid_condition_names_its_part(tmp_path, in_process, run, where, message):
    make_source(tmp_path)
    run(keep=("all",))
    with pytest.raises(UsageError, match=rf"data\.where: .*{message}"):
        open_selected(tmp_path / "out", where, tmp_path)


def test_set_without_columns_and_empty_selection_are_refused(tmp_path, in_process, run):
    make_source(tmp_path)
    run("plain")
    with pytest.raises(UsageError, match=r"no column `width`.*mmray prepare --keep"):
        open_selected(tmp_path / "plain", "width > 3", tmp_path)
    run(keep=("width",))
    with pytest.raises(UsageError, match="selects none of the 8 rows"):
        open_selected(tmp_path / "out", "width > 1000", tmp_path)


def test_selection_equals_the_set_of_the_filtered_source(tmp_path, in_process, run):
    where = "similarity > 0.3 and width >= 200"
    make_source(tmp_path, range(40))
    # a duplicate is dropped from both
    (tmp_path / "raw" / "9.png").write_bytes(color_image(3))
    run("whole", keep=("all",))
    selected = open_selected(tmp_path / "whole", where, tmp_path / "runs")
    source = tmp_path / "raw" / "rows.jsonl"
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    good = [row for row in rows if (row["similarity"] or 0) > 0.3 and (row["width"] or 0) >= 200]
    source.write_text("\n".join(map(json.dumps, good)))
    run("filtered")
    filtered = PreparedSet.open(str(tmp_path / "filtered"))
    assert selected.num_rows == filtered.num_rows == 14
    assert selected.keys() == filtered.keys()
    assert selected.fingerprint != PreparedSet.open(str(tmp_path / "whole")).fingerprint
    # also in another process, which maps the list of shards
    copied = pickle.loads(pickle.dumps(selected))
    order = np.array([13, 0, 7, 7])
    assert copied.read(order) == selected.read(order)
    # their lines in the source differ
    read = [[replace(row, source="") for row in each.read(order)] for each in (selected, filtered)]
    assert read[0] == read[1]
    for shuffle in (None, BlockShuffle(2, 3, 2)):
        plans = [
            SamplePlan(each.num_rows, 4, 2, seed=1, steps=9, block_shuffle=shuffle)
            for each in (selected, filtered)
        ]
        taken = [
            [
                each.keys(plan.row_ids_at(plan.positions(step, rank)))
                for step in range(9)
                for rank in (0, 1)
            ]
            for each, plan in zip((selected, filtered), plans, strict=True)
        ]
        assert taken[0] == taken[1]


def test_selection_of_a_set_on_an_object_store(tmp_path, in_process, memory):
    make_source(tmp_path)
    prepare(str(tmp_path / "raw" / "rows.jsonl"), memory, LAX.replace(keep=("similarity",)))
    selected = select_rows(PreparedSet.open(memory), "similarity > 0.3", to_path("memory://runs"))
    copied = pickle.loads(pickle.dumps(selected))
    assert copied.keys() == ["k1", "k3", "k5", "k6"]
    assert [row.key for row in copied.read(np.array([3, 0]))] == ["k6", "k1"]


def test_set_that_grows_keeps_columns_of_its_rows(tmp_path, in_process, run):
    make_source(tmp_path)
    run(keep=("similarity",))
    make_source(tmp_path, range(12))
    in_process.clear()
    run(keep=("similarity",))
    assert in_process == [2]
    selected = open_selected(tmp_path / "out", "similarity > 0.3", tmp_path)
    assert selected.keys() == ["k1", "k3", "k5", "k6", "k9", "k11"]
    files = [*(tmp_path / "out" / "columns" / "kept").glob("*.arrow")]
    assert len(files) == len([*(tmp_path / "out" / "shards").iterdir()])
