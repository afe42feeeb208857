"""The lease: one training at a time in a run's folder, also when holders die, sleep, or clocks jump."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from mmray.errors import TrainingError, UsageError
from mmray.storage import lease
from mmray.storage.lease import Lease, check_fence

BEAT_S, STALE_S = 0.05, 0.3


def short(run: Path) -> Lease:
    return Lease(run, heartbeat_s=BEAT_S, stale_after_s=STALE_S)


def hold_elsewhere(run: Path, fence: int = 1, age_s: float = 0.0) -> Path:
    """A lease as a process of another machine would have left it, its last beat `age_s` ago."""
    file = run / "lease" / str(fence)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"host": "node-7", "pid": 4711, "machine": "another", "process": "1"}))
    os.utime(file, (time.time() - age_s, time.time() - age_s))
    return file


def test_fences_only_grow(tmp_path: Path) -> None:
    fences = []
    for _ in range(3):
        held = short(tmp_path)
        fences.append(held.acquire())
        check_fence(tmp_path, fences[-1])
        held.release()
    assert fences == [1, 2, 3]
    assert [file.name for file in (tmp_path / "lease").iterdir()] == ["3"]


def test_second_is_refused_while_the_first_is_there(tmp_path: Path) -> None:
    first = short(tmp_path)
    first.acquire()
    with pytest.raises(UsageError, match=rf"process {os.getpid()} on .*--run\.name"):
        short(tmp_path).acquire()
    first.release()
    assert short(tmp_path).acquire() == 2


def test_fresh_lease_of_another_machine_is_respected(tmp_path: Path) -> None:
    hold_elsewhere(tmp_path)
    with pytest.raises(UsageError, match="process 4711 on node-7"):
        short(tmp_path).acquire()


def test_stale_lease_is_taken_over_and_the_orphan_stops(tmp_path: Path) -> None:
    hold_elsewhere(tmp_path, fence=4, age_s=10)
    check_fence(tmp_path, 4)
    held = short(tmp_path)
    assert held.acquire() == 5
    check_fence(tmp_path, 5)
    with pytest.raises(TrainingError, match="taken over"):
        check_fence(tmp_path, 4)
    held.release()
    with pytest.raises(TrainingError, match="taken over"):
        check_fence(tmp_path, 4)


def test_each_attempt_has_a_fence_of_its_own_and_one_that_wakes_up_writes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = short(tmp_path)
    assert (held.acquire(), held.advance(), held.advance(), held.fence) == (1, 2, 3, 3)
    check_fence(tmp_path, 3)
    for earlier in (1, 2):
        with pytest.raises(TrainingError, match="a later attempt"):
            check_fence(tmp_path, earlier)
    monkeypatch.setattr(lease, "_is_alive_here", lambda _: None)
    time.sleep(STALE_S + 4 * BEAT_S)
    with pytest.raises(UsageError):  # its heart beats on
        short(tmp_path).acquire()
    hold_elsewhere(tmp_path, fence=4)
    with pytest.raises(TrainingError, match=r"lease 4, this one had 3"):
        held.advance()
    held.release()


def test_heartbeat_keeps_it_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = short(tmp_path)
    held.acquire()
    monkeypatch.setattr(lease, "_is_alive_here", lambda _: None)  # as seen from another machine
    time.sleep(STALE_S + 4 * BEAT_S)
    with pytest.raises(UsageError):
        short(tmp_path).acquire()
    held.release()


def test_clock_that_jumped_ahead_does_not_cost_a_living_holder_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = short(tmp_path)
    held.acquire()
    monkeypatch.setattr(lease, "_is_alive_here", lambda _: None)
    monkeypatch.setattr(Lease, "_storage_time_s", lambda _: time.time() + 3600)
    with pytest.raises(UsageError):
        short(tmp_path).acquire()
    held.release()


def test_clock_that_ran_back_does_not_keep_a_dead_holder_alive(tmp_path: Path) -> None:
    hold_elsewhere(tmp_path, age_s=-3600)
    began_s = time.monotonic()
    assert short(tmp_path).acquire() == 2
    assert time.monotonic() - began_s >= STALE_S  # only watching could tell


def _hold(run: str, ready: multiprocessing.synchronize.Event, fences: multiprocessing.Queue[int]) -> None:
    fences.put(Lease(Path(run)).acquire())
    ready.set()
    time.sleep(60)


def test_killed_process_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, fences = spawn.Event(), spawn.Queue()
    process = spawn.Process(target=_hold, args=(str(tmp_path), ready, fences))
    process.start()
    assert ready.wait(60)
    assert fences.get(timeout=10) == 1
    with pytest.raises(UsageError, match=f"process {process.pid} "):
        Lease(tmp_path).acquire()
    process.kill()
    process.join()
    began_s = time.monotonic()
    second = Lease(tmp_path)  # with the long times of a real run
    assert second.acquire() == 2
    assert time.monotonic() - began_s < 2
    second.release()


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    file = hold_elsewhere(tmp_path)
    file.write_text(json.dumps(lease._this_process() | {"process": "1"}))
    held = short(tmp_path)
    assert held.acquire() == 2
    held.release()


def test_lost_lease_ends_its_heartbeat_and_its_release_changes_nothing(tmp_path: Path) -> None:
    first = short(tmp_path)
    fence = first.acquire()
    (tmp_path / "lease" / str(fence)).unlink()
    hold_elsewhere(tmp_path, fence=fence + 1)
    assert first._thread is not None
    first._thread.join(timeout=5)
    assert not first._thread.is_alive()
    first.release()
    assert [file.name for file in (tmp_path / "lease").iterdir()] == ["2"]
    with pytest.raises(UsageError, match="node-7"):
        short(tmp_path).acquire()


def test_a_file_only_just_created_counts_as_held(tmp_path: Path) -> None:
    hold_elsewhere(tmp_path).write_text("")
    with pytest.raises(UsageError, match="another process"):
        short(tmp_path).acquire()


def _race(run: str, start: multiprocessing.synchronize.Barrier, won: multiprocessing.Queue[int]) -> None:
    held = Lease(Path(run))
    start.wait(60)
    try:
        won.put(held.acquire())
    except UsageError:
        won.put(0)
    start.wait(60)  # the winner must still be alive when the others look


def test_of_many_at_once_one_wins(tmp_path: Path) -> None:
    hold_elsewhere(tmp_path, fence=3).write_text(json.dumps({"released": True}))
    fork = multiprocessing.get_context("fork")
    start, won = fork.Barrier(6), fork.Queue()
    processes = [fork.Process(target=_race, args=(str(tmp_path), start, won)) for _ in range(6)]
    for process in processes:
        process.start()
    results = sorted(won.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert results == [0, 0, 0, 0, 0, 4]


def test_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UsageError, match=r"--run\.storage"):
        short(tmp_path / "run").acquire()
