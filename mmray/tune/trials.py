"""Trials of a recipe and a search space: valid configs, or the reason why a trial is infeasible. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmray.cluster.capacity import Demand, Node, Pool, max_cluster, max_concurrent
from mmray.cluster.connect import INPUT_TASK_CPUS
from mmray.config import LENGTHS, Cluster, Config
from mmray.config.search_space import Space, override_settings, setting_value
from mmray.engine.batch import BatchShape, resolve_batch_shape, total_steps
from mmray.errors import UsageError
from mmray.train.validate import unsupported_reasons

DEFAULT_STEPS = 40  # default length, in steps of the largest global batch
LOG_LINES = 10  # metrics lines per trial; the first is warm-up, the others give the spread
EVAL_ROWS = 512  # held-out rows for the final evaluation, unless the goal is recall


@dataclass(frozen=True)
class Trial:
    """A combination of settings with its config, or the reason why it is infeasible."""

    name: str
    settings: dict[str, Any]
    config: Config
    shape: BatchShape | None = None  # rows per step, micro-batch, accumulation and workers; None: infeasible
    infeasible: str | None = None


def clear_length_and_derived_batch(recipe: Config, keys: Sequence[str]) -> Config:
    """Return the recipe without its length, and without its global batch if accumulation is searched."""
    return recipe.without_overridden_length_and_batch([*LENGTHS, "batch.micro", *keys])


def restore_length(trial_settings: Config, recipe: Config) -> Config:
    """Return the settings with the length of the recipe: the base of `best.yaml`."""
    length = recipe.train.model_dump(include={name.removeprefix("train.") for name in LENGTHS})
    return trial_settings.replace(train=trial_settings.train.replace(**length))


def build_trials(base: Config, space: Space) -> list[Trial]:
    """Return one trial per combination. Raises UsageError for an invalid setting, and if no trial is feasible."""
    trials = []
    for number, combination in enumerate(space.combinations(), 1):
        config = override_settings(base, combination)
        trial = Trial(f"t{number:03}", {key: setting_value(config, key) for key in combination}, config)
        micro, workers = config.batch.micro, config.cluster.max_workers
        try:
            shape = resolve_batch_shape(config.batch, workers)
            if conflicts := unsupported_reasons(config.with_cluster(workers=workers)):  # as in the trial
                raise UsageError("; ".join(conflicts))
            if isinstance(micro, int) and shape.micro < micro:
                limit = f"{shape.micro} rows per worker (batch.global {shape.global_rows} on {workers} workers)"
                raise UsageError(f"batch.micro {micro} is more than {limit}")
            trials.append(replace(trial, shape=shape))
        except UsageError as error:
            trials.append(replace(trial, infeasible=str(error)))
    if all(trial.infeasible for trial in trials):
        reasons = "\n  ".join(f"{trial.settings}: {trial.infeasible}" for trial in trials)
        raise UsageError(f"no combination is feasible:\n  {reasons}")
    return trials


def searched_values(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """Return {setting: distinct values over all trials} in order."""
    space: dict[str, list[Any]] = {}
    for key, value in (item for trial in trials for item in trial.settings.items()):
        if value not in space.setdefault(key, []):
            space[key].append(value)
    return space


def largest_cluster(trials: Sequence[Trial]) -> Cluster:
    """Return the `cluster` settings that need most CPUs, for the size of a local Ray cluster."""
    configs = (trial.config.cluster for trial in trials if trial.shape is not None)
    return max(configs, key=lambda config: config.max_workers * config.num_cpus)


def samples_per_trial(trial_settings: Config, trials: Sequence[Trial], num_rows: int) -> int:
    """Return the equal number of samples per trial; default: DEFAULT_STEPS steps of the largest global batch."""
    largest = max(trial.shape.global_rows for trial in trials if trial.shape)
    if trial_settings.train.samples is not None:
        return trial_settings.train.samples
    if trial_settings.train.epochs is not None:
        return max(largest, round(trial_settings.train.epochs * num_rows))
    return (trial_settings.train.steps or DEFAULT_STEPS) * largest


def trial_config(trial: Trial, samples: int, num_rows: int, folder: Path, goal: str) -> Config:
    """Return the config of the trial's run: its length, about ten lines of metrics, no retries, maximum workers."""
    assert trial.shape is not None
    config = trial.config
    train = config.train.replace(steps=None, samples=samples, epochs=None, log_every=1, checkpoint_every=0)
    steps = total_steps(train, num_rows, trial.shape.global_rows)
    limit = config.evaluate.limit if goal == "recall" else min(config.evaluate.limit or EVAL_ROWS, EVAL_ROWS)
    return config.replace(
        train=train.replace(log_every=max(1, steps // LOG_LINES)),
        evaluate=config.evaluate.replace(every=0, limit=limit),
        cluster=config.cluster.replace(workers=config.cluster.max_workers, max_failures=0),
        run=config.run.replace(name=trial.name, storage=str(folder / "trials"), resume="auto"),
    )


def warmup_warning(trial_configs: Sequence[Config], num_rows: int, goal: str) -> str | None:
    """Return a warning if a trial ends during warm-up, for goals that depend on the loss."""
    for config in trial_configs if goal in ("loss", "recall") else ():
        shape = resolve_batch_shape(config.batch, config.cluster.max_workers)
        steps = total_steps(config.train, num_rows, shape.global_rows)
        if steps <= config.optimizer.warmup_steps:
            return (
                f"{config.run.name} ends during warm-up ({steps} of {config.optimizer.warmup_steps} steps), so its "
                f"{goal} is not meaningful; use longer trials (--train.samples) or fewer --optimizer.warmup-steps"
            )
    return None


def to_recipe(trial: Trial) -> Config:
    """Return the trial as a recipe, with the recipe's length and the batch as `global` and `micro`."""
    assert trial.shape is not None
    config, micro = trial.config, "auto" if trial.shape.auto else trial.shape.micro
    return config.replace(
        batch=config.batch.replace(micro=micro, accumulation=None, global_=trial.shape.global_rows),
        run=config.run.replace(name=None, resume="auto"),
    )


def trial_concurrency(
    free: Sequence[Node], total: Sequence[Node], demand: Demand, wanted: int, pools: Sequence[Pool] = ()
) -> tuple[int, int]:
    """Return (concurrent trials, decode actors per trial): a trial without a CPU for its data would wait forever."""
    combined = replace(demand, workers=demand.workers * wanted, data_cpus=demand.data_cpus * wanted)
    nodes = max_cluster(combined, free, pools)
    num_concurrent = max_concurrent(demand, nodes, wanted)
    if num_concurrent == 0:  # the trial waits until other jobs have ended
        num_concurrent, nodes = 1, max_cluster(demand, total, pools)
    cpus = sum(node.resources.get("CPU", 0) for node in nodes if node.matches_labels(demand.data_label_selector))
    worker_cpus = 0 if demand.data_label_selector else demand.workers * demand.per_worker.get("CPU", 0)
    return num_concurrent, max(1, int(cpus / num_concurrent - worker_cpus) - INPUT_TASK_CPUS)
