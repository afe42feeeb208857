"""A training worker's heartbeat: a thread that reports each second the state and the source line of
training.

Both are read from the thread's stack. On request all stacks of the process are written into the
run's folder.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from mmray.storage.paths import AnyPath, open_for_upload

INTERVAL_S = 1.0
ENGINE = Path(__file__).parent
PACKAGE = str(ENGINE.parent)
LOOP_FILE = str(ENGINE / "loop.py")
LOOP_FUNCTION = "train_loop"  # of loop.py
# of loop.py; in them a changed stack counts as progress
FUNCTIONS_WITHOUT_STEPS = {"_evaluate", "_save", "_load"}
CHECKPOINT_WAIT_FILE = str(ENGINE / "checkpoint" / "manager.py")
DATA_WAIT_FILE = str(ENGINE / "prefetch.py")
COLLECTIVES_FILE = str(ENGINE / "collectives.py")  # reads results that other ranks contribute to
LIBRARIES = tuple(
    sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# a graph, the code of a graph
COMPILE_PATHS = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
# of these files; not called by compiled code
COMPILE_FUNCTIONS = {"compile_frame", "fx_codegen_and_compile"}
# DDP's collectives are inside the backward
COLLECTIVE_PATHS = ("torch/distributed/", "torch/autograd/")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) ", re.MULTILINE)
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Heartbeat:
    """Loop callback that sends heartbeats. If `send` returns True, all stacks are written to
    `folder`/stacks.

    A rank without progress hangs after a time that depends on its state (`Cluster.state_limits_s`).
    `process_info` has rank, node and process.
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], bool], process_info: dict[str, Any], folder: AnyPath
    ):
        self._send, self._process_info, self._folder = send, process_info, folder
        self._thread_id = threading.get_ident()
        self._first_step = self._step = self._progress = 0
        self._frames: list[FrameSummary] = []
        self._ended = threading.Event()

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Callback of the loop after each step."""
        self._step = step
        self.count_progress()

    def count_progress(self) -> None:
        """Record progress that the stack may not show, such as a read by another thread."""
        self._progress += 1

    @contextmanager
    def running(self, step: int) -> Iterator[None]:
        """Send heartbeats inside the block; `step` is the step at which the attempt starts."""
        self._first_step = self._step = step
        thread = threading.Thread(target=self._run, name="mmray-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(2 * INTERVAL_S)
            self._send({**self._process_info, "ended": True})

    def _run(self) -> None:
        dumped = False
        while not self._ended.is_set():
            if self._send({**self._process_info, **self._observe()}) and not dumped:
                dumped = True
                name = f"step-{self._first_step}-rank-{self._process_info['rank']}.txt"
                with (
                    open_for_upload(self._folder / "stacks" / name) as path,
                    path.open("w") as file,
                ):
                    print(self._process_info, file=file, flush=True)
                    faulthandler.dump_traceback(file, all_threads=True)
            self._ended.wait(INTERVAL_S)

    def _observe(self) -> dict[str, Any]:
        frames = stack_of_thread(self._thread_id)
        # an import is none of the states below
        calls = [frame for frame in frames if frame.name != "<module>"]
        package_frames = [frame for frame in calls if frame.filename.startswith(PACKAGE)]
        functions = {frame.name for frame in package_frames if frame.filename == LOOP_FILE}
        outside_steps = bool(functions & FUNCTIONS_WITHOUT_STEPS) or LOOP_FUNCTION not in functions
        if outside_steps and frames != self._frames:
            self.count_progress()
        self._frames = frames
        state = _state(calls, package_frames, started=self._step > self._first_step)
        files = [frame.filename.replace(os.sep, "/") for frame in calls]
        return {
            "step": self._step,
            "progress": self._progress,
            "state": state,
            "where": _location(frames),
            # In a collective, in a backward (unless it is compiled first), or reading a result that
            # the device reduces.
            "in_collective": state != "compiling"
            and (
                any(part in file for file in files for part in COLLECTIVE_PATHS)
                or (bool(calls) and calls[0].filename == COLLECTIVES_FILE)
            ),
        }


def _state(frames: list[FrameSummary], package_frames: list[FrameSummary], started: bool) -> str:
    """What the training thread does: a key of `Cluster.state_limits_s`."""
    if any(frame.filename == DATA_WAIT_FILE for frame in package_frames):
        return "waiting_for_data"
    calls = (frame for frame in frames if frame.name in COMPILE_FUNCTIONS)
    if any(frame.filename.replace(os.sep, "/").endswith(COMPILE_PATHS) for frame in calls):
        return "compiling"
    if package_frames and package_frames[0].filename == CHECKPOINT_WAIT_FILE:
        return "saving"
    return "training" if started else "starting"


def stack_of_thread(thread_id: int) -> list[FrameSummary]:
    """The calls of a thread of this process, innermost first, at most 100; empty if no scratch file
    can be created.

    Reads faulthandler's text, because walking the frame objects of a running thread crashed Python
    3.11. The file is in memory if the system has memfd, because a stalled disk would stall the
    process.
    """
    try:
        in_memory = hasattr(os, "memfd_create")
        with (
            os.fdopen(os.memfd_create("mmray-heartbeat"), "w+b")
            if in_memory
            else tempfile.TemporaryFile() as file
        ):
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            _, *threads = _THREAD.split(file.read().decode(errors="replace"))
    except OSError:
        return []
    stacks = {
        int(number, 16): stack for number, stack in zip(threads[::2], threads[1::2], strict=True)
    }
    calls = _CALL.findall(stacks.get(thread_id, ""))
    return [FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in calls]


def _location(frames: list[FrameSummary]) -> str:
    """`file:line in function` of the innermost frame of mmray or of the user's own code."""
    for frame in frames:
        if frame.filename.startswith(PACKAGE) or not frame.filename.startswith((*LIBRARIES, "<")):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "unknown"
