"""A run of each kind of model on Ray gives the weights of one process, also after resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mmray
from mmray.config import Cluster, Config, Data
from mmray.data.store.prepared_set import PreparedSet
from mmray.train.driver import train
from mmray.train.evaluate_export import export_run
from tests.engine.single_worker import run_config
from tests.engine.test_model_kinds import KINDS, STEPS, config_of, final_weights, labelled_row
from tests.made import CAPTIONS, make_set, png
from tests.train.runs import Silent, lines, same_weights

SCORES = ("recall_at", "median_rank", "zero_shot", "classification", "regions", "loss")
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training and an evaluation split."""
    rows = [labelled_row(number) for number in range(30)]
    folder = tmp_path_factory.mktemp("kinds-on-ray") / "set"
    make_set(folder, rows[:22], rows[22:])
    return folder


def on_ray(kind: str, prepared: Path, storage: Path) -> Config:
    config = config_of(kind, storage)
    return config.model_copy(update={"data": Data(train=str(prepared), workers=1), "cluster": Cluster(workers=1)})


@pytest.fixture
def alone(prepared: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, dict]:
    """A run of the kind in this process: its folder and final metrics."""
    train_set, test_set = PreparedSet.open(str(prepared), "train"), PreparedSet.open(str(prepared), "test")
    folder = tmp_path / "alone"
    result, _ = run_config(config_of(request.param, tmp_path), train_set, folder, test_set)
    return folder, result["metrics"]


@pytest.mark.parametrize(
    ("kind", "alone"),
    [pytest.param(kind, kind, marks=[] if kind == "fusion" else pytest.mark.slow) for kind in KINDS],
    indirect=["alone"],
)
def test_resume_on_ray_gives_the_same_weights(
    kind: str, alone: tuple[Path, dict], local_ray: None, prepared: Path, tmp_path: Path
) -> None:
    folder, metrics = alone
    config = on_ray(kind, prepared, tmp_path)
    shutil.copytree(folder / "checkpoints" / "step-3", tmp_path / kind / "checkpoints" / "step-3")
    run = train(config, Silent())
    assert (run.result["status"], run.result["steps"], run.result["restarts"]) == ("finished", STEPS, 0)
    assert [line["step"] for line in lines(run.path)] == [4, 5, 6]
    assert same_weights(final_weights(run.path), final_weights(folder))
    scores = {name: value for name, value in run.result["metrics"].items() if name.startswith(SCORES)}
    assert {name: metrics[name] for name in scores} == pytest.approx(scores, rel=1e-6)
    loaded = mmray.load(export_run(run.path, tmp_path / "exported", None))
    assert (loaded.embed_images([png(3)]) @ loaded.embed_texts(CAPTIONS).T).isfinite().all()
