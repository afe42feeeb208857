"""A step in any number of micro-batches equals that of the full batch: gradients, weights, buffers, temperature."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from mmray.engine import optimizer
from mmray.engine.precision import Precision, micro_seed
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import accumulate_gradients, optimizer_step
from tests.engine import toy

ROWS = 29  # not a power of two: the last micro-batch is smaller at 2, 4 and 8
INVALID = (3, 8, 9, 10, 11, 28)  # inside, at the end, and one full micro-batch at 8
STEPS = 20
KINDS = (
    "contrastive",
    "sigmoid",
    "matching",
    "classification",
    "language_modelling",
    "region_text",
    "contrastive + 0.1 * language_modelling + 0.5 * region_text",
    "contrastive + 0.5 * matching + 0.25 * classification",
    "sigmoid + 0.5 * contrastive",
)


def micro_of(accumulation: int) -> int:
    return -(-ROWS // accumulation)


def take(state: TrainState, micro_batches: list[dict[str, Tensor]], step: int):
    share = make_local_batch(micro_batches)
    return optimizer_step(state, share, lambda index: micro_seed(toy.SEED, step, 0, index))


def train(model: nn.Module, micro: int, **options) -> Tensor:
    state = toy.train_state(model, **options)
    for step in range(STEPS):
        assert take(state, toy.cut(toy.rows(ROWS, step, INVALID), micro), step).finite
    return toy.flat(model)


def train_plainly(model: nn.Module, micro: int, kind: str = "contrastive") -> Tensor:
    adam = optimizer.build_optimizer(model, toy.OPTIMIZER)
    for step in range(STEPS):
        toy.reference_gradients(model, toy.cut(toy.rows(ROWS, step, INVALID), micro), step, kind)
        nn.utils.clip_grad_norm_(model.parameters(), toy.OPTIMIZER.clip_norm)
        adam.step()
        model.constrain()
        adam.zero_grad()
    return toy.flat(model)


@cache
def plainly_whole(kind: str) -> Tensor:
    return train_plainly(toy.Toy(kind=kind).double(), ROWS, kind)


def same(clever: Tensor, plain: Tensor, kind: str) -> None:
    assert (clever - toy.flat(toy.Toy(kind=kind).double())).abs().max() > 0.01, "nothing was learned or is compared"
    torch.testing.assert_close(clever, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_accumulated_step_equals_plain_step_with_dropout_in_float64(accumulation: int, kind: str):
    micro, dropout = micro_of(accumulation), 0.3
    clever = train(toy.Toy(dropout, kind=kind).double(), micro, objective=toy.objective(kind))
    same(clever, train_plainly(toy.Toy(dropout, kind=kind).double(), micro, kind), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_accumulated_step_equals_full_batch_without_dropout(accumulation: int, kind: str):
    """So does the plain step of the same micro-batches, because without dropout it is the full batch's."""
    clever = train(toy.Toy(kind=kind).double(), micro_of(accumulation), objective=toy.objective(kind))
    same(clever, plainly_whole(kind), kind)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_accumulated_step_equals_plain_step_in_float32(accumulation: int, dropout: float):
    start = toy.flat(toy.Toy())
    clever = train(toy.Toy(dropout), micro_of(accumulation)) - start
    plain = train_plainly(toy.Toy(dropout), micro_of(accumulation)) - start
    assert (clever - plain).norm() / plain.norm() < 1e-4


def test_dropout_is_active():
    assert not torch.allclose(train(toy.Toy(0.3), 8), train(toy.Toy(0.0), 8), atol=1e-3)


def test_naive_accumulation_differs():
    """Check that the tests above can fail: losses within each micro-batch are a different loss."""
    micro_batches = toy.cut(toy.rows(ROWS, 0), micro_of(4))
    whole, pieces = toy.Toy().double(), toy.Toy().double()
    toy.reference_gradients(whole, micro_batches, 0)
    for micro in micro_batches:
        out = pieces(micro)
        share = len(micro["valid"]) / ROWS
        (toy.naive_contrastive(out["image_embed"], out["text_embed"], out["logit_scale"]) * share).backward()
    expected = toy.flat_gradient(whole)
    assert (toy.flat_gradient(pieces) - expected).norm() / expected.norm() > 0.1


@pytest.mark.parametrize("accumulation", [1, 4])
def test_temperature_gradient_counts_once(accumulation: int):
    micro_batches = toy.cut(toy.rows(ROWS, 0), micro_of(accumulation))
    expected, model = toy.Toy().double(), toy.Toy().double()
    loss = toy.reference_gradients(expected, micro_batches, 0)
    state, share = toy.train_state(model), make_local_batch(micro_batches)
    found = accumulate_gradients(state, share, lambda index: 0)
    torch.testing.assert_close(model.log_scale.grad, expected.log_scale.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.sums["loss"][0] / found.counts[0], loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.scalars["logit_scale"], expected.log_scale.exp().detach())


