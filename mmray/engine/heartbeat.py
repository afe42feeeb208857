"""A training worker's heartbeat: a thread that reports each second the state and the source line of
training.

The training thread sets its state with `with heartbeat.state("waiting_for_data")`; the source line
is read from its stack. On request all stacks of the process are written into the run's folder.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any

import psutil

from mmray.machine import HAS_MEMFD
from mmray.storage.paths import AnyPath, open_for_upload

if TYPE_CHECKING:
    from torch._dynamo.callback import CompilationCallbackHandler

INTERVAL_S = 1.0
END_TIMEOUT_S = 2.0  # wait for a heartbeat that is being sent
# States in which a changed stack counts as progress, because no step or micro-batch ends in them.
STATES_WITHOUT_STEPS = {"starting", "evaluating", "saving"}
ENGINE = Path(__file__).parent
PACKAGE = str(ENGINE.parent)
# This module reads results that other ranks contribute to.
COLLECTIVES_FILE = str(ENGINE / "collectives.py")
# DDP's collectives are inside the backward.
COLLECTIVE_PATHS = ("torch/distributed/", "torch/autograd/")
LIBRARIES = tuple(
    sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) ", re.MULTILINE)
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class HeartbeatState:
    """What a training process does now: the name of its state and a count of its progress.

    A rank whose count does not grow for longer than the limit of its state (`state_limits_s` of the
    `cluster` section) is hung, and the driver restarts the workers. It is constructed without
    arguments, and its first state is `starting`. Only a Heartbeat sends the state to a driver.

    Code calls `with state(name):` around long work, and `count_progress()` when a part of it is
    done.
    """

    def __init__(self) -> None:
        self._state = "starting"
        self._progress = 0

    def set_state(self, name: str) -> None:
        """Set the state that is reported until the next one; a new state counts as progress."""
        self._state = name
        self.count_progress()

    @contextmanager
    def state(self, name: str) -> Iterator[None]:
        """Context manager that sets the state that heartbeats report, and restores the previous one
        at its end.
        """
        previous = self._state
        self.set_state(name)
        try:
            yield
        finally:
            self.set_state(previous)

    def count_progress(self) -> None:
        """Record progress, such as a finished micro-batch or a read of a checkpoint."""
        self._progress += 1


def describe_process(rank: int, node: str, host: str) -> dict[str, Any]:
    """Return what identifies the process of a rank, for its heartbeats."""
    started_s = psutil.Process().create_time()
    return {
        "rank": rank,
        "node": node,
        "host": host,
        "pid": os.getpid(),
        "started_s": started_s,
    }


class Heartbeat(HeartbeatState):
    """Loop callback that sends heartbeats from a thread.

    The thread that trains constructs it, because that thread's stack is reported. The loop runs
    inside `with running(step):`, and calls `on_step(step, metrics)` after each step.

    Args:
        send: Called with one heartbeat, a flat dict with the entries of `process_info` and `step`
            (int), `progress` (int, counts up), `state` (as in `set_state`, or `compiling`), `where`
            (`file:line in function`) and `in_collective` (bool); at the end with the entries of
            `process_info` and `ended` (True). If it returns True, all stacks are written to
            `folder`/stacks.
        process_info: The rank and its process, as `describe_process` returns it: `rank`, `node`
            (ID), `host` (name), `pid` and `started_s` (seconds since the epoch).
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], bool], process_info: dict[str, Any], folder: AnyPath
    ):
        super().__init__()
        self._send = send
        self._process_info = process_info
        self._folder = folder
        self._thread_id = threading.get_ident()
        self._first_step = 0
        self._step = 0
        self._frames: list[FrameSummary] = []
        self._compiling = False
        # Where this object is registered, if it is.
        self._compiler_callbacks: CompilationCallbackHandler | None = None
        self._ended = threading.Event()

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Record a finished step; the state is then `training`."""
        self._step = step
        self.set_state("training")

    @contextmanager
    def running(self, step: int) -> Iterator[None]:
        """Context manager in which a thread sends a heartbeat each second; the last one reports the
        end.

        Args:
            step: Number of steps taken before this start of the workers.
        """
        self._first_step = step
        self._step = step
        thread = threading.Thread(target=self._run, name="mmray-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(END_TIMEOUT_S)
            self._stop_observing_compiler()
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
        self._observe_compiler()
        compiling = self._compiling  # read once, because it changes meanwhile
        state = "compiling" if compiling else self._state
        frames = stack_of_thread(self._thread_id)
        if state in STATES_WITHOUT_STEPS and frames != self._frames:
            self.count_progress()
        self._frames = frames
        return {
            "step": self._step,
            "progress": self._progress,
            "state": state,
            "where": _location(frames),
            "in_collective": not compiling and _waits_in_collective(frames),
        }

    def _observe_compiler(self) -> None:
        """Register for the start and the end of compilations, once torch's compiler is imported."""
        dynamo = sys.modules.get("torch._dynamo.callback")
        handler = getattr(dynamo, "callback_handler", None)
        if handler is None or self._compiler_callbacks is not None:
            return
        self._compiler_callbacks = handler
        handler.register_start_callback(self._compilation_started)
        handler.register_end_callback(self._compilation_ended)

    def _stop_observing_compiler(self) -> None:
        """Remove the callbacks, because the process may start another run."""
        handler = self._compiler_callbacks
        if handler is None:
            return
        with suppress(ValueError):  # the user's code may have cleared the callbacks
            handler.remove_start_callback(self._compilation_started)
            handler.remove_end_callback(self._compilation_ended)

    def _compilation_started(self, _: object) -> None:
        self._compiling = True
        self.count_progress()

    def _compilation_ended(self, _: object) -> None:
        self._compiling = False
        self.count_progress()


def _waits_in_collective(frames: list[FrameSummary]) -> bool:
    """Whether the thread is in a collective or a backward, or reads a result that the device
    reduces. An import of one of these modules is none.
    """
    calls = [frame for frame in frames if frame.name != "<module>"]
    files = [frame.filename.replace(os.sep, "/") for frame in calls]
    if calls and calls[0].filename == COLLECTIVES_FILE:
        return True
    return any(part in file for file in files for part in COLLECTIVE_PATHS)


def stack_of_thread(thread_id: int) -> list[FrameSummary]:
    """Return the calls of a thread of this process, innermost first, at most 100.

    Reads faulthandler's text, because walking the frame objects of a running thread crashed Python
    3.11. The file is in memory if the system has memfd, because a stalled disk would stall the
    process.

    Args:
        thread_id: Number of the thread, as threading.get_ident returns it.

    Returns:
        For each call a traceback.FrameSummary with `filename`, `lineno` and `name` (function);
        empty if no scratch file can be created.
    """
    try:
        with (
            os.fdopen(os.memfd_create("mmray-heartbeat"), "w+b")
            if HAS_MEMFD
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
