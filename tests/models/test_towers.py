"""Towers of text, audio and video: exact with missing modalities, and independent of padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmray
from mmray.config import (
    AudioTower,
    Batch,
    Config,
    Data,
    FrameTransformer,
    Objective,
    Run,
    Train,
)
from mmray.data.store.prepared_set import PreparedSet
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group
from mmray.models.build import build
from mmray.models.encoders.audio import AudioTransformer
from mmray.models.encoders.text import masked_mean
from mmray.models.protocol import RANDOM_WEIGHTS
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.contrastive import AudioText
from mmray.objectives.matching import ClipMatching
from mmray.training.evaluate_export import export_model
from tests.data.media.synthetic import encode_audio, encode_video
from tests.data.media.test_clips import make_rows
from tests.engine import recipe_models, toy
from tests.engine.single_worker import run_config
from tests.made import make_set
from tests.models.test_fusion import train
from tests.training.runs import same_weights

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC, OBJECTIVE = recipe_models.OTHER_MODELS["towers"]


def batch_of(rows: int = 8) -> dict[str, Tensor]:
    batch = synthetic_batch(SPEC.inputs, recipe_models.VOCAB, rows, "cpu")
    return recipe_models.without_modalities(batch)


def model_of() -> Any:
    torch.manual_seed(3)
    return build(SPEC, recipe_models.VOCAB, RANDOM_WEIGHTS).double()


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


@pytest.mark.parametrize("kind", ["towers", "towers with heads", *recipe_models.ARCHITECTURES])
def test_accumulated_step_equals_whole_batch(kind: str) -> None:
    whole = recipe_models.train_kind(kind, Group(), "single", micro=8)
    parts = recipe_models.train_kind(kind, Group(), "single", micro=3)
    start = recipe_models.train_kind(kind, Group(), "single", steps=0)
    toy.assert_equal_weights(parts, whole, start)


def with_negatives(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, each row with the text of the next one as its negative."""
    ids = batch["input_ids"].roll(-1, 0)
    return batch | {"negative_ids": ids, "negative_mask": batch["attention_mask"].roll(-1, 0)}


def test_heads_read_the_modalities_of_a_row_and_nothing_else() -> None:
    """Those of a batch are those of each row alone, without padding."""
    spec, _ = recipe_models.OTHER_MODELS["towers with heads"]
    torch.manual_seed(3)
    model: Any = build(spec, recipe_models.VOCAB, RANDOM_WEIGHTS).double()
    batch = with_negatives(batch_of())
    batch["audio"][3, 700:] = 0  # as the stream pads
    heads = ("class_logits", "match", "match_negative")
    outputs = model(batch)
    for row in range(8):
        alone = {name: column[row : row + 1] for name, column in batch.items()}
        for name, count in (("audio", "num_samples"), ("video", "num_frames")):
            length = int(alone[count])
            # Other values in place of what the row lacks; a shorter clip has no padding.
            alone[name] = alone[name][:, :length] if length else alone[name] * 0 + 7
        for name in heads:
            torch.testing.assert_close(
                model(alone)[name][0], outputs[name][row], rtol=0, atol=1e-12
            )
    for name, row in (("audio", 0), ("video", 1), ("audio", 3), ("video", 3)):
        changed = {key: column.clone() for key, column in batch.items()}
        changed[name][row] = changed[name][row].flip(0) // 2
        for head in heads:
            assert not torch.allclose(model(changed)[head][row], outputs[head][row])


