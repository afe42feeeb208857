"""A step in any number of micro-batches equals that of the full batch: gradients, weights, buffers,
temperature.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from mmray.engine import optimizer
from mmray.engine.collectives import Group
from mmray.engine.precision import micro_seed
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import accumulate_gradients, optimizer_step
from tests.engine import toy

ROWS = 29  # not a power of two: the last micro-batch is smaller at 2, 4 and 8
INVALID = (3, 8, 9, 10, 11, 28)  # inside, at the end, and one full micro-batch at 8
STEPS = 4
KINDS = (
    "contrastive",
    "sigmoid",
    "matching",
    "classification",
    "contrastive + 0.1 * classification",
    "contrastive + 0.5 * matching + 0.25 * classification",
    "sigmoid + 0.5 * contrastive",
    "contrastive + 2 * distillation + 0.5 * feature_distillation",
    "contrastive + 0.5 * captioning",
)


def micro_of(accumulation: int) -> int:
    return -(-ROWS // accumulation)


def take(state: TrainState, micro_batches: list[dict[str, Tensor]], step: int):
    batch = make_local_batch(micro_batches)
    return optimizer_step(state, batch, lambda index: micro_seed(toy.SEED, step, 0, index))


def train(model: nn.Module, micro: int, **options) -> Tensor:
    state = toy.train_state(model, **options)
    for step in range(STEPS):
        assert take(state, toy.cut(toy.rows(ROWS, step, INVALID), micro), step).is_finite
    return toy.flat(model)


@cache
def train_reference(kind: str, micro: int, dropout: float) -> Tensor:
    model = toy.Toy(dropout, kind=kind).double()
    adam = optimizer.build_optimizer(model, toy.OPTIMIZER)
    for step in range(STEPS):
        toy.reference_gradients(model, toy.cut(toy.rows(ROWS, step, INVALID), micro), step, kind)
        nn.utils.clip_grad_norm_(model.parameters(), toy.OPTIMIZER.clip_norm)
        adam.step()
        model.clamp_parameters()
        adam.zero_grad()
    return toy.flat(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_accumulated_step_equals_reference_in_float64(accumulation: int, dropout: float, kind: str):
    """Without dropout the reference is the full batch; with dropout it has the masks of the same
    micro-batches.
    """
    micro = micro_of(accumulation)
    weights = train(toy.Toy(dropout, kind=kind).double(), micro, objective=toy.objective(kind))
    expected = train_reference(kind, micro if dropout else ROWS, dropout)
    toy.assert_equal_weights(weights, expected, toy.flat(toy.Toy(kind=kind).double()))


@pytest.mark.parametrize("kind", [*KINDS, "0.5 * contrastive"])
def test_losses_and_gradients_of_sources_are_those_of_the_full_batch(kind: str):
    rows = toy.rows(ROWS, 0, INVALID)
    source = torch.arange(ROWS) % 3
    rows["source"] = source
    tables = []
    for micro in (ROWS, 4):
        batch = replace(make_local_batch(toy.cut(rows, micro)), num_sources=3)
        state = toy.train_state(toy.Toy(kind=kind).double(), objective=toy.objective(kind))
        cache = accumulate_gradients(state, batch, lambda index: 0)
        tables.append(cache.by_source)
    losses, counts, norms = tables[0]
    torch.testing.assert_close(tables[1], tables[0], rtol=0, atol=1e-9)
    assert counts.tolist() == source[rows["valid"]].bincount().tolist()
    assert norms.any() == (kind not in ("matching", "classification"))
    # all rows count in all terms, by one
    if not any(name in kind for name in ("classification", "distillation", "captioning")):
        assert losses.sum() / counts.sum() == pytest.approx(float(cache.means["loss"]), abs=1e-9)
    if kind == "0.5 * contrastive":
        outputs = toy.Toy().double()(rows)
        valid = rows["valid"]
        image, text = (outputs[name].detach()[valid] for name in ("image_embed", "text_embed"))
        embeds = torch.cat([image, text], dim=1).requires_grad_()
        image, text = embeds.split(toy.DIM, dim=1)
        logits = outputs["logit_scale"].detach() * image @ text.T
        each = -(logits.log_softmax(1) + logits.log_softmax(0)).diagonal() / 4
        each.mean().backward()
        for number in range(3):
            own = source[valid] == number
            assert losses[number] == pytest.approx(float(each[own].detach().sum()), abs=1e-9)
            expected = embeds.grad[own].norm(dim=1).sum()
            assert norms[number] == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_row_wise_objective_accumulates_to_the_full_batch(accumulation: int):
    whole = train(toy.Toy().double(), ROWS, objective=toy.Regression())
    toy.assert_equal_weights(
        train(toy.Toy().double(), micro_of(accumulation), objective=toy.Regression()), whole
    )


def test_scaled_loss_gives_same_step():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    scaled = train(toy.Toy().double(), 8, scaler=scaler)
    assert scaler.get_scale() > 2.0**14  # it was on, and saw finite steps
    toy.assert_equal_weights(scaled, train(toy.Toy().double(), 8))


def test_running_statistics_count_each_valid_row_once():
    micro_batches = toy.cut(toy.rows(ROWS, 0, INVALID), micro_of(8))
    model, expected = toy.Toy(batch_norm=True).double(), toy.Toy(batch_norm=True).double()
    take(toy.train_state(model), micro_batches, 0)
    for micro in micro_batches:
        if micro["valid"].any():
            expected({name: tensor[micro["valid"]] for name, tensor in micro.items()})
    for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=0, atol=1e-12, msg=name)


def test_batch_of_padding_leaves_gradients_and_statistics_unchanged():
    model = toy.Toy(batch_norm=True).double()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    batch = make_local_batch(toy.cut(toy.rows(4, 0, (0, 1, 2, 3)), 2))
    assert batch.is_dummy == (True, True) and batch.rows == 4
    assert accumulate_gradients(toy.train_state(model), batch, lambda index: 0).means["loss"] == 0
    assert not toy.flat_gradient(model).any()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_constraints_are_applied_after_each_step():
    model = toy.Toy().double()
    with torch.no_grad():
        model.log_scale.fill_(6)
    take(toy.train_state(model), toy.cut(toy.rows(8, 0), 4), 0)
    assert model.log_scale.item() == math.log(100)


def test_update_changes_the_weights_before_the_host_waits_for_the_norm(monkeypatch) -> None:
    """So a GPU has work while the host reads it."""
    changed: list[bool] = []

    def read_later(group: Group, tensor: Tensor):
        before = toy.flat(model).clone()

        def read() -> Tensor:
            changed.append(not torch.equal(toy.flat(model), before))
            return tensor

        return read

    model = toy.Toy()
    state = toy.train_state(model)
    monkeypatch.setattr(Group, "read_later", read_later)
    take(state, toy.cut(toy.rows(ROWS, 0), ROWS), step=0)
    assert changed == [True]
