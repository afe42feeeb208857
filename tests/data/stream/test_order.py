"""The order is a permutation per epoch, the same for any world size, and resumes at any step."""

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmray.data.store.mixture import MixtureComponent
from mmray.data.stream.order import ORDER_VERSION, PADDING, BlockShuffle, SamplePlan

ROWS, GLOBAL_ROWS, WORLDS = st.integers(1, 400), st.integers(1, 64), st.integers(1, 7)
BLOCKS = st.none() | st.builds(
    BlockShuffle, st.integers(1, 70), st.integers(1, 70), st.integers(1, 9)
)
COMPONENT = st.builds(MixtureComponent, st.integers(1, 60), st.integers(1, 150))
COMPONENTS = st.lists(COMPONENT, min_size=1, max_size=4).map(tuple)


def plan(num_rows=117, blocks=None, world=1, global_batch_size=8, **options):
    options = {"seed": 3, "steps": 10**6} | options
    return SamplePlan(num_rows, global_batch_size, world, block_shuffle=blocks, **options)


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
@given(st.integers(1, 3000), GLOBAL_ROWS, BLOCKS, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_each_epoch_is_a_permutation(num_rows, global_batch_size, shuffle, seed, epoch):
    """Also if an epoch ends within a step, and if lanes have no column or no row."""
    rows = epoch_of(plan(num_rows, shuffle, global_batch_size=global_batch_size, seed=seed), epoch)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@settings(max_examples=140)
@given(st.just(()) | COMPONENTS, ROWS, BLOCKS, GLOBAL_ROWS, WORLDS, st.integers(0, 100))
def test_step_takes_same_rows_at_any_world_size(
    components, num_rows, shuffle, global_batch_size, world, step
):
    """Of a set or a mixture; these are the rows that the number of rows consumed before the step
    determines.
    """
    make = partial(mixture, components) if components else partial(plan, num_rows)
    one, many = (make(shuffle, size, global_batch_size) for size in (1, world))
    assert np.array_equal(rows_of_step(one, step), rows_of_step(many, step))
    whole = one.row_ids_at(np.arange(one.rows_start(step + 1)))
    assert np.array_equal(whole[one.rows_start(step) :], rows_of_step(one, step))


@settings(max_examples=30)
@given(ROWS, GLOBAL_ROWS, WORLDS)
def test_steps_of_equal_size_take_each_row_once_per_epoch(num_rows, global_batch_size, world):
    p = plan(num_rows, global_batch_size=global_batch_size, world=world)
    steps = [rows_of_step(p, step) for step in range(-(-3 * num_rows // global_batch_size))]
    assert {len(rows) for rows in steps} == {global_batch_size}
    epochs = np.concatenate(steps)[: 3 * num_rows].reshape(3, num_rows)
    assert (np.sort(epochs, axis=1) == np.arange(num_rows)).all()


def test_epochs_seeds_and_each_number_of_a_block_shuffle_change_the_order():
    blocks = BlockShuffle(4, 16, 4)
    p = plan(1000, blocks)
    orders = [
        epoch_of(p, 0),
        epoch_of(p, 1),
        epoch_of(plan(1000, blocks, seed=4), 0),
        epoch_of(plan(1000, replace(blocks, lanes=3)), 0),
    ]
    orders += [epoch_of(plan(1000, replace(blocks, blocks_per_window=6)), 0)]
    orders += [epoch_of(plan(1000, replace(blocks, rows_per_block=17)), 0)]
    orders += [epoch_of(plan(1000), 0), epoch_of(plan(1000), 1)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert np.array_equal(epoch_of(plan(shuffle=False), 0), np.arange(117))


def test_order_equals_the_recorded_one():
    """Golden digests: a change of the order needs another ORDER_VERSION."""
    assert ORDER_VERSION == 1
    rows = SamplePlan(1003, 8, 1, 5, 100).row_ids_at(np.arange(3009))
    assert sha256(rows.tobytes()).hexdigest()[:16] == "1d62c0f1717a6839"
    p = SamplePlan(
        123, 8, 1, 5, 100, components=(MixtureComponent(90, 120), MixtureComponent(7, 3))
    )
    both = b"".join(column.tobytes() for column in p.row_ids_and_pass_indices_at(np.arange(1230)))
    assert sha256(both).hexdigest()[:16] == "acd5ea266ce82c52"
    in_blocks = replace(p, block_shuffle=BlockShuffle(3, 4, 5))
    both = b"".join(
        column.tobytes() for column in in_blocks.row_ids_and_pass_indices_at(np.arange(1230))
    )
    assert sha256(both).hexdigest()[:16] == "296fb0a59f17c238"


def test_rank_rows_are_padded():
    p = plan(world=3)
    assert p.rank_rows == 3
    assert p.positions(0, 2).tolist() == [6, 7, PADDING]
    assert [column.tolist() for column in p.row_ids_and_pass_indices_at(np.array([PADDING]))] == [
        [PADDING],
        [0],
    ]


@settings(max_examples=100)
@given(COMPONENTS, BLOCKS, GLOBAL_ROWS, st.integers(1, 5), st.booleans())
def test_mixture_takes_exact_shares_and_each_row_and_pass_once(
    components, blocks, global_batch_size, epochs, shuffle
):
    p = mixture(components, blocks, global_batch_size=global_batch_size, shuffle=shuffle)
    positions = np.arange(epochs * p.num_rows)
    rows, pass_index = p.row_ids_and_pass_indices_at(positions)
    assert len(set(zip(rows.tolist(), pass_index.tolist(), strict=True))) == len(positions)
    counts = np.bincount(rows, minlength=sum(part.num_rows for part in components))
    counts_by_part = np.split(counts, np.cumsum([part.num_rows for part in components])[:-1])
    for part, here in zip(components, counts_by_part, strict=True):
        assert here.sum() == epochs * part.per_epoch and here.max() - here.min() <= 1


def test_mixture_is_spread_over_the_epoch_and_differs_by_seed_and_epoch():
    components = (MixtureComponent(9000, 9000), MixtureComponent(500, 1000))
    blocks = BlockShuffle(8, 16, 4)
    full, near = (
        mixture(components, global_batch_size=256),
        mixture(components, blocks, global_batch_size=256),
    )
    for p, size, most in ((full, 1000, 0.04), (near, 256, 0.08)):
        usable = 30_000 // size * size
        fraction = (p.row_ids_at(np.arange(usable)) >= 9000).reshape(-1, size).mean(axis=1)
        assert abs(fraction - 0.1).max() < most
        assert not np.array_equal(epoch_of(p, 0), epoch_of(p, 1))
    assert not np.array_equal(epoch_of(full, 0), epoch_of(mixture(components, seed=4), 0))
    counts = [len(set((p.row_ids_at(np.arange(256)) // 16).tolist())) for p in (near, full)]
    assert counts[0] <= 8 * (4 + 2 * 2) < 100 and counts[1] > 180


STEPS_AT_ONCE = 16


def blocks_read(p, nodes, node, steps):
    """Blocks that a node reads in these steps, with a cache of 2.5 windows of its lanes."""
    shape = p.block_shuffle
    capacity = 5 * shape.blocks_per_window * shape.lanes // (2 * nodes)
    kept, reads = OrderedDict(), 0
    share = p.global_batch_size // nodes
    for first in range(0, steps, STEPS_AT_ONCE):
        starts = np.arange(first, first + STEPS_AT_ONCE) * p.global_batch_size + node * share
        rows = p.row_ids_at((starts[:, None] + np.arange(share)).ravel())
        for block in np.unique(rows // shape.rows_per_block).tolist():
            reads += block not in kept
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return reads


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("nodes", [8, 64])
def test_node_reads_its_share_of_the_blocks(nodes, sets):
    """In 1.5 epochs, so that the end of one counts; one of the sets three times per epoch."""
    lanes = 4 * nodes
    shape = BlockShuffle(lanes, rows_per_block=256, blocks_per_window=4 * sets)
    num_rows = lanes * 16 * 256
    parts = (MixtureComponent(num_rows, num_rows), MixtureComponent(num_rows // 3, num_rows))
    p = (
        plan(num_rows + 77, shape, 1, 1024)
        if sets == 1
        else mixture(parts, shape, global_batch_size=1024)
    )
    steps = 3 * p.num_rows // (2 * 1024)
    share = steps * 1024 / nodes / shape.rows_per_block
    read = [blocks_read(p, nodes, node, steps) / share for node in (0, nodes - 1)]
    print(f"{nodes} nodes: {min(read):.2f} to {max(read):.2f} times their share")
    assert max(read) < 1.2


def test_positions_one_window_later_are_in_the_blocks_of_the_next_window():
    shape = BlockShuffle(4, rows_per_block=10, blocks_per_window=5)
    p = plan(10_000, shape, 2, 16, steps=2000)
    window_steps = 4 * 10 * 5 // 16 + 1
    ahead = np.concatenate([p.one_window_later(p.positions(step, 1)) for step in range(250)])
    fetched = set((p.row_ids_at(ahead) // 10).tolist())
    used = [p.row_ids_at(p.positions(step, 1)) // 10 for step in range(window_steps, 250)]
    assert set(np.concatenate(used).tolist()) <= fetched
    assert p.one_window_later(p.positions(1999, 0)).size == 0
    assert replace(p, block_shuffle=None).one_window_later(p.positions(0, 0)).size == 0
    assert p.one_window_later(np.array([PADDING])).size == 0


def spread(p, batches=100):
    """Standard deviation of the fraction of a batch from one tenth of the set."""
    starts = np.linspace(0, p.steps - 1, batches).astype(int)
    tenths = [10 * p.row_ids_at(p.positions(step, 0)) // p.num_rows for step in starts]
    return np.std([np.bincount(tenth, minlength=10) / p.global_batch_size for tenth in tenths])


def test_spread_of_batches_relative_to_a_full_shuffle():
    """A million rows; the README of mmray/data/stream has this table."""
    lines = []
    for global_batch_size, lanes, blocks in (
        (256, 8, 4),
        (256, 8, 30),
        (4096, 64, 4),
        (4096, 64, 30),
    ):
        shape = BlockShuffle(lanes, 1000, blocks)
        full = plan(10**6, None, 1, global_batch_size, steps=10**6 // global_batch_size)
        p = replace(full, block_shuffle=shape)
        blocks = [
            len(np.unique(each.row_ids_at(each.positions(5, 0)) // 1000)) for each in (p, full)
        ]
        lines.append((global_batch_size, str(shape), *blocks, spread(p) / spread(full)))
        print("{} rows, {}: {} of {} blocks, spread {:.1f}".format(*lines[-1]))
    assert all(few[-1] > 1.2 * many[-1] for few, many in (lines[:2], lines[2:]))
    assert lines[1][-1] < 2
