"""Two ranks take the step that one rank takes; what one of them meets is decided for both."""

from __future__ import annotations

import json

import pytest
import torch
import torch.multiprocessing as mp

from mmray.data.order import Plan
from mmray.train import loop
from mmray.train.group import Group
from tests.train import toy, two_ranks


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Results of all scenes, by rank."""
    folder = tmp_path_factory.mktemp("two-ranks")
    mp.spawn(two_ranks.play, args=(str(folder),), nprocs=two_ranks.WORLD)
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(two_ranks.WORLD)]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return results, [json.loads(line) for line in lines]


@pytest.mark.parametrize("scene", ["whole_shares", "accumulated_shares"])
def test_two_ranks_are_one_rank(played, scene):
    one = toy.flat(two_ranks.steps_of_a_model(Group(), micro=two_ranks.ROWS))
    assert (one - toy.flat(toy.Toy().double())).abs().max() > 0.01
    for result in played[0]:
        torch.testing.assert_close(result[scene], one, rtol=0, atol=1e-9)


def test_a_rank_without_rows_takes_part(played):
    one = toy.flat(two_ranks.steps_of_a_model(Group(), micro=8, invalid=tuple(range(11, two_ranks.ROWS))))
    for result in played[0]:
        torch.testing.assert_close(result["a_rank_without_rows"], one, rtol=0, atol=1e-9)


def test_row_by_row_losses_are_divided_by_the_global_count(played):
    one = toy.flat(two_ranks.steps_of_a_model(Group(), micro=8, objective=toy.Regression()))
    for result in played[0]:
        torch.testing.assert_close(result["row_by_row"], one, rtol=0, atol=1e-9)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(played):
    assert [result["not_a_number_on_one_rank"] for result in played[0]] == [{"finite": False, "unchanged": True}] * 2


def test_gather_keeps_rank_order_and_returns_gradients(played):
    first = torch.arange(6.0).reshape(3, 2)
    for result in played[0]:
        scene = result["gathering"]
        torch.testing.assert_close(scene["everyone"], torch.cat([first, first + 10]))
        torch.testing.assert_close(scene["gradient"], torch.full((3, 2), 3.0))
        assert scene["uneven"].tolist() == [0, 0, 1, 1, 1]
        assert scene["told"] == {"rank": 0}


def test_the_loop_takes_the_same_steps_at_one_rank(played):
    """Same rows, same losses, same weights; both ranks stopped after the step at which one wished to."""
    results, lines = played
    plan = Plan(num_rows=33, global_rows=two_ranks.GLOBAL_ROWS, world=1, micro=4, seed=1, steps=12)
    log = toy.Lines()
    model = toy.Toy().double()
    asked = iter(range(100))
    loop.run(toy.task(model, plan, log=log, stop=lambda: next(asked) == 6), toy.steps_of(plan, 0))
    for result in results:
        assert (result["whole_loop"]["status"], result["whole_loop"]["steps"]) == ("stopped", 7)
        torch.testing.assert_close(result["whole_loop"]["weights"], toy.flat(model), rtol=0, atol=1e-9)
    for key in ("step", "epoch", "rows_start", "rows_stop", "rows_sha"):
        assert [line[key] for line in lines] == [line[key] for line in log.lines]
    for key in ("train/loss", "train/loss_image_to_text", "train/grad_norm", "train/logit_scale", "train/lr"):
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in log.lines], abs=1e-9)
