"""What `prepare` prints before it packs a source, and `--dry-run`."""

import json

import pytest

from mmray.config import Prepare
from mmray.data.prepare.pipeline import check_source, prepare
from mmray.errors import DataError
from tests.data.prepare.test_pipeline import LAX, color_image, make_source


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
    assert logs["columns"] == "id, image, text=title (ignored: text, texts, width, height)"
    assert logs["example"] == "rows.jsonl:1: id 'k0', image '0.png', text 'the title'"


def test_dry_run_checks_the_first_rows_and_writes_nothing(tmp_path):
    source = make_source(tmp_path / "raw", 2)
    (tmp_path / "raw" / "half.png").write_bytes(color_image(5)[:40])
    with source.open("a") as file:
        file.writelines(
            json.dumps({"image": name, "text": "x"}) + "\n" for name in ("half.png", "gone.png")
        )
        file.write("{broken\n" * 200)
    before = sorted(tmp_path.rglob("*"))
    lines = []
    check_source(str(source), Prepare(), lambda text, heading: lines.append(f"{heading}: {text}"))
    assert sorted(tmp_path.rglob("*")) == before
    assert any(line == "dry run: 2 of the first 100 rows are good" for line in lines)
    assert any(line.startswith("bad: 96 json, for example rows.jsonl:5") for line in lines)
    assert any(line.startswith("bad: 1 truncated") for line in lines)
    (tmp_path / "bad.jsonl").write_text('{"image": "gone.png", "text": "x"}\n' * 3)
    with pytest.raises(DataError, match="none of the first 3 rows is good"):
        check_source(str(tmp_path / "bad.jsonl"), Prepare(), print)
    with pytest.raises(DataError, match="there is no file"):
        check_source(str(tmp_path / "none.csv"), Prepare(), print)
