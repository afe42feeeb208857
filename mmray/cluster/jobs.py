"""Commands of mmray as jobs of a Ray cluster: submit, list, and follow them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from mmray.cluster.ray_internals import GITIGNORE_VARIABLE, job_client
from mmray.errors import INTERRUPTED, ResourceError, TrainingError, UsageError
from mmray.storage.paths import temp_dir

MAX_UPLOAD_MIB = 50
NUM_LISTED_FILES = 5
# The head does not answer: retry, and give up after ten minutes.
RETRY_S = 1.0
MAX_SILENCE_S = 600.0
STATUS_INTERVAL_S = 0.5
MAX_QUIET_S = 60.0  # a log without a new line may be of a job that has ended, or a lost connection
# The first line of a command's log about its run, as the console prints it.
RUN_LINE = re.compile(r"^run +(\S+)$", re.MULTILINE)
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)
Print = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A job of the cluster.

    Args:
        name: Submission ID of Ray.
        status: `pending`, `running`, `stopped`, `succeeded` or `failed`.
        run: Folder of the run that its log names; empty before, and for other commands.
        start_s: Start time in seconds since the epoch; 0: not started.
        exit_code: Exit code of the command; None: it has not ended.
    """

    name: str
    command: str
    status: str
    run: str = ""
    start_s: float = 0.0
    exit_code: int | None = None


def connect(address: str | None) -> JobSubmissionClient:
    """Return a client of the jobs of a cluster.

    Args:
        address: Address of the dashboard, such as `http://10.0.0.5:8265`; None:
            RAY_API_SERVER_ADDRESS, otherwise RAY_ADDRESS.

    Raises:
        ResourceError: It cannot be reached.
    """
    # Hides lines about the packages that Ray uploads.
    logging.getLogger("ray").setLevel(logging.WARNING)
    try:
        return job_client(address)
    except (ConnectionError, RuntimeError, requests.RequestException) as error:
        raise ResourceError(
            f"cannot reach the jobs of the cluster: {str(error).splitlines()[0]}. Give the address "
            "of the dashboard, such as --address http://HEAD:8265, or set RAY_API_SERVER_ADDRESS; "
            "RAY_AUTH_MODE must be as on the head"
        ) from error


def submit(client: JobSubmissionClient, words: Sequence[str], folder: Path) -> str:
    """Start a command of mmray as a job, with the tracked files of a folder as working directory.

    Args:
        words: The command after `mmray`, such as `["train", "clip"]`.

    Raises:
        UsageError: The files are over 50 MiB.
    """
    name = f"{words[0]}-{time.strftime('%m%d-%H%M%S')}-{time.time_ns() % 1000:03}"
    with _upload_folder(folder, words) as upload:
        return client.submit_job(
            entrypoint=shlex.join(["python", "-m", "mmray", *words]),
            submission_id=name,
            runtime_env={"working_dir": str(upload)},
            metadata={"mmray": shlex.join(words)},
        )


