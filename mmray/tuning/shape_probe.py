"""Start the worker groups that time batch shapes, and write sweep.json, trials.jsonl, best.yaml."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mmray.cluster.connect import needs_ray, ray_session
from mmray.config import Config, to_yaml
from mmray.config.search_space import Range, Space, override_settings
from mmray.engine.batch import resolve_batch_shape
from mmray.errors import (
    MmrayError,
    OutOfMemoryError,
    UsageError,
    first_line,
    is_out_of_memory,
)
from mmray.processes import Channel, ChildProcess
from mmray.report.sweep import SweepRecord
from mmray.report.write import write_report_safely
from mmray.storage import lease
from mmray.storage.paths import AnyPath, remove_tree
from mmray.sweep_files import SWEEP, Recommendation, TrialRow
from mmray.training import RunReporter
from mmray.training.backend import WorkerFailed, is_process_lost, select_cause
from mmray.training.driver import check_classes
from mmray.training.local import check_gpus, resolve_on_this_machine
from mmray.training.local_worker import configure_process
from mmray.training.run_dir import collect_environment
from mmray.training.validate import unsupported_reasons
from mmray.tuning.shape import Failure, Measurements, ShapeTask, build_rows, recommend
from mmray.tuning.sweep import resolve_sweep_dir
from mmray.tuning.trials import as_recipe, own_global_batch_size

GLOBAL = "batch.global"
DEFAULT_VOCAB = 30522  # BERT's: the probe does not read the data, whose tokenizer has the size
OnMessage = Callable[[dict[str, Any]], None]


def plan_task(base: Config, space: Space | None) -> ShapeTask:
    """Return which global batches to measure.

    Args:
        base: The recipe, with `batch`, `cluster` and `train` settings.
        space: Search space with a list of `batch.global`; None: the recipe's own global batch.

    Returns:
        A ShapeTask: `config`, the settings of the workers, and `global_batch_sizes`, the rows of
        each global batch to measure, ascending; nothing is measured yet.

    Raises:
        UsageError: A global batch is invalid, or the settings contradict each other.
    """
    if base.model.generates_text:
        raise UsageError(
            "batches of conversations are not timed on synthetic rows: search "
            "--space batch.tokens=4096,8192 or batch.micro=4,8"
        )
    listed = space.axes[GLOBAL] if space else (own_global_batch_size(base),)
    if isinstance(listed, Range):
        raise UsageError(
            f"--space {GLOBAL}: --goal throughput takes no ranges; list the values, with commas"
        )
    configs = [override_settings(base, _batch(size)) for size in listed]
    config = configs[0]
    if conflicts := unsupported_reasons(config.with_cluster(workers=config.cluster.max_workers)):
        raise UsageError("\n".join(conflicts))
    # Ascending, so that a size that does not fit is not tried with more rows.
    sizes = sorted({each.batch.global_ or 0 for each in configs})
    return ShapeTask(config, tuple(sizes))


def _batch(global_batch_size: Any) -> dict[str, Any]:
    return {GLOBAL: global_batch_size, "batch.micro": 1, "batch.accumulation": None}


def probe_shapes(base: Config, space: Space | None, reporter: RunReporter) -> SweepRecord:
    """Measure batch shapes (micro-batch, accumulation, workers) on synthetic batches; recommend
    one.

    Writes sweep.json, trials.jsonl, best.yaml and the report into the folder of the sweep, which is
    `run.name`, or by default RECIPE-tune, in `run.storage`.

    Args:
        space: Search space with a list of `batch.global`; None: the recipe's own global batch.

    Returns:
        A SweepRecord: `folder`, `summary` (content of sweep.json) and `trials`, a TrialRow per
        batch shape.

    Raises:
        MmrayError: The workers cannot start, or no batch shape fits into memory.
    """
    task = plan_task(base, space)
    start_s = time.monotonic()
    summary: dict[str, Any] = {
        "space": {GLOBAL: list(task.global_batch_sizes)},
        "measures": "shapes",
    }
    folder = resolve_sweep_dir(base, summary, reporter, restart=True)
    summary |= {"kind": "sweep", "recipe": base.recipe, "goal": "throughput"}
    with lease.Lease(folder.path, activity="in use for a sweep"):
        folder.write("recipe.yaml", to_yaml(base))
        folder.write_json(SWEEP, summary | {"status": "running"})
        reporter.log(str(folder.path), "sweep")
        try:
            measurements = measure(task, folder.path / "ray", reporter)
        except MmrayError:
            folder.write_json(SWEEP, summary | {"status": "failed"})
            raise
        rows = build_rows(task.global_batch_sizes, measurements)
        recommendation = recommend(rows, measurements, own_global_batch_size(base))
        if recommendation is not None:
            best = next(row for row in rows if row.trial == recommendation.best)
            recipe = best_recipe(base, best)
            recommendation = _with_scaled_steps(recommendation, base, recipe)
            folder.write("best.yaml", f"# {recommendation.why}\n" + to_yaml(recipe))
        summary |= {
            "status": "finished" if recommendation else "failed",
            "elapsed_s": time.monotonic() - start_s,
            "environment": collect_environment(),
            "recommendation": recommendation.to_json() if recommendation else None,
            "workers": measurements.workers,
            "limit_gib": measurements.limit_gib,
        }
        folder.write_rows(rows)
        folder.write_json(SWEEP, summary)
        write_report_safely(folder.path, reporter.log)
    return SweepRecord(folder.path, summary, rows)


def _with_scaled_steps(
    recommendation: Recommendation, base: Config, recipe: Config
) -> Recommendation:
    """Add to the reason what follows from another global batch."""
    changes = [
        f"{name} is {after} instead of {before}"
        for name, after, before in (
            ("train.steps", recipe.train.steps, base.train.steps),
            ("optimizer.warmup_steps", recipe.optimizer.warmup_steps, base.optimizer.warmup_steps),
        )
        if after != before
    ]
    if not changes:
        return recommendation
    why = f"{recommendation.why} {' and '.join(changes)}, for as many samples."
    return replace(recommendation, why=why)


def best_recipe(base: Config, best: TrialRow) -> Config:
    """Return the recipe with a measured batch shape (global batch, micro-batch and accumulation).

    `train.steps` and the warm-up are scaled, so that as many samples are trained as before.
    """
    assert best.global_batch_size is not None
    config = override_settings(base, _batch(best.global_batch_size) | {"batch.micro": best.micro})
    # An elastic recipe may have been measured with fewer workers than its largest number.
    shape = resolve_batch_shape(config.batch, best.workers or config.cluster.max_workers)
    return as_recipe(config, base, shape)


def measure(task: ShapeTask, scratch: AnyPath, reporter: RunReporter) -> Measurements:
    """Measure batch shapes in a process of this machine, or in a Ray worker group.

    Args:
        task: Config, and the global batches to measure in rows.
        scratch: Folder for files of Ray Train, removed at the end.

    Returns:
        A Measurements: `workers` (number of ranks), `limit_gib` (memory that each may use),
        `visits` (timed shapes, with `global_batch_size`, `micro_batch_size`, `step_s` and
        `peak_gib`) and `failures` (shapes that did not fit, with the reason).

    Raises:
        MmrayError: The workers cannot start, or no batch shape fits into memory.
    """
    config = task.config
    if not needs_ray(config.cluster):
        check_gpus(config)
        check_classes(config, reporter.log)
        task = replace(task, config=_with_vocab(resolve_on_this_machine(config)))
        return measure_in_groups(task, _run_locally, reporter)
    with ray_session(config.cluster, log=reporter.log):
        from mmray.tuning.shape_group import ShapeGroup  # imports Ray Train

        check_classes(config, reporter.log)
        group = ShapeGroup(config, scratch, reporter)
        if group.workers < config.cluster.max_workers:
            reporter.log(f"{group.workers} of {config.cluster.max_workers} could start", "workers")
        task = replace(task, config=_with_vocab(group.config))
        try:
            return measure_in_groups(task, group.run, reporter)
        finally:
            with suppress(OSError):
                remove_tree(scratch)


def _with_vocab(config: Config) -> Config:
    """Return the config with the embedding rows that the data would set."""
    trained = config.prepare.vocab_size if config.model.inputs.tokenizer == "trained" else 0
    vocab_size = config.model.vocab_size or trained or DEFAULT_VOCAB
    return config.replace(model=config.model.with_vocab(vocab_size, None))


def measure_in_groups(
    task: ShapeTask, run: Callable[[ShapeTask, OnMessage], Measurements], reporter: RunReporter
) -> Measurements:
    """Measure batch shapes in worker groups.

    A group that runs out of memory is followed by another one, which measures smaller batch shapes.
    A worker that is lost for an unknown reason counts as out of memory only if another one is lost
    at the same batch shape: Ray does not report processes that the kernel killed as such.

    Args:
        task: The rows of the global batches to measure, and what was measured before.
        run: Called with (task, on_message): starts a new worker group that times the shapes of the
            task, calls `on_message` with each message of the workers, and returns its measurements.
            A message is a dict with one or more of `status` and `note` (texts), `trying` (a pair,
            the rows of the global batch and of the micro-batch that is timed next) and `measured`
            (a result for the task). It raises WorkerFailed if a worker was lost or raised an error.

    Returns:
        The measurements of all groups: `workers` (number of ranks), `limit_gib` (memory that each
        may use), `visits` (timed batch shapes, each with `global_batch_size`, `micro_batch_size`,
        `step_s` and `peak_gib`) and `failures` (shapes that did not fit, with `global_batch_size`,
        `micro_batch_size` and `reason`).

    Raises:
        OutOfMemoryError: Not even a micro-batch of one row fits.
        Exception: Another error that a worker raised.
    """
    unexplained = set[tuple[int, int] | None]()
    while True:
        watch = _GroupWatch(task, reporter)
        try:
            measurements = run(task, watch.on_message)
        except WorkerFailed as error:
            task = watch.task
            trying = watch.trying
            reason = first_line(error.cause)
            shape = "start of the workers"
            if trying is not None:
                shape = f"global batch of {trying[0]} in micro-batches of {trying[1]}"
            is_memory = is_out_of_memory(error.cause)  # SIGKILL is a sign of it
            if error.kind == "lost" and not is_memory:
                if trying not in unexplained:
                    unexplained.add(trying)
                    text = f"{shape}: {reason}; not known to be out of memory, measuring again"
                    reporter.log(text, "workers")
                    continue
                is_memory = True
                reason += ", twice at this shape, which counts as out of memory"
            if not is_memory or trying is None or trying[1] == 1:
                raise error.cause from None
            task = task.add(Failure(*trying, reason))
            reporter.log(f"{shape}: {reason}; measuring shapes that need less memory", "memory")
            continue
        # Without failures, all global batches have fewer rows than workers.
        if not measurements.visits and measurements.failures:
            raise OutOfMemoryError(measurements.failure(max(task.global_batch_sizes), 1))
        return measurements


class _GroupWatch:
    """Receives the messages of a worker group, and keeps what it has measured."""

    def __init__(self, task: ShapeTask, reporter: RunReporter) -> None:
        self.task = task
        self.trying: tuple[int, int] | None = None  # global batch and micro-batch
        self._reporter = reporter

    def on_message(self, message: dict[str, Any]) -> None:
        self.trying = message.get("trying", self.trying)
        if "measured" in message:
            self.task = self.task.add(message["measured"])
        if "status" in message:
            self._reporter.status(message["status"])
        if "note" in message:
            self._reporter.log(message["note"], "weights")


def _run_locally(task: ShapeTask, on_message: OnMessage) -> Measurements:
    """Measure in a new process, which has memory of its own.

    Raises WorkerFailed if it dies.
    """
    child = ChildProcess("worker", _run_worker, task)
    try:
        return child.result(on_message)
    except Exception as error:  # noqa: BLE001 - raised with its kind
        raise select_cause([error], is_process_lost) from None
    finally:
        child.kill()


def _run_worker(channel: Channel, task: ShapeTask) -> Measurements:
    """Measure in this process, and send messages."""
    configure_process()
    import torch

    from mmray.engine.collectives import Group
    from mmray.tuning.shape_worker import measure_shapes

    device = (
        torch.device("cuda", 0) if task.config.cluster.accelerator == "gpu" else torch.device("cpu")
    )
    return measure_shapes(task, Group(device=device), channel.send)
