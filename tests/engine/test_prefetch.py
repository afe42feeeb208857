"""Local batches: padding is removed, positions are checked, the next batch is prefetched."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine import prefetch
from mmray.errors import TrainingError
from tests.engine import toy

CPU = torch.device("cpu")
PLAN = SamplePlan(num_rows=20, global_batch_size=10, world_size=1, seed=0, steps=2)


def local_batches(steps, **options):
    return prefetch.Prefetcher(steps, PLAN, 0, 0, CPU, **options)


def test_padding_is_removed_and_order_is_kept():
    rows = toy.rows(9, 0, invalid=(0, 3, 4, 5, 8))
    batch = prefetch.make_local_batch(toy.cut(rows, 3))
    assert [len(micro["valid"]) for micro in batch.micro_batches] == [2, 1, 2]
    assert batch.is_dummy == (False, True, False)
    for name in ("image", "key", "pos", "valid"):
        column = torch.cat([micro[name] for micro in batch.micro_batches])
        # row 3 only fills its micro-batch
        assert torch.equal(column, rows[name][[1, 2, 3, 6, 7]]), name
    assert torch.equal(batch.keys, rows["key"][[1, 2, 6, 7]])
    assert batch.rows == 9


def test_data_wait_is_measured():
    def slow():
        for micro_batches in toy.steps_of(PLAN, 0):
            time.sleep(0.05)
            yield micro_batches

    start_s = time.perf_counter()
    waits = [batch.wait_s for batch in local_batches(slow())]
    assert len(waits) == 2 and min(waits) >= 0.05 and sum(waits) <= time.perf_counter() - start_s


def test_error_in_the_thread_is_raised_in_the_caller():
    def items():
        yield 1
        raise TrainingError("lost")

    ahead = prefetch._BackgroundIterator(items(), lambda number: number, CPU, lambda: None)
    assert next(ahead) == 1
    with pytest.raises(TrainingError, match="lost"):
        next(ahead)


def test_exit_does_not_wait_forever_for_a_stalled_stream_without_interrupt(monkeypatch):
    monkeypatch.setattr(prefetch, "CLOSE_TIMEOUT_S", 0.1)
    stalled, release = threading.Event(), threading.Event()

    def items():
        yield 1
        stalled.set()
        ends.append(release.wait(60))

    ends: list[bool] = []
    ahead = prefetch._BackgroundIterator(items(), lambda number: number, CPU, lambda: None)
    assert next(ahead) == 1 and stalled.wait(60)
    ahead.close()
    assert not ends
    release.set()


def test_rows_bucketed_by_length_are_those_of_the_plan():
    steps = list(toy.steps_of(PLAN, 0, micro=5))
    swapped = [[second, first] for first, second in steps]
    assert [batch.rows for batch in local_batches(swapped, group_by_length=True)] == [10, 10]
    for wrong, group_by_length in ((swapped, False), (steps[::-1], True)):
        with pytest.raises(TrainingError, match="returned wrong rows"):
            list(local_batches(wrong, group_by_length=group_by_length))
