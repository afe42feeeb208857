"""Trials of a recipe and a search space: valid configs, or the reason why a trial is infeasible.

Pure functions that run before Ray starts, so that invalid settings fail early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool, max_cluster, max_concurrent, missing_capacity
from mmray.cluster.connect import INPUT_TASK_CPUS
from mmray.config import LENGTHS, Cluster, Config
from mmray.config.search_space import Space, setting_value, with_settings
from mmray.engine.batch import BatchShape, resolve_batch_shape, total_steps
from mmray.errors import ResourceError, UsageError

STEPS = 40  # default length, in steps of the largest global batch
WINDOWS = 10  # metrics lines per trial; the first is warm-up, the others give the spread
EVAL_ROWS = 512  # held-out rows for the final evaluation, unless the goal is recall


@dataclass(frozen=True)
class Trial:
    """A combination of settings with its config, or the reason why it is infeasible."""

    name: str
    settings: dict[str, Any]
    config: Config | None
    shape: BatchShape | None
    infeasible: str | None = None


def reset_searched(recipe: Config, keys: Sequence[str]) -> Config:
    """Return the recipe without its length, and without its global batch if accumulation is searched."""
    return recipe.without_conflicting([*LENGTHS, "batch.micro", *keys])


def restore_length(typed: Config, recipe: Config) -> Config:
    """Return the config with the length of the recipe, the base of `best.yaml`."""
    lengths = {name: getattr(recipe.train, name) for name in ("steps", "samples", "epochs")}
    return typed.replace(train=typed.train.replace(**lengths))


def trials_of(base: Config, space: Space) -> list[Trial]:
    """Return one trial per combination, numbered in order.

    Raises UsageError for a value that is invalid in all combinations; otherwise only those trials are infeasible.
    """
    trials, wrong, combinations = [], [], space.combinations()
    for number, typed in enumerate(combinations, 1):
        name = f"t{number:03}"
        try:
            config = with_settings(base, typed)
        except UsageError as error:
            wrong.append((typed, error))
            trials.append(Trial(name, typed, None, None, str(error)))
            continue
        trial = Trial(name, {key: setting_value(config, key) for key in typed}, config, None)
        batch, workers = config.batch, config.cluster.max_workers
        try:
            shape = resolve_batch_shape(batch, workers)
        except UsageError as error:
            trials.append(replace(trial, infeasible=str(error)))
            continue
        if isinstance(batch.micro, int) and shape.micro < batch.micro:
            limit = f"{shape.micro} rows per worker (batch.global {shape.global_rows} on {workers} workers)"
            trials.append(replace(trial, infeasible=f"batch.micro {batch.micro} is more than {limit}"))
        else:
            trials.append(replace(trial, shape=shape))
    for typed, reason in wrong:
        for key, value in typed.items():
            if sum(each[key] == value for each in combinations) == sum(each[key] == value for each, _ in wrong):
                raise UsageError(f"--space {reason}")
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
    """Return the cluster section that needs most CPUs, for the size of a local Ray cluster."""
    sections = [trial.config.cluster for trial in trials if trial.config is not None and trial.shape is not None]
    return max(sections, key=lambda section: section.max_workers * section.cpus_per_worker)


def samples_per_trial(typed: Config, trials: Sequence[Trial], num_rows: int) -> int:
    """Return the number of samples per trial, equal for all so that losses are comparable.

    `--train.samples N` is N; `--train.epochs E` is E x `num_rows`; `--train.steps N` is N steps of the largest global
    batch (smaller ones take more steps); without any it is STEPS of them.
    """
    largest = max(trial.shape.global_rows for trial in trials if trial.shape)
    if typed.train.samples is not None:
        return typed.train.samples
    if typed.train.epochs is not None:
        return max(largest, round(typed.train.epochs * num_rows))
    return (typed.train.steps or STEPS) * largest


def trial_config(trial: Trial, samples: int, num_rows: int, folder: Path, goal: str) -> Config:
    """Return the config of the trial's run: its length, about ten lines of metrics, no retries, maximum workers."""
    assert trial.config is not None and trial.shape is not None
    config = trial.config
    train = config.train.replace(steps=None, samples=samples, epochs=None, log_every=1, checkpoint_every=0)
    steps = total_steps(train, num_rows, trial.shape.global_rows)
    limit = config.evaluate.limit if goal == "recall" else min(config.evaluate.limit or EVAL_ROWS, EVAL_ROWS)
    return config.replace(
        train=train.replace(log_every=max(1, steps // WINDOWS)),
        evaluate=config.evaluate.replace(every=0, limit=limit),
        cluster=config.cluster.replace(workers=config.cluster.max_workers, max_failures=0),
        run=config.run.replace(name=trial.name, storage=str(folder / "trials"), resume="auto"),
    )


def warmup_warning(runs: Sequence[Config], num_rows: int, goal: str) -> str | None:
    """Return a warning if a trial ends during warm-up, for goals that depend on the loss."""
    if goal not in ("loss", "recall"):
        return None
    for run in runs:
        steps = total_steps(run.train, num_rows, resolve_batch_shape(run.batch, run.cluster.max_workers).global_rows)
        if steps <= run.optimizer.warmup_steps:
            return (
                f"{run.run.name} ends during warm-up ({steps} of {run.optimizer.warmup_steps} steps), so its {goal} is "
                "not meaningful; use longer trials (--train.samples) or fewer --optimizer.warmup-steps"
            )
    return None


def to_recipe(trial: Trial) -> Config:
    """Return the trial as a recipe, with the recipe's length and the batch as `global` and `micro`."""
    assert trial.config is not None and trial.shape is not None
    config = trial.config
    micro = "auto" if trial.shape.auto else trial.shape.micro
    return config.replace(
        batch=config.batch.replace(micro=micro, accumulation=None, global_=trial.shape.global_rows),
        run=config.run.replace(name=None, resume="auto"),
    )


# All resources are counted before a trial starts, because a trial without a CPU for its data would wait forever.
def max_demand(demands: Sequence[Demand]) -> Demand:
    """Return a demand that covers each of `demands`."""
    names = {name for demand in demands for name in demand.per_worker}
    return replace(
        demands[0],
        workers=max(demand.workers for demand in demands),
        per_worker={name: max(demand.per_worker.get(name, 0) for demand in demands) for name in names},
        data_cpus=max(demand.data_cpus for demand in demands),
    )


def trial_concurrency(
    free: Sequence[Node],
    whole: Sequence[Node],
    demand: Demand,
    wanted: int,
    pools: Sequence[Pool] = (),
    waits: bool = False,
) -> tuple[int, int]:
    """Return (concurrent trials, data CPUs per trial), with at most `wanted` trials.

    `free` and `whole` are the free and total resources per node; nodes that autoscaling can add count as free. If a
    trial fits only after other jobs release resources, one trial starts and waits. Raises ResourceError.
    """
    together = replace(demand, workers=demand.workers * wanted, data_cpus=demand.data_cpus * wanted)
    # Nodes that autoscaling can add: the pools without the nodes that are already there.
    group_of = [(node.labels or {}).get(NODE_GROUP) for node in whole]
    pooled = [node for node, group in zip(whole, group_of, strict=True) if group in {pool.name for pool in pools}]
    left = [replace(pool, most=pool.most - group_of.count(pool.name)) for pool in pools]
    reach = [*free, *max_cluster(together, pooled, left)]
    at_once = max_concurrent(demand, reach, wanted)
    if at_once == 0:
        lacking = None if waits else missing_capacity(demand, whole, pools)
        if lacking is not None:
            raise ResourceError(f"no trial fits: {lacking}")
        at_once, reach = 1, max_cluster(demand, whole, pools)
    cpus = sum(node.resources.get("CPU", 0) for node in reach if node.matches_labels(demand.data_labels)) / at_once
    taken = 0 if demand.data_labels else demand.workers * demand.per_worker.get("CPU", 0)
    return at_once, max(1, int(cpus - taken) - INPUT_TASK_CPUS)
