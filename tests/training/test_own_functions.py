"""Augmentation and metrics of the user, in runs of one worker."""

import shutil
import sys

import pytest

from mmray.config import Augment, Config, Data
from mmray.config.model_kinds import Vlm
from mmray.engine.checkpoint.state_io import load_weights
from mmray.training.driver import train
from mmray.training.validate import unsupported_reasons
from tests.test_contributing import example
from tests.training.runs import Silent, config, lines, make_data, same_weights

CODE = f"""
{example("Add a function of your own")}

def mark_and_erase(image, generator):
    from pathlib import Path

    Path(__file__).with_name("augmented").touch()
    return erase(image, generator)
"""


def test_resumed_run_with_own_augmentation_equals_the_undisturbed_one(
    tmp_path, monkeypatch, without_ray
):
    (tmp_path / "my_pkg.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_pkg", raising=False)
    data = make_data(tmp_path / "set")

    def run(name):
        wanted = config(data, tmp_path / "runs", name, steps=4, checkpoint_every=2)
        wanted = wanted.replace(
            data=wanted.data.replace(augment="my_pkg:mark_and_erase"),
            evaluate=wanted.evaluate.replace(every=0, metrics=("my_pkg:cosine",)),
        )
        return train(wanted.with_cluster(workers=1, cpus_per_worker=1), Silent())

    calm = run("calm")
    assert (tmp_path / "augmented").exists()
    # as if it had been killed after its checkpoint of step 2
    folder = tmp_path / "runs" / "killed"
    shutil.copytree(calm.path, folder)
    shutil.rmtree(folder / "checkpoints" / "step-4")
    (folder / "result.json").unlink()
    resumed = run("killed")
    losses = [[line["train/loss"] for line in lines(each.path)] for each in (calm, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    folders = [each.path / "checkpoints" / "step-4" for each in (calm, resumed)]
    assert same_weights(*map(load_weights, folders))
    scores = calm.result["metrics"]
    assert -1 <= scores["cosine/lowest"] < scores["cosine/mean"] <= 1
    assert "cosine, mean" in (calm.path / "report.html").read_text()


@pytest.mark.parametrize(
    "section", [{"data": Data(augment="my_pkg:erase")}, {"augment": Augment(flip=0.5)}]
)
def test_models_that_read_images_as_they_are_refuse_augmentation(section):
    reasons = unsupported_reasons(Config(model=Vlm(weights="sample-vlm"), **section))
    assert any("augment and data.augment" in reason for reason in reasons)
