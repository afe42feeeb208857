"""Two and four ranks take the steps of one rank, and errors on one of them are handled on all."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine import prefetch
from mmray.engine.collectives import Group
from mmray.training.workers.backend import COLLECTIVE_ERRORS
from tests.engine import ranks, toy


@pytest.mark.parametrize(
    ("fixture", "name"),
    [*(("two", name) for name in ranks.TWO_RANKS), *(("four", name) for name in ranks.FOUR_RANKS)],
)
def test_ranks_equal_one_process(request, fixture, name):
    _, train = (ranks.TWO_RANKS if fixture == "two" else ranks.FOUR_RANKS)[name]
    expected, start = train(Group()), train(Group(), steps=0)
    for result in request.getfixturevalue(fixture):
        toy.assert_equal_weights(result[name], expected, start)


def test_sharded_bf16_losses_are_close_to_float32(two):
    for result in two:
        plain, half = (result["sharded_bf16"][f"fsdp, {number}"] for number in ("fp32", "bf16"))
        assert half == pytest.approx(plain, rel=0.03) and half != pytest.approx(plain, rel=1e-6)
        assert plain[-1] < 0.95 * plain[0]


def test_sharded_bf16_trains_batch_norm_as_ddp_does(two):
    for result in two:
        sharded, replicated = (
            result["sharded_bf16"][f"{parallel}, bf16, norm"] for parallel in ("fsdp", "ddp")
        )
        assert sharded == pytest.approx(replicated, rel=5e-3)
        assert sharded != pytest.approx(result["sharded_bf16"]["fsdp, bf16"], rel=5e-3)


def test_groups_of_hsdp_have_the_timeout_of_the_run(four):
    assert [result["timeouts_of_hsdp"] for result in four] == [[77.0, 77.0]] * 4


def test_collectives_keep_rank_order_and_reduce_metrics(two):
    maxima = ("time/step_p95_s", "time/first_step_s", "memory/peak_gib", "host/memory_gib")
    for result in two:
        scenario = result["collectives"]
        assert scenario["uneven"].tolist() == [0, 0, 1, 1, 1]
        sums, own = scenario["reduced"]
        assert sums == [[3.0]]
        assert own == dict.fromkeys(maxima, 3.0) | {"time/step_s": 2.0, "gpu/busy": 2.0}


def test_ranks_agree_on_settings_that_all_gpus_support(two):
    common = ["fp16", "none", "bf16", "eager", "rank 1: no Python.h"]
    assert [result["common_defaults"] for result in two] == [["bf16", *common], ["fp16", *common]]


def test_non_finite_step_on_one_rank_is_skipped_on_both(two):
    expected = ranks.skipped_step(Group())
    assert (
        expected["skipped"] == 1
        and [math.isnan(norm) for norm in expected["norms"]].index(True) == 2
    )
    for result in two:
        result = result["skipped_step"]
        assert result["skipped"] == 1
        toy.assert_equal_weights(result["weights"], expected["weights"])
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-9, nan_ok=True)


def test_fp16_overflow_is_skipped_on_both_ranks_and_halves_the_scale(two):
    one, other = (result["overflow"] for result in two)
    assert one["unchanged"] == other["unchanged"] and torch.equal(one["weights"], other["weights"])
    skipped = one["unchanged"].count(True)
    # steps that are not skipped update weights
    assert one["unchanged"][:3] == [True] * 3 and 3 <= skipped < 10
    for result in (one, other):
        assert (result["skipped"], result["scale"]) == (skipped, ranks.LARGE_SCALE / 2**skipped)


def test_loop_on_two_ranks_takes_steps_of_one_rank(two):
    """Same rows, losses and weights; both ranks stop after the step at which one requested it."""
    expected, lines = ranks.stopped_loop(Group()), two[0]["stopped_loop"]["lines"]
    for result in two:
        assert result["stopped_loop"]["end"] == expected["end"] == ("stopped", 7)
        toy.assert_equal_weights(result["stopped_loop"]["weights"], expected["weights"])
    for key in ("step", "epoch", "rows_start", "rows_stop", "rows_sha"):
        assert [line[key] for line in lines] == [line[key] for line in expected["lines"]]
    for key in (
        "train/loss",
        "train/loss_image_to_text",
        "train/grad_norm",
        "train/logit_scale",
        "train/lr",
    ):
        assert [line[key] for line in lines] == pytest.approx(
            [line[key] for line in expected["lines"]], abs=1e-9
        )
    plan = SamplePlan(num_rows=33, global_batch_size=10, world_size=2, seed=1, steps=12)
    steps = [
        step
        for rank in range(2)
        for step in islice(toy.steps_of(plan, rank, micro=2), lines[0]["step"])
    ]
    batches = [prefetch.make_local_batch(micro_batches) for micro_batches in steps]
    padding = 1 - sum(batch.token_counts[0] for batch in batches) / sum(
        batch.token_counts[1] for batch in batches
    )
    # of the positions of all ranks
    assert 0.1 < padding < 0.9 and lines[0]["batch/padding"] == pytest.approx(padding)


def test_sums_by_source_are_those_of_one_process(two):
    expected = ranks.sources(Group())
    for result in two:
        torch.testing.assert_close(result["sources"], expected, rtol=0, atol=1e-9)


def test_step_has_one_reduction_of_counts_and_outputs(two):
    """The counts are reduced with the outputs, if all of the loss needs them."""
    for result in two:
        assert result["collectives_of_a_step"] == {
            "contrastive": ["all_gather_into_tensor", "reduce_scatter_tensor"],
            "sigmoid": ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"],
            "row-wise": ["all_reduce"],
        }


@pytest.mark.parametrize("scenario", ["synchronizing backward", "last forward", "in the optimizer"])
def test_oom_inside_a_collective_reports_the_smaller_micro_batch(request, scenario):
    """The collective of the other rank breaks, which is handled as a lost worker."""
    if scenario == "synchronizing backward":
        other, own = (
            result["oom_in_synchronizing_backward"] for result in request.getfixturevalue("two")
        )
    else:
        first = 0 if scenario == "last forward" else 2
        other, own = (
            result["oom"] for result in request.getfixturevalue("four")[first : first + 2]
        )
    assert own["micro"] == 2 and scenario in own["error"]
    assert own["error"].startswith("out of memory at step 3 with micro-batches of 4 rows (rank 1: ")
    assert other["error"].startswith("a broken collective")
    assert COLLECTIVE_ERRORS.search(other["error"]), other["error"]
