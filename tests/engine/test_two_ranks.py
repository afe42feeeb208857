"""Two ranks take the step of one rank, and errors on one of them are handled on both."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from mmray.config import Train
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop, prefetch
from mmray.engine.collectives import Group
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.sigmoid import Sigmoid
from tests.engine import recipe_models, toy, two_ranks

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the ranks


@pytest.mark.parametrize("scene", ["whole_shares", "accumulated_shares"])
def test_two_ranks_equal_one_rank(played, scene):
    one = toy.flat(two_ranks.steps_of_a_model(Group(), micro=two_ranks.ROWS))
    assert (one - toy.flat(toy.Toy().double())).abs().max() > 0.01
    for result in played[0]:
        torch.testing.assert_close(result[scene], one, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", two_ranks.KINDS)
def test_two_ranks_equal_one_rank_for_each_objective(played, kind):
    one = toy.flat(two_ranks.steps_of_a_kind(Group(), 21, kind))
    assert (one - toy.flat(toy.Toy(kind=kind).double())).abs().max() > 0.01
    for result in played[0]:
        torch.testing.assert_close(result["every_kind"][kind], one, rtol=0, atol=1e-9)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_two_ranks_equal_one_process_for_each_kind_of_model(played, kind, way):
    one, start = (recipe_models.weights_of(kind, Group(), "single", steps) for steps in (recipe_models.STEPS, 0))
    assert (one - start).abs().max() > 0.01
    for result in played[0]:
        torch.testing.assert_close(result["real_models"][f"{kind}, {way}"], one, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("kind", "way"), recipe_models.RECOMPUTED)
def test_two_ranks_with_activation_checkpointing_equal_one_plain_process(played, kind, way):
    one = recipe_models.weights_of(kind, Group(), "single")
    for result in played[0]:
        torch.testing.assert_close(result["recomputed"][f"{kind}, {way}"], one, rtol=0, atol=1e-9)


def test_sharded_checkpointed_and_bucketed_llava_equals_plain_run(played):
    """Half of an epoch's last step is padding."""
    one = recipe_models.as_llava(Group(), 3, group_by_length=False, parallel="single")
    torch.manual_seed(3)
    start = toy.flat(recipe_models.build(recipe_models.MODELS["generative"][0], recipe_models.VOCAB).double())
    assert (one - start).abs().max() > 0.01
    for result in played[0]:
        torch.testing.assert_close(result["recomputed"]["llava"], one, rtol=0, atol=1e-9)


def test_metrics_are_reduced_by_maximum_or_mean(played):
    worst = ("time/step_p95_s", "time/first_step_s", "memory/peak_gib", "host/memory_gib")
    for result in played[0]:
        sums, own = result["over_the_ranks"]
        assert sums == [3.0]
        assert own == dict.fromkeys(worst, 3.0) | {"time/step_s": 2.0, "gpu/busy": 2.0}


def test_telemetry_costs_less_than_one_percent_of_sample_run(played):
    """Relative to the steps of 50 ms between two logged lines."""
    for result in played[0]:
        assert result["cost_of_a_line"] < 0.01 * 0.05 * Train().log_every


def test_ring_shift_returns_rows_of_the_other_rank(played):
    assert [result["around_the_ring"].tolist() for result in played[0]] == [[1, 1], [0, 0]]


def test_gradients_are_views_of_ddp_buckets(played):
    """From the first forward on; separate gradients would double their memory."""
    for result in played[0]:
        assert result["where_gradients_live"] == [1] * 9  # three micro-batches in three steps


def test_ranks_agree_on_a_format_that_all_gpus_support(played):
    assert [result["formats"] for result in played[0]] == [["bf16", "fp16", "bf16"], ["fp16", "fp16", "bf16"]]


def test_rank_without_rows_joins_collectives(played):
    one = toy.flat(two_ranks.steps_of_a_model(Group(), micro=8, invalid=tuple(range(11, two_ranks.ROWS))))
    for result in played[0]:
        torch.testing.assert_close(result["a_rank_without_rows"], one, rtol=0, atol=1e-9)


def test_row_by_row_losses_are_divided_by_the_global_count(played):
    one = toy.flat(two_ranks.steps_of_a_model(Group(), micro=8, objective=toy.Regression()))
    for result in played[0]:
        torch.testing.assert_close(result["row_by_row"], one, rtol=0, atol=1e-9)


def test_non_finite_step_on_one_rank_is_skipped_on_both(played):
    assert [result["not_a_number_on_one_rank"] for result in played[0]] == [{"finite": False, "unchanged": True}] * 2


@pytest.mark.parametrize("way", two_ranks.CLIPPED)
def test_branches_are_clipped_by_their_norms_over_both_ranks(played, way):
    one = two_ranks.clipped(Group(), "single")
    at_once = toy.flat(two_ranks.steps_of_a_model(Group(), two_ranks.ROWS, model=toy.Branched().double()))
    assert (one - at_once).abs().max() > 0.001, "clipped as one it would be the same"
    for result in played[0]:
        torch.testing.assert_close(result["clipped_by_branches"][way], one, rtol=0, atol=1e-9)


