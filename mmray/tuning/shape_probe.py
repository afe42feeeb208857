"""Start the worker groups that measure batch shapes, and write their results: sweep.json,
trials.jsonl, best.yaml.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil
from multiprocessing.connection import Connection
from typing import Any

from mmray.cluster.connect import needs_ray, ray_session
from mmray.config import Config, from_yaml, to_yaml
from mmray.config.search_space import Space, override_settings, setting_value
from mmray.engine.batch import resolve_batch_shape
from mmray.errors import (
    MmrayError,
    OutOfMemoryError,
    TrainingError,
    UsageError,
    first_line,
    is_out_of_memory,
)
from mmray.processes import SPAWN, init_child, starting_children
from mmray.report.write import write_report_safely
from mmray.storage import lease
from mmray.storage.paths import AnyPath, remove_tree
from mmray.sweep_files import SWEEP, TRIALS
from mmray.training.driver import check_classes
from mmray.training.local import WorkerFailed, check_gpus, describe_exit, resolve_on_this_machine
from mmray.training.local_worker import pickled
from mmray.training.monitor import RunReporter
from mmray.training.run_dir import (
    RunDir,
    collect_environment,
    forbidden_changes,
    has_other_files,
    select_folder,
)
from mmray.training.validate import unsupported_reasons
from mmray.tuning.shape import (
    FailedShape,
    Measurements,
    Row,
    ShapeTask,
    fit,
    predict_rows,
    recommend,
    unmeasured_rows,
    with_measured,
)

FILES = (SWEEP, TRIALS, "recipe.yaml", "best.yaml", "report.html", "ray", lease.FOLDER)
GLOBAL = "batch.global"
DEFAULT_VOCAB = 30522  # of BERT: the probe does not read the data, whose tokenizer has the size
OnMessage = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Probe:
    """One worker group's settings, and the task that it measures."""

    settings: dict[str, Any]
    task: ShapeTask


def plan_probes(base: Config, space: Space | None) -> list[Probe]:
    """Return a probe per combination of settings; all global batches are one probe.

    Raises UsageError.
    """
    axes: dict[str, Any] = dict(space.axes) if space else {}
    for name, values in axes.items():
        if not isinstance(values, tuple):
            raise UsageError(
                f"--space {name}: --goal throughput takes no ranges; list the values, with commas"
            )
    sizes = axes.pop(GLOBAL, (_own_global(base),))
    probes = []
    for values in itertools.product(*axes.values()):
        combination = dict(zip(axes, values, strict=True))
        configs = [override_settings(base, combination | _batch(size)) for size in sizes]
        config = configs[0]
        if conflicts := unsupported_reasons(
            config.with_cluster(workers=config.cluster.max_workers)
        ):
            raise UsageError("\n".join(conflicts))
        rows = tuple(dict.fromkeys(each.batch.global_ or 0 for each in configs))
        settings = {name: setting_value(config, name) for name in combination}
        probes.append(Probe(settings, ShapeTask(config, rows, (config.cluster.max_workers,))))
    return probes


def _batch(global_rows: Any) -> dict[str, Any]:
    return {GLOBAL: global_rows, "batch.micro": 1, "batch.accumulation": None}


def candidate_workers(config: Config, world: int, device: str) -> tuple[int, ...]:
    """Return the numbers of workers to predict: of an elastic range 1, 2, 4, ...;

    `world` workers measure.
    """
    low, high = config.cluster.min_workers, config.cluster.max_workers
    threads_depend = device == "cpu" and config.cluster.cpus_per_worker == "auto"
    if (
        config.train.parallel in ("fsdp", "hsdp") or threads_depend
    ):  # a step of fewer workers differs in more than communication
        return tuple(sorted({world, high}))
    return tuple(
        sorted(
            {
                world,
                high,
                *(1 << shift for shift in range(high.bit_length()) if low <= 1 << shift <= high),
            }
        )
    )


def probe_shapes(
    base: Config, space: Space | None, reporter: RunReporter
) -> tuple[AnyPath, dict[str, Any], list[Row]]:
    """Measure, predict and recommend batch shapes; return the folder, sweep.json and the rows.
    Raises MmrayError.

    """
    probes, start_s = plan_probes(base, space), time.monotonic()
    folder = _resolve_folder(base, probes)
    with lease.Lease(folder.path, activity="in use for a sweep"):
        folder.write("recipe.yaml", to_yaml(base))
        reporter.log(str(folder.path), "sweep")
        rows: list[Row] = []
        results: list[tuple[Probe, Measurements]] = []
        summary: dict[str, Any] = {}
        failure: MmrayError | None = None
        for number, probe in enumerate(probes, 1):
            shown = " ".join(f"{name}={value}" for name, value in probe.settings.items())
            reporter.status(f"measuring batch shapes {shown}".rstrip())
            try:
                task, found = measure(probe.task, folder.path / "ray", reporter)
            except MmrayError as error:
                failure = error
                status = "out_of_memory" if isinstance(error, OutOfMemoryError) else "infeasible"
                new = unmeasured_rows(probe.task, status, first_line(error))
            else:
                results.append((replace(probe, task=task), found))
                new = with_measured(predict_rows(task, found, fit(found)), found)
            suffix = f"-{number}" if number > 1 else ""
            rows += [
                row | {"settings": probe.settings, "trial": row["trial"] + suffix} for row in new
            ]
            status = "finished" if number == len(probes) else "running"
            summary = _write(
                base, probes, folder, results, rows, status, time.monotonic() - start_s
            )
        write_report_safely(folder.path, reporter.log)
    if failure is not None and not results:
        raise failure
    return folder.path, summary, rows


