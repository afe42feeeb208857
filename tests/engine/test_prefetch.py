"""Local batches: padding is removed, positions are checked, the next batch is prefetched."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine import prefetch
from mmray.engine.metrics.timers import PhaseTimers
from tests.engine import toy

CPU = torch.device("cpu")


def test_padding_is_removed_and_order_is_kept():
    batch = toy.rows(9, 0, invalid=(0, 3, 4, 5, 8))
    share = prefetch.make_local_batch(toy.cut(batch, 3))
    rows, stand_in = [1, 2, 6, 7], [1, 2, 3, 6, 7]
    assert [len(micro["valid"]) for micro in share.micro_batches] == [2, 1, 2]
    assert share.is_filler == (False, True, False)
    for name in ("image", "key", "pos", "valid"):
        assert torch.equal(torch.cat([micro[name] for micro in share.micro_batches]), batch[name][stand_in]), name
    assert torch.equal(share.keys, batch["key"][rows])
    assert share.rows == 9


def test_batch_without_padding_is_passed_on_unchanged():
    micro_batches = toy.cut(toy.rows(9, 0), 4)
    assert prefetch.make_local_batch(micro_batches).micro_batches is micro_batches


def test_data_wait_is_measured():
    plan = SamplePlan(num_rows=20, global_rows=10, world=1, micro=5, seed=0, steps=2)

    def slow():
        for micro_batches in toy.steps_of(plan, 0):
            time.sleep(0.05)
            yield micro_batches

    waits = [share.wait_s for share in prefetch.prefetch(slow(), plan, 0, 0, CPU, PhaseTimers(CPU))]
    assert len(waits) == 2
    assert all(0.05 <= wait < 0.5 for wait in waits)


def test_different_positions_are_an_error():
    right = np.arange(4)
    prefetch.check_positions(right, right.copy(), 0, 0)
    with pytest.raises(prefetch.TrainingError, match="step 8 on rank 1: row 2 has position 9, 2 expected"):
        prefetch.check_positions(np.array([0, 1, 9, 3]), right, 7, 1)


def test_next_item_is_prefetched_by_one_thread():
    made, threads = [], set()

    def items():
        for number in range(4):
            threads.add(threading.current_thread().name)
            made.append(number)
            yield number

    ahead = prefetch._ahead(items(), lambda number: number * 10, CPU)
    assert next(ahead) == 0
    deadline = time.monotonic() + 5
    while len(made) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert made == [0, 1]  # one ahead, and no more
    assert list(ahead) == [10, 20, 30]
    assert len(threads) == 1
    assert threading.main_thread().name not in threads


def test_error_in_the_thread_is_raised_in_the_caller():
    def items():
        yield 1
        raise prefetch.TrainingError("lost")

    ahead = prefetch._ahead(items(), lambda number: number, CPU)
    assert next(ahead) == 1
    with pytest.raises(prefetch.TrainingError, match="lost"):
        next(ahead)


def test_prefetch_thread_uses_the_workers_gpu(monkeypatch):
    """The default is the first GPU, where pinned memory and streams would create a context."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread())))
    other = torch.device("cuda", 3)
    threads = list(prefetch._ahead((threading.current_thread() for _ in range(2)), lambda thread: thread, other))
    assert threads[0] is threads[1] and chosen == [(other, threads[0])]


def test_exit_does_not_wait_for_a_stalled_stream():
    stalled, goes_on = threading.Event(), threading.Event()

    def items():
        yield 1
        stalled.set()
        goes_on.wait(20)

    ahead = prefetch._ahead(items(), lambda number: number, CPU)
    assert next(ahead) == 1 and stalled.wait(5)
    began_s = time.monotonic()
    ahead.close()
    took_s = time.monotonic() - began_s
    goes_on.set()
    assert took_s < 5


def test_rows_bucketed_by_length_are_those_of_the_plan():
    plan = SamplePlan(num_rows=20, global_rows=10, world=1, micro=5, seed=0, steps=2)
    steps = list(toy.steps_of(plan, 0))
    swapped = [[second, first] for first, second in steps]
    shares = prefetch.prefetch(swapped, plan, 0, 0, CPU, PhaseTimers(CPU), bucketed=True)
    assert [share.rows for share in shares] == [10, 10]
    with pytest.raises(prefetch.TrainingError, match="returned wrong rows"):
        list(prefetch.prefetch(swapped, plan, 0, 0, CPU, PhaseTimers(CPU)))
    with pytest.raises(prefetch.TrainingError, match="returned wrong rows"):
        list(prefetch.prefetch(steps[::-1], plan, 0, 0, CPU, PhaseTimers(CPU), bucketed=True))
