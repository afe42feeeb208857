"""A run of each kind of model without Ray: train, resume, evaluate, export, load."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import mmray
from mmray.config import Batch, Config, Data, Evaluate, Objective, Optimizer, Run, Train
from mmray.data.store.prepared_set import PreparedSet
from mmray.engine.checkpoint import state_io
from mmray.errors import UsageError
from mmray.evaluation import EXAMPLES
from mmray.training.evaluate_export import export_model
from tests.engine import recipe_models
from tests.engine.single_worker import run_config
from tests.made import CAPTIONS, make_set, png, row
from tests.training.runs import lines, same_weights

STEPS = 6
OBJECTIVES = {"fusion": "contrastive + 0.5 * matching + classification"}
KINDS = ("clip", "siglip", "naflex", "fusion", "captioner")


def labeled_row(number):
    return replace(row(number), label=number % 3)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A training and an evaluation split."""
    rows, folder = (
        [labeled_row(number) for number in range(30)],
        tmp_path_factory.mktemp("kinds") / "set",
    )
    make_set(folder, rows[:22], rows[22:])
    return PreparedSet.open(str(folder), "train"), PreparedSet.open(str(folder), "test")


def config_of(kind, storage):
    model, objective = (recipe_models.MODELS | recipe_models.OTHER_MODELS)[kind]
    inputs = {"max_tokens": 12} | ({} if kind == "naflex" else {"fit": "squash"})
    changes = {"patch_dropout": 0.5} if kind == "clip" else {}
    if kind == "fusion":
        changes |= {"text": model.text.model_copy(update={"dropout": 0.1})}
    return Config(
        model=model.model_copy(update={"inputs": model.inputs.model_copy(update=inputs)} | changes),
        objective=Objective(kind=OBJECTIVES.get(kind, objective)),
        data=Data(train="made"),
        batch=Batch(micro=4, global_=8),
        optimizer=Optimizer(lr=1e-3, warmup_steps=1, lr_multipliers=("image.*=0.5",)),
        train=Train(
            steps=STEPS,
            log_every=1,
            checkpoint_every=3,
            ema=0.5,
            activation_checkpointing=model.branches if kind == "captioner" else ("image", "text"),
        ),
        evaluate=Evaluate(classes=("a", "red", "one")),
        run=Run(name=kind, storage=str(storage)),
    )


def final_weights(folder):
    return state_io.load_weights(folder / "checkpoints" / f"step-{STEPS}")


def train_and_resume(config, prepared, folder):
    """Metrics of a finished run, whose resume from step 3 gives the same weights, and its exported
    model.
    """
    result, _ = run_config(config, prepared[0], folder / "run", prepared[1])
    assert (result["status"], result["steps"], result["skipped_steps"]) == ("finished", STEPS, 0)
    checkpoint = folder / "run" / "checkpoints" / "step-3"
    run_config(config, prepared[0], folder / "resumed", prepared[1], checkpoint)
    assert same_weights(final_weights(folder / "run"), final_weights(folder / "resumed"))
    return (
        result["metrics"],
        lines(folder / "run"),
        mmray.load(export_model(folder / "run", folder / "exported")),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_resumes_and_exports(kind, prepared, tmp_path):
    metrics, logged, model = train_and_resume(config_of(kind, tmp_path), prepared, tmp_path)
    assert {"recall_at_1/image_to_text", "loss", "zero_shot/top_1"} <= metrics.keys()
    assert (
        ("classification/top_1" in metrics)
        == ("train/loss_matching" in logged[0])
        == (kind == "fusion")
    )
    is_captioner = kind == "captioner"
    assert ("caption_perplexity" in metrics) == ("train/loss_captioning" in logged[0])
    assert ("caption_perplexity" in metrics) == is_captioner
    examples = json.loads((tmp_path / "run" / EXAMPLES).read_text())
    if is_captioner:
        keys = {str(each["row"]): each["key"] for each in examples["image_to_text"]}
        assert examples["generated"].keys() == keys.keys()
        images = [png(int(key.removeprefix("row-"))) for key in keys.values()]
        assert [*examples["generated"].values()] == model.caption(images)
    scores = model.embed_images([png(3), png(200)]) @ model.embed_texts(CAPTIONS).T
    assert scores.shape == (2, 3) and scores.isfinite().all()
    if kind != "fusion":
        with pytest.raises(UsageError, match="this model has no match_head"):
            model.match([png(3)], CAPTIONS[:1])
    else:
        assert model.match([png(3)], CAPTIONS[:1]).shape == (1,)
