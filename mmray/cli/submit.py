"""`mmray submit`, `mmray status` and `mmray logs`: commands as jobs of a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from mmray.cli.args import parse_args, show_rows
from mmray.console.reporter import ConsoleReporter
from mmray.errors import UsageError

SUBMITTED = (
    "train",
    "prepare",
    "score",
    "select",
    "tune",
    "evaluate",
    "export",
    "bench",
    "doctor",
)


@dataclass(frozen=True)
class SubmitCommand:
    """Run a command of mmray as a job: `mmray submit [--address A] [--detach] train clip ...`.

    The tracked files of the working directory are uploaded. The log is followed, and the exit code
    is that of the command. Ctrl-C stops the job at a checkpoint; the same line resumes it.
    """

    address: str | None = None
    """Address of the dashboard, http://HEAD:8265; None: RAY_API_SERVER_ADDRESS."""
    detach: bool = False
    """Return when the job is submitted; `mmray logs JOB` follows it."""


@dataclass(frozen=True)
class StatusCommand:
    """List the jobs of a cluster that run or wait, and the last ended ones."""

    address: str | None = None
    """Address of the dashboard, http://HEAD:8265; None: RAY_API_SERVER_ADDRESS."""
    json: str | None = None
    """Write the list to this JSON file; `-`: print it instead of the table."""


@dataclass(frozen=True)
class LogsCommand:
    """Show the log of a job until it ends; the exit code is the one of its command."""

    run: Positional[Annotated[str, arg(metavar="RUN")]]
    """Name of a run, or of a job of `mmray status`."""
    address: str | None = None
    """Address of the dashboard, http://HEAD:8265; None: RAY_API_SERVER_ADDRESS."""


def submit(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Run a command as a job of a cluster, and show its log.

    Args:
        argv: `--address` and `--detach`, then the command, such as `["train", "clip"]`.
        console: receives messages.

    Returns:
        Exit status of the command; 130 if the job was stopped; 0 with --detach.

    Raises:
        MmrayError: the command cannot be submitted, or the cluster not be reached.
    """
    words = list(argv)
    start = next((index for index, word in enumerate(words) if word in SUBMITTED), len(words))
    command = parse_args(SubmitCommand, words[:start], "mmray submit")
    if start == len(words):
        raise UsageError(f"mmray submit: give a command, one of {', '.join(SUBMITTED)}")
    from mmray.cluster import jobs  # importing Ray's client takes a second

    if untracked := jobs.untracked_modules(Path.cwd()):
        text = f"{', '.join(untracked[:5])}: not tracked by git, so not uploaded (`git add` them)"
        console.log(text, "warning")
    client = jobs.connect(command.address)
    name = jobs.submit(client, words[start:], Path.cwd())
    console.log(f"{name}: mmray {' '.join(words[start:])}", "job")
    return 0 if command.detach else jobs.follow(client, name, _show)


def status(argv: Sequence[str], console: ConsoleReporter) -> int:
    """List the jobs of a cluster.

    Args:
        argv: arguments after the command, such as `["--json", "jobs.json"]`.
        console: receives the table.

    Returns:
        Exit status 0.

    Raises:
        ResourceError: the cluster cannot be reached.
    """
    command = parse_args(StatusCommand, argv, "mmray status")
    from mmray.cluster import jobs

    rows = jobs.list_jobs(jobs.connect(command.address))
    columns = {
        "name": ("job", ""),
        "status": ("status", ""),
        "run": ("run", ""),
        "exit_code": ("exit code", ">"),
        "age": ("started", ">"),
        "command": ("command", ""),
    }
    show_rows(rows, "jobs", command.json, console, columns, _texts, "no jobs")
    return 0


def logs(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Show the log of a job until it ends.

    Args:
        argv: arguments after the command, such as `["clip"]`.
        console: not used: the log is written as it is.

    Returns:
        Exit status of the command of the job.

    Raises:
        MmrayError: there is no such job, or the cluster cannot be reached.
    """
    command = parse_args(LogsCommand, argv, "mmray logs")
    from mmray.cluster import jobs

    client = jobs.connect(command.address)
    return jobs.follow(client, jobs.find_job(client, command.run).name, _show)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _texts(row: dict[str, Any]) -> dict[str, str | None]:
    from mmray.report.summary import format_duration

    return {"age": None if row["age_s"] is None else f"{format_duration(row['age_s'])} ago"}
