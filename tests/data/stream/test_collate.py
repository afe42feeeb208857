"""Collation of blocks into micro-batches: the rows of a step in any grouping, and less padding by
length.
"""

import numpy as np
import pytest
import torch

from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import SamplePlan
from mmray.engine.metrics.meters import padding_fractions
from mmray.engine.prefetch import make_local_batch


def blocks(plan, lengths):
    """One block with all steps of the last rank, with padding; position p has lengths[p % N]
    tokens.
    """
    pos = np.concatenate([plan.positions(step, plan.world_size - 1) for step in range(plan.steps)])
    num_tokens = np.where(pos >= 0, lengths[pos % len(lengths)], 1).astype(np.int32)
    ids = np.zeros((len(pos), lengths.max()), np.int32)
    for row, count in zip(ids, num_tokens, strict=True):
        row[:count] = count
    image = np.broadcast_to(pos.astype(np.uint8)[:, None, None, None], (len(pos), 3, 2, 2))
    tokens = {"input_ids": ids, "num_tokens": num_tokens}
    yield {"image": image.copy(), **tokens, "key": pos, "label": pos, "valid": pos >= 0, "pos": pos}


def padding_share(steps):
    masks = [micro["attention_mask"][micro["valid"]] for step in steps for micro in step]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


@pytest.mark.parametrize("micro", [4, 5, 16])
def test_group_by_length_keeps_rows_and_pads_less(micro):
    plan = SamplePlan(
        num_rows=30, global_batch_size=46, world_size=3, seed=0, steps=4, shuffle=False
    )
    lengths = np.random.default_rng(0).integers(2, 30, 30)
    plain = list(iter_micro_batches(blocks(plan, lengths), plan.rank_rows, micro))
    sorted_ = list(
        iter_micro_batches(blocks(plan, lengths), plan.rank_rows, micro, group_by_length=True)
    )
    for one, other in zip(plain, sorted_, strict=True):
        assert [len(micro["pos"]) for micro in one] == [len(micro["pos"]) for micro in other]
        assert rows_of(one) == rows_of(other)
    share, plain_share = padding_share(sorted_), padding_share(plain)
    for steps, expected in ((sorted_, share), (plain, plain_share)):
        assert padding_fractions(counts_of(steps)) == {"batch/padding": pytest.approx(expected)}
    # a single micro-batch has no order to change
    expected = {4: (0.14, 0.32), 5: (0.18, 0.34), 16: (0.43, 0.43)}
    assert (share, plain_share) == pytest.approx(expected[micro], abs=0.005)


def counts_of(steps):
    """Tokens and padding of these steps."""
    counts = [make_local_batch(micros).token_counts for micros in steps]
    return [sum(column) for column in zip(*counts, strict=True)]


@pytest.mark.parametrize("group_by_length", [False, True])
@pytest.mark.parametrize("micro", [4, 5, 16])
def test_step_in_several_blocks_equals_step_in_one(micro, group_by_length):
    plan = SamplePlan(num_rows=30, global_batch_size=46, world_size=3, seed=0, steps=4)
    lengths = np.random.default_rng(0).integers(2, 30, 30)
    (whole,) = blocks(plan, lengths)
    parts = [
        {name: column[first : first + 4] for name, column in whole.items()}
        for first in range(0, 64, 4)
    ]
    for part in parts:  # padded to its longest caption, as in the block
        part["input_ids"] = part["input_ids"][:, : part["num_tokens"].max()]
    steps = (
        iter_micro_batches(each, plan.rank_rows, micro, group_by_length)
        for each in ([whole], parts)
    )
    for one, other in zip(*steps, strict=True):
        for first, second in zip(one, other, strict=True):
            assert first.keys() == second.keys() and all(
                torch.equal(first[name], second[name]) for name in first
            )


@pytest.mark.parametrize("sizes", [(7, 10), (24,), (8, 16)])
def test_blocks_that_cross_the_end_of_a_step_are_an_error(sizes):
    plan = SamplePlan(num_rows=30, global_batch_size=46, world_size=3, seed=0, steps=4)
    (whole,) = blocks(plan, np.array([3]))
    parts = [{name: column[:size] for name, column in whole.items()} for size in sizes]
    with pytest.raises(
        RuntimeError, match=f"blocks of {', '.join(map(str, sizes))} rows for a step of 16 rows"
    ):
        list(iter_micro_batches(parts, plan.rank_rows, 4))


def rows_of(step):
    """Position, image and unpadded caption of each row of a step, for any grouping."""
    columns = ("pos", "image", "input_ids", "attention_mask")
    rows = (row for micro in step for row in zip(*(micro[name] for name in columns), strict=True))
    return sorted(
        (int(p), int(image[0, 0, 0]), tuple(ids[mask.bool()].tolist()))
        for p, image, ids, mask in rows
    )


def test_captions_are_padded_to_a_multiple_up_to_the_longest_allowed():
    plan = SamplePlan(num_rows=30, global_batch_size=46, world_size=3, seed=0, steps=4)
    lengths = np.random.default_rng(0).integers(2, 30, 30)
    (whole,) = blocks(plan, lengths)
    whole["input_ids"] = whole["input_ids"][:, : lengths.max()]
    widths = set()
    steps = (
        iter_micro_batches([whole], plan.rank_rows, 4, False, *padding) for padding in ((), (8, 29))
    )
    for plain, padded in zip(*steps, strict=True):
        assert rows_of(plain) == rows_of(padded)
        for one, other in zip(plain, padded, strict=True):
            longest, width = one["input_ids"].shape[1], other["input_ids"].shape[1]
            assert width == min(-(-longest // 8) * 8, 29)
            assert torch.equal(one["input_ids"], other["input_ids"][:, :longest])
            assert not other["attention_mask"][:, longest:].any()
            widths.add(width)
    assert {16, 24, 29} >= widths > {24}
