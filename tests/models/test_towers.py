"""Towers of text, audio and video: exact with missing modalities, and independent of padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmray.config import AudioTower, Batch, Config, Data, Objective, Optimizer, Run, Train
from mmray.data.store.prepared_set import PreparedSet
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group
from mmray.models.build import build
from mmray.models.encoders.audio import AudioTransformer
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.contrastive import AudioText
from tests.data.media.test_clips import make_rows
from tests.engine import recipe_models, toy
from tests.engine.single_worker import run_config
from tests.made import make_set
from tests.training.runs import same_weights

SPEC, OBJECTIVE = recipe_models.OTHER_MODELS["towers"]


def batch_of(rows: int = 8) -> dict[str, Tensor]:
    batch = synthetic_batch(SPEC.inputs, recipe_models.VOCAB, rows, "cpu")
    return recipe_models.without_modalities(batch)


def model_of() -> Any:
    torch.manual_seed(3)
    return build(SPEC, recipe_models.VOCAB, {}).double()


def test_a_missing_modality_has_the_embedding_zero_and_no_gradient() -> None:
    model = model_of()
    batch = batch_of()
    outputs = model(batch)
    for name in ("text", "audio", "video"):
        norms = outputs[f"{name}_embed"].norm(dim=1)
        assert torch.equal(norms > 0.5, batch[f"has_{name}"])
    only = {name: column[4:5] for name, column in batch.items()}  # it has no audio
    model(only)["audio_embed"].sum().backward()
    gradients = [weight.grad for weight in model.audio.parameters()]
    # Every weight takes part, so no rank waits for it.
    assert all(each is not None and not each.any() for each in gradients)


def naive_loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for first, second, weight in (
        ("audio", "text", 1.0),
        ("video", "text", 1.0),
        ("audio", "video", 0.5),
    ):
        kept = batch["valid"] & batch[f"has_{first}"] & batch[f"has_{second}"]
        pair = (outputs[f"{name}_embed"][kept] for name in (first, second))
        total = total + weight * toy.naive_contrastive(*pair, outputs["logit_scale"])
    return total


def test_loss_compares_the_rows_that_have_both_modalities() -> None:
    batch = batch_of()
    batch["valid"][-1] = False
    outputs = model_of()(batch)
    loss, counts, metrics = toy.objective(OBJECTIVE).compute_loss(outputs, batch)
    assert counts.tolist() == [2, 3, 2]
    assert (loss / counts).sum().item() == pytest.approx(
        naive_loss(outputs, batch).item(), rel=1e-12
    )
    assert {"loss_audio_to_text", "loss_text_to_video", "loss_audio_video"} <= metrics.keys()


def test_no_row_with_both_modalities_gives_no_loss() -> None:
    batch = batch_of()
    rows = {name: column[4:] for name, column in batch.items()}
    outputs = model_of()(rows)
    loss, count, _ = AudioText().compute_loss(outputs, rows)
    assert (loss.item(), count.item()) == (0.0, 0)


def test_accumulated_step_equals_whole_batch() -> None:
    whole = recipe_models.train_kind("towers", Group(), "single", micro=8)
    parts = recipe_models.train_kind("towers", Group(), "single", micro=3)
    start = recipe_models.train_kind("towers", Group(), "single", steps=0)
    toy.assert_equal_weights(parts, whole, start)


def test_audio_features_do_not_depend_on_padding() -> None:
    torch.manual_seed(0)
    tower = AudioTransformer(AudioTower(width=16, depth=2, heads=2), 8000).double()
    audio = torch.randint(-9999, 9999, (2, 4000)).short()
    num_samples = torch.tensor([1700, 1234])
    audio[0, 1700:] = 0
    audio[1, 1234:] = 0
    long, mask = tower(audio, num_samples)
    short, short_mask = tower(audio[:, :1700], num_samples)
    assert torch.equal(mask.sum(1), short_mask.sum(1))
    for row, length in enumerate(mask.sum(1).tolist()):
        torch.testing.assert_close(long[row, :length], short[row, :length], rtol=0, atol=1e-12)


def test_order_of_frames_matters_and_missing_ones_do_not() -> None:
    model = model_of()
    batch = {name: column[:2] for name, column in batch_of().items()}
    batch["num_frames"][:] = 2
    embed = model.video(batch["video"], batch["num_frames"])
    changed = batch["video"].clone()
    changed[:, 2] = 7
    torch.testing.assert_close(model.video(changed, batch["num_frames"]), embed)
    torch.testing.assert_close(
        model.video(batch["video"][:, :2], batch["num_frames"]), embed, rtol=0, atol=1e-12
    )
    assert not torch.allclose(model.video(batch["video"].flip(1), batch["num_frames"]), embed)


def test_resumed_run_equals_uninterrupted(tmp_path: Path) -> None:
    rows = [
        replace(row, key=f"{row.key} {number}")
        for number in range(3)
        for row in make_rows()
        if row.key not in ("broken", "two")
    ]
    make_set(tmp_path / "set", rows[:12], rows[12:])
    train_set, eval_set = (
        PreparedSet.open(str(tmp_path / "set"), split) for split in ("train", "test")
    )
    config = Config(
        model=SPEC,
        objective=Objective(kind=OBJECTIVE),
        data=Data(train="made"),
        batch=Batch(micro=3, global_=8),
        optimizer=Optimizer(lr=1e-3, warmup_steps=1),
        train=Train(steps=6, log_every=1, checkpoint_every=3),
        run=Run(name="towers", storage=str(tmp_path)),
    )
    result, _ = run_config(config, train_set, tmp_path / "run", eval_set)
    assert (result["status"], result["steps"]) == ("finished", 6)
    # Five held-out rows have two texts, and the pair without text is one clip.
    assert result["metrics"]["rows"] == 11 and result["metrics"]["bad_rows"] == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    run_config(config, train_set, tmp_path / "resumed", eval_set, checkpoint)
    weights = [
        state_io.load_weights(tmp_path / name / "checkpoints" / "step-6")
        for name in ("run", "resumed")
    ]
    assert same_weights(*weights)
