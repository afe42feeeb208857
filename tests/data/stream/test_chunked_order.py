"""Chunked sample order: as exact as the full shuffle; rows of a chunk stay close; batches mix many chunks."""

from hashlib import sha256
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmray.data.stream.order import PADDING, MixtureComponent, SamplePlan

SOURCES = 10


class Quality(NamedTuple):
    """Mean distinct chunks in a batch, mean distance of neighbouring rows between epochs (1/3 if random), deviation of
    the share of a tenth of the set in a batch (1 if random)."""

    chunks: float
    distance: float
    deviation: float


def quality(rows: int, chunk: int, window: int, batch: int = 256, of: int = 0, epochs: int = 2) -> Quality:
    """Measure an order over `rows` rows sorted by source; `of`: chunk size to count, default `chunk`."""
    order = SamplePlan(
        num_rows=rows, global_rows=batch, world=1, micro=batch, seed=0, steps=10**9, chunk=chunk, window=window
    ).rows_at(np.arange(epochs * rows))
    batches = order[: len(order) // batch * batch].reshape(-1, batch)
    chunks = np.sort(batches // (of or chunk), axis=1)
    shares = (batches < rows // SOURCES).mean(axis=1)
    share = rows // SOURCES / rows
    return Quality(
        float(1 + (np.diff(chunks, axis=1) > 0).sum(axis=1).mean()),
        float(np.abs(np.diff(order)).mean() / rows),
        float(shares.std() / np.sqrt(share * (1 - share) / batch)),
    )


CHUNKS = st.integers(1, 70)
WINDOWS = st.integers(1, 9)
PARTS = st.lists(st.builds(MixtureComponent, st.integers(1, 60), st.integers(1, 150)), min_size=1, max_size=4).map(
    tuple
)


def plan(num_rows, chunk, window, world=1, seed=3, global_rows=8, parts=()):
    return SamplePlan(num_rows, global_rows, world, 4, seed, 10**6, parts=parts, chunk=chunk, window=window)


def mixture(parts, chunk, window, world=1, global_rows=8):
    return plan(sum(part.per_epoch for part in parts), chunk, window, world, global_rows=global_rows, parts=parts)


def rows_of_step(p, step):
    positions = np.concatenate([p.positions(step, rank) for rank in range(p.world)])
    return p.rows_at(positions[positions != PADDING])


def epoch_of(p, number):
    return p.rows_at(np.arange(number * p.num_rows, (number + 1) * p.num_rows))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), CHUNKS, WINDOWS, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_each_epoch_is_a_permutation(num_rows, chunk, window, seed, epoch):
    rows = epoch_of(plan(num_rows, chunk, window, seed=seed), epoch)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), CHUNKS, WINDOWS, st.integers(1, 64), st.integers(1, 7), st.integers(0, 40))
def test_step_takes_same_rows_at_any_world_size(num_rows, chunk, window, global_rows, world, step):
    one = plan(num_rows, chunk, window, global_rows=global_rows)
    assert np.array_equal(
        rows_of_step(one, step), rows_of_step(plan(num_rows, chunk, window, world, global_rows=global_rows), step)
    )
    whole = one.rows_at(np.arange(one.rows_stop(step)))
    assert np.array_equal(whole[one.rows_start(step) :], rows_of_step(one, step))


