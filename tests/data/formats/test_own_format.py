"""One entry in FORMATS, or a setting `module:Class`, adds a source format."""

import re
from pathlib import Path

import numpy as np
import pytest

import mmray
from mmray.builtin import FORMATS
from mmray.config import Prepare
from mmray.data.formats.detect import source_class
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import UsageError
from tests.made import png

NAME = "tests.data.formats.caption_lines:CaptionLines"


def write_source(folder):
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(number))
    lines = [f"{number}.png | caption {number}" for number in range(3)]
    file = folder / "my.captions"
    file.write_text("\n".join([*lines, "a line without a bar"]))
    return file


@pytest.mark.parametrize("source_format", ["auto", "captions", NAME])
def test_added_format_is_prepared(tmp_path, monkeypatch, in_process, source_format):
    if source_format != NAME:
        monkeypatch.setitem(FORMATS, "captions", NAME)
    settings = Prepare(format=source_format, max_bad_fraction=0.5, vocab_size=0)
    manifest = prepare(str(write_source(tmp_path)), str(tmp_path / "out"), settings)
    rows = PreparedSet.open(str(tmp_path / "out")).read(np.arange(3))
    assert [row.texts for row in rows] == [[f"caption {number}"] for number in range(3)]
    assert [row.source for row in rows] == [f"my.captions:{number}" for number in (1, 2, 3)]
    assert manifest.reasons == {"captions": 1}


def test_unknown_formats_are_refused():
    with pytest.raises(UsageError, match=r"prepare\.format: .*no `captions`; use one of auto"):
        Prepare(format="captions")
    with pytest.raises(UsageError, match=r"prepare\.format: cannot load `no_such_module:Source`"):
        source_class("no_such_module:Source")


def test_readme_has_a_row_for_each_format():
    page = Path(mmray.__file__).parent / "data" / "formats" / "README.md"
    table = page.read_text().split("## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in first_cells for name in re.findall("`(.+?)`", cell)) == sorted(
        FORMATS
    )
