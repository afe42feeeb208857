"""What evaluation and export take out of a checkpoint: the weights, or their average where the run kept one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mmray.models.build import build
from mmray.train import checkpoint
from mmray.train.scoring import restored_model
from mmray.train.task import AVERAGE
from tests.train import runs


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_averaged_weights_are_taken_where_there_are_any(tmp_path: Path, ema: float) -> None:
    config = runs.config("none", tmp_path, "one", ema=ema)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 20})})
    torch.manual_seed(0)
    model = build(config.model, 20)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    start = model.log_scale.item()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    average.update_parameters(model)
    state = {AVERAGE: average.state_dict()} if ema else {}
    meta = {"architecture": model.architecture()}
    found = restored_model(config, checkpoint.save(tmp_path, 3, model.state_dict(), state, meta))
    assert found.log_scale.item() == pytest.approx(start + (0.5 if ema else 1))
    expected = average.module if ema else model
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))
