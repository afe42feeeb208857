"""Start the worker groups that time batch shapes, and write sweep.json, trials.jsonl, best.yaml."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mmray.cluster.connect import needs_ray, ray_session
from mmray.config import Config, to_yaml
from mmray.config.search_space import override_settings
from mmray.engine.batch import resolve_batch_shape
from mmray.errors import MmrayError, UsageError
from mmray.report.sweep import SweepRecord
from mmray.report.write import write_report_safely
from mmray.storage import lease
from mmray.storage.paths import AnyPath, remove_tree
from mmray.sweep_files import SWEEP, TrialRow
from mmray.training import RunReporter
from mmray.training.driver import check_classes
from mmray.training.resolve import with_default_vocab, with_written_weights
from mmray.training.run_dir import collect_environment
from mmray.training.validate import unsupported_reasons
from mmray.training.workers.local import measure_in_worker
from mmray.tuning.results import recommend_trial
from mmray.tuning.shape import Measurements, build_rows
from mmray.tuning.sweep import resolve_sweep_dir
from mmray.tuning.trials import as_recipe, own_global_batch_size

if TYPE_CHECKING:
    from mmray.engine.collectives import Group


def with_own_batch(base: Config) -> Config:
    """Return the settings of the workers: the recipe with its global batch as a number.

    Raises:
        UsageError: The settings contradict each other, or batches are conversations.
    """
    if base.model.generates_text:
        raise UsageError(
            "batches of conversations are not timed on synthetic rows: search "
            "--space batch.tokens=4096,8192 or batch.micro=4,8"
        )
    config = override_settings(base, _batch(own_global_batch_size(base), 1))
    if conflicts := unsupported_reasons(config.with_cluster(workers=config.cluster.max_workers)):
        raise UsageError("\n".join(conflicts))
    return config


def _batch(global_batch_size: int, micro: int | None) -> dict[str, Any]:
    return {"batch.global": global_batch_size, "batch.micro": micro, "batch.accumulation": None}


def probe_shapes(base: Config, reporter: RunReporter) -> SweepRecord:
    """Measure batch shapes (micro-batch, accumulation, workers) of a recipe on synthetic batches;
    recommend one.

    Writes sweep.json, trials.jsonl, best.yaml and the report into the folder of the sweep, which is
    `run.name`, or by default RECIPE-tune, in `run.storage`.

    Returns:
        A SweepRecord: `folder`, `summary` (content of sweep.json) and `trials`, a TrialRow per
        batch shape.

    Raises:
        MmrayError: The workers cannot start, or no batch shape fits into memory.
    """
    config = with_own_batch(base)
    start_s = time.monotonic()
    summary: dict[str, Any] = {"measures": "shapes"}
    folder = resolve_sweep_dir(base, summary, reporter, restart=True)
    summary |= {"kind": "sweep", "recipe": base.recipe, "goal": "throughput"}
    with lease.Lease(folder.path, activity="in use for a sweep"):
        folder.write("recipe.yaml", to_yaml(base))
        folder.write_json(SWEEP, summary | {"status": "running"})
        reporter.log(str(folder.path), "sweep")
        try:
            measurements = measure(config, folder.path / "ray", reporter)
        except MmrayError:
            folder.write_json(SWEEP, summary | {"status": "failed"})
            raise
        rows = build_rows(measurements)
        recommendation = recommend_trial(rows, "throughput")
        assert recommendation is not None, "the workers have timed a shape, or raised an error"
        best = next(row for row in rows if row.trial == recommendation.best)
        recipe = to_yaml(best_recipe(base, best))
        folder.write("best.yaml", f"# {recommendation.why}\n{recipe}")
        summary |= {
            "status": "finished",
            "elapsed_s": time.monotonic() - start_s,
            "environment": collect_environment(),
            "recommendation": recommendation._asdict(),
            "workers": measurements.workers,
        }
        folder.write_rows(rows)
        folder.write_json(SWEEP, summary)
        write_report_safely(folder.path, reporter.log)
    return SweepRecord(folder.path, summary, rows)


def best_recipe(base: Config, best: TrialRow) -> Config:
    """Return the recipe with a measured micro-batch."""
    config = override_settings(base, _batch(own_global_batch_size(base), best.micro))
    # An elastic recipe may have been measured with fewer workers than its largest number.
    shape = resolve_batch_shape(config.batch, best.workers or config.cluster.max_workers)
    return as_recipe(config, base, shape)


def measure(config: Config, scratch: AnyPath, reporter: RunReporter) -> Measurements:
    """Measure batch shapes in a process of this machine, or in a Ray worker group.

    Args:
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
    if not needs_ray(config.cluster):
        check_classes(config)
        return measure_in_worker(_measure_in_worker, with_default_vocab(config), on_message)
    with ray_session(config.cluster, log=reporter.log):
        from mmray.training.workers.ray_backend import RayBackend, run_group  # imports Ray Train

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
            return run_group(_measure_in_worker, config, scratch, reporter.log, on_message)
        finally:
            with suppress(OSError):
                remove_tree(scratch)


def _measure_in_worker(
    config: Config, group: Group, report: Callable[[dict[str, str]], Any]
) -> Measurements:
    from mmray.tuning.shape_worker import measure_shapes  # late: the driver imports no torch

    return measure_shapes(config, group, report)
