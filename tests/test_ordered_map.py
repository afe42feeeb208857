"""The ordered map over processes that are slow, late or lost; here they are threads."""

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from types import SimpleNamespace

import pytest

from mmray import ordered_map
from mmray.ordered_map import OrderedMap
from tests.polling import wait_until


class LostError(Exception):
    pass


class ThreadWorker:
    """A thread that computes `work(item, careful)`; `lose` fails its items like a lost process."""

    def __init__(self, work, node="a"):
        self.node, self._work = node, work
        self._thread = ThreadPoolExecutor(1)
        self.taken, self._futures, self._lost = [], [], False

    def submit(self, item, careful):
        self.taken.append(item)
        future = Future()
        self._futures.append(future)
        if self._lost:
            future.set_exception(LostError())
        else:
            self._thread.submit(self._compute, future, item, careful)
        return future

    def _compute(self, future, item, careful):
        try:
            result = self._work(item, careful)
            if not future.done():
                future.set_result(result)
        except LostError:
            self.lose()
        except KeyError as error:
            future.set_exception(error)

    def lose(self):
        self._lost = True
        for future in self._futures:
            if not future.done():
                future.set_exception(LostError())


class ThreadPool:
    """Workers that tests make, lose and replace."""

    def __init__(self, workers, max_in_flight=4, replacement=None, node_limits=None):
        self.workers, self.max_in_flight = list(workers), max_in_flight
        self._replacement, self._node_limits = replacement, node_limits or {}
        self.computed_here, self.closed = [], False

    def node_limit(self, node):
        return self._node_limits.get(node, self.max_in_flight)

    def is_lost_worker(self, error):
        return isinstance(error, LostError)

    def replace(self, worker):
        self.workers.remove(worker)
        if self._replacement is not None:
            self.workers.append(self._replacement())

    def compute_here(self, item):
        self.computed_here.append(item)
        return item**2

    def update(self, waited_s):
        pass

    def kill(self):
        for worker in self.workers:
            worker.lose()

    def close(self):
        self.closed = True


def square(item, careful):
    return item**2


def run(pool, count, late_s=None):
    with closing(OrderedMap(pool, range(count), late_s)) as results:
        return list(results)


def test_results_are_in_order_and_the_limits_are_kept():
    """Also per node: no results may fill the memory of a small one."""
    in_flight = []

    def slow(item, careful):
        time.sleep(random.Random(item).uniform(0, 0.01))
        return item**2

    small, large = ThreadWorker(slow, "small"), ThreadWorker(slow, "large")
    pool = ThreadPool([small, large], max_in_flight=5, node_limits={"small": 1})
    results = OrderedMap(pool, range(60))
    assert small.taken and large.taken  # before the first result is requested
    for number, result in enumerate(results):
        assert result == number**2
        unfinished = len(small.taken) + len(large.taken) - number - 1
        on_small = sum(item > number for item in small.taken)
        in_flight.append((unfinished, on_small))
    assert max(unfinished for unfinished, _ in in_flight) <= 5
    assert max(on_small for _, on_small in in_flight) <= 1
    assert 0 < len(small.taken) < len(large.taken)


def test_items_of_a_lost_worker_are_computed_by_others_with_care():
    careful_items = set()

    def work(item, careful):
        if item == 7 and not careful:
            raise LostError
        if careful:
            careful_items.add(item)
        return item**2

    pool = ThreadPool([ThreadWorker(work), ThreadWorker(work)], 6, lambda: ThreadWorker(work))
    assert run(pool, 30) == [number**2 for number in range(30)]
    assert 7 in careful_items and len(careful_items) <= 3 and len(pool.workers) == 2


class VirtualTime:
    """The clock of the map: it advances only if all workers that compute have finished.

    Args:
        stalled: A worker that never finishes items from 4 on.
    """

    def __init__(self, monkeypatch, stalled):
        self.now_s, self._stalled = 0.0, stalled
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=time.sleep)
        monkeypatch.setattr(ordered_map, "time", clock)
        monkeypatch.setattr(ordered_map, "wait", self._wait)

    def _wait(self, futures, timeout_s, return_when):
        submitted = zip(self._stalled.taken, self._stalled._futures, strict=True)
        never_done = [future for item, future in submitted if item >= 4]
        computed = [future for future in futures if future not in never_done]
        if computed:
            wait(computed, 60, return_when)
        else:
            self.now_s += timeout_s
            assert self.now_s < 100, "no item is late"


