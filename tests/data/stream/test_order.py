"""The order is a permutation per epoch, the same for any world size, and resumes at any step."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmray.data.stream.order import PADDING, MixtureComponent, SamplePlan, hash_choice

ROWS, GLOBAL_ROWS, WORLDS = st.integers(1, 400), st.integers(1, 64), st.integers(1, 7)
CHUNKS, WINDOWS = st.just(1) | st.integers(1, 70), st.integers(1, 9)
PARTS = st.lists(st.builds(MixtureComponent, st.integers(1, 60), st.integers(1, 150)), min_size=1, max_size=4).map(
    tuple
)


def plan(num_rows=117, chunk=1, window=1, world=1, global_rows=8, **options):
    options = {"micro": 4, "seed": 3, "steps": 10**6} | options
    return SamplePlan(num_rows, global_rows, world, chunk=chunk, window=window, **options)


def mixture(parts, *shape, **options):
    return plan(sum(part.per_epoch for part in parts), *shape, parts=parts, **options)


def rows_of_step(p, step):
    positions = np.concatenate([p.positions(step, rank) for rank in range(p.world)])
    return p.rows_at(positions[positions != PADDING])


def epoch_of(p, number):
    return p.rows_at(np.arange(number * p.num_rows, (number + 1) * p.num_rows))


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 3000), CHUNKS, WINDOWS, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_each_epoch_is_a_permutation(num_rows, chunk, window, seed, epoch):
    rows = epoch_of(plan(num_rows, chunk, window, seed=seed), epoch)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


def check_step(one, many, step):
    """A step takes the same rows at any world size, and those that its number of consumed rows says."""
    assert np.array_equal(rows_of_step(one, step), rows_of_step(many, step))
    whole = one.rows_at(np.arange(one.rows_stop(step)))
    assert np.array_equal(whole[one.rows_start(step) :], rows_of_step(one, step))
    assert one.step_at(one.rows_start(step)) == step


@settings(max_examples=80, deadline=None)
@given(ROWS, CHUNKS, WINDOWS, GLOBAL_ROWS, WORLDS, st.integers(0, 100))
def test_step_takes_same_rows_at_any_world_size(num_rows, chunk, window, global_rows, world, step):
    check_step(*(plan(num_rows, chunk, window, size, global_rows) for size in (1, world)), step)


@settings(max_examples=60, deadline=None)
@given(PARTS, CHUNKS, WINDOWS, GLOBAL_ROWS, WORLDS, st.integers(0, 60))
def test_step_of_a_mixture_takes_same_rows_at_any_world_size(parts, chunk, window, global_rows, world, step):
    check_step(*(mixture(parts, chunk, window, size, global_rows) for size in (1, world)), step)


@settings(max_examples=60, deadline=None)
@given(ROWS, GLOBAL_ROWS, WORLDS)
def test_steps_of_an_epoch_cover_it_exactly(num_rows, global_rows, world):
    p = plan(num_rows, global_rows=global_rows, world=world)
    for epoch in range(2):
        steps = range(epoch * p.steps_per_epoch, (epoch + 1) * p.steps_per_epoch)
        rows = np.concatenate([rows_of_step(p, step) for step in steps])
        assert np.array_equal(np.sort(rows), np.arange(num_rows))
        assert p.rows_stop(steps[-1]) == (epoch + 1) * num_rows


def test_step_at_refuses_a_row_inside_a_step():
    with pytest.raises(ValueError, match="no step of 8 rows starts at row 3"):
        plan().step_at(3)


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
    orders += [epoch_of(plan(1000, 17, 4), 0), epoch_of(plan(1000), 0), epoch_of(plan(1000), 1)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert np.array_equal(epoch_of(plan(shuffle=False), 0), np.arange(117))


def test_order_equals_the_recorded_one():
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


@pytest.mark.parametrize("shape", [(1, 1), (32, 64)])
def test_order_of_a_hundred_million_rows_needs_no_memory(shape):
    p = plan(100_000_000, *shape, world=8, global_rows=4096)
    rows = p.rows_at(p.positions(900_000, 3))
    assert rows.shape == (512,) and len(set(rows.tolist())) == 512 and rows.max() < 100_000_000
    p = mixture((MixtureComponent(100_000_000, 150_000_000), MixtureComponent(7, 1000)), *shape, 8, 4096)
    rows = p.rows_at(p.positions(900_000, 3))
    assert rows.shape == (512,) and rows.max() < 100_000_007


def test_full_shuffle_has_no_visible_structure():
    """Displacements of a uniform permutation: neighbours are n/3 apart on average."""
    n = 20_000
    rows = plan(n, seed=7).rows_at(np.arange(n))
    assert abs(np.abs(np.diff(rows)).mean() / n - 1 / 3) < 0.01
    assert abs((np.diff(rows) < 0).mean() - 0.5) < 0.01
    assert abs(np.corrcoef(rows, np.arange(n))[0, 1]) < 0.03


def test_batch_of_a_chunked_order_has_rows_of_the_expected_number_of_chunks():
    """256 draws from 64 equal chunks meet 64 * (1 - (63/64)**256) = 62.9 of them; a set sorted by source is mixed."""
    rows, batch = 2**17, 256
    for shape, expected, slack in (((32, 64), 62.9, 0.5), ((1, 1), 248.2, 1.5)):
        order = plan(rows, *shape, seed=0, global_rows=batch).rows_at(np.arange(2 * rows))
        chunks = np.sort(order.reshape(-1, batch) // 32, axis=1)
        assert 1 + (np.diff(chunks, axis=1) > 0).sum(axis=1).mean() == pytest.approx(expected, abs=slack)
        assert np.abs(np.diff(order)).mean() / rows == pytest.approx(1 / 3, abs=0.02)


def test_hash_choice_depends_only_on_seed_epoch_and_key():
    keys = np.arange(1000, dtype=np.int64)
    epoch, choices = np.zeros(1000, np.int64), np.full(1000, 5)
    first = hash_choice(0, epoch, keys, choices)
    assert np.array_equal(first, hash_choice(0, epoch, keys, choices))
    assert (first != hash_choice(0, epoch + 1, keys, choices)).mean() > 0.7
    assert (first != hash_choice(1, epoch, keys, choices)).mean() > 0.7
    assert set(first.tolist()) == {0, 1, 2, 3, 4}


def test_rank_rows_and_accumulation():
    p = plan(world=3, micro=2)
    assert (p.rank_rows, p.accumulation) == (3, 2)
    assert p.positions(0, 2).tolist() == [6, 7, PADDING]


@settings(max_examples=100, deadline=None)
@given(PARTS, CHUNKS, WINDOWS, st.integers(1, 5), st.booleans())
def test_mixture_takes_exact_shares_and_each_row_and_pass_once(parts, chunk, window, epochs, shuffle):
    p = mixture(parts, chunk, window, shuffle=shuffle)
    positions = np.arange(epochs * p.num_rows)
    rows, passes = p.rows_at(positions), p.passes_at(positions)
    assert len(set(zip(rows.tolist(), passes.tolist(), strict=True))) == len(positions)
    counts = np.bincount(rows, minlength=sum(part.num_rows for part in parts))
    for part, here in zip(parts, np.split(counts, np.cumsum([part.num_rows for part in parts])[:-1]), strict=True):
        assert here.sum() == epochs * part.per_epoch and here.max() - here.min() <= 1


def test_mixture_is_spread_over_the_epoch_and_differs_by_seed_and_epoch():
    parts = (MixtureComponent(9000, 9000), MixtureComponent(500, 1000))
    full, near = mixture(parts, global_rows=256), mixture(parts, 16, 8, global_rows=256)
    for p, size, most in ((full, 1000, 0.04), (near, 250, 0.08)):
        share = (p.rows_at(np.arange(30_000)) >= 9000).reshape(-1, size).mean(axis=1)
        assert abs(share - 0.1).max() < most
        assert not np.array_equal(epoch_of(p, 0), epoch_of(p, 1))
    assert not np.array_equal(epoch_of(full, 0), epoch_of(mixture(parts, seed=4), 0))
    chunks = [len(set((p.rows_at(np.arange(256)) // 16).tolist())) for p in (near, full)]
    assert chunks[0] < 40 and chunks[1] > 180


def test_passes_are_epochs_and_padding_is_kept():
    assert plan(5).passes_at(np.arange(12)).tolist() == [0] * 5 + [1] * 5 + [2] * 2
    p = mixture((MixtureComponent(117, 117),))
    for epoch in range(3):
        assert np.array_equal(np.sort(epoch_of(p, epoch)), np.arange(117))
    assert p.rows_at(np.array([PADDING])).tolist() == [PADDING] and p.passes_at(np.array([PADDING])).tolist() == [0]
