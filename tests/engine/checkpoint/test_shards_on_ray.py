"""A sharded run through Ray: kill a worker, resume on one worker as replicas, evaluate and
export.
"""

import pytest
import torch

import mmray
from mmray.engine.checkpoint import files, state_io
from mmray.training.driver import train
from mmray.training.evaluate_export import evaluate_model, export_model
from tests.training.runs import STEPS, Silent, config, make_data, marks

FSDP = {"parallel": "fsdp", "precision": "fp32"}


def weights(run, step):
    return state_io.load_weights(run.path / "checkpoints" / f"step-{step}")


@pytest.mark.slow  # five runs and an evaluation
@pytest.mark.timeout(900)
def test_sharded_run_survives_kill_and_resumes_as_replicas(local_ray, tmp_path):
    make_data(tmp_path / "set")
    calm = train(config(tmp_path / "set", tmp_path, "calm", **FSDP), Silent())
    kill = ("tests.training.faults:KillRankOneOnce",)
    killed = train(config(tmp_path / "set", tmp_path, "killed", callbacks=kill, **FSDP), Silent())
    assert killed.result["restarts"] == 1 and marks(killed.path) == marks(calm.path)
    assert files.num_tensor_files(killed.path / "checkpoints" / f"step-{STEPS}") == 2
    ours, theirs = weights(killed, STEPS), weights(calm, STEPS)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    scores = evaluate_model(calm.path, None, None, None, None, Silent())
    assert (
        scores["recall_at_1/image_to_text"] == calm.result["metrics"]["recall_at_1/image_to_text"]
    )
    assert mmray.load(str(export_model(calm.path, tmp_path / "model", None))).embed_texts(
        ["a red one"]
    ).shape == (1, 16)
    for name, parallel, workers in (("calm", "ddp", 1), ("killed", "fsdp", 3)):
        wanted = config(
            tmp_path / "set", tmp_path, name, **FSDP | {"parallel": parallel, "steps": STEPS + 3}
        )
        further = train(wanted.with_cluster(workers=workers), Silent())
        assert (further.result["status"], further.result["steps"]) == ("finished", STEPS + 3)
        assert marks(further.path)[:STEPS] == marks(calm.path)[:STEPS]
        newest = further.path / "checkpoints" / f"step-{STEPS + 3}"
        assert files.num_tensor_files(newest) == (3 if parallel == "fsdp" else 1)
