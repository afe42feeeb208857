"""Trials of a search space: their settings, and the configs of their runs. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmray.builtin import KINDS
from mmray.config import Cluster, Config, Train
from mmray.config.search_space import Range, Space, override_settings, setting_value
from mmray.engine.batch import BatchShape, resolve_batch_shape, total_steps
from mmray.errors import UsageError
from mmray.storage.paths import AnyPath
from mmray.sweep_files import GOALS
from mmray.training.validate import unsupported_reasons
from mmray.tuning.rungs import rungs_up_to

TOKENS = "batch.tokens"
# Which tokens of held-out conversations are targets, and which conversations are left out.
_SETTINGS_OF_TARGETS = ("data.targets", "data.reasoning", "model.inputs.max_tokens")
# Length of a trial for throughput, in steps of the largest global batch.
DEFAULT_STEPS = 40
# Held-out rows of a trial for throughput.
EVAL_ROWS = 512
# Half the width of the default range of the learning rate.
LR_FACTOR = 10.0
# Lines of metrics.jsonl up to the first rung.
LOG_LINES = 10
# Evaluations up to the first rung.
EVALS_PER_RUNG = 4
# Trained rows between evaluations, per evaluated row: a forward pass takes a third of a step, so
# evaluations cost 5 %.
TRAINED_PER_EVALUATED = 7
# Trials are compared after their warm-up only.
MIN_RUNG_WARMUPS = 2
MIN_RUNG_STEPS = 4


def parse_budget(text: str | None) -> float | None:
    """Return the seconds of a value of `--budget`, such as `2h`, `30m` or `90s`; None without one.

    Raises:
        UsageError: The text has another form, or the number is 0.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--budget {text}: write a time such as 2h, 30m or 90s")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True)
class SweepRequest:
    """Recipe, search space, goal and budget of a sweep, as the user has requested it.

    Attributes:
        base: The recipe, with its own training length (steps, samples or epochs), for best.yaml.
        length: Section `train` with the training length of a trial; without any it is that of the
            recipe.
        space: Lists and ranges by searched setting.
        goal: `throughput` (samples/s), `loss` (held-out) or `recall` (recall@1).
        concurrency: Trials at a time; None: one on a single machine, as many as fit on a cluster.
        budget_s: Largest number of seconds of all commands of the sweep; None: no limit.
    """

    base: Config
    length: Train
    space: Space
    goal: str
    concurrency: int | None = None
    budget_s: float | None = None


@dataclass(frozen=True)
class Trial:
    """A combination of searched settings with the config to train, or the reason why it is
    infeasible.

    Attributes:
        name: For example `t001`.
        settings: The searched settings and their values as JSON data, such as {"optimizer.lr":
            0.001}.
        config: The recipe with these settings.
        shape: Global batch, micro-batch and workers; None if the trial is infeasible.
        infeasible: The reason; None if the trial is feasible.
    """

    name: str
    settings: dict[str, Any]
    config: Config
    shape: BatchShape | None = None
    infeasible: str | None = None


@dataclass(frozen=True)
class TrialData:
    """The prepared data of all trials.

    Attributes:
        sets: The prepared sets, as values of the settings `data.train` and `data.eval`.
        num_rows: Rows of an epoch.
    """

    sets: dict[str, str] = field(default_factory=dict)
    num_rows: int = 0
    held_out_rows: int = 0


def default_axes(base: Config, goal: str) -> dict[str, str] | None:
    """Return the search space of a sweep without `--space`, as texts by setting.

    It is the learning rate for `loss` and `recall`, `batch.tokens` for the throughput of a
    vision-language model, and None for others, whose shapes are timed on synthetic batches.
    """
    if goal != "throughput":
        lr = base.optimizer.lr
        return {"optimizer.lr": f"loguniform({lr / LR_FACTOR:g},{lr * LR_FACTOR:g})"}
    if not base.model.generates_text:
        return None
    longest = base.max_row_tokens
    return {TOKENS: ",".join(str(longest * 2**power) for power in range(4))}


