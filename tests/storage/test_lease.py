"""Lease: one writer at a time, also if holders die or sleep, or clocks jump; on file systems and
object stores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmray.errors import ForceExit, StorageError, TrainingError, UsageError
from mmray.storage import lease
from mmray.storage.lease import Lease, check_fencing_token
from mmray.storage.paths import to_path, write_atomic
from tests.polling import wait_until

BEAT_S, STALE_S = 0.05, 0.3
ELSEWHERE = {"host": "node-7", "pid": 4711, "machine": "another", "process": "1"}


def short(run: Path, stale_after_s: float = STALE_S) -> Lease:
    return Lease(run, heartbeat_s=BEAT_S, stale_after_s=stale_after_s)


def hold_elsewhere(run: Path, fencing_token: int = 1) -> Path:
    """A lease that a process of another machine left."""
    file = run / "lease" / str(fencing_token)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(ELSEWHERE))
    return file


def test_fences_only_grow_and_second_holder_is_refused(tmp_path):
    for fencing_token in (1, 2, 3):
        with short(tmp_path) as held:
            assert held.fencing_token == fencing_token
            check_fencing_token(tmp_path, fencing_token)
            with pytest.raises(UsageError, match=rf"process {os.getpid()} on .*--run\.name"):
                short(tmp_path).acquire()
    assert [file.name for file in (tmp_path / "lease").iterdir()] == ["3"]


def test_live_holder_on_another_machine_is_named_and_kept(tmp_path, monkeypatch):
    holder = short(tmp_path)
    fencing_token = holder.acquire()
    file = tmp_path / "lease" / str(fencing_token)
    file.write_text(json.dumps(ELSEWHERE))
    for offset_s in (0, -3600, 3600):  # clocks do not matter
        monkeypatch.setattr(time, "time", lambda offset_s=offset_s: 1.8e9 + offset_s)
        with pytest.raises(UsageError, match="process 4711 on node-7"):
            short(tmp_path, stale_after_s=60).acquire()  # until a heartbeat
    holder.release()


def test_stale_lease_is_taken_over_and_old_holder_stops(tmp_path):
    hold_elsewhere(tmp_path, fencing_token=4)
    check_fencing_token(tmp_path, 4)
    with short(tmp_path) as held:
        assert held.fencing_token == 5
        check_fencing_token(tmp_path, 5)
        with pytest.raises(TrainingError, match="taken over"):
            check_fencing_token(tmp_path, 4)
    with pytest.raises(TrainingError, match="taken over"):
        check_fencing_token(tmp_path, 4)


def test_advance_fences_off_earlier_attempts_and_heartbeat_continues(tmp_path, monkeypatch):
    held = short(tmp_path)
    assert (
        held.acquire(),
        held.claim_next_token(),
        held.claim_next_token(),
        held.fencing_token,
    ) == (1, 2, 3, 3)
    check_fencing_token(tmp_path, 3)
    for earlier in (1, 2):
        with pytest.raises(TrainingError, match="a later attempt"):
            check_fencing_token(tmp_path, earlier)
    monkeypatch.setattr(lease, "_is_alive_here", lambda _: None)  # as seen from another machine
    with pytest.raises(UsageError):
        short(tmp_path, stale_after_s=60).acquire()
    hold_elsewhere(tmp_path, fencing_token=4)
    with pytest.raises(TrainingError, match=r"token 4, this process has 3"):
        held.claim_next_token()
    held.release()


def test_vanished_storage_is_no_take_over(tmp_path):
    """An empty folder is in place of the mount; the lease is renewed again when it is back."""
    run = tmp_path / "mount" / "run"
    run.mkdir(parents=True)
    with short(run) as held:
        (tmp_path / "mount").rename(tmp_path / "away")
        (tmp_path / "mount").mkdir()
        time.sleep(3 * BEAT_S)
        with pytest.raises(OSError, match="not mounted"):
            held.check()
        with pytest.raises(StorageError, match="not mounted"):
            held.claim_next_token()
        assert not list((tmp_path / "mount").iterdir())
        (tmp_path / "mount").rmdir()
        (tmp_path / "away").rename(tmp_path / "mount")
        held.check()
        before_s = lease._modified_s(run / "lease" / "1")
        wait_until(lambda: lease._modified_s(run / "lease" / "1") > before_s)
        assert held.claim_next_token() == 2


def test_rival_in_a_new_folder_is_a_take_over(tmp_path):
    """The folder was deleted, and another process has started there."""
    with short(tmp_path / "run") as held:
        assert held.claim_next_token() == 2
        (tmp_path / "run").rename(tmp_path / "deleted")
        hold_elsewhere(tmp_path / "run", fencing_token=1)
        with pytest.raises(TrainingError, match="taken over"):
            held.check()


def _hold(run: str, fencing_tokens: multiprocessing.Queue[int]):
    fencing_tokens.put(Lease(Path(run)).acquire())
    time.sleep(60)


def test_killed_local_holder_is_replaced_at_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    fencing_tokens = spawn.Queue()
    process = spawn.Process(target=_hold, args=(str(tmp_path), fencing_tokens))
    process.start()
    assert fencing_tokens.get(timeout=60) == 1
    with pytest.raises(UsageError, match=f"process {process.pid} "):
        Lease(tmp_path).acquire()
    process.kill()
    process.join()
    started_s = time.monotonic()
    with Lease(tmp_path) as second:  # with default timeouts
        assert second.fencing_token == 2 and time.monotonic() - started_s < lease.STALE_AFTER_S / 2


def test_forced_exit_does_not_wait_for_the_storage(tmp_path, monkeypatch):
    """A write of the heartbeat hangs; a second Ctrl-C has to exit."""
    monkeypatch.setattr(lease.Lease, "release", lambda self: pytest.fail("uses the storage"))
    with pytest.raises(ForceExit), lease.Lease(tmp_path):
        raise ForceExit


def test_holder_is_known_without_proc(tmp_path, monkeypatch):
    """As on macOS, where the lease of a killed process would otherwise have to expire."""

    class WithoutProc(type(tmp_path)):
        def exists(self):
            return not str(self).startswith("/proc") and super().exists()

        def read_text(self, *arguments):
            return (
                super().read_text(*arguments)
                if not str(self).startswith("/proc")
                else (self / "none").read_bytes()
            )

    monkeypatch.setattr(lease, "Path", WithoutProc)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = {
        "pid": child.pid,
        "machine": lease._machine_id(),
        "process": lease._start_time(child.pid),
    }
    assert lease._is_alive_here(owner)
    child.communicate()
    assert lease._is_alive_here(owner) is False


def test_reused_pid_is_not_the_holder(tmp_path):
    owner = ELSEWHERE | {"machine": lease._machine_id(), "pid": os.getpid()}
    hold_elsewhere(tmp_path).write_text(json.dumps(owner))
    with short(tmp_path) as held:
        assert held.fencing_token == 2


def test_holder_that_releases_while_another_waits_is_replaced(tmp_path):
    file = hold_elsewhere(tmp_path)
    threading.Timer(BEAT_S, write_atomic, (file, json.dumps({"released": True}))).start()
    with short(tmp_path, stale_after_s=600) as held:
        assert held.fencing_token == 2


def test_heartbeat_and_release_of_a_lost_lease_keep_the_new_holder(tmp_path):
    first = short(tmp_path)
    fencing_token = first.acquire()
    (tmp_path / "lease" / str(fencing_token)).unlink()
    hold_elsewhere(tmp_path, fencing_token=fencing_token + 1)
    with pytest.raises(FileNotFoundError):
        first._write_heartbeat(fencing_token)
    first.release()
    assert [file.name for file in (tmp_path / "lease").iterdir()] == ["2"]


def _race(run: str, start: multiprocessing.synchronize.Barrier, won: multiprocessing.Queue[int]):
    held = Lease(Path(run))
    start.wait(60)
    try:
        won.put(held.acquire())
    except UsageError:
        won.put(0)
    start.wait(60)  # the winner stays alive until all others have tried


def test_one_of_many_contenders_wins(tmp_path):
    hold_elsewhere(tmp_path, fencing_token=3).write_text(json.dumps({"released": True}))
    fork = multiprocessing.get_context("fork")
    start, won = fork.Barrier(6), fork.Queue()
    processes = [fork.Process(target=_race, args=(str(tmp_path), start, won)) for _ in range(6)]
    for process in processes:
        process.start()
    results = sorted(won.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert results == [0, 0, 0, 0, 0, 4]


def test_lease_on_a_store_has_one_holder_until_release(s3, monkeypatch):
    run = to_path(s3.address) / "mine"
    first = Lease(run, heartbeat_s=1.1)  # longer than the resolution of S3's timestamps
    assert first.acquire() == 1
    check_fencing_token(run, 1)
    with pytest.raises(UsageError, match=r"is being trained by process"):
        Lease(run).acquire()
    monkeypatch.setattr(lease, "_is_alive_here", lambda _: None)  # as seen from another machine
    with pytest.raises(UsageError):
        Lease(run).acquire()
    first.release()
    second = Lease(run)
    assert (second.acquire(), second.claim_next_token()) == (2, 3)
    for earlier in (1, 2):
        with pytest.raises(TrainingError, match="taken over"):
            check_fencing_token(run, earlier)
    check_fencing_token(run, 3)
    second.release()


def test_late_heartbeat_of_a_replaced_holder_on_a_store_is_harmless(s3):
    run = to_path(s3.address) / "mine"
    silent = Lease(run)
    assert silent._claim(4)
    claim = run / "lease" / f"4{silent._suffix}"
    claim.write_text(json.dumps(ELSEWHERE))
    held = Lease(run, heartbeat_s=0.5, stale_after_s=0.5)
    assert held.acquire() == 5
    with pytest.raises(FileNotFoundError):
        silent._write_heartbeat(4)
    claim.write_text("{}")  # a heartbeat that was in flight during the take-over
    check_fencing_token(run, 5)
    with pytest.raises(TrainingError, match="taken over"):
        check_fencing_token(run, 4)
    held.release()


def test_at_most_one_contender_on_a_store_gets_a_number(s3):
    claims = [Lease(to_path(s3.address)) for _ in range(4)]
    for fencing_token in (1, 2, 3):
        start = threading.Barrier(4)

        def contend(own, fencing_token=fencing_token, start=start):
            start.wait(60)
            return own._claim(fencing_token)

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(contend, claims)) <= 1
    assert claims[0]._claim(4) and not claims[1]._claim(4)
