"""Trackers as users write them, good and bad; named in run.trackers by tests."""

import json
import time
from pathlib import Path


class Keeping:
    """Keeps all it is told in the run's folder."""

    def start(self, about, run_id):
        self.file = Path(about["folder"]) / "kept.jsonl"
        self._keep({"start": run_id, "about": about})
        return run_id or "first"

    def log(self, step, metrics):
        self._keep({"step": step, "metrics": metrics})

    def finish(self, good):
        self._keep({"finish": good})

    def _keep(self, what):
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\n")


class Failing(Keeping):
    """A server that answers with errors, and chats on standard output."""

    def log(self, step, metrics):
        print("a library's own word")
        raise ConnectionError("503 from https://me:secret-word@tracker.example/api")

    def finish(self, good):
        raise TimeoutError("nobody there")


class Unreachable(Keeping):
    def start(self, about, run_id):
        raise ConnectionError("no route to host")


class Hanging(Keeping):
    """A call that never comes back."""

    def log(self, step, metrics):
        time.sleep(1e6)


class Dying(Keeping):
    def log(self, step, metrics):
        raise SystemExit(7)