def build_trial(base: Config, name: str, settings: dict[str, Any]) -> Trial:
    """Return the trial of a combination of settings.

    Valid settings that contradict each other make it infeasible.

    Args:
        settings: Value by searched setting, such as {"optimizer.lr": 0.001}.

    Raises:
        UsageError: A setting does not exist or has an invalid value.
    """
    config = override_settings(base, settings)
    typed = {key: setting_value(config, key) for key in settings}
    workers = config.cluster.max_workers
    try:
        shape = resolve_batch_shape(config.batch, workers, config.max_row_tokens)
    except UsageError as error:
        return Trial(name, typed, config, infeasible=str(error))
    conflicts = unsupported_reasons(config.with_cluster(workers=workers))
    if conflicts:
        return Trial(name, typed, config, infeasible="; ".join(conflicts))
    micro = typed.get("batch.micro")
    if isinstance(micro, int) and shape.micro_batch_size < micro:
        reason = (
            f"batch.micro {micro} is more than {shape.micro_batch_size} rows per worker "
            f"(batch.global {shape.global_batch_size} on {workers} workers)"
        )
        return Trial(name, typed, config, infeasible=reason)
    return Trial(name, typed, config, shape)


def corner_trials(base: Config, space: Space, goal: str) -> list[Trial]:
    """Return trials of all listed values and both ends of each range, to check them before a sweep.

    Raises:
        UsageError: A setting cannot be searched, or no combination is feasible.
    """
    for key in space.axes:
        if reason := _refused_reason(base, key, goal):
            raise UsageError(f"--space {key}: {reason}")
    corners = space.corners()
    trials = [build_trial(base, f"c{number}", each) for number, each in enumerate(corners)]
    if all(trial.infeasible for trial in trials):
        reasons = "\n  ".join(f"{trial.settings}: {trial.infeasible}" for trial in trials)
        raise UsageError(f"no combination is feasible:\n  {reasons}")
    return trials


def _refused_reason(base: Config, key: str, goal: str) -> str | None:
    """Return why a setting cannot be searched: without effect in a trial, or what is compared would
    differ; None if it can.
    """
    if key.startswith(("prepare.", "data.eval")) or key == "data.train":
        return "trials are compared on one set; start a command for each set"
    if key == "model.weights" and base.model.kind in KINDS and KINDS[base.model.kind].hf_type:
        return (
            "weights define image size, preprocessing and tokenizer, and all trials would have "
            "those of the recipe; start a command for each"
        )
    if GOALS[goal].eval_metric is None:
        return None
    if key in ("batch.micro", "batch.accumulation", TOKENS):
        return (
            f"--goal {goal} depends on the global batch, not on how it is divided; search "
            "batch.global, or find the fastest division with --goal throughput"
        )
    if key.startswith("evaluate."):
        return f"trials are compared by one evaluation; give it once, as --{key} VALUE"
    if key in ("optimizer.schedule", "optimizer.final_lr_fraction"):
        return (
            f"--goal {goal} compares trials at a constant learning rate after the warm-up, so it "
            "has no effect; compare runs of `mmray train`"
        )
    if key == "objective.kind" and goal == "loss":
        return "losses of two objectives are not comparable; use --goal recall"
    if key in _SETTINGS_OF_TARGETS and base.model.generates_text:
        return (
            "held-out losses of trials would be of different tokens, so not comparable; compare "
            "the answers of runs of `mmray train` (evaluate.num_generations)"
        )
    return None


def typed_space(base: Config, space: Space) -> Space:
    """Return the space with listed values of the types of the settings. Raises UsageError."""
    axes = dict(space.axes)
    for key, axis in space.axes.items():
        if not isinstance(axis, Range):
            configs = [override_settings(base, {key: value}) for value in axis]
            axes[key] = tuple(setting_value(config, key) for config in configs)
    return replace(space, axes=axes)


def describe_space(space: Space) -> dict[str, list[Any]]:
    """Return values or ranges (texts) by setting, as JSON data for sweep.json."""
    return {
        key: [str(axis)] if isinstance(axis, Range) else list(axis)
        for key, axis in space.axes.items()
    }


def largest_cluster(trials: Sequence[Trial]) -> Cluster:
    """Return the `cluster` settings of the trial with most CPUs, to start a local Ray with."""
    configs = [trial.config.cluster for trial in trials if trial.shape is not None]
    return max(configs, key=lambda config: config.max_workers * config.num_cpus)