def _write(
    base: Config,
    probes: list[Probe],
    folder: RunDir,
    results: list[tuple[Probe, Measurements]],
    rows: list[Row],
    status: str,
    elapsed_s: float,
) -> dict[str, Any]:
    """Write the results so far, so that a killed probe keeps what it measured; return
    sweep.json.
    """
    recommendation, fits = _recommend(base, rows, results), [fit(found) for _, found in results]
    summary = {
        "kind": "sweep",
        "recipe": base.recipe,
        **_identity(probes),
        "goal": "throughput",
        "status": status if recommendation or status == "running" else "failed",
        "elapsed_s": elapsed_s,
        "environment": collect_environment(),
        "recommendation": recommendation,
        "probes": [{"settings": probe.settings, **found.to_json()} for probe, found in results],
        "fits": [{"text": each.format(), **asdict(each)} for each in fits],
    }
    folder.write(TRIALS, "".join(json.dumps(row) + "\n" for row in rows))
    folder.write_json(SWEEP, summary)
    if recommendation:
        best = next(row for row in rows if row["trial"] == recommendation["best"])
        folder.write("best.yaml", f"# {recommendation['why']}\n" + to_yaml(best_recipe(base, best)))
    return summary


def _recommend(
    base: Config, rows: list[Row], results: list[tuple[Probe, Measurements]]
) -> Row | None:
    """Return the best recommendation of all combinations of settings."""
    own = _own_global(base)
    found = [
        recommend([row for row in rows if row["settings"] == probe.settings], measured, own)
        for probe, measured in results
    ]
    by_trial = {row["trial"]: row for row in rows}
    best = max(
        filter(None, found), key=lambda each: by_trial[each["best"]]["samples_per_s"], default=None
    )
    if best is not None:
        row = by_trial[best["best"]]
        steps, before = (
            best_recipe(base, row).train.steps,
            row["settings"].get("train.steps", base.train.steps),
        )
        if steps != before:
            best["why"] += (
                f" train.steps is {steps} instead of {before} for as many samples; the warm-up is "
                "scaled too."
            )
    return best


def _own_global(base: Config) -> int:
    """Return the global batch of the recipe."""
    return resolve_batch_shape(base.batch, base.cluster.max_workers).global_batch_size


def best_recipe(base: Config, best: Row) -> Config:
    """Return the recipe with the shape and settings of a row, and as many steps as cover the
    recipe's samples.
    """
    config = override_settings(
        base, best["settings"] | _batch(best["global"]) | {"batch.micro": best["micro"]}
    )
    if config.train.steps is not None:
        ratio = _own_global(base) / best["global"]
        steps, warmup_steps = (
            ceil(config.train.steps * ratio),
            ceil(config.optimizer.warmup_steps * ratio),
        )
        optimizer = config.optimizer.replace(warmup_steps=warmup_steps)
        config = config.replace(train=config.train.replace(steps=steps), optimizer=optimizer)
    workers = (
        config.cluster.workers if best["workers"] == config.cluster.max_workers else best["workers"]
    )
    return config.with_cluster(workers=workers).replace(
        run=config.run.replace(name=None, resume="auto")
    )


def _identity(probes: list[Probe]) -> dict[str, Any]:
    space: dict[str, list[Any]] = {GLOBAL: list(probes[0].task.global_rows)}
    for name, value in (item for probe in probes for item in probe.settings.items()):
        if value not in space.setdefault(name, []):
            space[name].append(value)
    return {"space": space, "measures": "shapes"}


def _resolve_folder(base: Config, probes: list[Probe]) -> RunDir:
    """Return the folder of this probe: an equal one is measured again. Raises UsageError."""

    def inspect(path: AnyPath) -> tuple[list[str], bool] | None:
        before = RunDir(path).read_json(SWEEP)
        if before is None:
            if has_other_files(path, FILES):
                raise UsageError(f"{path} exists and is not a sweep; choose another --run.name")
            return None
        changes = [
            f"{name}: {before.get(name)} -> {now}"
            for name, now in _identity(probes).items()
            if before.get(name) != now
        ]
        recipe = from_yaml((path / "recipe.yaml").read_text(), str(path / "recipe.yaml"))
        old, new = (config.model_dump(mode="json", by_alias=True) for config in (recipe, base))
        return changes + forbidden_changes(
            old, new, ("run", "cluster.address", "cluster.start_timeout_s")
        ), False

    return RunDir(select_folder(base.run, f"{base.recipe}-tune", inspect, "sweep").path)