@contextmanager
def _upload_folder(folder: Path, words: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary folder with copies of the files to upload, all of which Ray uploads, also
    those that a `.gitignore` of theirs excludes.
    """
    files = files_to_upload(folder, words)
    check_upload_size(folder, files)
    with temp_dir() as upload:
        for file in files:
            (upload / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, upload / file)
        before = os.environ.get(GITIGNORE_VARIABLE, "0")
        os.environ[GITIGNORE_VARIABLE] = "1"
        try:
            yield upload
        finally:
            os.environ[GITIGNORE_VARIABLE] = before


def files_to_upload(folder: Path, words: Sequence[str]) -> list[str]:
    """Return the tracked files of a folder, also of git submodules, and those that a command names,
    as relative paths.

    Args:
        folder: Folder of a git repository, or another one.
        words: Arguments of the command, such as a recipe file.
    """
    command = ["git", "ls-files", "--recurse-submodules", "-z"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    tracked = listed.stdout.split("\0") if listed.returncode == 0 else []
    named = [word for word in words if not Path(word).is_absolute() and ".." not in word]
    return sorted({file for file in (*tracked, *named) if file and (folder / file).is_file()})


def untracked_modules(folder: Path) -> list[str]:
    """Return the Python files of a git repository that are not tracked, and so are not uploaded;
    without those in ignored folders, such as virtual environments.
    """
    words = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    files: list[str] = []
    for options in ([], ["--ignored", "--directory"]):
        listed = subprocess.run(
            [*words, *options], cwd=folder, capture_output=True, text=True, check=False
        )
        files += [file for file in listed.stdout.split("\0") if file.endswith(".py")]
    return files


def check_upload_size(folder: Path, files: Sequence[str]) -> None:
    """Raise UsageError if files are over 50 MiB, with the biggest.

    Args:
        files: Relative paths.
    """
    sizes = sorted(((folder / file).stat().st_size / 2**20, file) for file in files)
    total = sum(size for size, _ in sizes)
    if total > MAX_UPLOAD_MIB:
        biggest = ", ".join(f"{file} ({size:.1f} MiB)" for size, file in sizes[-NUM_LISTED_FILES:])
        raise UsageError(
            f"the tracked files of {folder} have {total:.0f} MiB, and a job uploads at most "
            f"{MAX_UPLOAD_MIB} MiB; the biggest: {biggest}. Put data on storage that all nodes "
            "share, and run `git rm --cached` for files that are none of the code"
        )


def find_job(client: JobSubmissionClient, name: str) -> Job:
    """Return the job with a submission ID; if there is none, the newest job of the run with this
    name or folder.

    Raises:
        UsageError: There is none.
    """
    submitted = _submitted_jobs(client)
    for details in submitted:
        if details.submission_id == name:
            return _to_job(client, details)
    for details in submitted:
        job = _to_job(client, details)
        if name in (job.run, job.run.rstrip("/").rpartition("/")[2]):
            return job
    newest = [str(details.submission_id) for details in submitted[:NUM_LISTED_FILES]]
    raise UsageError(
        f"no job or run `{name}` on the cluster; the newest jobs: {', '.join(newest) or 'none'}"
    )


def _submitted_jobs(client: JobSubmissionClient) -> list[JobDetails]:
    """Return the jobs that were submitted, the last one first."""
    submitted = [each for each in client.list_jobs() if each.submission_id]
    return sorted(submitted, key=lambda each: each.start_time or 0, reverse=True)


def _to_job(client: JobSubmissionClient, details: JobDetails) -> Job:
    """Return a job, with the run that its log names; this reads the log."""
    name = str(details.submission_id)
    run = RUN_LINE.search(client.get_job_logs(name))
    words = (details.metadata or {}).get("mmray")
    return Job(
        name=name,
        command=f"mmray {words}" if words else str(details.entrypoint),
        status=details.status.value.lower(),
        run=run[1] if run else "",
        start_s=(details.start_time or 0) / 1000,
        exit_code=details.driver_exit_code,
    )


def follow(client: JobSubmissionClient, name: str, show: Print) -> int:
    """Show the log of a job until it ends; a lost connection is restored.

    Ctrl-C stops the job, which may write a checkpoint; the log is shown to its end. A second one
    leaves it.

    Args:
        show: Called with each piece of the log, a text that may have several lines.

    Returns:
        The exit code of the command; 130 if it was stopped.

    Raises:
        ResourceError: The head did not answer for ten minutes.
        TrainingError: The job ended without an exit code, because its node was lost.
    """
    log = _LogFollower(client, name, show)
    try:
        status = log.wait()
    except KeyboardInterrupt:
        show("\nstopping the job at a checkpoint; Ctrl-C again leaves it\n")
        status = log.wait(stop=True)
    if status == JobStatus.STOPPED:
        return INTERRUPTED
    details = client.get_job_info(name)
    if details.driver_exit_code is not None:
        return details.driver_exit_code
    if status == JobStatus.SUCCEEDED:
        return 0
    raise TrainingError(f"job {name} failed: {details.message}")


@dataclass
class _LogFollower:
    client: JobSubmissionClient
    name: str
    show: Print
    num_shown: int = 0  # characters

    def wait(self, stop: bool = False) -> JobStatus:
        """Show the log until the job ends, and return its status.

        Args:
            stop: Request first that the job stops.
        """
        last_answer_s = time.monotonic()
        while True:
            try:
                if stop:
                    self.client.stop_job(self.name)
                    stop = False
                asyncio.run(self._tail())
                status = self.client.get_job_status(self.name)
                if status in ENDED:
                    self._show_rest(self.client.get_job_logs(self.name))
                    return status
                last_answer_s = time.monotonic()
                time.sleep(STATUS_INTERVAL_S)
            except (OSError, RuntimeError, requests.RequestException) as error:
                if time.monotonic() - last_answer_s > MAX_SILENCE_S:
                    raise ResourceError(
                        f"no answer from the head for {MAX_SILENCE_S:.0f} s ({error}); the job "
                        f"may still run. Follow it with `mmray logs {self.name}`"
                    ) from error
                time.sleep(RETRY_S)

    async def _tail(self) -> None:
        """Show the log as it grows, from the first character that was not shown, until it ends or
        is quiet for MAX_QUIET_S.
        """
        position = 0
        pieces = aiter(self.client.tail_job_logs(self.name))
        while True:
            try:
                async with asyncio.timeout(MAX_QUIET_S):
                    piece = await anext(pieces, None)
            except TimeoutError:
                return
            if piece is None:
                return
            new = piece[max(0, self.num_shown - position) :]
            position += len(piece)
            if new:
                self.num_shown = position
                self.show(new)

    def _show_rest(self, log: str) -> None:
        if rest := log[self.num_shown :]:
            self.num_shown = len(log)
            self.show(rest)


def list_jobs(client: JobSubmissionClient) -> list[dict[str, Any]]:
    """Return the submitted jobs that run or wait, and the 5 newest that have ended.

    Returns:
        A dict for each job with the fields of Job: `name`, `command`, `status`, `run`, `start_s`
        and `exit_code`; and `age_s`, the seconds since it started (None: it has not started).
    """
    submitted = _submitted_jobs(client)
    active = [details for details in submitted if details.status not in ENDED]
    ended = [details for details in submitted if details.status in ENDED]
    jobs = [_to_job(client, details) for details in active + ended[:NUM_LISTED_FILES]]
    now_s = time.time()
    return [vars(job) | {"age_s": now_s - job.start_s if job.start_s else None} for job in jobs]
