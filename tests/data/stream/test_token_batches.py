"""Rows of a step by tokens: each row once, the bound held, equally many micro-batches a rank."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmray.data.store.shard_table import MappedArray, MappedFile
from mmray.data.stream.order import PADDING, BlockPlan, SamplePlan
from mmray.data.stream.token_batches import Assignment, TokenPlan, assign_rows
from mmray.data.text.tokenizer import TextEncoder
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.errors import DataError

STEPS = st.lists(st.integers(0, 900), min_size=1, max_size=120).map(np.array)


def sizes(assignment: Assignment, tokens: np.ndarray, padded: bool) -> np.ndarray:
    """Tokens of each micro-batch, int [ranks, micro-batches]."""
    return np.array(
        [
            [
                tokens[rows].max(initial=0) * len(rows) if padded else tokens[rows].sum()
                for rows in micro_batches
            ]
            for micro_batches in assignment
        ]
    )


def mixed_lengths(rows: int, seed: int) -> np.ndarray:
    """Token counts of rows with 0 to 3 images of 64 to 1,200 tokens, and short or long texts."""
    draw = np.random.default_rng(seed)
    images = draw.choice([0, 1, 2, 3], rows, p=[0.2, 0.6, 0.15, 0.05])
    per_image = draw.integers(64, 1200, rows)
    text = np.minimum(draw.lognormal(4.5, 0.9, rows), 1500).astype(int)
    return np.minimum(images * per_image + text + 20, 4096)


@settings(max_examples=150, deadline=None)
@given(
    tokens=STEPS,
    world_size=st.integers(1, 9),
    max_tokens=st.integers(900, 4000),
    padded=st.booleans(),
    ranks_per_group=st.sampled_from([None, 1, 2, 3]),
)
def test_each_row_is_taken_once_and_micro_batches_fit(
    tokens: np.ndarray, world_size: int, max_tokens: int, padded: bool, ranks_per_group: int | None
) -> None:
    found = assign_rows(tokens, world_size, max_tokens, padded, ranks_per_group)
    rows = [row for rank in found for micro_batch in rank for row in micro_batch.tolist()]
    assert sorted(rows) == list(range(len(tokens)))
    assert len(found) == world_size and len({len(rank) for rank in found}) == 1
    assert sizes(found, tokens, padded).max() <= max_tokens
    assert all((np.diff(micro_batch) > 0).all() for rank in found for micro_batch in rank)
    if ranks_per_group:
        # The ranks of a group share the columns that the order gives them.
        plan = SamplePlan(len(tokens), len(tokens), world_size, seed=0, steps=1)
        for first in range(0, world_size, ranks_per_group):
            group = range(first, min(first + ranks_per_group, world_size))
            columns = np.concatenate([plan.positions(0, rank) for rank in group])
            taken = np.concatenate([part for rank in group for part in found[rank]])
            assert sorted(taken.tolist()) == sorted(columns[columns >= 0].tolist())


def test_row_over_the_bound_is_an_error_with_its_size() -> None:
    with pytest.raises(DataError, match=r"row 1 of the step has 4,097 tokens, over .* 4,096"):
        assign_rows(np.array([5, 4097, 3]), 2, 4096)


@pytest.mark.parametrize(
    ("padded", "world_size", "imbalance", "padding"),
    [(False, 8, 1.01, 0.0), (False, 64, 1.01, 0.0), (True, 8, 1.06, 0.08)],
)
def test_realistic_lengths_are_balanced(
    padded: bool, world_size: int, imbalance: float, padding: float
) -> None:
    """Ranks differ little in the size of each micro-batch, so they wait little for each other."""
    shares = []
    for seed in range(5):
        tokens = mixed_lengths(32 * world_size, seed)
        found = assign_rows(tokens, world_size, 8192, padded)
        each = sizes(found, tokens, padded)
        # A collective of each micro-batch waits for the largest of them.
        waiting = each.max(axis=0).sum() / each.mean(axis=0).sum()
        shares.append((waiting, 1 - tokens.sum() / each.sum(), each.mean() / 8192))
    worst = np.max(shares, axis=0)
    filled = np.mean(shares, axis=0)[2]
    print(
        f"padded {padded}, {world_size} ranks: imbalance {worst[0]:.3f}, padding {worst[1]:.3f}, "
        f"micro-batches {filled:.2f} full"
    )
    assert worst[0] <= imbalance and worst[1] <= padding and filled > 0.75


@pytest.mark.parametrize("padded", [False, True])
def test_real_captions_are_balanced(shared_data: Path, padded: bool) -> None:
    """3,583 captions of 3 to 30 tokens, each with 0 to 3 images of 25 tokens."""
    file = str(shared_data / "tokenizers" / "bpe_simple_vocab_16e6.txt.gz")
    encoder = TextEncoder(load_tokenizer(file, None), 77)
    lines = (shared_data / "noto_emoji" / "captions.jsonl").read_text().splitlines()
    _, text = encoder.encode([json.loads(line)["text"] for line in lines])
    draw = np.random.default_rng(0)
    images = draw.choice([0, 1, 2, 3], len(text), p=[0.2, 0.6, 0.15, 0.05])
    tokens = draw.permutation(text + 27 * images + 12)  # with the marks of images and turns
    waiting, padding = [], []
    for first in range(0, len(tokens) - 1024, 1024):
        step = tokens[first : first + 1024]
        each = sizes(assign_rows(step, 8, 2048, padded), step, padded)
        waiting.append(each.max(axis=0).sum() / each.mean(axis=0).sum())
        padding.append(1 - step.sum() / each.sum())
    print(
        f"padded {padded}: {text.min()} to {text.max()} tokens a caption, imbalance "
        f"{max(waiting):.3f}, padding {max(padding):.3f}"
    )
    assert max(waiting) <= 1.01
    assert max(padding) <= (0.05 if padded else 0)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_steps_have_the_rows_of_the_order_at_any_world_size(world_size: int) -> None:
    tokens = mixed_lengths(100, 3).astype(np.uint32)
    tokens[[4, 40]] = 50_000  # not used
    plan = TokenPlan(
        100,
        24,
        world_size,
        seed=5,
        steps=9,
        num_tokens=tokens,
        max_row_tokens=4096,
        max_tokens=6000,
    )
    for step in (0, 4, 8):
        ranks = [plan.positions(step, rank) for rank in range(world_size)]
        assert len({len(positions) for positions in ranks}) == 1
        taken = np.concatenate(ranks)
        expected = np.arange(step * 24, step * 24 + 24)
        assert sorted(taken[taken != PADDING].tolist()) == expected.tolist()
        sizes = [plan.micro_batch_sizes(step, rank) for rank in range(world_size)]
        assert len({len(each) for each in sizes}) == 1
        for positions, each in zip(ranks, sizes, strict=True):
            for part in np.split(positions, np.cumsum(each)[:-1]):
                rows = plan.row_ids_at(part[part != PADDING])
                used = tokens[rows][tokens[rows] <= 4096]
                assert used.sum() <= 6000
            assert sum(each) == len(positions)


def test_pickled_plan_has_the_location_of_the_counts(tmp_path: Path) -> None:
    tokens = mixed_lengths(5000, 3).astype(np.uint32)
    plan = TokenPlan(
        5000, 24, 2, seed=5, steps=9, num_tokens=tokens, max_row_tokens=4096, max_tokens=6000
    )
    mapped = MappedArray(MappedFile.write(tmp_path, "tokens-{}.uint32", tokens))
    pickled = pickle.dumps(replace(plan, num_tokens=mapped))
    assert len(pickled) < 2000
    copied = pickle.loads(pickled)
    for step in (0, 8):
        assert copied.positions(step, 1).tolist() == plan.positions(step, 1).tolist()


@pytest.mark.parametrize("block_mb", [0.002, 0.02, 1.0])
def test_blocks_of_a_stream_have_the_rows_of_each_rank_in_order(block_mb: float) -> None:
    tokens = mixed_lengths(100, 4).astype(np.uint32)
    plan = TokenPlan(
        100, 24, 3, seed=5, steps=7, num_tokens=tokens, max_row_tokens=4096, max_tokens=6000
    )
    blocks = BlockPlan.sized(plan, 2, 1000, block_mb)
    # Blocks are assigned to the ranks in turn.
    for rank in range(3):
        rows = [blocks.positions(number) for number in range(rank, blocks.count, 3)]
        expected = [plan.positions(step, rank) for step in range(2, 7)]
        assert np.concatenate(rows).tolist() == np.concatenate(expected).tolist()
    for first in range(0, blocks.count, 3):
        assert len({len(blocks.positions(first + rank)) for rank in range(3)}) == 1
