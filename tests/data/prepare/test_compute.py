"""`prepare --compute`: values of a function of the user become columns of the set."""

import csv
import json
import sys

import numpy as np
import pytest

import mmray
from mmray.config import Config, Data, Prepare
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import column_types
from mmray.data.store.selection import select_rows
from mmray.errors import DataError
from mmray.training.validate import check_selections
from tests.data.prepare.test_pipeline import keys, make_source, quarantine
from tests.test_contributing import example

EXAMPLE = example("Add a function of your own")
SETTINGS = Prepare(max_bad_fraction=1.0, rows_per_shard=4, vocab_size=100, compute="my_pkg:measure")


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write the user's module, which the next prepare imports as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(code):
        (tmp_path / "my_pkg.py").write_text(code)
        monkeypatch.delitem(sys.modules, "my_pkg", raising=False)

    return write


@pytest.mark.parametrize("keep", [(), ("width",)])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_values_are_columns_that_where_selects_and_show_lists(
    tmp_path, in_process, write_module, keep, suffix
):
    write_module(EXAMPLE)
    source = make_source(tmp_path / "raw", 6, width=640)
    if suffix == "csv":
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        source = source.with_suffix(".csv")
        with source.open("w") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    out = tmp_path / "out"
    manifest = prepare(str(source), str(out), SETTINGS.replace(keep=keep))
    kept = {"width": "int64"} if keep else {}
    assert column_types(manifest.columns) == kept | {"brightness": "double", "words": "int64"}
    # of a raw source, which is prepared later, any name may be a computed column
    where = "brightness > 3"
    check_selections(Config(data=Data(train=str(source), where=where), prepare=SETTINGS))
    prepared = PreparedSet.open(str(out))
    brightness = [each["brightness"] for each in prepared.columns(np.arange(6))]
    assert brightness == sorted(brightness) and brightness[0] < brightness[5]
    where = f"brightness > {brightness[2]} and words == 2"
    assert select_rows(prepared, where, tmp_path / "selections").num_rows == sum(
        each > brightness[2] for each in brightness
    )
    assert dict(mmray.show(out).rows[0]["facts"])["words"] == "2"


FAULTS = """
from mmray.data.rows import BadRow

def measure(row):
    if row.key == "k1":
        raise KeyError("no such thing")
    if row.key == "k2":
        raise BadRow("quality", "dark", "its mean is 3")
    return {"width": row.columns["width"] + 1} if row.key == "k3" else {"half": 0.5}
"""


def test_row_of_an_exception_is_quarantined_with_its_type(tmp_path, in_process, write_module):
    write_module(FAULTS)
    source = make_source(tmp_path / "raw", 5, width=640)
    out = tmp_path / "out"
    prepare(str(source), str(out), SETTINGS.replace(keep=("width",)))
    assert keys(out) == ["k0", "k4"]
    assert [
        (each["key"], each["stage"], each["reason"], each["detail"]) for each in quarantine(out)
    ] == [
        ("k1", "compute", "KeyError", "prepare.compute: KeyError: 'no such thing'"),
        ("k2", "quality", "dark", "its mean is 3"),
        (
            "k3",
            "compute",
            "repeated-column",
            "prepare.compute returned width, which the source has: rename it",
        ),
    ]


def test_chunks_are_packed_again_only_if_the_code_changed(tmp_path, in_process, write_module):
    source = make_source(tmp_path / "raw", 6)
    out = tmp_path / "out"

    def values(factor):
        write_module(f"def measure(row):\n    return {{'number': {factor} * int(row.key[1:])}}\n")
        prepare(str(source), str(out), SETTINGS)
        return [each["number"] for each in PreparedSet.open(str(out)).columns(np.arange(6))]

    assert values(1) == [0, 1, 2, 3, 4, 5] and in_process == [0, 1]
    assert values(1) == [0, 1, 2, 3, 4, 5] and in_process == [0, 1]
    assert values(2) == [0, 2, 4, 6, 8, 10] and in_process == [0, 1, 0, 1]
    manifest = prepare(str(source), str(out), SETTINGS.replace(compute=None))
    assert manifest.columns == {} and in_process == [0, 1] * 3


def test_value_that_is_no_number_or_text_ends_prepare(tmp_path, in_process, write_module):
    write_module("def measure(row):\n    return {'tags': [1]}\n")
    source = make_source(tmp_path / "raw", 1)
    with pytest.raises(DataError, match=r"rows.jsonl:1: .* `tags` has a value of type list"):
        prepare(str(source), str(tmp_path / "out"), SETTINGS)
