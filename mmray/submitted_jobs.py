"""Commands of mmray as jobs of a Ray cluster: what `mmray submit`, `status` and `logs` call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class SubmittedJob:
    """A command of mmray that runs as a job of a Ray cluster.

    Args:
        name: its submission ID.
        command: its command, such as `mmray train clip`.
        address: address of the dashboard; None: RAY_API_SERVER_ADDRESS.
    """

    def __init__(self, name: str, command: str, address: str | None = None):
        self.name = name
        self.command = command
        self._address = address

    def __repr__(self) -> str:
        return f"SubmittedJob({self.name!r}, {self.command!r})"

    def follow(self, show: Callable[[str], None]) -> int:
        """Show the log until the job ends, over lost connections; Ctrl-C stops it at a checkpoint.

        Args:
            show: called with pieces of the log.

        Returns:
            Exit code of the command; 130 if the job was stopped.

        Raises:
            ResourceError: the head did not answer for ten minutes.
            TrainingError: the job ended without an exit code, because its node was lost.
        """
        from mmray.cluster import jobs

        return jobs.follow(jobs.connect(self._address), self.name, show)


def submit(command: Sequence[str], *, address: str | None = None) -> SubmittedJob:
    """Start a command of mmray as a job of a Ray cluster.

    The tracked files of the working directory, and files that the command names, are its working
    directory there.

    Args:
        command: the words after `mmray`, such as `["train", "clip", "--cluster.workers", "4"]`.
        address: address of the dashboard, http://HEAD:8265; None: RAY_API_SERVER_ADDRESS.

    Returns:
        The job.

    Raises:
        UsageError: the files are over 50 MiB.
        ResourceError: the cluster cannot be reached.
    """
    from mmray.cluster import jobs

    name = jobs.submit(jobs.connect(address), command, Path.cwd())
    return SubmittedJob(name, f"mmray {' '.join(command)}", address)


def find_job(run: str, *, address: str | None = None) -> SubmittedJob:
    """Return the newest job of a run.

    Args:
        run: name or folder of the run, or name of the job.
        address: address of the dashboard, http://HEAD:8265; None: RAY_API_SERVER_ADDRESS.

    Raises:
        UsageError: there is no such job.
        ResourceError: the cluster cannot be reached.
    """
    from mmray.cluster import jobs

    job = jobs.find_job(jobs.connect(address), run)
    return SubmittedJob(job.name, job.command, address)


def jobs(*, address: str | None = None) -> list[dict[str, Any]]:
    """Return the jobs of a cluster that run or wait, and the last ended ones.

    Args:
        address: address of the dashboard, http://HEAD:8265; None: RAY_API_SERVER_ADDRESS.

    Returns:
        For each job `name`, `command`, `status`, `run`, `exit_code`, `start_s` and `age_s`.

    Raises:
        ResourceError: the cluster cannot be reached.
    """
    from mmray.cluster import jobs as cluster_jobs

    listed = cluster_jobs.cluster_status(cluster_jobs.connect(address))
    return cluster_jobs.as_rows(listed, time.time())
