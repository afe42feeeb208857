"""`mmray doctor`: problems of this machine or cluster, and fixes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from mmray.cli.args import JsonFile, command, write_json
from mmray.console.reporter import ConsoleReporter
from mmray.errors import Finding, ResourceError

ICONS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}


@command()
def doctor(
    console: ConsoleReporter,
    *,
    address: str | None = None,
    storage: str = "runs",
    cluster: bool = False,
    json: JsonFile = None,
) -> int:
    """Check this machine and the Ray cluster for problems that stop or slow a run.

    Prints each problem with its fix; the exit code is 4 if there is an error.

    Args:
        address: Ray address; None: RAY_ADDRESS if set, otherwise a temporary cluster on this
            machine.
        storage: folder for runs.
        cluster: also measure each node of the cluster and the links between nodes: takes a minute.
    """
    findings = []
    with console.show_progress("checking"):
        for finding in _checks(address, storage, cluster):
            findings.append(finding)
            icon, style = ICONS[finding.level]
            name = f"{finding.name:<22} "
            line = Text.assemble((f"{icon} ", style), (name, "bold"), finding.observed)
            if finding.fix:
                line.append(f"\n{'':<25}{finding.fix}", style="italic")
            console.print(line)
    write_json(json, {"findings": [vars(finding) for finding in findings]})
    levels = [finding.level for finding in findings]
    console.log(f"{levels.count('error')} errors, {levels.count('warning')} warnings", "summary")
    return ResourceError.exit_code if "error" in levels else 0


def _checks(address: str | None, storage: str, cluster: bool) -> Iterator[Finding]:
    from mmray.cluster.doctor import run_checks

    yield from run_checks(address, storage)
    if cluster:
        from mmray.cluster.node_checks import check_cluster

        yield from check_cluster(address, storage)
