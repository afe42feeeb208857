"""`mmray doctor`: problems of this machine or cluster, and their fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from mmray.cli.args import parse_args, write_json
from mmray.console.reporter import ConsoleReporter
from mmray.errors import ResourceError

ICONS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}


@dataclass(frozen=True)
class DoctorCommand:
    """Check this machine and the Ray cluster for problems that stop or slow a run.

    Exit code 4 if there are errors.
    """

    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise a temporary cluster on this machine."""
    storage: str = "runs"
    """Folder for runs."""
    json: str | None = None
    """Write the results to this JSON file."""


def doctor(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Check this machine and the Ray cluster for problems, and print each with its fix.

    Args:
        argv: arguments after the command, such as `["--storage", "runs"]`.
        console: receives a line per check.

    Returns:
        Exit status: 4 if there are errors, otherwise 0.
    """
    command = parse_args(DoctorCommand, argv, "mmray doctor")
    from mmray.cluster.doctor import run_checks

    findings = []
    with console.show_progress("checking"):
        for finding in run_checks(command.address, command.storage):
            findings.append(finding)
            icon, style = ICONS[finding.level]
            name = f"{finding.name:<22} "
            line = Text.assemble((f"{icon} ", style), (name, "bold"), finding.observed)
            if finding.fix:
                line.append(f"\n{'':<25}{finding.fix}", style="italic")
            console.print(line)
    write_json(command.json, {"findings": [vars(finding) for finding in findings]})
    levels = [finding.level for finding in findings]
    console.log(f"{levels.count('error')} errors, {levels.count('warning')} warnings", "summary")
    return ResourceError.exit_code if "error" in levels else 0
