"""The process of one tracker: lines of JSON on standard input to a tracker's calls, its errors as lines of text out.

Started by tracking.py with the tracker's class. The first line tells about the run, each further one brings metrics of
a step, the last how the run ended. The run's tracker-NAME.json holds the tracker's own id of the run and the last step
it took, so that a run that goes on is the same run there, and steps done twice are told once.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any, Protocol, TextIO

from mmray import plugins
from mmray.storage.paths import AnyPath, to_path, write_atomic
from mmray.train.run_dir import redact_text

STATUS = {"finished": True, "stopped": True, "failed": False}


class Tracker(Protocol):
    """An experiment tracker; your own is named `package.module:Class` in run.trackers and called without arguments."""

    def start(self, about: dict[str, Any], run_id: str | None) -> str:
        """Begin, or go on with `run_id`; returns the run's id. `about`: name, project, folder, config of the run."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Figures of a step by name."""

    def finish(self, good: bool) -> None:
        """The run has ended; `good`: finished, or stopped by a wish."""


class Desk:
    """Takes lines to a tracker; an error of it is told the first and every hundredth time."""

    def __init__(self, tracker: Tracker, name: str, out: TextIO) -> None:
        self.tracker, self.name, self.out = tracker, name, out
        self.num_errors, self.last_step, self.good = 0, 0, False
        self.run_id = ""
        self.file: AnyPath = Path()

    def begin(self, about: dict[str, Any]) -> bool:
        """Whether the tracker could begin."""
        self.file = to_path(about["folder"]) / f"tracker-{self.name}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):  # none yet, or damaged: another run there
            known = json.loads(self.file.read_text())
            self.run_id, self.last_step = known["id"], known["last_step"]
        try:
            self.run_id = self.tracker.start(about, self.run_id or None)
            self._remember()
        except Exception as error:  # noqa: BLE001 - whatever a library or a user's class raises, training goes on
            self._tell(f"it could not begin, and gets nothing of this run: {_first(error)}")
            return False
        return True

    def take(self, line: dict[str, Any]) -> None:
        """One line after the first."""
        if "status" in line:
            self.good = STATUS.get(line["status"], False)
            return
        if line["step"] <= self.last_step:
            return
        try:
            self.tracker.log(line["step"], line["metrics"])
        except Exception as error:  # noqa: BLE001 - as above
            self.num_errors += 1
            if self.num_errors % 100 == 1:
                self._tell(f"it did not take step {line['step']}: {_first(error)}")
            return
        self.last_step = line["step"]
        with contextlib.suppress(OSError):  # a resume then tells the tracker some steps twice
            self._remember()

    def end(self) -> None:
        try:
            self.tracker.finish(self.good)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(f"it could not end: {_first(error)}")
        if self.num_errors:
            self._tell(f"it did not take {self.num_errors} lines (metrics.jsonl has them all)")

    def _remember(self) -> None:
        write_atomic(self.file, json.dumps({"id": self.run_id, "last_step": self.last_step}) + "\n")

    def _tell(self, text: str) -> None:
        print(redact_text(text), file=self.out, flush=True)


def main(spec: str) -> int:
    """Take lines to the tracker of class `spec` until there are none; what a library prints goes nowhere."""
    # A job that is stopped has all its processes signalled; the run's own end, and the end of input, come after that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lines, out = sys.stdin, sys.stdout
    sys.stdout = sys.stderr
    about = json.loads(lines.readline())
    name = spec.rpartition(":")[2].removesuffix("Tracker").lower()
    try:
        tracker = plugins.load_class(spec, "run.trackers")()
    except Exception as error:  # noqa: BLE001 - as above
        print(redact_text(f"it could not begin, and gets nothing of this run: {_first(error)}"), file=out, flush=True)
        return 0
    desk = Desk(tracker, name, out)
    began = desk.begin(about)
    for line in lines:  # to the end in any case: nobody may be left writing to a full pipe
        if began:
            desk.take(json.loads(line))
    if began:
        desk.end()
    return 0


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
