"""DPO: losses, gradients and whole runs equal a plain loop of the published formula."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from mmray import api
from mmray.config import (
    Batch,
    Config,
    Data,
    Evaluate,
    Lora,
    Objective,
    Optimizer,
    Prepare,
    Run,
    Train,
    VlmInputs,
    to_yaml,
)
from mmray.config import Vlm as VlmConfig
from mmray.data.messages import split_rejected
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.vlm.reader import ConversationReader, ReferenceLogProbs
from mmray.data.vlm.token_counter import ProcessorCounter
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.errors import DataError, MmrayError, UsageError
from mmray.models.vlm.model import Vlm
from mmray.objectives import build
from mmray.training.driver import train
from mmray.training.saved_model import load_model, open_run
from mmray.training.validate import objective_reasons
from tests.engine.conftest import spawn_ranks
from tests.made import encode
from tests.models.vlm import two_ranks
from tests.models.vlm.rows import double_model, photo, settings
from tests.training.runs import Silent, lines

pytestmark = pytest.mark.usefixtures("forked_data_processes")

BETA = 0.5
ANSWERS = [
    ("a circle and a triangle", "two"),
    ("red", "blue and green"),
    ("three", "zero"),
    ("a square", "There are three shapes."),
    ("yes", "no"),
    ("one", "two circles"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Rows with 0, 1 and 2 images, the last one without a rejected answer."""
    folder = tmp_path_factory.mktemp("source")
    rows: list[dict[str, Any]] = []
    for number, (chosen, rejected) in enumerate(ANSWERS):
        images = []
        for index in range(number % 3):
            images.append(f"{number}-{index}.png")
            data = encode(Image.fromarray(photo(40 + 8 * number, 30 + 20 * index)))
            (folder / images[-1]).write_bytes(data)
        rows.append(
            {"prompt": f"What color {number}?", "chosen": chosen, "rejected": rejected}
            | ({"images": images} if images else {})
        )
    rows.append({"prompt": "How many?", "completion": "one"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.fixture(scope="module")
def prepared(source, forked_children) -> str:
    folder = str(source.with_name("set"))
    prepare(str(source), folder, Prepare())
    return folder


def pairs(model: Vlm, folder: str, weights: Any) -> list[Any]:
    """The encoded rows with random log-probabilities of a reference model."""
    opened = PreparedSet.open(folder)
    reader = ConversationReader(
        opened, settings(weights, question=""), 10**7, references=ReferenceLogProbs("adapters_off")
    )
    draw = np.random.default_rng(0)
    rows = opened.read(np.arange(len(ANSWERS)))
    return [replace(reader.encode_row(row), reference=draw.normal(-9, 3, 2)) for row in rows]


def plain_loss(model: Vlm, rows: list[Any], loss_type: str) -> torch.Tensor:
    """Sum of the losses, by the forward of transformers for one conversation at a time."""
    losses = []
    packed = model.packed
    model.packed = False
    for row in rows:
        scores = []
        for each, reference in zip((row, row.rejected), row.reference, strict=True):
            batch = model.collator()([each])
            logits = model.net(**model.model_inputs(batch)).logits[0]
            ids = torch.from_numpy(each.input_ids.astype(np.int64))
            log_probs = torch.log_softmax(logits[: len(ids) - 1], dim=1)
            picked = log_probs.gather(1, ids[1:, None])[:, 0]
            targets = torch.from_numpy(each.loss_weights[1:] > 0)
            ratio = picked[targets].sum() - float(reference)
            scores.append(ratio if loss_type == "sigmoid" else ratio / targets.sum())
        difference = scores[0] - scores[1]
        if loss_type == "ipo":
            losses.append((difference - 1 / (2 * BETA)) ** 2)
        else:
            losses.append(-F.logsigmoid(BETA * difference))
    model.packed = packed
    return torch.stack(losses).sum()


@pytest.fixture(scope="module", params=["qwen3_vl", "llava", "gemma3"])
def model_and_pairs(request, folder_of, prepared) -> tuple[Vlm, list[Any]]:
    """A model of a family, and the rows with random log-probabilities of a reference."""
    weights = folder_of(request.param)
    model = double_model(weights)
    return model, pairs(model, prepared, weights)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo"])
def test_micro_batches_equal_the_published_formula(model_and_pairs, loss_type) -> None:
    model, rows = model_and_pairs
    model.zero_grad(set_to_none=True)
    objective = build(Objective(kind="dpo", beta=BETA, loss_type=loss_type))
    collate = model.collator(pairs=True)
    total = 0.0
    for part in (rows[:1], rows[1:4], rows[4:], []):
        batch = collate(part) | {"valid": torch.ones(len(part), dtype=torch.bool)}
        loss, count, sums = objective.compute_loss(model(batch), batch)
        loss.backward()
        assert int(count) == len(part)
        assert set(sums) == {
            "reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected"
        }  # fmt: skip
        total += float(loss.detach())
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    plain = plain_loss(model, rows, loss_type)
    plain.backward()
    assert total == pytest.approx(float(plain.detach()), rel=1e-9)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            # Gemma's norms compute in float32.
            difference = (gradients[name] - weight.grad).abs().max()
            assert difference < 1e-6 * weight.grad.abs().max() + 1e-9, name


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_two_ranks_have_the_gradient_of_one(family, folder_of, tmp_path) -> None:
    weights = str(folder_of(family))
    expected = two_ranks.gradient(double_model(weights), Group(), "ddp", is_dpo=True)
    for by_strategy in spawn_ranks(two_ranks.preferences, tmp_path, 2, weights):
        for gradient in by_strategy.values():
            assert torch.allclose(gradient, expected, rtol=1e-6, atol=1e-9)


def config_of(weights: Any, folder: str, out: Path, **changes: Any) -> Config:
    sections: dict[str, Any] = {
        "model": VlmConfig(weights=str(weights), inputs=VlmInputs(max_tokens=200)),
        "objective": Objective(kind="dpo", beta=BETA),
        "data": Data(train=folder, workers=1, shuffle=False),
        "batch": Batch(global_=3, micro=3),
        "optimizer": Optimizer(lr=1e-2, warmup_steps=0, schedule="constant", weight_decay=0.0),
        "train": Train(steps=2, log_every=1, precision="fp32"),
        "run": Run(name=out.name, storage=str(out.parent)),
    }
    return Config(**sections | changes).with_cluster(workers=1, cpus_per_worker=1)


def run(config: Config) -> list[dict[str, Any]]:
    return lines(train(config, Silent(), local=True).path)


@pytest.fixture(scope="module")
def scored(folder_of, prepared, tmp_path_factory) -> str:
    folder = str(shutil.copytree(prepared, tmp_path_factory.mktemp("scored") / "set"))
    api.score(folder, folder_of("qwen3_vl"), reporter=Silent())
    return folder


def lora(weights: Any, **objective: Any) -> dict[str, Any]:
    """Sections of a run that trains adapters only."""
    inputs = VlmInputs(max_tokens=200)
    adapters = Lora(rank=4, targets=("*_proj",))
    return {
        "model": VlmConfig(weights=str(weights), inputs=inputs, lora=adapters),
        "objective": Objective(kind="dpo", beta=BETA, **objective),
        "optimizer": Optimizer(lr=1e-2, warmup_steps=0, freeze=("projector",)),
    }


@pytest.fixture(scope="module")
def evaluated(folder_of, scored, tmp_path_factory):
    """Config and lines of a run by its reference, evaluated on all rows at its end."""
    weights = folder_of("qwen3_vl")

    @cache
    def run_with(reference: str) -> tuple[Config, list[dict[str, Any]]]:
        own = lora(weights, reference=reference) if reference == "adapters_off" else {}
        data = Data(train=scored, eval=scored, workers=1, shuffle=False)
        evaluate = Evaluate(num_generations=0)
        out = tmp_path_factory.mktemp(reference) / "run"
        config = config_of(weights, scored, out, data=data, evaluate=evaluate, **own)
        return config, run(config)

    return run_with


def test_run_starts_at_the_reference_and_learns_the_same_in_any_micro_batches(
    folder_of, scored, evaluated, tmp_path
) -> None:
    _, whole = evaluated("reference")
    assert whole[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert whole[0]["train/reward_margin"] == pytest.approx(0, abs=1e-4)
    assert whole[1]["train/loss"] != pytest.approx(np.log(2), abs=1e-3)
    by_tokens = Batch(global_=3, tokens=400)
    divided = run(config_of(folder_of("qwen3_vl"), scored, tmp_path / "divided", batch=by_tokens))
    for name in ("train/loss", "train/reward_margin", "train/reward_accuracy"):
        values = [[line[name] for line in each] for each in (whole, divided)]
        assert values[1] == pytest.approx(values[0], abs=1e-4)


def test_adapters_off_equals_the_column(folder_of, scored, evaluated, tmp_path) -> None:
    weights = folder_of("qwen3_vl")
    column = run(config_of(weights, scored, tmp_path / "column", **lora(weights)))
    config, adapters_off = evaluated("adapters_off")
    losses = [[line["train/loss"] for line in each] for each in (column, adapters_off)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    trained = config.replace(
        optimizer=Optimizer(freeze=("*.bias",)), run=Run(name="t", storage=str(tmp_path))
    )
    with pytest.raises(UsageError, match="are trained fully"):
        run(trained)


@pytest.mark.parametrize("reference", ["reference", "adapters_off"])
def test_held_out_rows_have_the_rewards_of_the_formula(reference, scored, evaluated) -> None:
    config, run_lines = evaluated(reference)
    last = run_lines[-1]
    folder = Path(config.run.storage) / config.run.name
    model: Any = load_model(*open_run(folder, None)[::2]).eval()
    opened = PreparedSet.open(scored)
    reader = ConversationReader(
        opened, config.model, 10**7, references=ReferenceLogProbs("adapters_off")
    )
    numbers = np.arange(len(ANSWERS))
    columns = opened.columns(numbers)
    rows = [
        replace(
            reader.encode_row(row),
            reference=np.array([values["reference_chosen"], values["reference_rejected"]]),
        )
        for row, values in zip(opened.read(numbers), columns, strict=True)
    ]
    with torch.no_grad():
        expected = float(plain_loss(model, rows, "sigmoid")) / len(rows)
    assert last["evaluate/preference_loss"] == pytest.approx(expected, abs=1e-3)
    assert 0 <= last["evaluate/reward_accuracy"] <= 1
    assert last["evaluate/rows"] == len(ANSWERS) + 1


def test_set_without_the_columns_of_the_run_is_refused_by_name(
    folder_of, prepared, scored, tmp_path
) -> None:
    weights = folder_of("qwen3_vl")
    with pytest.raises(MmrayError, match=f"run mmray score {prepared} --weights {weights}"):
        run(config_of(weights, prepared, tmp_path / "a"))
    scored = str(shutil.copytree(scored, tmp_path / "set"))
    smaller = VlmConfig(weights=str(weights), inputs=VlmInputs(max_tokens=200, max_pixels=1024))
    config = config_of(weights, scored, tmp_path / "b", model=smaller)
    with pytest.raises(
        DataError, match=r"transformers or mmray than those of the run: run mmray score .*FILE"
    ):
        run(config)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    with pytest.raises(UsageError, match="limits of images or version were others"):
        api.score(scored, weights, config=tmp_path / "run.yaml", reporter=Silent())
    api.score(scored, weights, config=tmp_path / "run.yaml", name="smaller", reporter=Silent())
    objective = Objective(kind="dpo", reference="smaller")
    line = run(config.replace(objective=objective))[0]
    assert line["train/loss"] == pytest.approx(np.log(2), abs=1e-4)


def test_column_of_other_weights_is_refused_before_the_first_step(
    folder_of, scored, tmp_path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder_of("qwen3_vl").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"whose weights are not those of model\.weights"):
        run(config_of(other, scored, tmp_path / "run"))


def test_tokens_of_a_pair_bound_both_conversations(folder_of, prepared) -> None:
    weights = str(folder_of("qwen3_vl"))
    counter = ProcessorCounter(weights, pairs=True)
    assert counter.digest != ProcessorCounter(weights).digest
    count = counter.build()
    rows = PreparedSet.open(prepared).read(np.arange(len(ANSWERS) + 1))
    reader = ConversationReader(
        PreparedSet.open(prepared),
        settings(weights, question=""),
        10**7,
        references=ReferenceLogProbs("adapters_off"),
    )
    for row in rows[:-1]:
        lengths = [len(each.input_ids) for each in reader.encode_row(row).conversations]
        assert count(row) == 2 * max(lengths)
    assert split_rejected(rows[-1].messages) is None
    with pytest.raises(ValueError, match="no rejected answer"):
        count(rows[-1])


@pytest.mark.parametrize(
    ("freeze", "train", "is_refused"),
    [
        (("projector",), "", False),
        (("vision", "*connector*"), "", False),
        (("vision",), "", True),
        (("projector",), "embed_tokens", True),
    ],
)
def test_adapters_off_with_other_trained_weights_is_refused_from_settings(
    freeze, train, is_refused, tmp_path
) -> None:
    base = config_of("w", "set", tmp_path, **lora("w", reference="adapters_off"))
    model = base.model.replace(lora=base.model.lora.replace(train=train))
    config = base.replace(model=model, optimizer=base.optimizer.replace(freeze=freeze))
    refused = any("no fixed reference" in each for each in objective_reasons(config))
    assert refused == is_refused


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        ({"kind": "grpo"}, "generates the answers that it trains on"),
        ({"kind": "dpo + language_modelling"}, "cannot be a part of a sum"),
        ({"kind": "language_modelling", "beta": 0.3}, "only objective dpo uses it"),
        ({"kind": "dpo", "reference": "adapters_off"}, "needs adapters"),
    ],
)
def test_settings_without_a_meaning_are_refused(objective, reason, tmp_path) -> None:
    with pytest.raises(UsageError, match=reason):
        config = config_of("w", "set", tmp_path, objective=Objective(**objective))
        raise UsageError("\n".join(objective_reasons(config)))


def test_shape_of_a_batch_counts_two_conversations() -> None:
    config = config_of("w", "set", Path("run"), batch=Batch(global_=8, tokens=800))
    assert resolve_batch_shape(config.batch, 1, config.max_row_tokens).micro_batch_size == 2
