"""Equal dropout masks for the same micro-batch, different ones for others, and an unchanged generator of the caller."""

from __future__ import annotations

import itertools

import torch

from mmray.engine.precision import micro_seed, seeded

CPU = torch.device("cpu")


def draw(seed: int) -> torch.Tensor:
    with seeded(seed, CPU):
        return torch.rand(4)


def test_same_seed_draws_same_values_and_restores_the_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(draw(11), draw(11))
    assert torch.equal(torch.rand(2), expected)


def test_each_step_rank_and_micro_batch_has_its_own_seed():
    seeds = {micro_seed(*numbers) for numbers in itertools.product(range(3), range(20), range(4), range(8))}
    assert len(seeds) == 3 * 20 * 4 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
