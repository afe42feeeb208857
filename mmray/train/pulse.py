"""A training worker's heartbeat: a thread that says each second which step it is in, and where the training thread is.

Where it is comes from looking at its stack, so the loop itself does nothing for it. On the driver's wish all stacks are
written into the run's folder. Knows nothing of Ray: `send` takes a beat, and answers whether stacks are wanted.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mmray.data.folders import written
from mmray.data.remote import Folder

EVERY_S = 1.0
PACKAGE = str(Path(__file__).parents[1])
LONG = {"_evaluate", "_save"}  # of loop.py and worker.py: no steps are taken in them
WRITER = str(Path(PACKAGE, "train", "writer.py"))
READING = str(Path(PACKAGE, "train", "group.py"))  # what other ranks have a part in
WAITING = ("torch/distributed/", "torch/autograd/")  # DDP's collectives hide in the backward


class Pulse:
    """Callback of the loop and sender of beats; `stacks` is where this rank's stacks go.

    Waiting for a checkpoint counts as moving on for `write_limit_s`: a mount that died takes for ever.
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], bool], about: dict[str, Any], stacks: Folder, write_limit_s: float
    ):
        self._send, self._about, self._stacks, self._write_limit_s = send, about, stacks, write_limit_s
        self._writes_since_s: float | None = None
        self._thread_id = threading.get_ident()
        self._step = self._mark = 0
        self._seen: tuple[Any, ...] = ()
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
        frames = list(_frames(sys._current_frames().get(self._thread_id)))
        ours = [frame for frame in frames if frame.f_code.co_filename.startswith(PACKAGE)]
        names = {frame.f_code.co_name for frame in ours}
        seen = tuple((id(frame.f_code), frame.f_lasti) for frame in frames)
        if self._writes(ours) or (seen != self._seen and (names & LONG or "run" not in names)):
            self._mark += 1  # not in a step, but moving: before the loop or after it, evaluating, saving
        self._seen = seen
        return {"step": self._step, "mark": self._mark, "where": _where(frames, ours), "waits": _waits(frames)}

    def _writes(self, ours: list[FrameType]) -> bool:
        """Whether the thread waits for a checkpoint, which may take its time, though not all of it."""
        now_s = time.monotonic()
        if not ours or ours[0].f_code.co_filename != WRITER:
            self._writes_since_s = None
            return False
        since_s = self._writes_since_s = self._writes_since_s or now_s
        return now_s - since_s < self._write_limit_s

    def _dump(self) -> None:
        with written(self._stacks) as here, here.open("w") as file:
            file.write(f"{self._about}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost outward."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frames: list[FrameType]) -> bool:
    """Whether the thread is in a collective, in a backward, or reading a result that a device has yet to reduce."""
    files = (frame.f_code.co_filename.replace(os.sep, "/") for frame in frames)
    if any(part in file for file in files for part in WAITING):
        return True
    return bool(frames) and frames[0].f_code.co_filename == READING


def _where(frames: list[FrameType], ours: list[FrameType]) -> str:
    """The innermost frame of ours, or of a user's callback that ours calls."""
    outer = next((frame for frame in ours), None)
    called = None
    for frame in frames:
        if frame is outer:
            break
        called = frame
    inner = called if called is not None and outer is not None and outer.f_code.co_name == "_tell" else outer
    inner = inner or (frames[0] if frames else None)
    if inner is None:
        return "nowhere"
    return f"{inner.f_code.co_filename}:{inner.f_lineno} in {inner.f_code.co_name}"
