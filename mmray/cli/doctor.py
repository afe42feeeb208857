"""`mmray doctor`: what is wrong with this machine or cluster, and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from mmray.cli.args import parsed, write_json
from mmray.cli.console import Screen
from mmray.errors import ResourceError

ICONS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}


@dataclass(frozen=True)
class DoctorCommand:
    """Look at this machine, and at a Ray cluster: what would stop or slow a run, and what mends it. Exit 4 if any."""

    address: str | None = None
    """Ray address; none: RAY_ADDRESS where it is set, else a cluster started here for the moment."""
    storage: str = "runs"
    """Folder that runs are to be written to."""
    json: str | None = None
    """Write the findings to this file."""


def doctor(argv: Sequence[str], screen: Screen) -> int:
    """mmray doctor [--address A] [--storage runs]"""
    command = parsed(DoctorCommand, argv, "mmray doctor")
    from mmray.cluster.doctor import run_checks

    findings = []
    with screen.work("looking"):
        for finding in run_checks(command.address, command.storage):
            findings.append(finding)
            screen.console.print(_line(finding))
    write_json(command.json, {"findings": [vars(finding) for finding in findings]})
    levels = [finding.level for finding in findings]
    screen.note(f"{levels.count('error')} errors, {levels.count('warning')} warnings", "summary")
    return ResourceError.exit_code if "error" in levels else 0


def _line(finding: object) -> Text:
    """A finding, with its fix on a line of its own."""
    level, name, observed, fix = vars(finding).values()
    mark, style = ICONS[level]
    line = Text.assemble((f"{mark} ", style), (f"{name:<22} ", "bold"), observed)
    return line if not fix else line.append(f"\n{'':<25}{fix}", style="italic")
