"""Following a job whose log stream hangs, and naming files that are not uploaded."""

import asyncio
import subprocess
from types import SimpleNamespace

from ray.job_submission import JobStatus

from mmray.cluster import jobs


class QuietJob:
    """A client of a job whose log is never sent to its end, as over a broken connection."""

    def __init__(self):
        self.statuses = [JobStatus.RUNNING, JobStatus.SUCCEEDED]

    async def tail_job_logs(self, name):
        yield "first\n"
        await asyncio.sleep(3600)

    def get_job_status(self, name):
        return self.statuses.pop(0)

    def get_job_logs(self, name):
        return "first\nlast\n"

    def get_job_info(self, name):
        return SimpleNamespace(driver_exit_code=0)


def test_follow_ends_with_its_job_if_the_log_hangs(monkeypatch):
    monkeypatch.setattr(jobs, "MAX_QUIET_S", 0.05)
    shown = []
    assert jobs.follow(QuietJob(), "train-1", shown.append) == 0
    assert "".join(shown) == "first\nlast\n"


def test_untracked_and_ignored_modules_are_named(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("ignored.py\n.venv/\n")
    (tmp_path / ".venv").mkdir()
    for file in ("ignored.py", "new.py", ".venv/site.py", "tracked.py", "notes.txt"):
        (tmp_path / file).write_text("")
    subprocess.run(["git", "add", "tracked.py"], cwd=tmp_path, check=True)
    assert jobs.untracked_modules(tmp_path) == ["new.py", "ignored.py"]