def test_ranks_stay_equal_after_a_skipped_step(played):
    one = two_ranks.skipping(Group(), None)
    assert one["skipped"] == 1 and [math.isnan(norm) for norm in one["norms"]].index(True) == 2
    for result in played[0]:
        found = result["skipping"]
        assert found["skipped"] == 1
        torch.testing.assert_close(found["weights"], one["weights"], rtol=0, atol=1e-9)
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-9, nan_ok=True)


def test_fp16_overflow_is_skipped_on_both_ranks_and_halves_the_scale(played):
    one, other = (result["overflow"] for result in played[0])
    assert one["stood"] == other["stood"] and torch.equal(one["weights"], other["weights"])
    skipped = one["stood"].count(True)
    assert (
        one["stood"][:3] == [True] * 3 and 3 <= skipped < two_ranks.STEPS // 2
    )  # steps that are not skipped update weights
    for result in (one, other):
        assert (result["skipped"], result["scale"]) == (skipped, two_ranks.LARGE_SCALE / 2**skipped)


def test_gather_keeps_rank_order_and_returns_gradients(played):
    first = torch.arange(6.0).reshape(3, 2)
    for result in played[0]:
        scene = result["gathering"]
        torch.testing.assert_close(scene["everyone"], torch.cat([first, first + 10]))
        torch.testing.assert_close(scene["gradient"], torch.full((3, 2), 3.0))
        assert scene["uneven"].tolist() == [0, 0, 1, 1, 1]
        assert scene["told"] == {"rank": 0}


def test_loop_on_two_ranks_takes_steps_of_one_rank(played):
    """Same rows, losses and weights; both ranks stop after the step at which one requested it."""
    results, lines = played
    plan = SamplePlan(num_rows=33, global_rows=two_ranks.GLOBAL_ROWS, world=1, micro=4, seed=1, steps=12)
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
    both = [islice(toy.steps_of(replace(plan, world=2, micro=2), rank), lines[0]["step"]) for rank in range(2)]
    shares = [prefetch.make_local_batch(micro_batches) for steps in both for micro_batches in steps]
    padding = 1 - sum(share.tokens for share in shares) / sum(share.padded_tokens for share in shares)
    assert 0.1 < padding < 0.9 and lines[0]["batch/padding"] == pytest.approx(
        padding
    )  # as a share of all positions on all ranks


SHRUNK = [*((place, Contrastive) for place in toy.PLACES)]
SHRUNK += [(f"ring: {place}", Sigmoid) for place in toy.PLACES]
SHRUNK += [(f"row by row: {place}", toy.Regression) for place in two_ranks.ROW_BY_ROW_PLACES]


@pytest.mark.parametrize(("scene", "objective"), SHRUNK)
def test_oom_on_one_rank_retries_the_step_with_smaller_micro_batches(played, scene, objective):
    """Results are equal wherever in the step it happened; the ranks vote, and the log names the rows."""
    kind = "sigmoid" if objective is Sigmoid else "contrastive"
    plain = two_ranks.cramped(Group(), "nowhere", objective(), kind=kind)
    assert plain["micros"] == [4] * 4
    for result in played[0]:
        shrunk = result["without_room"][scene]
        torch.testing.assert_close(shrunk["weights"], plain["weights"], rtol=0, atol=1e-9)
        assert shrunk["micros"] == [4, 2, 2, 2]  # lines of steps 2, 4, 6 and 8
        place = scene.rpartition(": ")[2]
        names = ", ".join(f"row {row}" for row in rows_of(step=2, rank=1)[:4])
        (told,) = shrunk["told"]
        assert (
            f"out of memory at step 3 with micro-batches of 4 rows "
            f"(rank 1, with {names} and 4 more: no room at {place})" in told
        )
        assert told.endswith("retrying the same rows with 2 at a time")


def test_ring_objective_votes_even_with_one_micro_batch(played):
    plain = two_ranks.cramped(Group(), "nowhere", Sigmoid(), micro=8, kind="sigmoid")
    for result in played[0]:
        shrunk = result["without_room"]["ring at once: loss"]
        torch.testing.assert_close(shrunk["weights"], plain["weights"], rtol=0, atol=1e-9)
        assert shrunk["micros"] == [8, 4, 4, 4]
        assert shrunk["told"][0].startswith("out of memory at step 3 with micro-batches of 8 rows (rank 1, with")


def rows_of(step, rank):
    plan = SamplePlan(num_rows=60, global_rows=16, world=2, micro=4, seed=1, steps=8)
    positions = plan.positions(step, rank)
    return [int(row) for row in plan.rows_at(positions[positions >= 0])]


def test_oom_with_one_row_is_an_error_on_each_rank(played):
    for result in played[0]:
        told = result["without_room_for_one_row"]
        assert told.startswith("0 out of memory at step 3 with micro-batches of 1 rows (rank 1, with row")
        assert "--model.inputs.image-side" in told


def test_ranks_agree_on_largest_micro_batch_that_fits_all(played):
    assert [result["rehearsals"] for result in played[0]] == [{"both": 3, "all": 12}] * 2


def test_oom_in_synchronizing_backward_reports_smaller_micro_batch(played):
    left, met = (result["parting"] for result in played[0])
    assert met["micro"] == 2
    assert "no room at synchronising backward" in met["error"]
    assert left["error"].startswith("a broken collective")
