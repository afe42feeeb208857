"""Trials of a recipe and a search space: valid configs, rungs, starting points. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mmray.cluster.capacity import Demand, Node, Pool, max_cluster, max_concurrent
from mmray.cluster.connect import INPUT_TASK_CPUS
from mmray.config import LENGTHS, Cluster, Config
from mmray.config.search_space import Range, Space, override_settings, round_sampled, setting_value
from mmray.engine.batch import BatchShape, resolve_batch_shape, total_steps
from mmray.errors import UsageError
from mmray.report.sweep import LEARNING_GOALS
from mmray.storage.paths import AnyPath
from mmray.training.validate import unsupported_reasons

# default length, in steps of the largest global batch; of learning goals: that of the recipe
DEFAULT_STEPS = 40
# metrics lines of the shortest trial; the first is warm-up, the others give the spread
LOG_LINES = 10
EVAL_ROWS = 512  # held-out rows of a trial that is not compared by them
EVALS_PER_RUNG = 4  # points of a learning curve up to the first rung
# rows between evaluations: a forward pass takes a third of a step, so these cost 5 %
TRAINED_PER_EVALUATED = 7
# eta of successive halving: a quarter of the trials continues, with four times the samples
REDUCTION = 4
MIN_PROMOTED = 2
MAX_RUNGS = 3
MAX_GENERATIONS = 8  # of population based training
MIN_RUNG_STEPS = 4  # of the largest global batch
MIN_RUNG_WARMUPS = 2  # losses are compared after the warm-up only
# Settings that a run can change when it resumes, and that do not change the memory of a step.
CHANGEABLE = tuple(
    f"optimizer.{name}" for name in ("lr", "weight_decay", "betas", "eps", "clip_norm")
)
LR_FACTOR = 10.0  # half the width of the default range of the learning rate


@dataclass(frozen=True)
class Trial:
    """A combination of settings with its config, or the reason why it is infeasible."""

    name: str
    settings: dict[str, Any]
    config: Config
    # rows per step, micro-batch, accumulation and workers; None: infeasible
    shape: BatchShape | None = None
    infeasible: str | None = None


@dataclass(frozen=True)
class FeasibleSpace:
    """The feasible trials at the corners of a search space, and the data of all trials."""

    corners: list[Trial]
    # `data_key`: prepared sets
    data_sets: dict[str, dict[str, str | None]] = field(default_factory=dict)
    num_rows: int = 0  # largest
    held_out_rows: int = 0


def clear_length_and_derived_batch(recipe: Config, keys: Sequence[str]) -> Config:
    """Return the recipe without its length, and without its global batch if accumulation is
    searched.
    """
    return recipe.without_overridden_length_and_batch([*LENGTHS, "batch.micro", *keys])


def restore_length(trial_settings: Config, recipe: Config) -> Config:
    """Return the settings with the length of the recipe: the base of `best.yaml`."""
    length = recipe.train.model_dump(include={name.removeprefix("train.") for name in LENGTHS})
    return trial_settings.replace(train=trial_settings.train.replace(**length))


def is_shape_probe(goal: str, searched: Collection[str]) -> bool:
    """Return whether the micro-batch of each global batch is searched, instead of comparing the
    listed settings in trials.
    """
    return goal == "throughput" and set(searched) <= {"batch.global"}


def default_axes(base: Config, goal: str) -> dict[str, str]:
    """Return the space of a sweep without `--space`: the learning rate, for goals that depend on
    learning.
    """
    lr = base.optimizer.lr
    return (
        {"optimizer.lr": f"loguniform({lr / LR_FACTOR:g},{lr * LR_FACTOR:g})"}
        if goal in LEARNING_GOALS
        else {}
    )


def build_trial(
    base: Config, name: str, settings: dict[str, Any], keep_micro: bool = True
) -> Trial:
    """Return the trial of these settings. Raises UsageError for an invalid setting.

    keep_micro: whether a micro-batch above a worker's share of the global batch is infeasible,
    instead of reduced.
    """
    config = override_settings(base, settings)
    trial = Trial(name, {key: setting_value(config, key) for key in settings}, config)
    micro, workers = config.batch.micro, config.cluster.max_workers
    try:
        shape = resolve_batch_shape(config.batch, workers)
        # as in the trial
        if conflicts := unsupported_reasons(config.with_cluster(workers=workers)):
            raise UsageError("; ".join(conflicts))
        if keep_micro and isinstance(micro, int) and shape.micro_batch_size < micro:
            limit = (
                f"{shape.micro_batch_size} rows per worker (batch.global "
                f"{shape.global_batch_size} on {workers} workers)"
            )
            raise UsageError(f"batch.micro {micro} is more than {limit}")
    except UsageError as error:
        return replace(trial, infeasible=str(error))
    return replace(trial, shape=shape)


def corner_trials(base: Config, space: Space) -> list[Trial]:
    """Return trials of all listed values and both ends of each range.

    Raises UsageError if none is feasible.
    """
    keep = "batch.micro" in space.axes
    trials = [
        build_trial(base, f"c{number}", each, keep) for number, each in enumerate(space.corners())
    ]
    if all(trial.infeasible for trial in trials):
        reasons = "\n  ".join(f"{trial.settings}: {trial.infeasible}" for trial in trials)
        raise UsageError(f"no combination is feasible:\n  {reasons}")
    return trials


def parse_values(base: Config, space: Space) -> Space:
    """Return the space with the listed values as JSON data of the settings' types, as in rows of
    trials.
    """
    axes = {
        key: axis
        if isinstance(axis, Range)
        else tuple(setting_value(override_settings(base, {key: value}), key) for value in axis)
        for key, axis in space.axes.items()
    }
    return replace(space, axes=axes)


def describe_space(space: Space) -> dict[str, list[Any]]:
    """Return {setting: listed values, or the range as text} for sweep.json."""
    return {
        key: [str(axis)] if isinstance(axis, Range) else list(axis)
        for key, axis in space.axes.items()
    }


def starting_points(base: Config, space: Space) -> list[dict[str, Any]]:
    """Return the first configurations to try: the recipe's own, then other global batches with
    scaled learning rates.

    The rate follows the square root of the global batch (Malladi et al. 2022), then the batch
    itself (Goyal et al. 2017). At most half of the samples, so that the others explore. A grid has
    none.
    """
    if space.num_samples is None:
        return []
    own = {key: setting_value(base, key) for key in space.axes}
    points = [own]
    lr_range, sizes = space.axes.get("optimizer.lr"), space.axes.get("batch.global")
    if isinstance(lr_range, Range) and sizes is not None and (size := own["batch.global"]):
        ends = (
            (sizes.low, math.sqrt(sizes.low * sizes.high), sizes.high)
            if isinstance(sizes, Range)
            else ()
        )
        candidates = [round(each) for each in ends] if isinstance(sizes, Range) else list(sizes)
        for exponent in (0.5, 1.0):
            for other in sorted(candidates, key=lambda each: abs(math.log(each / size))):
                lr = own["optimizer.lr"] * (other / size) ** exponent
                clipped = round_sampled(float(min(max(lr, lr_range.low), lr_range.high)))
                points.append(own | {"batch.global": other, "optimizer.lr": clipped})
    unique = [point for number, point in enumerate(points) if point not in points[:number]]
    inside = [
        point
        for point in unique
        if all(_contains(space.axes[key], value) for key, value in point.items())
    ]
    return inside[: max(1, space.num_samples // 2)]


def _contains(axis: tuple[Any, ...] | Range, value: Any) -> bool:
    if isinstance(axis, Range):
        return isinstance(value, int | float) and axis.low <= value <= axis.high
    return value in axis


def largest_cluster(trials: Sequence[Trial]) -> Cluster:
    """Return the `cluster` settings that need most CPUs, for the size of a local Ray cluster."""
    configs = (trial.config.cluster for trial in trials if trial.shape is not None)
    return max(configs, key=lambda config: config.max_workers * config.num_cpus)


def samples_per_trial(
    settings: Config, recipe: Config, goal: str, recipe_rows: int, largest: int, num_rows: int
) -> int:
    """Return the samples of a full trial: as given, else those of the recipe, or DEFAULT_STEPS
    steps for its speed.

    recipe_rows, largest: the recipe's and the largest global batch.
    """
    train = settings.train
    if goal in LEARNING_GOALS and (train.steps, train.samples, train.epochs) == (None, None, None):
        return max(largest, total_steps(recipe.train, num_rows, recipe_rows) * recipe_rows)
    if train.samples is not None:
        return train.samples
    if train.epochs is not None:
        return max(largest, round(train.epochs * num_rows))
    return (train.steps or DEFAULT_STEPS) * largest


def rungs_of(samples: int, shortest: int) -> tuple[int, ...]:
    """Return the samples after which trials are compared: `samples`, and parts of it of at least
    `shortest`.
    """
    rungs: tuple[int, ...] = (samples,)
    while len(rungs) < MAX_RUNGS and rungs[0] // REDUCTION >= shortest:
        rungs = (rungs[0] // REDUCTION, *rungs)
    return rungs


def even_rungs(samples: int, shortest: int, most: int) -> tuple[int, ...]:
    """Return up to `most` rungs in equal distances of at least `shortest` samples."""
    count = max(1, min(most, samples // shortest))
    return tuple(samples * number // count for number in range(1, count + 1))


def num_promoted(count: int) -> int:
    """Return how many of the trials that reached a rung continue: the best quarter, but at least
    two.
    """
    return min(count, max(MIN_PROMOTED, count // REDUCTION))


def planned_samples(count: int, rungs: Sequence[int], scheduler: str) -> int:
    """Return the samples of `count` trials; of ASHA about as many as under successive halving."""
    if scheduler == "pbt":
        return count * rungs[-1]
    total = 0
    for samples, before in zip(rungs, (0, *rungs), strict=False):
        total += count * (samples - before)
        count = num_promoted(count)
    return total


class Share(NamedTuple):
    """How many trials run at a time, and what each has then;

    None: as a run alone on the cluster.
    """

    num_trials: int = 1
    decode_actors: int | None = None
    cpus_per_worker: float | None = None  # of `auto`


@dataclass(frozen=True)
class SweepPlan:
    """What every trial trains and measures; the trials get it from the driver."""

    base: Config
    goal: str
    rungs: tuple[int, ...]  # samples; the last is the length of a full trial
    folder: AnyPath
    # global batch of the recipe: unit of `warmup_steps`, and batch of the held-out loss
    recipe_rows: int
    held_out_rows: int = 0
    keep_micro: bool = True  # see `build_trial`
    # settings with a range; their values are rounded to keep recipes readable
    sampled: tuple[str, ...] = ()
    on_gpus: bool = False
    # the worker is a process of this machine, as in `mmray train`, without Ray Train
    local: bool = False
    share: Share = field(default_factory=Share)
    # `data_key`: prepared sets
    data_sets: dict[str, dict[str, str | None]] = field(default_factory=dict)

    @property
    def learning(self) -> bool:
        return self.goal in LEARNING_GOALS

    @property
    def warmup_samples(self) -> int:
        return self.base.optimizer.warmup_steps * self.recipe_rows

    def is_recipe(self, trial: Trial) -> bool:
        """Return whether the trial has the recipe's own settings."""
        return all(
            round_sampled(setting_value(self.base, key)) == round_sampled(value)
            for key, value in trial.settings.items()
        )

    def trial(self, name: str, settings: dict[str, Any]) -> Trial:
        settings = {
            key: round_sampled(value) if key in self.sampled else value
            for key, value in settings.items()
        }
        try:
            return build_trial(self.base, name, settings, self.keep_micro)
        except UsageError as error:
            return Trial(name, settings, self.base, infeasible=str(error))

    def config(self, trial: Trial, samples: int, cooldown: bool = False) -> Config:
        """Return the config of a trial's run up to `samples`, with the maximum of workers.

        A lost node restarts the run once; on one machine a lost worker ends it, because the trial
        is the cause. For learning goals: the warm-up in samples, a constant rate after it so that
        rungs are comparable, and with `cooldown` a linear decay after the samples of the last rung.
        """
        assert trial.shape is not None
        config, rows = trial.config, trial.shape.global_batch_size
        max_failures = 0 if self.local else min(1, config.cluster.max_failures)
        shortest = math.ceil(self.rungs[0] / rows)
        train = config.train.replace(steps=None, samples=samples, epochs=None, checkpoint_every=0)
        evaluate = config.evaluate.replace(
            every=0, limit=min(config.evaluate.limit or EVAL_ROWS, EVAL_ROWS)
        )
        optimizer = config.optimizer
        if self.learning:
            loss_batch = config.evaluate.loss_batch or self.recipe_rows
            evaluated = min(self.held_out_rows, config.evaluate.limit or self.held_out_rows)
            every = max(
                shortest // EVALS_PER_RUNG, math.ceil(TRAINED_PER_EVALUATED * evaluated / rows)
            )
            evaluate = config.evaluate.replace(
                every=min(max(1, every), shortest), loss_batch=loss_batch
            )
            warmup_steps = math.ceil(optimizer.warmup_steps * self.recipe_rows / rows)
            optimizer = optimizer.replace(
                schedule="cooldown" if cooldown else "constant", warmup_steps=warmup_steps
            )
        return config.replace(
            train=train.replace(log_every=max(1, shortest // LOG_LINES)),
            evaluate=evaluate,
            optimizer=optimizer,
            data=config.data.replace(**self.data_sets.get(data_key(config), {})),
            cluster=config.cluster.replace(
                workers=config.cluster.max_workers, max_failures=max_failures
            ),
            run=config.run.replace(
                name=trial.name, storage=str(self.folder / "trials"), resume="auto"
            ),
        )

    def cooldown_samples(self, trial: Trial) -> int:
        """Return the samples of a run of schedule `cooldown` whose rate decays after the samples of
        the last rung.
        """
        from mmray.engine.optimizer import COOLDOWN_FRACTION  # imports torch

        assert trial.shape is not None
        rows, full = trial.shape.global_batch_size, self.rungs[-1]
        warmup = self.config(trial, full).optimizer.warmup_steps
        steps = math.ceil(full / rows)
        return math.ceil((steps - COOLDOWN_FRACTION * warmup) / (1 - COOLDOWN_FRACTION)) * rows

    def can_cool_down(self, trial: Trial) -> bool:
        """Return whether the rate of a full trial can decay: not before the end of its warm-up."""
        return self.learning and self.cooldown_samples(trial) > self.rungs[-1]

    def recipe(self, trial: Trial) -> Config:
        """Return the trial as a recipe, with the samples of the recipe and the batch as `global`
        and `micro`.
        """
        assert trial.shape is not None
        config, micro = trial.config, "auto" if trial.shape.auto else trial.shape.micro_batch_size
        ratio = self.recipe_rows / trial.shape.global_batch_size
        steps = config.train.steps and math.ceil(config.train.steps * ratio)
        optimizer = config.optimizer.replace(
            warmup_steps=math.ceil(config.optimizer.warmup_steps * ratio)
        )
        return config.replace(
            train=config.train.replace(steps=steps),
            optimizer=optimizer.replace(schedule="cooldown") if self.learning else optimizer,
            batch=config.batch.replace(
                micro=micro, accumulation=None, global_=trial.shape.global_batch_size
            ),
            run=config.run.replace(name=None, resume="auto"),
        )


def data_key(config: Config) -> str:
    """Return what the prepared sets of a trial depend on."""
    return f"{config.data.train} {config.data.eval} {config.prepare.model_dump_json()}"


def build_plan(
    settings: Config,
    base: Config,
    space: Space,
    goal: str,
    feasible: FeasibleSpace,
    scheduler: str = "halving",
    folder: AnyPath = Path(),
    recipe_rows: int | None = None,
) -> SweepPlan:
    """Return the plan of a sweep. `settings` has the length of a trial, if the user gave one; see
    `SweepPlan`.

    recipe_rows: global batch of the recipe, which `base` does not have if accumulation is searched.
    """
    sizes = [trial.shape.global_batch_size for trial in feasible.corners if trial.shape]
    if (
        base.batch.global_ is not None
        or "batch.accumulation" not in space.axes
        or recipe_rows is None
    ):
        recipe = build_trial(base, "recipe", {}, keep_micro=False).shape
        recipe_rows = recipe.global_batch_size if recipe else min(sizes)
    samples = samples_per_trial(settings, base, goal, recipe_rows, max(sizes), feasible.num_rows)
    shortest = samples
    if goal in LEARNING_GOALS:
        warmup_steps = max(trial.config.optimizer.warmup_steps for trial in feasible.corners)
        shortest = max(MIN_RUNG_WARMUPS * warmup_steps * recipe_rows, MIN_RUNG_STEPS * max(sizes))
    rungs = (
        even_rungs(samples, shortest, MAX_GENERATIONS)
        if scheduler == "pbt"
        else rungs_of(samples, shortest)
    )
    keep_micro = "batch.micro" in space.axes
    sampled = tuple(key for key, axis in space.axes.items() if isinstance(axis, Range))
    rows, sets = (recipe_rows, feasible.held_out_rows), feasible.data_sets
    return SweepPlan(base, goal, rungs, folder, *rows, keep_micro, sampled, data_sets=sets)


def warmup_warning(plan: SweepPlan) -> str | None:
    """Return a warning if a full trial ends during warm-up, or has no rung before its end."""
    if plan.learning and plan.rungs[-1] <= plan.warmup_samples:
        return (
            f"trials end during warm-up ({plan.rungs[-1]:,} of {plan.warmup_samples:,} samples), "
            f"so their {plan.goal} "
            "is not meaningful; use longer trials (--train.samples) or fewer "
            "--optimizer.warmup-steps"
        )
    if plan.learning and len(plan.rungs) == 1:
        return (
            f"trials are not compared before their end, because {plan.rungs[0]:,} samples are too "
            "few for two rungs "
            f"(the first has at least {MIN_RUNG_WARMUPS} warm-ups and {MIN_RUNG_STEPS} steps); use "
            "longer trials "
            "(--train.samples)"
        )
    return None


def larger_than_out_of_memory(trial: Trial, rows: Sequence[dict[str, Any]]) -> str | None:
    """Return why a trial needs at least the memory of one that ran out of it before its first rung;

    None if unknown.
    """

    def other(settings: dict[str, Any]) -> dict[str, Any]:
        free = (*CHANGEABLE, "optimizer.warmup_steps")
        return {
            key: value
            for key, value in settings.items()
            if key not in free and not key.startswith("batch.")
        }

    assert trial.shape is not None
    for row in rows:
        same = other(row["settings"]) == other(trial.settings)
        if (
            row["status"] == "out_of_memory"
            and not row["rungs"]
            and same
            and not trial.shape.auto
            and trial.shape.micro_batch_size >= row["micro"]
            and trial.shape.world_size == row["workers"]
        ):
            return (
                f"not started: {row['trial']} ran out of memory with micro-batches of "
                f"{row['micro']} rows"
            )
    return None


def cpus_of_share(cpus: float, num_trials: int, demand: Demand) -> float:
    """Return the CPUs of each worker on one machine whose CPUs that many trials share; at
    least 1.
    """
    return float(max(1, int((cpus / num_trials - demand.data_cpus) / demand.workers)))


def trial_concurrency(
    free: Sequence[Node],
    total: Sequence[Node],
    demand: Demand,
    wanted: int,
    pools: Sequence[Pool] = (),
) -> tuple[int, int]:
    """Return (concurrent trials, decode actors per trial): a trial without a CPU for its data would
    wait forever.
    """
    combined = replace(demand, workers=demand.workers * wanted, data_cpus=demand.data_cpus * wanted)
    nodes = max_cluster(combined, free, pools)
    num_concurrent = max_concurrent(demand, nodes, wanted)
    if num_concurrent == 0:  # the trial waits until other jobs have ended
        num_concurrent, nodes = 1, max_cluster(demand, total, pools)
    cpus = sum(
        node.resources.get("CPU", 0)
        for node in nodes
        if node.matches_labels(demand.data_label_selector)
    )
    worker_cpus = (
        0 if demand.data_label_selector else demand.workers * demand.per_worker.get("CPU", 0)
    )
    return num_concurrent, max(1, int(cpus / num_concurrent - worker_cpus) - INPUT_TASK_CPUS)