def test_heads_learn_from_the_modalities_that_rows_have() -> None:
    """Four classes: a bright quarter, a pitch and a word. Rows lack audio, video or neither."""
    torch.manual_seed(0)
    spec, _ = recipe_models.OTHER_MODELS["towers with heads"]
    model = build(spec.replace(classes=4), recipe_models.VOCAB, RANDOM_WEIGHTS).train()
    batch = synthetic_batch(spec.inputs, recipe_models.VOCAB, 12, "cpu")
    label = torch.arange(12) % 4
    video = torch.zeros(12, 3, 3, 2, 8, 2, 8, dtype=torch.uint8)
    video[torch.arange(12), :, :, label // 2, :, label % 2] = 255
    times = torch.arange(batch["audio"].shape[1]) / spec.inputs.audio_rate
    pitch = 400 * 2.0**label
    batch |= {
        "video": video.view(12, 3, 3, 16, 16),
        "audio": (9999 * torch.sin(2 * torch.pi * pitch[:, None] * times)).short(),
        "input_ids": (label + 5)[:, None].expand(-1, 6).contiguous(),
        "label": label,
    }
    for name, count, rows in (
        ("audio", "num_samples", slice(0, 4)),
        ("video", "num_frames", slice(4, 8)),
    ):
        batch[f"has_{name}"][rows] = False
        batch[count][rows] = 0
    means = train(model, "audio_text + video_text + clip_matching + classification", batch)
    assert means["match_accuracy"] > 0.95 and means["class_accuracy"] > 0.95


def test_matching_counts_rows_with_a_text_and_a_medium() -> None:
    objective = ClipMatching()
    batch = batch_of()
    for name in ("has_audio", "has_video"):
        batch[name][3] = False
    assert objective.counted_rows(batch).tolist() == [
        *(True, True, False, False, True),
        *(False, False, True),
    ]
    gathered = {
        "text_embed": torch.eye(8) * batch["has_text"][:, None],
        "valid": batch["valid"],
        "offset": 0,
        **{name: batch[name] for name in objective.gathered_inputs},
    }
    outputs = {"media_embed_sum": torch.ones(8, 8), "logit_scale": torch.tensor(0.0)}
    for position in range(20):
        rows = batch | {"pos": batch["pos"] + 8 * position}
        negatives = objective.sample_hard_negatives(outputs, rows, gathered)
        for missing in batch["input_ids"][~batch["has_text"]]:
            own = (batch["input_ids"] == missing).all(dim=1)
            assert not (negatives["negative_ids"][~own] == missing).all(dim=1).any()


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
    """Of the towers without heads: test_pretrained_clips.py."""
    spec, objective = recipe_models.OTHER_MODELS["towers with heads"]
    config = Config(model=spec, objective=Objective(kind=objective))
    metrics = train_and_resume(config, tmp_path)
    # Five held-out rows have two texts, and the pair without text is one clip.
    assert (metrics["rows"], metrics["bad_rows"]) == (11, 0)
    assert {"classification/top_1", "classification/rows"} <= metrics.keys()
    model = mmray.load(export_model(tmp_path / "run", tmp_path / "out"))
    clips = [encode_video(times_ms=range(0, 400, 40), audio="aac"), encode_audio("flac", 0.3)]
    match = model.match(clips, ["a", "b"])
    assert match.shape == (2,) and ((match > 0) & (match < 1)).all()
    classes = model.classify(clips, ["a", "b"])
    torch.testing.assert_close(classes.sum(dim=1), torch.ones(2))
    # Each row is independent of the others, and its sound and its text decide.
    torch.testing.assert_close(model.match(clips[1:], ["b"]), match[1:], rtol=0, atol=1e-6)
    assert not torch.allclose(model.match(clips, ["b", "a"]), match, atol=1e-6)
    assert model.embed_audio(clips).shape == model.embed_texts(["a", "b"]).shape == (2, 8)
    silent = encode_video(times_ms=range(0, 400, 40))
    with pytest.warns(UserWarning, match="file 1 has no audio; its embedding is 0"):
        embeds = model.embed_audio([clips[1], silent])
    torch.testing.assert_close(embeds[0], model.embed_audio(clips[1:])[0], rtol=0, atol=1e-6)
    assert not embeds[1].any()


def test_without_layers_a_video_is_the_mean_of_its_frames() -> None:
    torch.manual_seed(3)
    spec = SPEC.replace(video=FrameTransformer(depth=0))
    model: Any = build(spec, recipe_models.VOCAB, RANDOM_WEIGHTS).double()
    pixels = torch.randn(2, 3, 3, 16, 16, dtype=torch.float64)
    features, mask = model.video.tower(pixels, torch.tensor([3, 1]))
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    alone = model.video.tower.image(pixels[0])
    torch.testing.assert_close(masked_mean(features, mask)[0], alone.mean(dim=0))


def train_and_resume(config: Config, folder: Path) -> dict[str, float]:
    """Metrics of a run on rows that lack modalities; its resume has the same weights."""
    rows = [
        replace(row, key=f"{row.key} {number}", label=number)
        for number in range(3)
        for row in make_rows()
        if row.key not in ("broken", "two")
    ]
    make_set(folder / "set", rows[:12], rows[12:])
    train_set, eval_set = (
        PreparedSet.open(str(folder / "set"), split) for split in ("train", "test")
    )
    config = config.replace(
        data=Data(train="made"),
        batch=Batch(micro=3, global_=8),
        optimizer=config.optimizer.replace(lr=1e-3, warmup_steps=1),
        train=Train(steps=6, log_every=1, checkpoint_every=3),
        run=Run(name="towers", storage=str(folder)),
    )
    result, _ = run_config(config, train_set, folder / "run", eval_set)
    assert (result["status"], result["steps"]) == ("finished", 6)
    checkpoint = folder / "run" / "checkpoints" / "step-3"
    run_config(config, train_set, folder / "resumed", eval_set, checkpoint)
    weights = [
        state_io.load_weights(folder / name / "checkpoints" / "step-6")
        for name in ("run", "resumed")
    ]
    assert same_weights(*weights)
    return result["metrics"]
