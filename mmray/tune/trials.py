"""From a recipe and a space to trials: each a whole config that is valid, or the reason why it cannot be.

Pure, and done before Ray starts: a misspelt setting costs a second, not a sweep.
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

STEPS = 40  # of the largest global batch, where no length is given
WINDOWS = 10  # lines of metrics.jsonl in a trial: the first warms up, the others show the spread
EVAL_ROWS = 512  # held-out rows scored at a trial's end, unless recall is the goal


@dataclass(frozen=True)
class Trial:
    """One combination. `config` is the recipe with its settings; `infeasible` says why it cannot be run."""

    name: str
    settings: dict[str, Any]
    config: Config | None
    shape: BatchShape | None
    infeasible: str | None = None


def opened(recipe: Config, keys: Sequence[str]) -> Config:
    """The recipe with those settings emptied that a sweep chooses anew, so that what is typed shows.

    These are its length, and its global batch where accumulation is searched: that follows, then, from the rest.
    """
    return recipe.without_conflicting([*LENGTHS, "batch.micro", *keys])


def closed(typed: Config, recipe: Config) -> Config:
    """The config with the recipe's own length again: what `best.yaml` starts from."""
    lengths = {name: getattr(recipe.train, name) for name in ("steps", "samples", "epochs")}
    return typed.replace(train=typed.train.replace(**lengths))


def trials_of(base: Config, space: Space) -> list[Trial]:
    """A trial for each combination, numbered in order.

    A value that is wrong in every combination it stands in raises UsageError; one that is wrong in some only makes
    those infeasible, as does batch arithmetic that cannot be.
    """
    trials, wrong = [], []
    for number, typed in enumerate(space.combinations(), 1):
        try:
            config = with_settings(base, typed)
        except UsageError as error:
            wrong.append((typed, error))
            trials.append(Trial(f"t{number:03}", typed, None, None, str(error)))
            continue
        settings = {key: setting_value(config, key) for key in typed}
        trials.append(_shaped(Trial(f"t{number:03}", settings, config, None)))
    _raise_where_always_wrong(space.combinations(), wrong)
    if all(trial.infeasible for trial in trials):
        reasons = "\n  ".join(f"{trial.settings}: {trial.infeasible}" for trial in trials)
        raise UsageError(f"no combination can be run:\n  {reasons}")
    return trials


def _raise_where_always_wrong(all_typed: list[dict[str, Any]], wrong: list[tuple[dict[str, Any], UsageError]]) -> None:
    for typed, error in wrong:
        for key, value in typed.items():
            here = sum(other[key] == value for other in all_typed)
            if here == sum(other[key] == value for other, _ in wrong):
                raise UsageError(f"--space {error}")


def _shaped(trial: Trial) -> Trial:
    """The trial with its batch shape, or with why there is none."""
    assert trial.config is not None
    batch, workers = trial.config.batch, trial.config.cluster.max_workers
    try:
        shape = resolve_batch_shape(batch, workers)
    except UsageError as error:
        return replace(trial, infeasible=str(error))
    if isinstance(batch.micro, int) and shape.micro < batch.micro:
        share = f"a worker's share of {shape.global_rows} rows over {workers} workers is {shape.micro}"
        return replace(trial, infeasible=f"batch.micro {batch.micro}: {share}")
    return replace(trial, shape=shape)


