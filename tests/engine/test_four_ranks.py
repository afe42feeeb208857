"""Four ranks with uneven batches take the step of one, sharded or not; an OOM while another rank waits is reported."""

from __future__ import annotations

import pytest
import torch

from mmray.engine.collectives import Group
from mmray.train.recovery import COLLECTIVE_ERRORS
from tests.engine import four_ranks, toy, two_ranks

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the ranks


def same(found, expected, start):
    assert (expected - start).abs().max() > 0.005, "nothing was learned or is compared"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scene", ["ragged"])
def test_four_ranks_equal_one_rank(four, scene):
    one = toy.flat(two_ranks.steps_of_a_model(Group(), micro=two_ranks.ROWS, steps=four_ranks.STEPS))
    for result in four:
        same(result[scene], one, toy.flat(toy.Toy().double()))


def test_four_ranks_equal_one_rank_for_row_wise_objective(four):
    one = toy.flat(two_ranks.steps_of_a_model(Group(), micro=8, steps=four_ranks.STEPS, objective=toy.Regression()))
    for result in four:
        same(result["row_by_row"], one, toy.flat(toy.Toy().double()))


@pytest.mark.parametrize("kind", four_ranks.REPLICATED)
def test_four_ranks_equal_one_rank_for_each_objective(four, kind):
    one = toy.flat(two_ranks.steps_of_a_kind(Group(), 21, kind, steps=four_ranks.STEPS))
    for result in four:
        same(result["replicated"][kind], one, toy.flat(toy.Toy(kind=kind).double()))


@pytest.mark.parametrize("kind", two_ranks.KINDS)
def test_sharded_ranks_equal_one_rank_for_each_objective(four, kind):
    one = toy.flat(two_ranks.steps_of_a_kind(Group(), 21, kind, steps=four_ranks.SHARDED_STEPS))
    for result in four:
        same(result["sharded"][kind], one, toy.flat(toy.Toy(kind=kind).double()))


def test_weighted_sigmoid_takes_texts_of_one_rank_in_chunks(four):
    for result in four:
        told = result["ring"]
        assert (told["visiting"], told["gathers"]) == (3, [])
        assert told["home"] <= 6
        assert told["calls"] == 2 * four_ranks.WORLD  # chunks of a rank's 6 rows, times ranks


def test_sharded_bf16_losses_are_close_to_float32(four):
    for result in four:
        plain, half = result["bf16"]["fp32"], result["bf16"]["bf16"]
        assert half == pytest.approx(plain, rel=0.03) and half != pytest.approx(plain, rel=1e-6)
        assert plain[-1] < 0.95 * plain[0]


PARTED = ("no room at last forward", "no room for a state")


@pytest.mark.parametrize("pair", range(four_ranks.PAIRS))
def test_oom_inside_a_collective_reports_the_smaller_micro_batch(pairs, pair):
    """With fsdp and in the optimizer; the collective of the other rank breaks, which is handled as a lost worker."""
    left, met = (result["parting"] for result in pairs[2 * pair : 2 * pair + 2])
    assert met["micro"] == 2 and PARTED[pair] in met["error"]
    assert met["error"].startswith("out of memory at step 3 with micro-batches of 4 rows (rank 1, with row")
    assert left["error"].startswith("a broken collective")
    assert COLLECTIVE_ERRORS.search(left["error"]), left["error"]
