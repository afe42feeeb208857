"""The order is a permutation per epoch, the same for any world size, and resumes at any step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmray.data.stream.order import PADDING, MixtureComponent, SamplePlan, hash_choice


def plan(num_rows=117, global_rows=8, world=1, micro=4, seed=0, steps=100, shuffle=True):
    return SamplePlan(num_rows, global_rows, world, micro, seed, steps, shuffle)


def rows_of_step(p: SamplePlan, step: int) -> np.ndarray:
    positions = np.concatenate([p.positions(step, rank) for rank in range(p.world)])
    return p.rows_at(positions[positions != PADDING])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_each_epoch_is_a_permutation(num_rows, seed, epoch):
    p = plan(num_rows=num_rows, seed=seed)
    rows = p.rows_at(np.arange(epoch * num_rows, (epoch + 1) * num_rows))
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 7), st.integers(0, 40))
def test_step_takes_same_rows_at_any_world_size(num_rows, global_rows, world, step):
    one = rows_of_step(plan(num_rows=num_rows, global_rows=global_rows), step)
    many = rows_of_step(plan(num_rows=num_rows, global_rows=global_rows, world=world), step)
    assert np.array_equal(one, many)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 7))
def test_steps_of_an_epoch_cover_it_exactly(num_rows, global_rows, world):
    p = plan(num_rows=num_rows, global_rows=global_rows, world=world)
    for epoch in range(2):
        steps = range(epoch * p.steps_per_epoch, (epoch + 1) * p.steps_per_epoch)
        rows = np.concatenate([rows_of_step(p, step) for step in steps])
        assert np.array_equal(np.sort(rows), np.arange(num_rows))
        assert p.rows_stop(steps[-1]) == (epoch + 1) * num_rows


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 64), st.integers(0, 100))
def test_step_at_inverts_rows_start(num_rows, global_rows, step):
    p = plan(num_rows=num_rows, global_rows=global_rows)
    assert p.step_at(p.rows_start(step)) == step


def test_step_at_refuses_a_row_inside_a_step():
    with pytest.raises(ValueError, match="no step of 8 rows starts at row 3"):
        plan().step_at(3)


def test_epochs_and_seeds_differ_and_repeat():
    p, other = plan(), plan(seed=1)
    first, second = p.rows_at(np.arange(117)), p.rows_at(np.arange(117, 234))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other.rows_at(np.arange(117)))
    assert np.array_equal(first, plan(world=3).rows_at(np.arange(117)))


def test_shuffle_off_keeps_source_order():
    assert np.array_equal(plan(shuffle=False).rows_at(np.arange(117)), np.arange(117))


def test_shuffle_has_no_visible_structure():
    """Displacements of a uniform permutation: neighbours are n/3 apart on average."""
    n = 20_000
    rows = plan(num_rows=n, seed=7).rows_at(np.arange(n))
    assert abs(np.abs(np.diff(rows)).mean() / n - 1 / 3) < 0.01
    assert abs((np.diff(rows) < 0).mean() - 0.5) < 0.01
    assert abs(np.corrcoef(rows, np.arange(n))[0, 1]) < 0.03


def test_order_of_a_hundred_million_rows_needs_no_memory():
    p = plan(num_rows=100_000_000, global_rows=4096, world=8, micro=512, steps=10**6)
    rows = p.rows_at(p.positions(900_000, 3))
    assert rows.shape == (512,) and len(set(rows.tolist())) == 512 and rows.max() < 100_000_000


def test_hash_choice_depends_only_on_seed_epoch_and_key():
    keys = np.arange(1000, dtype=np.int64)
    epoch, choices = np.zeros(1000, np.int64), np.full(1000, 5)
    first = hash_choice(0, epoch, keys, choices)
    assert np.array_equal(first, hash_choice(0, epoch, keys, choices))
    assert (first != hash_choice(0, epoch + 1, keys, choices)).mean() > 0.7
    assert (first != hash_choice(1, epoch, keys, choices)).mean() > 0.7
    assert set(first.tolist()) == {0, 1, 2, 3, 4}


def test_rank_rows_and_accumulation():
    p = plan(global_rows=8, world=3, micro=2)
    assert (p.rank_rows, p.accumulation) == (3, 2)
    assert p.positions(0, 2).tolist() == [6, 7, PADDING]


PARTS = st.lists(st.builds(MixtureComponent, st.integers(1, 60), st.integers(1, 150)), min_size=1, max_size=4).map(
    tuple
)


def mixture(parts, world=1, global_rows=8, shuffle=True, seed=3):
    return SamplePlan(sum(part.per_epoch for part in parts), global_rows, world, 4, seed, 10**6, shuffle, parts)


def counts_of(p, epochs):
    """How often each row of each set is taken in the first epochs, as a list of arrays."""
    rows = p.rows_at(np.arange(epochs * p.num_rows))
    counts = np.bincount(rows, minlength=sum(part.num_rows for part in p.parts))
    return np.split(counts, np.cumsum([part.num_rows for part in p.parts])[:-1])


@settings(max_examples=80, deadline=None)
@given(PARTS, st.integers(1, 5), st.booleans())
def test_epoch_of_a_mixture_takes_the_exact_share_of_each_set(parts, epochs, shuffle):
    for part, counts in zip(parts, counts_of(mixture(parts, shuffle=shuffle), epochs), strict=True):
        assert counts.sum() == epochs * part.per_epoch
        assert counts.max() - counts.min() <= 1
        if epochs * part.per_epoch % part.num_rows == 0:
            assert (counts == epochs * part.per_epoch // part.num_rows).all()


@settings(max_examples=60, deadline=None)
@given(PARTS, st.integers(1, 64), st.integers(1, 7), st.integers(0, 60))
def test_step_of_a_mixture_takes_same_rows_at_any_world_size(parts, global_rows, world, step):
    one, many = mixture(parts, 1, global_rows), mixture(parts, world, global_rows)
    assert np.array_equal(rows_of_step(one, step), rows_of_step(many, step))
    whole = one.rows_at(np.arange(one.rows_stop(step)))
    assert np.array_equal(whole[one.rows_start(step) :], rows_of_step(one, step))
    assert one.step_at(one.rows_start(step)) == step


@settings(max_examples=60, deadline=None)
@given(PARTS, st.integers(1, 4))
def test_each_row_and_pass_is_taken_once(parts, epochs):
    p = mixture(parts)
    positions = np.arange(epochs * p.num_rows)
    pairs = set(zip(p.rows_at(positions).tolist(), p.passes_at(positions).tolist(), strict=True))
    assert len(pairs) == len(positions)


def test_single_set_takes_each_row_once_and_keeps_padding():
    p = mixture((MixtureComponent(117, 117),))
    for epoch in range(3):
        assert np.array_equal(np.sort(p.rows_at(np.arange(epoch * 117, epoch * 117 + 117))), np.arange(117))
    assert p.rows_at(np.array([PADDING])).tolist() == [PADDING] and p.passes_at(np.array([PADDING])).tolist() == [0]


def test_mixture_is_spread_over_the_epoch_and_differs_by_seed_and_epoch():
    p = mixture((MixtureComponent(9000, 9000), MixtureComponent(500, 1000)))
    rows = p.rows_at(np.arange(30_000))
    share = (rows >= 9000).reshape(-1, 1000).mean(axis=1)
    assert abs(share - 0.1).max() < 0.04
    assert not np.array_equal(rows[:10_000], rows[10_000:20_000])
    assert not np.array_equal(rows, mixture(p.parts, seed=4).rows_at(np.arange(30_000)))


def test_mixture_of_a_hundred_million_rows_needs_no_memory():
    p = mixture((MixtureComponent(100_000_000, 150_000_000), MixtureComponent(7, 1000)), world=8, global_rows=4096)
    rows = p.rows_at(p.positions(900_000, 3))
    assert rows.shape == (512,) and rows.max() < 100_000_007


def test_passes_of_a_single_set_are_epochs():
    assert plan(num_rows=5).passes_at(np.arange(12)).tolist() == [0] * 5 + [1] * 5 + [2] * 2
