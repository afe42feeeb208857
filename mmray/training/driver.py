"""One training run, from config to result, on the driver: resolve, check, lock the run's folder,
train, finalize.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmray import plugins
from mmray.cluster.connect import needs_ray, ray_session, session_title
from mmray.config import Config
from mmray.data.store.manifest import QUARANTINE
from mmray.data.store.mixture import PreparedMixture
from mmray.engine.bad_rows import load_bad_rows, merge_bad_rows
from mmray.engine.worker_context import TRAINING
from mmray.errors import ForceExit, TrainingError, UsageError
from mmray.machine import torchrun_world_size
from mmray.report.write import write_report_safely
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath
from mmray.training import RunReporter, run_dir, trackers, validate
from mmray.training.resolve import ResolvedRun, resolve_run
from mmray.training.supervisor import Supervisor
from mmray.training.workers.backend import Backend
from mmray.training.workers.local import LocalBackend, with_workers_of_torchrun


@dataclass
class RunOutcome:
    """Outcome of a run.

    Args:
        result: Content of result.json.
        already_done: Whether the run had finished before, so that nothing was trained.
    """

    path: AnyPath
    result: dict[str, Any]
    already_done: bool = False


class StartTimeline:
    """Reporter that passes progress to another one, and records when each stage of a start began.

    A start is that of the command, or a restart of the workers; it ends with step 1 or the first
    step after the restart.

    Args:
        start_s: time.monotonic() at the start of the command.

    Attributes:
        starts: For each start a list of its stages, {"stage": title, "at_s": seconds from the start
            of the command to that of the stage}. The first stage is `importing` at 0.
    """

    def __init__(self, reporter: RunReporter, start_s: float) -> None:
        self.log = reporter.log
        self.phase = reporter.phase
        self.step = reporter.step
        self.prepare_progress = reporter.prepare_progress
        self.starts: list[list[dict[str, Any]]] = [[{"stage": "importing", "at_s": 0.0}]]
        self._reporter = reporter
        self._start_s = start_s

    def status(self, title: str) -> None:
        """Record a stage of the start, and pass it on."""
        if self.starts[-1][-1]["stage"] == TRAINING:
            self.starts.append([])
        self.starts[-1].append({"stage": title, "at_s": round(time.monotonic() - self._start_s, 2)})
        self._reporter.status(title)


def train(
    config: Config,
    reporter: RunReporter,
    start_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    local: bool = False,
    check_storage: bool = True,
) -> RunOutcome:
    """Train a run from start to end, or resume it if it exists.

    Args:
        start_s: time.monotonic() when the command started; None: now.
        should_stop: Called each second; True stops like Ctrl-C, at a checkpoint.
        local: Do not use Ray, although this process is connected to it.
        check_storage: Check that all nodes can use `run.storage`.

    Raises:
        MmrayError: The run cannot start or failed; its `exit_code` is the exit status of the
            command.
    """
    timeline = StartTimeline(reporter, time.monotonic() if start_s is None else start_s)
    world_size = torchrun_world_size()
    if world_size > 1:
        config = with_workers_of_torchrun(config, reporter.log)
    validate.validate_settings(config)
    if local or world_size > 1 or not needs_ray(config.cluster):
        if config.evaluate.where == "beside":
            raise UsageError(
                "evaluate.where beside needs a Ray cluster, whose nodes evaluate meanwhile: set "
                "--cluster.address, or leave it out"
            )
        timeline.status("checking the settings")
        with closing(LocalBackend(config.model, world_size)) as backend:
            check_classes(config)
            return _train(config, timeline, backend, should_stop)
    timeline.status(session_title(config.cluster))
    actors = (config.data.worker_range or (1, 1))[0]
    # Classes of the user may import torch, which takes seconds: they are loaded while Ray starts.
    with ray_session(config.cluster, actors, partial(check_classes, config), reporter.log):
        from mmray.training.workers.ray_backend import RayBackend  # late: it imports Ray Train

        outcome = _train(config, timeline, RayBackend(check_storage), should_stop)
        timeline.phase("stopping Ray")
        return outcome


def check_classes(config: Config) -> None:
    """Check that the classes and packages that settings name can be loaded.

    Raises:
        UsageError: One cannot be loaded.
    """
    trackers.check_trackers(config)
    if config.model.lora.rank:
        plugins.check_installed("peft", "model.lora.rank", "lora")
    if config.model.lora.load_in_4bit:
        plugins.check_installed("bitsandbytes", "model.lora.load_in_4bit", "bitsandbytes")
    if config.train.float8 != "none":
        plugins.check_installed("torchao", "train.float8", "float8")
    if ":" in config.objective.kind:
        from mmray import objectives

        objectives.build(config.objective)
    for name in config.train.callbacks:
        plugins.load_class(name, "train.callbacks")
    if ":" in config.model.kind:
        plugins.load_class(config.model.kind, "model.kind")


def _train(
    config: Config, reporter: StartTimeline, backend: Backend, should_stop: Callable[[], bool]
) -> RunOutcome:
    reporter.status("checking the data")
    backend.check(config, reporter)
    resolved = resolve_run(backend.resolve(config), reporter)
    cluster = config.cluster
    # Device and CPUs depend on the machine: the run's file keeps what was given.
    saved_config = resolved.config.with_cluster(
        accelerator=cluster.accelerator, cpus_per_worker=cluster.cpus_per_worker
    )
    is_auto = config.data.shuffle_blocks == "auto"
    selection = run_dir.select_run(saved_config, resolved.data_identity, resolved.steps, is_auto)
    if is_auto and selection.action == "resume":
        # `auto` depends on the number of workers and the size of the cache, which may change.
        stored_shuffle = run_dir.stored_shuffle(selection.path)
        if stored_shuffle != saved_config.data.shuffle_blocks:
            data = config.data.replace(shuffle_blocks=stored_shuffle)
            return _train(config.replace(data=data), reporter, backend, should_stop)
    if selection.skipped:
        more = f" (and {len(selection.skipped) - 1:,} more)" if len(selection.skipped) > 1 else ""
        advice = "use its settings or raise --train.steps to resume it"
        reporter.log(f"{selection.skipped[-1]}{more}; {advice}", "not resumed")
    existing = run_dir.RunDir(selection.path)
    if selection.action == "done":
        return RunOutcome(selection.path, existing.read_json("result.json"), already_done=True)
    if selection.action == "resume":
        before = existing.read_json("data.json").get("train")
        address = resolved.data_identity["train"]
        if before != address:
            reporter.log(f"the data has moved from {before} to {address}", "moved")
        for line in run_dir.describe_earlier_version(selection.path, saved_config):
            reporter.log(line, "warning")
    backend.check_inputs(resolved)
    with Lease(selection.path) as lease:
        if selection.action == "start" and (selection.path / "config.yaml").exists():
            text = "ended before its first stored step with other settings; it starts with the new"
            reporter.log(f"{selection.path} {text}", "restarted")
            run_dir.remove_start(selection.path)
        run = run_dir.write_run_files(
            selection.path, saved_config, resolved.data_identity, resolved.tokenizer_json
        )
        _log_summary(resolved, run, reporter)
        if idle := describe_idle(
            resolved.config, backend.num_local(resolved.config.cluster.accelerator)
        ):
            reporter.log(idle, "idle")
        try:
            with trackers.TrackingReporter(resolved.config, run.path, reporter) as tracking:
                supervisor = Supervisor(
                    resolved, run, lease, tracking, backend, reporter.starts, should_stop
                )
                result = supervisor.train()
                tracking.run_status = result["status"]
        finally:
            if not isinstance(sys.exception(), ForceExit):
                _finalize_run_dir(run, lease, reporter)
        return RunOutcome(run.path, result)


def _finalize_run_dir(run: run_dir.RunDir, lease: Lease, reporter: RunReporter) -> None:
    """Merge and count the quarantined rows and write the report, unless another process owns the
    run now.
    """
    try:
        lease.check()
        merge_bad_rows(run.path)
        reasons = Counter(load_bad_rows(run.path).values())
        if reasons:
            kinds = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
            text = f"{reasons.total():,} rows were not used: {kinds}; see {run.path / QUARANTINE}"
            reporter.log(text, "quarantined")
    except TrainingError:
        return
    except OSError as error:
        reporter.log(f"{QUARANTINE} could not be merged from its parts: {error}", "storage")
    reporter.phase("writing the report")
    try:
        write_report_safely(run.path, reporter.log)
    except KeyboardInterrupt:  # the run has ended, so its outcome is shown
        folder = shlex.quote(str(run.path))
        reporter.log(f"interrupted; `mmray report {folder}` writes it", "report")


def _log_summary(resolved: ResolvedRun, run: run_dir.RunDir, reporter: RunReporter) -> None:
    num_rows = resolved.data_identity["num_rows"]
    counts = [
        f"{each.num_rows:,} held out{f' in {name}' if name else ''}"
        for name, each in resolved.eval_sets.items()
    ]
    held_out = ", ".join(counts) or "none held out, so no evaluation"
    reporter.log(str(run.path), "run")
    reporter.log(f"{resolved.data_identity['train']}: {num_rows:,} rows, {held_out}", "data")
    if isinstance(resolved.train_set, PreparedMixture):
        for name, part in zip(resolved.train_set.names, resolved.train_set.components, strict=True):
            share = 100 * part.per_epoch / num_rows
            repeats = part.per_epoch / part.num_rows
            reporter.log(
                f"{part.per_epoch:,} rows of {name} per epoch ({share:.3g} %); it has "
                f"{part.num_rows:,}, each taken {repeats:.3g} times",
                "mixture",
            )
    if resolved.config.data.block_shuffle is not None:
        lanes, rows, blocks = resolved.config.data.block_shuffle
        reporter.log(
            f"{lanes:,} lanes, {rows:,} adjacent rows per block, {blocks:,} blocks per window",
            "shuffle",
        )
    epochs = resolved.steps * resolved.batch_shape.global_batch_size / num_rows
    cluster = resolved.config.cluster
    gpus = resolved.config.train.gpus_per_worker
    count, device = (
        (gpus, "GPU") if cluster.accelerator == "gpu" else (cluster.num_threads, "CPU thread")
    )
    devices = f"with {count} {device}{'s' * (count > 1)}{' each' * (cluster.max_workers > 1)}"
    reporter.log(f"{cluster.workers} {devices}{', elastic' * cluster.elastic}", "workers")
    reporter.log(str(resolved.batch_shape), "batch")
    warmup_steps = resolved.config.optimizer.warmup_steps
    reporter.log(describe_schedule(resolved.steps, epochs, warmup_steps), "schedule")


def describe_schedule(steps: int, epochs: float, warmup_steps: int) -> str:
    """Describe the length of a run, and a warm-up that does not end in it."""
    text = f"{steps:,} steps, about {epochs:.1f} epochs"
    if warmup_steps < steps:
        return text
    return (
        f"{text}; the warm-up (optimizer.warmup_steps) takes {warmup_steps:,}, so the learning "
        "rate does not reach optimizer.lr"
    )


def describe_idle(config: Config, num_local: int | None) -> str | None:
    """Describe which cores or GPUs of this machine are not used for training, and how to use them,
    such as `3 of 4 GPUs; --cluster.workers 4 uses them`; None if nothing is idle.

    Args:
        num_local: Number of GPUs of the machine (of cores for training on CPUs); None: the workers
            run on a cluster.
    """
    cluster = config.cluster
    on_gpus = config.cluster.accelerator == "gpu"
    if num_local is None:
        return None
    unit = config.train.gpus_per_worker if on_gpus else cluster.max_workers
    num_used = cluster.max_workers * (unit if on_gpus else cluster.num_threads)
    if num_used >= num_local // unit * unit:  # the largest multiple that the machine has
        return None
    flag = f"--cluster.workers {num_local // unit}" if on_gpus else "--cluster.cpus-per-worker auto"
    return (
        f"{num_local - num_used} of {num_local} {'GPUs' if on_gpus else 'cores'}; {flag} uses them"
    )