def searched(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """{setting: the values that the trials give it}, in order; of a range, those that were drawn."""
    space: dict[str, list[Any]] = {}
    for trial in trials:
        for key, value in trial.settings.items():
            values = space.setdefault(key, [])
            if value not in values:
                values.append(value)
    return space


def widest(trials: Sequence[Trial]) -> Cluster:
    """The cluster section that asks for most CPUs: a Ray started on this machine must hold it."""
    sections = [trial.config.cluster for trial in trials if trial.config is not None and trial.shape is not None]
    return max(sections, key=lambda section: section.max_workers * section.cpus_per_worker)


def samples_per_trial(typed: Config, trials: Sequence[Trial], num_rows: int) -> int:
    """Rows that each trial trains, the same for all, so that their losses can be compared.

    `--train.samples N` is N; `--train.epochs E` is E x `num_rows`; `--train.steps N` is N steps of the largest global
    batch (smaller ones take more steps); without any it is STEPS of them.
    """
    largest = max(trial.shape.global_rows for trial in trials if trial.shape)
    if typed.train.samples is not None:
        return typed.train.samples
    if typed.train.epochs is not None:
        return max(largest, round(typed.train.epochs * num_rows))
    return (typed.train.steps or STEPS) * largest


def as_run(trial: Trial, samples: int, num_rows: int, folder: Path, goal: str) -> Config:
    """The config of the trial's run: its length, about ten lines of metrics, no retry, its place in the sweep.

    An elastic recipe trains with its most workers, all the time: those are what the trial's row says.
    """
    assert trial.config is not None and trial.shape is not None
    config = trial.config
    train = config.train.replace(steps=None, samples=samples, epochs=None, log_every=1, checkpoint_every=0)
    steps = total_steps(train, num_rows, trial.shape.global_rows)
    limit = config.evaluate.limit
    if goal != "recall":
        limit = min(limit or EVAL_ROWS, EVAL_ROWS)
    return config.replace(
        train=train.replace(log_every=max(1, steps // WINDOWS)),
        evaluate=config.evaluate.replace(every=0, limit=limit),
        cluster=config.cluster.replace(workers=config.cluster.max_workers, max_failures=0),
        run=config.run.replace(name=trial.name, storage=str(folder / "trials"), resume="auto"),
    )


def warm_up_doubt(runs: Sequence[Config], num_rows: int, goal: str) -> str | None:
    """What to say where a trial ends before its warm-up does: its loss says little of the settings then."""
    if goal not in ("loss", "recall"):
        return None
    for run in runs:
        steps = total_steps(run.train, num_rows, resolve_batch_shape(run.batch, run.cluster.max_workers).global_rows)
        if steps <= run.optimizer.warmup_steps:
            return (
                f"{run.run.name} takes {steps} steps, all of them in the warm-up of {run.optimizer.warmup_steps}: its "
                f"{goal} says little; ask for longer trials (--train.samples) or less --optimizer.warmup-steps"
            )
    return None


def best_recipe(trial: Trial) -> Config:
    """The trial as a recipe: the recipe's own length, its batch as `global` and `micro`, the name left to the run."""
    assert trial.config is not None and trial.shape is not None
    config = trial.config
    micro = "auto" if trial.shape.auto else trial.shape.micro
    return config.replace(
        batch=config.batch.replace(micro=micro, accumulation=None, global_=trial.shape.global_rows),
        run=config.run.replace(name=None, resume="auto"),
    )


# How many trials a cluster holds side by side; pure.
#
# A trial that gets its training workers but no CPU for its data waits for ever, in silence; so room for all of it is
# counted first. The trial's own driver takes no CPU: it sits on the head beside the command's.
def largest(demands: Sequence[Demand]) -> Demand:
    """A demand that holds each of these."""
    names = {name for demand in demands for name in demand.per_worker}
    return replace(
        demands[0],
        workers=max(demand.workers for demand in demands),
        per_worker={name: max(demand.per_worker.get(name, 0) for demand in demands) for name in names},
        data_cpus=max(demand.data_cpus for demand in demands),
    )


def room_for(
    free: Sequence[Node],
    whole: Sequence[Node],
    demand: Demand,
    wanted: int,
    pools: Sequence[Pool] = (),
    waits: bool = False,
) -> tuple[int, int]:
    """(trials at a time, CPUs that each then has for data actors), up to `wanted` trials.

    `free` is what is free on the nodes, `whole` all that they have; nodes that the pools have yet to add count as free.
    Where one trial has room once others let go of theirs, one is tried: it waits as a run does. Raises ResourceError.
    """
    together = replace(demand, workers=demand.workers * wanted, data_cpus=demand.data_cpus * wanted)
    reach = [*free, *to_come(together, whole, pools)]
    at_once = max_concurrent(demand, reach, wanted)
    if at_once == 0:
        lacking = None if waits else missing_capacity(demand, whole, pools)
        if lacking is not None:
            raise ResourceError(f"not one trial has room: {lacking}")
        at_once, reach = 1, max_cluster(demand, whole, pools)
    cpus = sum(node.resources.get("CPU", 0) for node in reach if node.matches_labels(demand.data_labels)) / at_once
    taken = 0 if demand.data_labels else demand.workers * demand.per_worker.get("CPU", 0)
    return at_once, max(1, int(cpus - taken) - INPUT_TASK_CPUS)


def to_come(demand: Demand, here: Sequence[Node], pools: Sequence[Pool]) -> list[Node]:
    """The nodes that the pools may add to those that are here, as far as the demand could use them."""
    group_of = [(node.labels or {}).get(NODE_GROUP) for node in here]
    theirs = [node for node, group in zip(here, group_of, strict=True) if group in {pool.name for pool in pools}]
    left = [replace(pool, most=pool.most - group_of.count(pool.name)) for pool in pools]
    return max_cluster(demand, theirs, left)
