"""A run of each kind of model without Ray: train, resume, evaluate, export, load."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mmray
from mmray.config import (
    Batch,
    ChatInputs,
    Clip,
    ClipImage,
    ClipText,
    Config,
    CrossAttention,
    Data,
    Decoder,
    Evaluate,
    Fusion,
    Generative,
    ImageTower,
    Inputs,
    Lora,
    Model,
    Objective,
    Optimizer,
    Run,
    Siglip,
    TextTower,
    Train,
)
from mmray.data.store.prepared_set import PreparedSet, Row
from mmray.data.stream.order import Blocks, ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.chat import extend_tokenizer
from mmray.data.text.tokenizer import TextEncoder
from mmray.engine.checkpoint import state_io
from mmray.engine.worker import work
from mmray.engine.worker_context import DriverHandle, WorkerContext
from mmray.storage.lease import Lease
from mmray.train import run_dir
from mmray.train.evaluate_export import export_run
from tests.made import CAPTIONS, make_set, png, row
from tests.train.runs import lines, same_weights

INPUTS = Inputs(image_side=16, fit="squash", max_tokens=12)
IMAGE, TEXT = ClipImage(width=16, depth=1, heads=2, patch=8), ClipText(width=16, depth=1, heads=2)
KINDS: dict[str, tuple[Model, str]] = {
    "clip": (Clip(inputs=INPUTS, image=IMAGE, text=TEXT, embed_dim=8, patch_dropout=0.5), "contrastive"),
    "siglip": (Siglip(inputs=INPUTS, image=IMAGE, text=TEXT), "sigmoid"),
    "fusion": (
        Fusion(
            inputs=INPUTS.model_copy(update={"max_boxes": 2}),
            image=ImageTower(name="convnet", width=8, depth=2),
            text=TextTower(width=16, depth=1, heads=2, dropout=0.1),
            cross=CrossAttention(width=16, depth=1, heads=2, dropout=0.1),
            embed_dim=8,
            classes=3,
            regions=True,
            region_labels=("", "a", "red"),
        ),
        "contrastive + 0.5 * matching + classification + region_text",
    ),
}
WRITING = Generative(
    inputs=ChatInputs(image_side=16, fit="squash", max_tokens=32),
    image=IMAGE,
    text=Decoder(width=16, depth=1, heads=2),
)
STEPS = 6
LINE = DriverHandle(lambda _: None, lambda: False, lambda _: 0, lambda _: False, {"rank": 0, "node": "", "pid": 0})


def told(number: int) -> Row:
    """A row with label row % 3, and row % 4 boxes with labels 1 and 2."""
    boxes, labels = [[0.1 * each, 0.2, 0.5, 0.9] for each in range(number % 4)], [1, 2, 1][: number % 4]
    return replace(row(number), label=number % 3, boxes=boxes, box_labels=labels)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedSet, PreparedSet]:
    """A training and an evaluation split."""
    rows = [told(number) for number in range(30)]
    place = tmp_path_factory.mktemp("kinds") / "set"
    make_set(place, rows[:22], rows[22:])
    return PreparedSet.open(str(place), "train"), PreparedSet.open(str(place), "test")


def config_of(kind: str, storage: Path) -> Config:
    model, objective = (KINDS | {"generative": (WRITING, "language_modelling")})[kind]
    return Config(
        model=model,
        objective=Objective(kind=objective),
        data=Data(train="made"),
        batch=Batch(micro=4, global_=8),
        optimizer=Optimizer(lr=1e-3, warmup_steps=1, lr_multipliers=("image.*=0.5",)),
        train=Train(steps=STEPS, log_every=1, checkpoint_every=3, ema=0.5, activation_checkpointing=("image", "text")),
        evaluate=Evaluate(classes=("a", "red", "one")),
        run=Run(name=kind, storage=str(storage)),
    )


def trained(config: Config, sets: tuple[PreparedSet, PreparedSet], folder: Path, checkpoint: str | None = None) -> dict:
    """Run one worker without Ray, from the start or from a checkpoint."""
    train_set, eval_set = sets
    tokenizer = extend_tokenizer(train_set.tokenizer_json, config.model.inputs)
    vocab_size = TextEncoder(tokenizer, 8).vocab_size
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})
    reader = RowReader(train_set, config.model.inputs, tokenizer, config.prepare.max_pixels)
    plan = SamplePlan(num_rows=22, global_rows=8, world=1, micro=4, seed=0, steps=STEPS)
    start = ResumePoint(plan, 3 if checkpoint else 0, checkpoint)
    blocks = Blocks(plan, start.step, 2)
    run_dir.create_run_dir(folder, config, {"train": "made"}, tokenizer)
    lease = Lease(folder)
    job = WorkerContext(config, folder, lease.acquire(), reader, eval_set, tokenizer)
    read = (reader.block(plan, blocks.positions(number)) for number in range(blocks.count))
    try:
        return work(job, start, read, torch.device("cpu"), LINE)
    finally:
        lease.release()


def ended(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run."""
    return state_io.load_weights(folder / "checkpoints" / f"step-{STEPS}")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_resumes_and_exports(
    kind: str, prepared: tuple[PreparedSet, PreparedSet], tmp_path: Path
) -> None:
    config, folder = config_of(kind, tmp_path), tmp_path / kind
    outcome = trained(config, prepared, folder)
    assert (outcome["status"], outcome["steps"], outcome["skipped_steps"]) == ("finished", STEPS, 0)
    metrics = outcome["metrics"]
    assert {"recall_at_1/image_to_text", "loss", "zero_shot/top_1"} <= metrics.keys()
    assert ("classification/top_1" in metrics) == (kind == "fusion")
    assert ("train/loss_matching" in lines(folder)[0]) == (kind == "fusion")
    if kind == "fusion":
        assert lines(folder)[0]["train/loss_region_text"] > 0
        assert metrics["regions/boxes"] == sum(min(2, number % 4) for number in range(22, 30))
        assert 0 <= metrics["regions/top_1"] <= 1

    again = tmp_path / "again"
    trained(config, prepared, again, str(folder / "checkpoints" / "step-3"))
    assert same_weights(ended(folder), ended(again))

    loaded = mmray.load(export_run(folder, tmp_path / "exported", None))
    scores = loaded.embed_images([png(3), png(200)]) @ loaded.embed_texts(CAPTIONS).T
    assert scores.shape == (2, 3)
    assert scores.isfinite().all()
    if kind == "fusion":
        assert loaded.match([png(3)], CAPTIONS[:1]).shape == (1,)
        named = loaded.classify_boxes(png(3), [[1, 2, 8, 9], [0, 0, 16, 16]])
        assert (named.shape, named[:, 0].tolist()) == ((2, 3), [0, 0])  # label 0 has no name


