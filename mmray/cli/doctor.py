"""`mmray doctor`: problems of this machine or cluster, and their fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rich.text import Text

from mmray.cli.args import parse_args, require_positive, write_json
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
    """Check this machine and the Ray cluster for problems, and print each with its fix.

    Args:
        argv: arguments after the command, such as `["--storage", "runs"]`.
        console: receives a line per check.

    Returns:
        Exit status: 4 if there are errors, otherwise 0.
    """
    command = parse_args(DoctorCommand, argv, "mmray doctor")
    require_positive(command, "gpus", "samples_per_s", "gpu_price", "cpu_price")
    if command.recipe is not None:
        return _print_data_nodes(command, command.recipe, console)
    from mmray.cluster.doctor import run_checks

    findings = []
    with console.show_progress("checking"):
        checks = run_checks(command.address, command.storage)
        if command.cluster:
            from mmray.bench.preflight import check_cluster

            checks = chain(checks, check_cluster(command.address, command.storage))
        for finding in checks:
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
