"""Every entry of the matrix has the documented outcome in one prepare; the README has the same
table.
"""

from contextlib import suppress

import pytest

from mmray.config import Prepare
from mmray.data.images.decode import BadImage, decode, verify_image
from mmray.data.prepare import pipeline as prepare_module
from mmray.data.prepare.pipeline import prepare
from tests.conftest import ROOT
from tests.data.formats import bad_inputs as matrix
from tests.data.prepare.test_pipeline import quarantine, run_here


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Outcome of each line (number) and each tar (name): stage and reason."""
    folder = tmp_path_factory.mktemp("matrix")
    lines, tars = matrix.write_source(folder)
    of_lines, of_tars = faults_of(lines, folder / "lines"), faults_of(tars, folder / "tars")
    assert not list(folder.rglob("up.png"))
    return {int(place.rpartition(":")[2]): fault for place, fault in of_lines.items()} | {
        place.partition("/")[0]: fault for place, fault in of_tars.items()
    }


def faults_of(source, out):
    """Stage and reason of the quarantined rows by location; all other rows are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "map_tasks", run_here)
        settings = Prepare(max_bad_fraction=1.0, vocab_size=0, duplicates="keep")
        manifest = prepare(str(source), str(out), settings)
    faults = quarantine(out)
    assert manifest.num_rows + len(faults) == manifest.num_read == matrix.count(source)
    assert all(fault["detail"] for fault in faults)
    return {fault["source"]: f"{fault['stage']} {fault['reason']}" for fault in faults}


@pytest.mark.parametrize(("place", "name"), matrix.places())
def test_bad_input_has_the_documented_outcome(outcomes, place, name):
    assert outcomes.get(place, matrix.KEPT) == matrix.ALL[name][1]


def test_native_decoders_write_nothing_to_stderr(capfd):
    for data, _, _ in matrix.IMAGES.values():
        for read in (verify_image, decode):
            with suppress(BadImage):
                read(data)
    assert capfd.readouterr().err == ""


def test_readme_table_matches_the_matrix():
    readme = (ROOT / "mmray" / "data" / "formats" / "README.md").read_text()
    assert readme.count(matrix.BEGIN) == readme.count(matrix.END) == 1
    assert matrix.table() in readme, (
        "put the output of `python -m tests.data.formats.bad_inputs` between the marks"
    )
