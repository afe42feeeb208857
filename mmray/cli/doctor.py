"""`mmray doctor`: problems of this machine or cluster, what limits a run, and fixes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

from rich.text import Text
from tyro.conf import Positional, arg

from mmray.cli.args import JsonFile, command, write_json
from mmray.console.reporter import ConsoleReporter
from mmray.errors import Finding, ResourceError, UsageError

DECODE_S = 1.0  # of --cluster, on each node
ICONS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}


@command()
def doctor(
    console: ConsoleReporter,
    *,
    run: Positional[Annotated[str | None, arg(metavar="[RUN]")]] = None,
    address: str | None = None,
    storage: str = "runs",
    cluster: bool = False,
    json: JsonFile = None,
) -> int:
    """Check this machine and the Ray cluster for problems that stop or slow a run, or only state
    what limits the speed of a run.

    Prints each problem with its fix; the exit code is 4 if there is an error.

    Args:
        run: folder (or address, s3://...) of a run, running or ended: state what limits its speed,
            from its metrics, and check nothing else. None: check this machine and the cluster.
        address: Ray address; None: RAY_ADDRESS if set, otherwise a temporary cluster on this
            machine.
        storage: folder for runs.
        cluster: also measure each node of the cluster and the links between nodes: takes a minute.
    """
    if run is not None and (address is not None or storage != "runs" or cluster):
        raise UsageError(
            f"mmray doctor {run} reads a run and takes only --json; leave out the other "
            f"arguments, or {run} to check this machine or a cluster"
        )
    findings = []
    with console.show_progress("checking"):
        for finding in _checks(run, address, storage, cluster):
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


def _checks(run: str | None, address: str | None, storage: str, cluster: bool) -> Iterator[Finding]:
    """Yield the findings: what limits a run, otherwise of this machine and the cluster."""
    if run is not None:
        from mmray.report.run import RunRecord
        from mmray.report.summary import find_limit
        from mmray.run import Run

        yield find_limit(RunRecord(Run(run).path))
        return
    from mmray.cluster.doctor import run_checks

    yield from run_checks(address, storage)
    if cluster:
        from mmray.bench.synthetic_images import photos_per_s
        from mmray.cluster.node_checks import check_cluster
        from mmray.data.images.decode import decode

        decodes_per_s = partial(photos_per_s, decode, DECODE_S)
        yield from check_cluster(address, storage, decodes_per_s)
