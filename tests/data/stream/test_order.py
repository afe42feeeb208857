"""The order is a permutation per epoch, the same for any world size, and resumes at any step."""

from functools import partial
from hashlib import sha256

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmray.data.store.prepared_set import MixtureComponent
from mmray.data.stream.order import PADDING, SamplePlan

ROWS, GLOBAL_ROWS, WORLDS = st.integers(1, 400), st.integers(1, 64), st.integers(1, 7)
BLOCKS, WINDOWS = st.just(1) | st.integers(1, 70), st.integers(1, 9)
COMPONENT = st.builds(MixtureComponent, st.integers(1, 60), st.integers(1, 150))
COMPONENTS = st.lists(COMPONENT, min_size=1, max_size=4).map(tuple)


def plan(num_rows=117, shuffle_block=1, window=1, world=1, global_rows=8, **options):
    options = {"seed": 3, "steps": 10**6} | options
    return SamplePlan(
        num_rows,
        global_rows,
        world,
        shuffle_block=shuffle_block,
        blocks_per_window=window,
        **options,
    )


def mixture(components, *shape, **options):
    return plan(
        sum(part.per_epoch for part in components), *shape, components=components, **options
    )


def rows_of_step(p, step):
    positions = np.concatenate([p.positions(step, rank) for rank in range(p.world_size)])
    return p.row_ids_at(positions[positions != PADDING])


def epoch_of(p, number):
    return p.row_ids_at(np.arange(number * p.num_rows, (number + 1) * p.num_rows))


@settings(max_examples=120)
@given(st.integers(1, 3000), BLOCKS, WINDOWS, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_each_epoch_is_a_permutation(num_rows, shuffle_block, window, seed, epoch):
    rows = epoch_of(plan(num_rows, shuffle_block, window, seed=seed), epoch)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@settings(max_examples=140)
@given(st.just(()) | COMPONENTS, ROWS, BLOCKS, WINDOWS, GLOBAL_ROWS, WORLDS, st.integers(0, 100))
def test_step_takes_same_rows_at_any_world_size(
    components, num_rows, shuffle_block, window, global_rows, world, step
):
    """Of a set or a mixture; these are the rows that the number of rows consumed before the step
    determines.
    """
    make = partial(mixture, components) if components else partial(plan, num_rows)
    one, many = (make(shuffle_block, window, size, global_rows) for size in (1, world))
    assert np.array_equal(rows_of_step(one, step), rows_of_step(many, step))
    whole = one.row_ids_at(np.arange(one.rows_start(step + 1)))
    assert np.array_equal(whole[one.rows_start(step) :], rows_of_step(one, step))


@settings(max_examples=60)
@given(ROWS, GLOBAL_ROWS, WORLDS)
def test_steps_of_equal_size_take_each_row_once_per_epoch(num_rows, global_rows, world):
    p = plan(num_rows, global_rows=global_rows, world=world)
    steps = [rows_of_step(p, step) for step in range(-(-3 * num_rows // global_rows))]
    assert {len(rows) for rows in steps} == {global_rows}
    epochs = np.concatenate(steps)[: 3 * num_rows].reshape(3, num_rows)
    assert (np.sort(epochs, axis=1) == np.arange(num_rows)).all()


def test_epochs_and_seeds_differ_and_chunk_and_window_change_the_order():
    p = plan(1000, 16, 4)
    orders = [
        epoch_of(p, 0),
        epoch_of(p, 1),
        epoch_of(plan(1000, 16, 4, seed=4), 0),
        epoch_of(plan(1000, 16, 5), 0),
    ]
    orders += [epoch_of(plan(1000, 17, 4), 0), epoch_of(plan(1000), 0), epoch_of(plan(1000), 1)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert np.array_equal(epoch_of(plan(shuffle=False), 0), np.arange(117))


def test_order_equals_the_recorded_one():
    """Golden digests: the order must never change."""
    rows = SamplePlan(1003, 8, 1, 5, 100).row_ids_at(np.arange(3009))
    assert sha256(rows.tobytes()).hexdigest()[:16] == "1d62c0f1717a6839"
    p = SamplePlan(
        123, 8, 1, 5, 100, components=(MixtureComponent(90, 120), MixtureComponent(7, 3))
    )
    both = b"".join(column.tobytes() for column in p.row_ids_and_pass_indices_at(np.arange(1230)))
    assert sha256(both).hexdigest()[:16] == "acd5ea266ce82c52"


def test_rank_rows_are_padded():
    p = plan(world=3)
    assert p.rank_rows == 3
    assert p.positions(0, 2).tolist() == [6, 7, PADDING]
    assert [column.tolist() for column in p.row_ids_and_pass_indices_at(np.array([PADDING]))] == [
        [PADDING],
        [0],
    ]


@settings(max_examples=100)
@given(COMPONENTS, BLOCKS, WINDOWS, st.integers(1, 5), st.booleans())
def test_mixture_takes_exact_shares_and_each_row_and_pass_once(
    components, shuffle_block, window, epochs, shuffle
):
    p = mixture(components, shuffle_block, window, shuffle=shuffle)
    positions = np.arange(epochs * p.num_rows)
    rows, pass_index = p.row_ids_and_pass_indices_at(positions)
    assert len(set(zip(rows.tolist(), pass_index.tolist(), strict=True))) == len(positions)
    counts = np.bincount(rows, minlength=sum(part.num_rows for part in components))
    counts_by_part = np.split(counts, np.cumsum([part.num_rows for part in components])[:-1])
    for part, here in zip(components, counts_by_part, strict=True):
        assert here.sum() == epochs * part.per_epoch and here.max() - here.min() <= 1


def test_mixture_is_spread_over_the_epoch_and_differs_by_seed_and_epoch():
    components = (MixtureComponent(9000, 9000), MixtureComponent(500, 1000))
    full, near = mixture(components, global_rows=256), mixture(components, 16, 8, global_rows=256)
    for p, size, most in ((full, 1000, 0.04), (near, 250, 0.08)):
        fraction = (p.row_ids_at(np.arange(30_000)) >= 9000).reshape(-1, size).mean(axis=1)
        assert abs(fraction - 0.1).max() < most
        assert not np.array_equal(epoch_of(p, 0), epoch_of(p, 1))
    assert not np.array_equal(epoch_of(full, 0), epoch_of(mixture(components, seed=4), 0))
    blocks = [len(set((p.row_ids_at(np.arange(256)) // 16).tolist())) for p in (near, full)]
    assert blocks[0] < 40 and blocks[1] > 180
