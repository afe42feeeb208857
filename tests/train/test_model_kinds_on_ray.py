"""A run of each kind of model on Ray gives the weights of one process, also after resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mmray
from mmray.config import Cluster, Data
from mmray.data.store.prepared_set import PreparedSet
from mmray.train.driver import train
from mmray.train.evaluate_export import export_run
from tests.engine.single_worker import run_config
from tests.engine.test_model_kinds import KINDS, STEPS, config_of, final_weights, labeled_row
from tests.made import CAPTIONS, make_set, png
from tests.train.runs import Silent, lines, same_weights

SCORES = ("recall_at", "median_rank", "zero_shot", "classification", "regions", "loss")
pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("kind", KINDS)
def test_resume_on_ray_gives_the_same_weights(kind: str, local_ray: None, tmp_path: Path) -> None:
    rows, prepared = [labeled_row(number) for number in range(30)], tmp_path / "set"
    make_set(prepared, rows[:22], rows[22:])
    config, folder = config_of(kind, tmp_path), tmp_path / "alone"  # first in this process
    train_set, test_set = (PreparedSet.open(str(prepared), split) for split in ("train", "test"))
    metrics = run_config(config, train_set, folder, test_set)[0]["metrics"]
    shutil.copytree(folder / "checkpoints" / "step-3", tmp_path / kind / "checkpoints" / "step-3")
    changes = {"data": Data(train=str(prepared), workers=1), "cluster": Cluster(workers=1)}
    run = train(config.model_copy(update=changes), Silent())
    assert (run.result["status"], run.result["steps"], run.result["restarts"]) == ("finished", STEPS, 0)
    assert [line["step"] for line in lines(run.path)] == [4, 5, 6]
    assert same_weights(final_weights(run.path), final_weights(folder))
    scores = {name: value for name, value in run.result["metrics"].items() if name.startswith(SCORES)}
    assert {name: metrics[name] for name in scores} == pytest.approx(scores, rel=1e-6)
    loaded = mmray.load(export_run(run.path, tmp_path / "exported", None))
    assert (loaded.embed_images([png(3)]) @ loaded.embed_texts(CAPTIONS).T).isfinite().all()