def test_scaled_loss_gives_same_step():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    scaled = train(toy.Toy().double(), 8, scaler=scaler)
    assert scaler.get_scale() > 2.0**14  # it was on, and saw finite steps
    torch.testing.assert_close(scaled, train(toy.Toy().double(), 8), rtol=0, atol=1e-9)


def test_running_statistics_count_each_valid_row_once():
    micro_batches = toy.cut(toy.rows(ROWS, 0, INVALID), micro_of(8))
    clever, plain = toy.Toy(batch_norm=True).double(), toy.Toy(batch_norm=True).double()
    take(toy.train_state(clever), micro_batches, 0)
    for micro in micro_batches:
        if micro["valid"].any():
            plain({name: tensor[micro["valid"]] for name, tensor in micro.items()})
    for (name, got), (_, expected) in zip(clever.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, msg=name)


def test_batch_of_padding_leaves_gradients_and_statistics_unchanged():
    model = toy.Toy(batch_norm=True).double()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state, share = (
        toy.train_state(model),
        make_local_batch(toy.cut(toy.rows(4, 0, (0, 1, 2, 3)), 2)),
    )
    assert share.is_filler == (True, True)
    assert share.rows == 4
    sums = accumulate_gradients(state, share, lambda index: 0).sums
    assert sums["loss"] == 0
    assert not toy.flat_gradient(model).any()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0)


def test_constraints_are_applied_after_each_step():
    model = toy.Toy().double()
    with torch.no_grad():
        model.log_scale.fill_(6)
    take(toy.train_state(model), toy.cut(toy.rows(8, 0), 4), 0)
    assert model.log_scale.item() == math.log(100)


def test_nan_skips_the_step():
    model = toy.Toy()
    state = toy.train_state(model)
    take(state, toy.cut(toy.rows(8, 0), 4), 0)
    before = toy.flat(model)
    with torch.no_grad():
        bias = model.caption[1].bias
        kept = bias.clone()
        bias[0] = float("nan")
    result = take(state, toy.cut(toy.rows(8, 1), 4), 1)
    with torch.no_grad():
        bias.copy_(kept)
    assert not result.finite
    torch.testing.assert_close(toy.flat(model), before, rtol=0, atol=0)
    assert take(state, toy.cut(toy.rows(8, 2), 4), 2).finite


def test_contents_of_invalid_rows_do_not_matter():
    micro_batches = toy.cut(toy.rows(ROWS, 0, INVALID), 8)
    models = [toy.Toy().double(), toy.Toy().double()]
    for model, fill in zip(models, (0, 255), strict=True):
        for micro in micro_batches:
            micro["image"][~micro["valid"]] = fill
        take(toy.train_state(model), micro_batches, 0)
    torch.testing.assert_close(toy.flat(models[0]), toy.flat(models[1]), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_gradient_is_close_to_float32(dtype: torch.dtype):
    share = make_local_batch(toy.cut(toy.rows(ROWS, 0), 8))
    gradients = []
    for precision in (toy.FP32, Precision("mixed", dtype, "cpu")):
        model = toy.Toy()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024, enabled=precision.needs_scaler)
        state = toy.train_state(model, precision=precision, scaler=scaler)
        accumulate_gradients(state, share, lambda index: 0)
        gradients.append(toy.flat_gradient(model) / scaler.get_scale())
        assert gradients[-1].dtype == torch.float32
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 1e-6 < error < 0.05  # the format differs, the gradient does not


def test_frozen_branch_stays_and_others_learn():
    model = toy.Toy()
    for parameter in model.pixels.parameters():
        parameter.requires_grad_(False)
    pixels, words = model.pixels[2].weight.clone(), model.words.weight.clone()
    take(toy.train_state(model), toy.cut(toy.rows(ROWS, 0), 8), 0)
    torch.testing.assert_close(model.pixels[2].weight, pixels, rtol=0, atol=0)
    assert not torch.equal(model.words.weight, words)


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_row_wise_objective_accumulates_to_the_full_batch(accumulation: int):
    whole = train(toy.Toy().double(), ROWS, objective=toy.Regression())
    pieces = train(toy.Toy().double(), micro_of(accumulation), objective=toy.Regression())
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-9)


def test_row_wise_step_has_gradient_of_the_mean():
    batch = toy.rows(ROWS, 0)
    expected, model = toy.Toy().double(), toy.Toy().double()
    out = expected(batch)
    weight = batch["attention_mask"].sum(1)
    mean = ((out["image_embed"] - out["text_embed"]).square().sum(1) * weight).sum() / weight.sum()
    (mean * out["logit_scale"]).backward()
    state, share = (
        toy.train_state(model, objective=toy.Regression()),
        make_local_batch(toy.cut(batch, 8)),
    )
    sums = accumulate_gradients(state, share, lambda index: 0).sums
    torch.testing.assert_close(toy.flat_gradient(model), toy.flat_gradient(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(sums["distance"][0] / weight.sum(), mean.detach(), rtol=0, atol=1e-12)