@dataclass(frozen=True)
class SweepPlan:
    """Recipe, goal, rungs and data of a sweep; the driver sends it to the trials.

    `trial(name, settings)` returns the Trial of a combination of settings, and `run_config(trial,
    samples)` the config with which it trains up to a number of samples.

    Attributes:
        request: The recipe, to which trials add their settings, the search space and the goal.
        rungs: Numbers of samples after which trials are compared; the last is the length of a full
            trial.
        data: The prepared data of all trials.
        folder: Folder of the sweep.
        local: Whether the worker is a process of this machine, as in `mmray train`, without Ray
            Train.
    """

    request: SweepRequest
    rungs: tuple[int, ...]
    data: TrialData = TrialData()
    folder: AnyPath = Path()
    local: bool = False

    @property
    def is_learned(self) -> bool:
        """Whether trials are compared by held-out loss or recall, not by their speed."""
        return GOALS[self.request.goal].eval_metric is not None

    @property
    def recipe_rows(self) -> int:
        """Rows of the recipe's global batch: its warm-up is so many steps of this size, and the
        held-out loss of all trials is computed within groups of this many rows unless
        `evaluate.loss_batch` is set.
        """
        return own_global_batch_size(self.request.base)

    @property
    def warmup_samples(self) -> int:
        """Number of samples of the recipe's learning-rate warm-up."""
        return self.request.base.optimizer.warmup_steps * self.recipe_rows

    def is_recipe(self, settings: dict[str, Any]) -> bool:
        """Return whether the searched settings of a trial have the values of the recipe."""
        own = {key: setting_value(self.request.base, key) for key in settings}
        return self.request.space.round(own) == self.request.space.round(settings)

    def trial(self, name: str, settings: dict[str, Any]) -> Trial:
        """Return the trial of a combination of settings."""
        rounded = self.request.space.round(settings)
        try:
            return build_trial(self.request.base, name, rounded)
        except UsageError as error:
            return Trial(name, rounded, self.request.base, infeasible=str(error))

    def run_config(self, trial: Trial, samples: int) -> Config:
        """Return the config with which a trial trains up to a number of samples.

        It has the largest number of workers that `cluster.workers` allows, such as 4 of `1-4`. If a
        node is lost the workers are restarted once (not if `cluster.max_failures` is 0); on one
        machine a lost worker ends the run, because the trial is then the likely cause. For the
        goals `loss` and `recall` the learning rate is constant after the warm-up, and the run is
        evaluated at least once up to the first rung.

        Args:
            samples: Samples (rows) from the start of the run after which it ends, a rung.
        """
        assert trial.shape is not None
        config = trial.config
        first_rung_steps = math.ceil(self.rungs[0] / trial.shape.global_batch_size)
        if self.is_learned:
            config = self._comparable(trial, first_rung_steps)
        else:
            limit = min(EVAL_ROWS, config.evaluate.limit or EVAL_ROWS)
            config = config.replace(
                evaluate=config.evaluate.replace(every=0, limit=limit, where="training")
            )
        max_failures = 0 if self.local else min(1, config.cluster.max_failures)
        return config.replace(
            train=config.train.replace(
                steps=None,
                samples=samples,
                epochs=None,
                checkpoint_every=0,
                log_every=max(1, first_rung_steps // LOG_LINES),
            ),
            data=config.data.replace(**self.data.sets),
            cluster=config.cluster.replace(
                workers=config.cluster.max_workers, max_failures=max_failures
            ),
            run=config.run.replace(
                name=trial.name, storage=str(self.folder / "trials"), resume="auto"
            ),
        )

    def _comparable(self, trial: Trial, first_rung_steps: int) -> Config:
        """Return the config of a trial whose held-out values are comparable at rungs.

        The learning rate is constant after the warm-up. A contrastive loss grows with the rows
        among which it is computed, so these are the same in all trials.
        """
        assert trial.shape is not None
        evaluate = trial.config.evaluate
        return trial.config.replace(
            evaluate=evaluate.replace(
                every=self._steps_between_evaluations(trial, first_rung_steps),
                where="training",
                loss_batch=evaluate.loss_batch or self.recipe_rows,
            ),
            optimizer=trial.config.optimizer.replace(
                schedule="constant",
                warmup_steps=_as_many_samples(
                    trial.config.optimizer.warmup_steps, self.request.base, trial.shape
                ),
            ),
        )

    def _steps_between_evaluations(self, trial: Trial, first_rung_steps: int) -> int:
        assert trial.shape is not None
        held_out_rows = self.data.held_out_rows
        evaluated = min(held_out_rows, trial.config.evaluate.limit or held_out_rows)
        affordable = math.ceil(TRAINED_PER_EVALUATED * evaluated / trial.shape.global_batch_size)
        every = max(1, first_rung_steps // EVALS_PER_RUNG, affordable)
        return min(every, first_rung_steps)

    def best_recipe(self, trial: Trial) -> Config:
        """Return the recipe of the sweep with the settings of a trial, which trains on as many
        samples as the recipe without them. For the goals `loss` and `recall` its learning rate
        schedule is `cooldown`, and its held-out loss is computed among as many rows as in trials.
        """
        assert trial.shape is not None
        config = as_recipe(trial.config, self.request.base, trial.shape)
        if not self.is_learned:
            return config
        loss_batch = config.evaluate.loss_batch or self.recipe_rows
        return config.replace(
            optimizer=config.optimizer.replace(schedule="cooldown"),
            evaluate=config.evaluate.replace(loss_batch=loss_batch),
        )


def own_global_batch_size(recipe: Config) -> int:
    """Return the global batch of a recipe, with the largest number of its workers."""
    return resolve_batch_shape(recipe.batch, recipe.cluster.max_workers).global_batch_size


def as_recipe(config: Config, base: Config, shape: BatchShape) -> Config:
    """Return measured settings as a recipe that trains on as many samples as the recipe of the
    sweep: `train.steps` and the warm-up are scaled.

    Args:
        config: The recipe of the sweep with the measured settings.
        base: The recipe of the sweep.
        shape: The measured global batch and micro-batch, which become the section `batch`.
    """
    train = config.train
    if train.steps is not None:
        train = train.replace(steps=_as_many_samples(train.steps, base, shape))
    warmup_steps = _as_many_samples(config.optimizer.warmup_steps, base, shape)
    return config.replace(
        train=train,
        optimizer=config.optimizer.replace(warmup_steps=warmup_steps),
        batch=shape.to_settings(config.batch).replace(accumulation=None),
        run=config.run.replace(name=None, resume="auto"),
    )


def _as_many_samples(steps: int, base: Config, shape: BatchShape) -> int:
    """Return the steps that have as many samples as `steps` of the recipe `base`."""
    return math.ceil(steps * own_global_batch_size(base) / shape.global_batch_size)


def build_plan(request: SweepRequest, trials: Sequence[Trial], data: TrialData) -> SweepPlan:
    """Return the plan of a sweep, with the rungs.

    Args:
        trials: Feasible trials at the corners of the space, for the largest batch and warm-up.
        data: The prepared data, for the rows of an epoch.
    """
    base = request.base
    largest = max(trial.shape.global_batch_size for trial in trials if trial.shape)
    plan = SweepPlan(request, (), data)
    recipe_rows = plan.recipe_rows
    length = request.length
    has_length = (length.steps, length.samples, length.epochs) != (None, None, None)
    if not plan.is_learned:
        steps = total_steps(length, data.num_rows, largest) if has_length else DEFAULT_STEPS
        return replace(plan, rungs=(length.samples or steps * largest,))
    train = length if has_length else base.train
    samples = train.samples or total_steps(train, data.num_rows, recipe_rows) * recipe_rows
    warmup_steps = max(trial.config.optimizer.warmup_steps for trial in trials)
    min_samples = max(MIN_RUNG_WARMUPS * warmup_steps * recipe_rows, MIN_RUNG_STEPS * largest)
    return replace(plan, rungs=rungs_up_to(max(samples, largest), min_samples))


def warmup_warning(plan: SweepPlan) -> str | None:
    """Return a warning if the trials of a sweep are too short.

    A trial of the full length may end during the warm-up of the learning rate, or it may be too
    short for a comparison before its end, which would end bad trials early.

    Returns:
        A sentence with advice; None if there is nothing to warn about.
    """
    if not plan.is_learned:
        return None
    if plan.rungs[-1] <= plan.warmup_samples:
        return (
            f"trials end during warm-up ({plan.rungs[-1]:,} of {plan.warmup_samples:,} samples), "
            f"so their {plan.request.goal} is not meaningful; use longer trials (--train.samples) "
            "or fewer --optimizer.warmup-steps"
        )
    if len(plan.rungs) == 1:
        return (
            f"trials are not compared before their end, because {plan.rungs[0]:,} samples are too "
            f"few for two rungs (the first has at least {MIN_RUNG_WARMUPS} warm-ups and "
            f"{MIN_RUNG_STEPS} steps); use longer trials (--train.samples)"
        )
    return None
