"""`mmray submit`, `mmray status` and `mmray logs`: commands as jobs of a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from mmray.cli.args import JsonList, RunPath, command, show_rows
from mmray.cli.lines import Line
from mmray.console.reporter import ConsoleReporter
from mmray.errors import UsageError

NOT_SUBMITTED = ("submit", "status", "logs")
DESCRIPTION = """\
Run a command of mmray as a job: `mmray submit [--address A] [--detach] train clip ...`.

The tracked files of the working directory are uploaded. The log is followed, and the exit code is
that of the command. Ctrl-C stops the job at a checkpoint; the same line resumes it."""
Address = Annotated[
    str | None,
    arg(help="Address of the dashboard, http://HEAD:8265; None: RAY_API_SERVER_ADDRESS."),
]


def read_line(words: Sequence[str]) -> Line:
    """Split a line before the command that it submits."""
    names = _submitted_names()
    start = next((index for index, word in enumerate(words) if word in names), len(words))
    return Line(words[:start], {"words": list(words[start:])}, description=DESCRIPTION)


def _submitted_names() -> list[str]:
    from mmray.cli import COMMANDS  # which imports this module

    return [name for name in COMMANDS if name not in NOT_SUBMITTED]


@command(read=read_line)
def submit(
    console: ConsoleReporter, words: list[str], address: Address = None, detach: bool = False
) -> int:
    """Run a command as a job of a cluster, and show its log.

    Args:
        console: receives messages.
        words: the command and its arguments.
        detach: return when the job is submitted; `mmray logs JOB` follows it.
    """
    if not words:
        raise UsageError(f"mmray submit: give a command, one of {', '.join(_submitted_names())}")
    from mmray.cluster import jobs  # importing Ray's client takes a second

    if untracked := jobs.untracked_modules(Path.cwd()):
        text = f"{', '.join(untracked[:5])}: not tracked by git, so not uploaded (`git add` them)"
        console.log(text, "warning")
    client = jobs.connect(address)
    name = jobs.submit(client, words, Path.cwd())
    console.log(f"{name}: mmray {' '.join(words)}", "job")
    return 0 if detach else _follow(client, name, console)


@command()
def status(console: ConsoleReporter, *, address: Address = None, json: JsonList = None) -> None:
    """List the jobs of a cluster that run or wait, and the last ended ones."""
    from mmray.cluster import jobs

    rows = jobs.list_jobs(jobs.connect(address))
    columns = {
        "name": ("job", ""),
        "status": ("status", ""),
        "run": ("run", ""),
        "exit_code": ("exit code", ">"),
        "age": ("started", ">"),
        "command": ("command", ""),
    }
    show_rows(rows, "jobs", json, console, columns, _texts, "no jobs")


@command()
def logs(console: ConsoleReporter, *, run: RunPath, address: Address = None) -> int:
    """Show the log of a job until it ends; the exit code is the one of its command.

    Args:
        run: name of a run, or of a job of `mmray status`.
    """
    from mmray.cluster import jobs

    client = jobs.connect(address)
    return _follow(client, jobs.find_job(client, run).name, console)


def _follow(client: Any, name: str, console: ConsoleReporter) -> int:
    """Show the log of a job until it ends, and then its state; return its exit code."""
    from mmray.cluster import jobs

    code = jobs.follow(client, name, _show)
    console.log(f"{name}: {client.get_job_status(name).lower()}, exit code {code}", "job")
    return code


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _texts(row: dict[str, Any]) -> dict[str, str | None]:
    from mmray.report.summary import format_duration

    return {"age": None if row["age_s"] is None else f"{format_duration(row['age_s'])} ago"}
