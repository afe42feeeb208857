"""`mmray doctor`: problems of this machine or cluster, what limits a run, and fixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from rich.text import Text
from tyro.conf import Positional, arg

from mmray.cli.args import parse_args, write_json
from mmray.console.reporter import ConsoleReporter
from mmray.errors import Finding, ResourceError, UsageError, require_positive

DECODE_S = 1.0  # of --cluster, on each node
ICONS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}


@dataclass(frozen=True)
class DoctorCommand:
    """Check this machine and the Ray cluster for problems that stop or slow a run, or only state
    what limits a run.

    Exit code 4 if there are errors.
    """

    run: Positional[Annotated[str | None, arg(metavar="[RUN]")]] = None
    """Folder (or address, s3://...) of a run, running or ended: state what limits its speed, from
    its metrics, and check nothing else. None: check this machine and the cluster."""
    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise a temporary cluster on this machine."""
    storage: str = "runs"
    """Folder for runs."""
    cluster: bool = False
    """Also measure each node of the cluster and the links between nodes: takes a minute."""
    recipe: str | None = None
    """Only print how many CPUs for data this recipe needs with --gpus."""
    gpus: int = 8
    """GPUs of the run, for --recipe."""
    samples_per_s: float | None = None
    """Rows per second of one GPU, from a run, for --recipe; None: measured on this machine."""
    gpu_price: float | None = None
    """Price of a GPU per hour, for --recipe."""
    cpu_price: float | None = None
    """Price of a CPU core per hour, for --recipe."""
    json: str | None = None
    """Write the results to this JSON file."""


def doctor(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Check this machine and the Ray cluster for problems, and print each with its fix; or print
    what limits the speed of a run.

    Args:
        argv: arguments after the command, such as `["--storage", "runs"]` or `["runs/clip"]`.
        console: receives a line per check.

    Returns:
        Exit status: 4 if there are errors, otherwise 0.

    Raises:
        UsageError: the folder is not a run, or other arguments are given with it.
    """
    command = parse_args(DoctorCommand, argv, "mmray doctor")
    require_positive(
        gpus=command.gpus,
        samples_per_s=command.samples_per_s,
        gpu_price=command.gpu_price,
        cpu_price=command.cpu_price,
    )
    if command.run is not None and command != DoctorCommand(run=command.run, json=command.json):
        raise UsageError(
            f"mmray doctor {command.run} reads a run and takes only --json; leave out the other "
            f"arguments, or {command.run} to check this machine or a cluster"
        )
    if command.recipe is not None:
        return _print_data_nodes(command, command.recipe, console)
    findings = []
    with console.show_progress("checking"):
        for finding in _checks(command):
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


def _checks(command: DoctorCommand) -> Iterator[Finding]:
    """Yield the findings: what limits a run, otherwise of this machine and the cluster."""
    if command.run is not None:
        from mmray.report.run import RunRecord
        from mmray.report.summary import find_limit
        from mmray.run import Run

        yield find_limit(RunRecord(Run(command.run).path))
        return
    from mmray.cluster.doctor import run_checks

    yield from run_checks(command.address, command.storage)
    if command.cluster:
        from mmray.bench.synthetic_images import photos_per_s
        from mmray.cluster.node_checks import check_cluster
        from mmray.data.images.decode import decode

        decodes_per_s = partial(photos_per_s, decode, DECODE_S)
        yield from check_cluster(command.address, command.storage, decodes_per_s)


def _print_data_nodes(command: DoctorCommand, name: str, console: ConsoleReporter) -> int:
    """Print the CPUs for data that a recipe needs, and what they cost."""
    from mmray.bench.data_nodes import plan_data_nodes
    from mmray.config import recipes

    with console.show_progress("measuring"):
        plan = plan_data_nodes(
            recipes.load(name),
            command.gpus,
            command.samples_per_s,
            command.gpu_price,
            command.cpu_price,
        )
    each = plan.samples_per_s / command.gpus
    console.log(f"{each:,.0f} samples/s each ({plan.device})", f"{command.gpus} GPUs")
    console.log(f"{plan.decodes_per_s:,.0f} images/s a core", "decoding")
    console.log(f"{plan.cpus:,} cores on data nodes, with a quarter more than the mean", "CPUs")
    if plan.cost_per_hour is not None:
        console.log(f"{plan.cost_per_hour:,.2f} per hour, GPUs and CPUs", "cost")
    if "CPU" in plan.device:
        text = "samples/s were measured on a CPU: pass --samples-per-s of a run on your GPU"
        console.log(text, "note")
    write_json(command.json, vars(plan))
    return 0