@settings(max_examples=60, deadline=None)
@given(st.integers(200, 3000), st.integers(2, 40), WINDOWS)
def test_window_takes_full_chunks_except_for_a_ragged_one(num_rows, chunk, window):
    rows = epoch_of(plan(num_rows, chunk, window), 1)
    chunks = -(-num_rows // chunk)
    windows = max(1, chunks // window)
    length, longer = divmod(chunks, windows)
    sizes = np.repeat([length + 1, length], [longer, windows - longer]) * chunk
    seen = [set((part // chunk).tolist()) for part in np.split(rows, np.cumsum(sizes)[:-1])]
    shared = sum(len(each) for each in seen) - chunks
    assert 0 <= shared <= chunks * chunk - num_rows


def test_epochs_and_seeds_differ_and_chunk_and_window_change_the_order():
    p = plan(1000, 16, 4)
    orders = [epoch_of(p, 0), epoch_of(p, 1), epoch_of(plan(1000, 16, 4, seed=4), 0), epoch_of(plan(1000, 16, 5), 0)]
    orders += [epoch_of(plan(1000, 17, 4), 0), epoch_of(plan(1000, 1, 1), 0)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert np.array_equal(orders[0], epoch_of(plan(1000, 16, 4, world=3), 0))


def test_chunk_of_one_equals_the_recorded_order():
    """Golden digests: the order must never change."""
    assert (
        sha256(SamplePlan(1003, 8, 1, 4, 5, 100).rows_at(np.arange(3009)).tobytes()).hexdigest()[:16]
        == "1d62c0f1717a6839"
    )
    p = SamplePlan(123, 8, 1, 4, 5, 100, parts=(MixtureComponent(90, 120), MixtureComponent(7, 3)))
    both = p.rows_at(np.arange(1230)).tobytes() + p.passes_at(np.arange(1230)).tobytes()
    assert sha256(both).hexdigest()[:16] == "acd5ea266ce82c52"


@pytest.mark.parametrize(("chunk", "window"), [(10**9, 1), (117, 10**9), (116, 1), (2, 1)])
def test_chunks_and_windows_larger_than_the_set(chunk, window):
    assert np.array_equal(np.sort(epoch_of(plan(117, chunk, window), 0)), np.arange(117))


def test_order_of_a_hundred_million_rows_needs_no_memory():
    p = plan(100_000_000, 32, 64, world=8, global_rows=4096)
    rows = p.rows_at(p.positions(900_000, 3))
    assert rows.shape == (512,) and len(set(rows.tolist())) == 512 and rows.max() < 100_000_000


@settings(max_examples=60, deadline=None)
@given(PARTS, CHUNKS, WINDOWS, st.integers(1, 5))
def test_mixture_takes_exact_shares_and_each_row_and_pass_once(parts, chunk, window, epochs):
    p = mixture(parts, chunk, window)
    positions = np.arange(epochs * p.num_rows)
    rows, passes = p.rows_at(positions), p.passes_at(positions)
    assert len(set(zip(rows.tolist(), passes.tolist(), strict=True))) == len(positions)
    counts = np.bincount(rows, minlength=sum(part.num_rows for part in parts))
    for part, here in zip(parts, np.split(counts, np.cumsum([part.num_rows for part in parts])[:-1]), strict=True):
        assert here.sum() == epochs * part.per_epoch and here.max() - here.min() <= 1


@settings(max_examples=40, deadline=None)
@given(PARTS, CHUNKS, WINDOWS, st.integers(1, 64), st.integers(1, 7), st.integers(0, 60))
def test_step_of_a_mixture_takes_same_rows_at_any_world_size(parts, chunk, window, global_rows, world, step):
    one, many = (mixture(parts, chunk, window, size, global_rows) for size in (1, world))
    assert np.array_equal(rows_of_step(one, step), rows_of_step(many, step))
    whole = one.rows_at(np.arange(one.rows_stop(step)))
    assert np.array_equal(whole[one.rows_start(step) :], rows_of_step(one, step))


def test_chunked_mixture_is_spread_over_the_epoch():
    p = mixture((MixtureComponent(9000, 9000), MixtureComponent(500, 1000)), 16, 8, global_rows=256)
    share = (p.rows_at(np.arange(30_000)) >= 9000).reshape(-1, 250).mean(axis=1)
    assert abs(share - 0.1).max() < 0.08
    near, full = (len(set((each.rows_at(np.arange(256)) // 16).tolist())) for each in (p, mixture(p.parts, 1, 1)))
    assert near < 40 and full > 180


def test_batch_has_rows_of_the_expected_number_of_chunks():
    """256 draws from 64 equal chunks meet 64 * (1 - (63/64)**256) = 62.9 of them."""
    near, full = quality(2**17, 32, 64), quality(2**17, 1, 1, of=32)
    assert near.chunks == pytest.approx(62.9, abs=0.5) and full.chunks == pytest.approx(248.2, abs=1.5)
    assert near.distance == pytest.approx(1 / 3, abs=0.02) and full.distance == pytest.approx(1 / 3, abs=0.01)
    assert near.deviation > full.deviation == pytest.approx(1, abs=0.15)