def measure(
    task: ShapeTask, scratch: AnyPath, reporter: RunReporter
) -> tuple[ShapeTask, Measurements]:
    """Measure a task in a process of this machine (one worker) or in a Ray worker group.

    Returns the task with the device and the candidate numbers of workers, and its measurements.
    After a group that died in a measurement another one starts (`_until_it_fits`). Raises
    MmrayError.
    """
    config = task.config
    if not needs_ray(config.cluster):
        check_gpus(config)
        check_classes(config)
        task = _resolved(task, resolve_on_this_machine(config))
        return task, _until_it_fits(task, _run_locally, reporter)
    with ray_session(config.cluster):
        from mmray.tuning.shape_group import ShapeGroup  # imports Ray Train

        check_classes(config)
        group = ShapeGroup(config, scratch, reporter)
        workers = candidate_workers(config, group.workers, group.config.cluster.accelerator)
        task = _resolved(replace(task, workers=workers), group.config)
        try:
            return task, _until_it_fits(task, group.run, reporter)
        finally:
            with suppress(OSError):
                remove_tree(scratch)


def _resolved(task: ShapeTask, config: Config) -> ShapeTask:
    """Return the task with the config and the embedding rows that the data would set."""
    trained = config.prepare.vocab_size if config.model.inputs.tokenizer == "trained" else 0
    config = config.replace(
        model=config.model.with_vocab(config.model.vocab_size or trained or DEFAULT_VOCAB, None)
    )
    return replace(task, config=config)


def _until_it_fits(
    task: ShapeTask, run: Callable[[ShapeTask, OnMessage], Measurements], reporter: RunReporter
) -> Measurements:
    """Measure in one group after the other, each without the shapes that do not fit because of an
    earlier one.

    A worker lost without a sign of too little memory (its node, preemption, NCCL) counts as out of
    memory only if another one is lost at the same shape.
    """
    trying, unexplained = (0, 0), set[tuple[int, int]]()  # rows of a micro-batch and of a step

    def on_message(message: dict[str, Any]) -> None:
        nonlocal trying
        trying = message.get("trying", trying)
        if "status" in message:
            reporter.status(message["status"])
        if "note" in message:
            reporter.log(message["note"], "weights")

    while True:
        trying = 0, 0
        try:
            found = run(task, on_message)
        except (OutOfMemoryError, WorkerFailed) as error:
            lost = isinstance(error, WorkerFailed) and error.kind == "lost"
            cause = error.cause if isinstance(error, WorkerFailed) else error
            # SIGKILL too: see describe_signal
            reason, out_of_memory = first_line(cause), is_out_of_memory(cause)
            failed = FailedShape(*trying, reason)
            if lost and not out_of_memory:
                if trying not in unexplained:
                    unexplained.add(trying)
                    shape = failed if failed.rows else "start of the workers"
                    reporter.log(
                        f"{shape}: {reason}; not known to be out of memory, measuring again",
                        "workers",
                    )
                    continue
                reason += ", twice at this shape, which counts as out of memory"
            if failed.rows < 2 or not (lost or out_of_memory):
                raise cause from None
            task = replace(
                task, failed_shapes=(*task.failed_shapes, failed._replace(reason=reason))
            )
            reporter.log(f"{failed}: {reason}; measuring shapes that need less memory", "memory")
            continue
        if not found.samples:
            raise OutOfMemoryError(f"a micro-batch of 1 row does not fit: {found.reason}")
        return found


def _run_locally(task: ShapeTask, on_message: OnMessage) -> Measurements:
    """Measure in a new process; its memory is not that of this one.

    Raises WorkerFailed if it dies.
    """
    connection, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_run_worker, args=(theirs, task), name="mmray-shapes")
    with starting_children():
        process.start()
    theirs.close()  # so that the end of the process is read as EOF
    try:
        while True:
            name, value = connection.recv()
            if name == "returned":
                return value
            if name == "raised":
                error = pickle.loads(value)
                raise error if isinstance(error, MmrayError) else WorkerFailed("raised", error)
            on_message(value)
    except EOFError:
        process.join()
        raise WorkerFailed("lost", TrainingError(describe_exit(process.exitcode or 0))) from None
    finally:
        process.kill()
        process.join()


def _run_worker(connection: Connection, task: ShapeTask) -> None:
    """Measure in this process, and send messages, then the result or the error."""
    init_child()
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as in training/local_worker.py
    import torch

    from mmray.engine.collectives import Group
    from mmray.tuning.shape_worker import measure_shapes

    device = (
        torch.device("cuda", 0) if task.config.cluster.accelerator == "gpu" else torch.device("cpu")
    )
    try:
        found = measure_shapes(
            task, Group(device=device), lambda message: connection.send(("message", message))
        )
        connection.send(("returned", found))
    except Exception as error:  # noqa: BLE001 - raised again in the driver
        connection.send(("raised", pickled(error)))
