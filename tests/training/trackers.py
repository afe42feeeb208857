"""Working and failing trackers that tests name in run.trackers."""

import json
import time
from pathlib import Path


class Keeping:
    """Writes every call to kept.jsonl in the run's folder."""

    def start(self, about, run_id):
        self.file = Path(about["folder"]) / "kept.jsonl"
        self._keep({"start": run_id, "about": about})
        return run_id or "first"

    def log(self, step, metrics):
        self._keep({"step": step, "metrics": metrics})

    def finish(self, success):
        self._keep({"finish": success})

    def _keep(self, what):
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\n")


class Failing(Keeping):
    """A server that returns errors."""

    def log(self, step, metrics):
        raise ConnectionError("503 from https://me:secret-word@tracker.example/api")

    def finish(self, success):
        raise TimeoutError("no response")


class Unreachable(Keeping):
    def start(self, about, run_id):
        raise ConnectionError("no route to host")


class Hanging(Keeping):
    """A call that never returns."""

    def log(self, step, metrics):
        time.sleep(1e6)


class Exiting(Keeping):
    def log(self, step, metrics):
        raise SystemExit(7)