@pytest.mark.parametrize("rank", [0, 2])
def test_generative_kind_trains_resumes_and_exports(
    rank: int, prepared: tuple[PreparedSet, PreparedSet], tmp_path: Path
) -> None:
    config, folder = config_of("generative", tmp_path), tmp_path / "run"
    adapted = config.model.model_copy(update={"lora": Lora(rank=rank)})
    optimizer = config.optimizer.model_copy(update={"lr": 0.02})
    changes = {"model": adapted, "optimizer": optimizer, "evaluate": Evaluate(num_generations=4, max_new_tokens=5)}
    config = config.model_copy(update=changes)
    outcome = trained(config, prepared, folder)
    assert (outcome["status"], outcome["steps"], outcome["skipped_steps"]) == ("finished", STEPS, 0)
    metrics, logged = outcome["metrics"], lines(folder)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["answered"] == 4 and 0 <= metrics["bleu_4"] <= 1
    assert logged[-1]["train/loss"] < logged[0]["train/loss"]
    assert 0 <= logged[0]["train/token_accuracy"] <= 1

    again = tmp_path / "again"
    trained(config, prepared, again, str(folder / "checkpoints" / "step-3"))
    assert same_weights(ended(folder), ended(again))

    answers = mmray.load(export_run(folder, tmp_path / "exported", None)).answer([png(3), png(200)], max_new_tokens=5)
    assert [type(answer) for answer in answers] == [str, str]
