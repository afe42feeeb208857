"""A training worker's heartbeat: a thread that says each second which step it is in, and where the training thread is.

Where it is comes from looking at its stack, so the loop itself does nothing for it. The look is faulthandler's: one
call of C, in which no thread moves, and which makes no frame objects. Those of a thread that runs on may be of a call
that has ended meanwhile. On the driver's wish all stacks are written into the run's folder. Knows nothing of Ray:
`send` takes a beat, and answers whether stacks are wanted.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from mmray.storage.paths import AnyPath, open_for_upload

EVERY_S = 1.0
_HERE = str(Path(__file__).parent).encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
PACKAGE = str(Path(_HERE).parent)
LONG = {"_evaluate", "_save", "_load"}  # of loop.py and worker.py: no steps are taken in them
WRITER = str(Path(_HERE, "checkpoint", "async_saver.py"))
READING = str(Path(_HERE, "collectives.py"))  # what other ranks have a part in
WAITING = ("torch/distributed/", "torch/autograd/")  # DDP's collectives hide in the backward


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) ", re.MULTILINE)
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    """A call that has not returned, and the line it stands at."""

    file: str
    line: int
    name: str


class Heartbeat:
    """Callback of the loop and sender of beats; `stacks` is where this rank's stacks go.

    Waiting for a checkpoint counts as moving on for `write_limit_s`: a mount that died takes for ever.
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], bool], about: dict[str, Any], stacks: AnyPath, write_limit_s: float
    ):
        self._send, self._about, self._stacks, self._write_limit_s = send, about, stacks, write_limit_s
        self._writes_since_s: float | None = None
        self._thread_id = threading.get_ident()
        self._step = self._mark = 0
        self._seen: list[Frame] = []
        self._ended = threading.Event()

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        """The loop's: a step has been taken."""
        self._step = step
        self._mark += 1

    @contextmanager
    def beating(self, step: int) -> Iterator[None]:
        """Beats are sent inside the block; `step` is where the attempt begins."""
        self._step = step
        thread = threading.Thread(target=self._beat, name="mmray-pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(2 * EVERY_S)
            self._send({**self._about, "ended": True})

    def _beat(self) -> None:
        dumped = False
        while not self._ended.is_set():
            wanted = self._send({**self._about, **self._look()})
            if wanted and not dumped:
                dumped = True
                self._dump()
            self._ended.wait(EVERY_S)

    def _look(self) -> dict[str, Any]:
        calls = stack_of_thread(self._thread_id)
        ours = [call for call in calls if call.file.startswith(PACKAGE)]
        names = {call.name for call in ours}
        if self._writes(ours) or (calls != self._seen and (names & LONG or "run" not in names)):
            self._mark += 1  # not in a step, but moving: before the loop or after it, evaluating, saving
        self._seen = calls
        return {"step": self._step, "mark": self._mark, "where": _where(calls, ours), "waits": _waits(calls)}

    def _writes(self, ours: list[Frame]) -> bool:
        """Whether the thread waits for a checkpoint, which may take its time, though not all of it."""
        now_s = time.monotonic()
        if not ours or ours[0].file != WRITER:
            self._writes_since_s = None
            return False
        since_s = self._writes_since_s = self._writes_since_s or now_s
        return now_s - since_s < self._write_limit_s

    def _dump(self) -> None:
        with open_for_upload(self._stacks) as here, here.open("w") as file:
            file.write(f"{self._about}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def stack_of_thread(thread_id: int) -> list[Frame]:
    """The calls of a thread of this process, from the innermost outward, a hundred of them at most.

    None where a file for them cannot be had: a full disk is no reason for a heart to stop.
    """
    try:
        with _scratch() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            _, *threads = _THREAD.split(file.read().decode(errors="replace"))
    except OSError:
        return []
    stacks = {int(number, 16): stack for number, stack in zip(threads[::2], threads[1::2], strict=True)}
    found = _CALL.findall(stacks.get(thread_id, ""))
    return [Frame(file_name, int(line), name) for file_name, line, name in found]


def _scratch() -> IO[bytes]:
    """A file in memory, where the system has such: a disk that stalls would stall the whole process."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("mmray-pulse"), "w+b")
    return tempfile.TemporaryFile()


def _waits(calls: list[Frame]) -> bool:
    """Whether the thread is in a collective, in a backward, or reading a result that a device has yet to reduce."""
    files = (call.file.replace(os.sep, "/") for call in calls)
    if any(part in file for file in files for part in WAITING):
        return True
    return bool(calls) and calls[0].file == READING


def _where(calls: list[Frame], ours: list[Frame]) -> str:
    """The innermost call of ours, or of a user's callback that ours calls."""
    outer = next(iter(ours), None)
    called = None
    for call in calls:
        if call is outer:
            break
        called = call
    inner = called if called is not None and outer is not None and outer.name == "_tell" else outer
    inner = inner or next(iter(calls), None)
    return "nowhere" if inner is None else f"{inner.file}:{inner.line} in {inner.name}"