def test_without_a_worker_items_are_computed_here(monkeypatch):
    monkeypatch.setattr(ordered_map, "FIRST_LATE_S", 0.05)
    pool = ThreadPool([ThreadWorker(square)])
    results = OrderedMap(pool, range(8), late_s=0.05)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    pool.workers[0].lose()
    assert list(results) == [number**2 for number in range(3, 8)]
    assert set(pool.computed_here) >= {7}  # others may have been finished before


def test_late_items_are_computed_by_another_worker_and_the_stalled_one_gets_no_more(monkeypatch):
    release = threading.Event()

    def stalls(item, careful):
        if item >= 4:
            release.wait(60)
        return item**2

    stalled = ThreadWorker(stalls)
    pool = ThreadPool([stalled, ThreadWorker(square)], max_in_flight=6)
    clock = VirtualTime(monkeypatch, stalled)
    assert run(pool, 40, late_s=0.1) == [number**2 for number in range(40)]
    assert clock.now_s <= ordered_map.POLL_S and pool.computed_here == []
    assert max(stalled.taken) < 12
    release.set()


def test_error_of_the_work_is_raised_and_interrupt_ends_a_wait():
    def fail(item, careful):
        raise KeyError(item)

    with pytest.raises(KeyError, match="0"):
        run(ThreadPool([ThreadWorker(fail)]), 3)
    release = threading.Event()
    pool = ThreadPool([ThreadWorker(lambda *_: release.wait(60))])
    results = OrderedMap(pool, range(3))
    threading.Timer(0.1, results.interrupt).start()
    assert list(results) == []
    release.set()


def test_stalled_workers_are_not_awaited_for_each_item(monkeypatch):
    """The only worker stalls: after the first late item, the caller computes the others at once."""
    release = threading.Event()

    def stalls(item, careful):
        if item >= 4:
            release.wait(60)
        return item**2

    stalled = ThreadWorker(stalls)
    pool = ThreadPool([stalled], max_in_flight=2)
    clock = VirtualTime(monkeypatch, stalled)
    assert run(pool, 40, late_s=0.3) == [number**2 for number in range(40)]
    assert clock.now_s <= 2 * ordered_map.POLL_S and len(pool.computed_here) == 36
    release.set()


def test_process_lost_between_two_checks_is_replaced():
    """Its item fails after lost items were removed, and before the next result is read."""

    class LosingPool(ThreadPool):
        iterates = False

        def node_limit(self, node):
            if self.iterates:
                first.lose()
            return 1

    release = threading.Event()

    def is_stopped(item, careful):
        release.wait(60)

    first = ThreadWorker(is_stopped)
    pool = LosingPool([first], replacement=lambda: ThreadWorker(square))
    with closing(OrderedMap(pool, range(5))) as results:
        pool.iterates = True
        assert list(results) == [0, 1, 4, 9, 16]
    release.set()
    assert first.taken == [0] and first not in pool.workers


def test_pool_is_updated_while_no_result_is_requested():
    """A thread may do it while the caller does other work, but not while the caller waits."""
    may_finish = threading.Event()
    updating = []

    def work(item, careful):
        assert item == 0 or may_finish.wait(60)
        return item

    pool = ThreadPool([ThreadWorker(work)], max_in_flight=1)
    pool.update = lambda waited_s: updating.append(threading.current_thread())
    results = OrderedMap(pool, range(2))
    assert next(results) == 0
    other = ThreadPoolExecutor(1)
    updating.clear()
    other.submit(results.update_pool).result()
    assert len(updating) == 1 and updating[0] is not threading.current_thread()
    waiting = ThreadPoolExecutor(1).submit(next, results)
    wait_until(lambda: updating[-1] is not updating[0])  # the caller waits
    other.submit(results.update_pool).result()
    may_finish.set()
    assert waiting.result() == 1
    assert updating.count(updating[0]) == 1
