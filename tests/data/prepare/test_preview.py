"""What `prepare` prints before it packs a source."""

import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from mmray.console.outcomes import log_manifest
from mmray.data.prepare.pipeline import prepare
from mmray.training.resolve import resolve_run
from tests.data.prepare.test_pipeline import LAX, make_source
from tests.training.runs import Silent, config


def test_columns_and_an_example_are_logged_before_packing(tmp_path, in_process):
    source = make_source(tmp_path / "raw", 3, texts=["one", None], title="the title", width=640)
    with source.open("a") as file:  # a column that the first row has not
        file.write(json.dumps({"id": "k3", "image": "0.png", "title": "x", "height": 4}) + "\n")
    logs = {}
    settings = LAX.model_copy(update={"columns": ("text=title",)})

    def log(text, heading):
        assert not in_process  # nothing is packed yet
        logs[heading] = text

    prepare(str(source), str(tmp_path / "out"), settings, log=log)
    unused = "columns `text`, `texts`, `width`, `height` are not used"
    assert logs["columns"] == f"id, image, text=title ({unused})"
    assert logs["example"] == "rows.jsonl:1: id 'k0', image '0.png', text 'the title'"


def test_columns_of_some_rows_with_half_a_preference_are_not_called_unused(tmp_path, in_process):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b", "x": 1}, {"prompt": "r"}]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"chosen": "c"}]))

    def logged(*columns):
        logs = {}
        settings = LAX.model_copy(update={"columns": columns})
        out = str(tmp_path / f"out{len(columns)}")
        prepare(str(source), out, settings, log=lambda text, heading: logs.update({heading: text}))
        return logs["columns"]

    assert logged() == "messages (column `x` is not used)"
    assert logged("completion=chosen") == "messages (column `x` is not used)"


def test_repeated_images_of_captions_are_announced_before_packing(tmp_path, in_process):
    source = make_source(tmp_path / "raw", 2)
    with source.open("a") as file:
        file.writelines(json.dumps({"image": "0.png", "text": f"{n}"}) + "\n" for n in range(3))

    def headings(**changes):
        logs = {}
        settings = LAX.model_copy(update=changes)
        out = str(tmp_path / "-".join(["out", *changes]))
        prepare(str(source), out, settings, log=lambda text, heading: logs.update({heading: text}))
        return logs

    assert headings()["repeats"].startswith("3 of the first 5 rows have the image of an earlier")
    assert "repeats" not in headings(group="image")
    assert "repeats" not in headings(duplicates="row")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_columns_that_are_not_used_are_counted_in_the_set_and_logged(
    tmp_path, suffix, forked_children
):
    make_source(tmp_path / "raw", 16)
    rows = [
        {"image": f"{number}.png", "text": f"text {number}", "width": number or None, "height": 7}
        for number in range(16)
    ]
    file = tmp_path / "raw" / f"other.{suffix}"
    table = pa.Table.from_pylist(rows)
    if suffix == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == "csv":
        pyarrow.csv.write_csv(table, file)
    else:
        pyarrow.parquet.write_table(table, file)
    out = tmp_path / "out"
    manifest = prepare(str(file), str(out), LAX.model_copy(update={"keep": ("height",)}))
    # Parquet columns that are not read count for all rows, others for rows with a value.
    num_rows = 16 if suffix == "parquet" else 15
    reporter = Silent()
    log_manifest(manifest, str(out), reporter)
    line = f"{num_rows} rows: column `width` is not used (for example other.{suffix}:"
    assert [text.startswith(line) for label, text in reporter.notes if label == "notice"] == [True]
    run = Silent()
    resolve_run(config(out, tmp_path, "run", steps=1), run)
    assert [line in text for label, text in run.notes if label == "notice"] == [True]
