"""Start the worker groups that time batch shapes, and write sweep.json, trials.jsonl, best.yaml."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mmray.cluster.connect import needs_ray, ray_session
from mmray.config import Config, to_yaml
from mmray.config.search_space import Range, Space, override_settings
from mmray.engine.batch import resolve_batch_shape
from mmray.errors import MmrayError, UsageError
from mmray.report.sweep import SweepRecord
from mmray.report.write import write_report_safely
from mmray.storage import lease
from mmray.storage.paths import AnyPath, remove_tree
from mmray.sweep_files import SWEEP, Recommendation, TrialRow
from mmray.training import RunReporter
from mmray.training.driver import check_classes
from mmray.training.local import measure_in_worker
from mmray.training.resolve import with_default_vocab, with_written_weights
from mmray.training.run_dir import collect_environment
from mmray.training.validate import unsupported_reasons
from mmray.tuning.shape import Measurements, build_rows, recommend
from mmray.tuning.sweep import resolve_sweep_dir
from mmray.tuning.trials import as_recipe, own_global_batch_size

if TYPE_CHECKING:
    from mmray.engine.collectives import Group

GLOBAL = "batch.global"


def plan_measurements(base: Config, space: Space | None) -> tuple[Config, tuple[int, ...]]:
    """Return the settings of the workers, and the rows of each global batch to measure, ascending.

    Args:
        base: The recipe, with `batch`, `cluster` and `train` settings.
        space: Search space with a list of `batch.global`; None: the recipe's own global batch.

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
    # Ascending: larger ones are not tried after the first whose rows do not fit.
    return config, tuple(sorted({each.batch.global_ or 0 for each in configs}))


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
    config, global_batch_sizes = plan_measurements(base, space)
    start_s = time.monotonic()
    summary: dict[str, Any] = {
        "space": {GLOBAL: list(global_batch_sizes)},
        "measures": "shapes",
    }
    folder = resolve_sweep_dir(base, summary, reporter, restart=True)
    summary |= {"kind": "sweep", "recipe": base.recipe, "goal": "throughput"}
    with lease.Lease(folder.path, activity="in use for a sweep"):
        folder.write("recipe.yaml", to_yaml(base))
        folder.write_json(SWEEP, summary | {"status": "running"})
        reporter.log(str(folder.path), "sweep")
        try:
            measurements = measure(config, global_batch_sizes, folder.path / "ray", reporter)
        except MmrayError:
            folder.write_json(SWEEP, summary | {"status": "failed"})
            raise
        rows = build_rows(global_batch_sizes, measurements)
        recommendation = recommend(rows, own_global_batch_size(base))
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


def measure(
    config: Config, global_batch_sizes: Sequence[int], scratch: AnyPath, reporter: RunReporter
) -> Measurements:
    """Measure batch shapes in a process of this machine, or in a Ray worker group.

    Args:
        global_batch_sizes: Rows of each global batch, ascending.
        scratch: Folder for files of Ray Train, removed at the end.

    Raises:
        MmrayError: The workers cannot start, or no batch shape fits into memory.
    """

    def on_message(message: dict[str, str]) -> None:
        if "status" in message:
            reporter.status(message["status"])
        else:
            reporter.log(message["note"], "weights")

    config = with_written_weights(config)
    work = partial(_measure_in_worker, global_batch_sizes=global_batch_sizes)
    if not needs_ray(config.cluster):
        check_classes(config)
        return measure_in_worker(work, with_default_vocab(config), on_message)
    with ray_session(config.cluster, log=reporter.log):
        from mmray.training.ray_backend import RayBackend, run_group  # imports Ray Train

        check_classes(config)
        backend = RayBackend()
        backend.check(config, reporter)
        config = with_default_vocab(backend.resolve(config))
        try:
            workers = backend.choose_world_size(config)
        finally:
            backend.autoscaler.cancel()
        if workers < config.cluster.max_workers:
            reporter.log(f"{workers} of {config.cluster.max_workers} could start", "workers")
        config = config.with_cluster(workers=workers)
        try:
            return run_group(work, config, scratch, reporter.log, on_message)
        finally:
            with suppress(OSError):
                remove_tree(scratch)


def _measure_in_worker(
    config: Config,
    group: Group,
    report: Callable[[dict[str, str]], Any],
    global_batch_sizes: Sequence[int],
) -> Measurements:
    from mmray.tuning.shape_worker import measure_shapes  # late: the driver imports no torch

    return measure_shapes(config, group, report, global_batch_sizes)
