"""Trials as trials of Ray Tune, which starts, schedules and stops them. Each is a run of
`mmray train`.

A trial trains to its next rung, ends its workers with a checkpoint, reports, and resumes if it
continues.

`Tuner.restore` is not used, because it does not restore the rungs of the scheduler and reads
pickles: a repeated command starts Ray Tune again, and for ASHA and Optuna trials report their
finished rungs again from trials.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.basic_variant import BasicVariantGenerator

from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.cluster.run_resources import check_capacity
from mmray.errors import ResourceError, TrainingError
from mmray.report.run import read_lines
from mmray.storage.paths import remove_tree
from mmray.sweep_files import GOALS, Rung, TrialRow
from mmray.training import RunReporter
from mmray.training.backend import run_in_thread
from mmray.training.coordinator import IMPORTING
from mmray.training.driver import train
from mmray.training.monitor import signal_handlers
from mmray.training.ray_trainer import ray_storage
from mmray.tuning.concurrency import apply_trial_resources
from mmray.tuning.results import ENDED, TrialOutcome, classify_error, newest_value
from mmray.tuning.rungs import REDUCTION
from mmray.tuning.suggestions import build_optuna, tune_space
from mmray.tuning.sweep import STOP_FILE, SweepState
from mmray.tuning.trials import SweepPlan, Trial, TrialResources

# `verbose=0` disables only the older reporter of Ray Tune; trials must keep the working directory.
# A trial that ends with an error reports no metric.
ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
}
# The driver of a trial runs on the head node and requests no CPU, because a small machine needs all
# of them for data.
_DRIVER_RESOURCES = {HEAD_RESOURCE: 0.001}
# Keys of a report to Ray Tune. A report of a rung has the samples and the value; the last report
# has the outcome.
SAMPLES = "samples"
METRIC = "value"
STARTED = "started"
OUTCOME = "outcome"
# The only parameter of a trial with known settings; settings of Optuna have a dot.
NAME = "trial"


def run_trials_on_ray_tune(
    state: SweepState,
    resources: TrialResources,
    num_rungs: int,
    names: Sequence[str] | None,
) -> None:
    """Train trials with Ray Tune, up to a rung.

    Ray Tune runs in a thread, while the calling thread handles signals. The rows of the trials in
    `state`, and in trials.jsonl, are updated meanwhile.

    Args:
        state: The running sweep, with a row for each trial.
        resources: Number of trials at a time, and the resources of each.
        num_rungs: Number of rungs up to which the trials train.
        names: Trials to train, such as `t001`; None: the trials that Optuna suggests.

    Raises:
        TrainingError: Ray Tune itself failed. The error of a trial is in its row instead.
    """
    request = state.plan.request
    scratch = state.folder.path / "ray"
    remove_tree(scratch)
    trainable = tune.with_parameters(
        _run_trial,
        plan=replace(state.plan, resources=resources),
        rows=dict(state.rows),
        num_rungs=num_rungs,
        # ASHA could decide differently about a trial that it has pruned.
        ended=(*ENDED, "pruned") if request.scheduler == "asha" else ENDED,
    )
    sweep_name = state.folder.path.name
    trainable.__name__ = sweep_name  # what Ray's dashboard calls the actors of trials
    if names is None:
        param_space = tune_space(request.base, request.space)
    else:
        param_space = {NAME: tune.grid_search(list(names))}
    callback = _TuneCallback(state)
    tuner = tune.Tuner(
        tune.with_resources(trainable, _DRIVER_RESOURCES),
        param_space=param_space,
        tune_config=_tune_config(state, resources.num_concurrent, names, callback.name),
        run_config=tune.RunConfig(
            name=sweep_name,
            **ray_storage(scratch),
            verbose=0,
            stop=callback,
            callbacks=[callback],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )
    try:
        with signal_handlers(state.on_signal):
            run_in_thread(tuner.fit, lambda: None)
    except Exception as error:
        raise TrainingError(
            f"Ray Tune failed: {error}. Rerun the same command; measured trials are kept"
        ) from error
    finally:
        state.stop_all()
        remove_tree(scratch)


def _tune_config(
    state: SweepState,
    max_concurrent: int,
    names: Sequence[str] | None,
    name_trial: Callable[[Any], str],
) -> tune.TuneConfig:
    """Return how Ray Tune searches and schedules; see `run_trials_on_ray_tune`."""
    request = state.plan.request
    searcher: ConcurrencyLimiter | BasicVariantGenerator
    if names is None:
        earlier = [row.settings for row in state.rows.values()]
        searcher = build_optuna(request.base, request.space, earlier, max_concurrent)
    else:
        searcher = BasicVariantGenerator(max_concurrent=max_concurrent)
    return tune.TuneConfig(
        metric=METRIC,
        mode="max" if GOALS[request.goal].maximize else "min",
        num_samples=request.space.num_trials if names is None else 1,
        search_alg=searcher,
        scheduler=build_asha(state.plan.rungs) if request.scheduler == "asha" else None,
        trial_name_creator=name_trial,
        reuse_actors=True,  # Importing torch takes several seconds.
    )


def build_asha(rungs: Sequence[int]) -> ASHAScheduler:
    """Return Ray Tune's ASHA scheduler (Li et al. 2020), which ends trials at rungs.

    The metric and its mode are those of the TuneConfig that gets the scheduler.
    """
    return ASHAScheduler(
        time_attr=SAMPLES, grace_period=rungs[0], max_t=rungs[-1], reduction_factor=REDUCTION
    )


def _run_trial(
    params: dict[str, Any],
    plan: SweepPlan,
    rows: dict[str, TrialRow],
    num_rungs: int,
    ended: tuple[str, ...],
) -> None:
    """Train from rung to rung and report each to Ray Tune, which may end this function in a report.

    Rungs that were finished before are only reported. A failure is reported instead of raised.
    """
    name = tune.get_context().get_trial_name()
    row = rows.get(name) or TrialRow(name, "waiting", params)
    # Every report repeats the last value, which the searcher takes from the last report.
    last: dict[str, Any] = {}

    def report_rung(rung: Rung) -> None:
        last.update({SAMPLES: rung.samples, METRIC: rung.value})
        tune.report(dict(last))

    for rung in row.rungs:
        report_rung(rung)
    outcome = TrialOutcome(row.status, row.error)
    if row.status not in ended:
        reporter = _TrialReporter(on_started=lambda: tune.report(last | {STARTED: True}))
        # An error is the outcome of this trial only.
        try:
            trial = plan.trial(name, row.settings)
            outcome = train_rungs(trial, plan, len(row.rungs), num_rungs, reporter, report_rung)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            outcome = classify_error(error)
    tune.report(last | {OUTCOME: outcome._asdict()})


def train_rungs(
    trial: Trial,
    plan: SweepPlan,
    start: int,
    stop: int,
    reporter: RunReporter,
    report_rung: Callable[[Rung], None],
) -> TrialOutcome:
    """Train a trial from rung to rung, and report its value at each.

    Args:
        start: Index of the first rung to train to, from 0.
        stop: Index after the last rung to train to.
        report_rung: Called when the trial has reached a rung.

    Returns:
        A TrialOutcome with `status` and `error` (the reason, or None): `finished` after the last
        rung of the plan, `paused` if later rungs are left, `stopped` if a stop was requested,
        `infeasible`, or `failed` if the goal was not measured.

    Raises:
        MmrayError: The run of the trial failed.
    """
    if trial.infeasible:
        return TrialOutcome("infeasible", trial.infeasible)
    try:
        check_capacity(trial.config.with_cluster(workers=trial.config.cluster.max_workers))
    except ResourceError as error:
        return TrialOutcome("infeasible", str(error))
    should_stop = (plan.folder / STOP_FILE).exists
    for samples in plan.rungs[start:stop]:
        if should_stop():
            return TrialOutcome("stopped")
        config = apply_trial_resources(plan.run_config(trial, samples), plan.resources)
        run = train(
            config, reporter, should_stop=should_stop, local=plan.local, check_storage=False
        )
        if run.result["status"] != "finished":
            return TrialOutcome("stopped")
        value = newest_value(list(read_lines(run.path / "metrics.jsonl")), plan.request.goal)
        if isinstance(value, str):
            return TrialOutcome("failed", value)
        report_rung(Rung(samples, value))
    return TrialOutcome("finished" if stop == len(plan.rungs) else "paused")


class _TrialReporter:
    """RunReporter of a trial without output: its metrics are read from its folder."""

    def __init__(self, on_started: Callable[[], None]) -> None:
        self._on_started = on_started

    def status(self, title: str) -> None:
        if title == IMPORTING:
            self._on_started()

    def log(self, *_: Any) -> None: ...
    def phase(self, *_: Any) -> None: ...
    def prepare_progress(self, *_: Any) -> None: ...
    def step(self, *_: Any) -> None: ...


class _TuneCallback(tune.Stopper, tune.Callback):
    """Connects Ray Tune with the state of the sweep.

    Pickled without state, because Ray Tune's restore is not used.
    """

    def __init__(self, state: SweepState) -> None:
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __deepcopy__(self, _: Any) -> _TuneCallback:
        """Return this object: Ray Tune copies the function that names its trials."""
        return self

    def name(self, trial: Any) -> str:
        """Return the name of a trial of Ray Tune."""
        return trial.config.get(NAME) or self._state.add(trial.config)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether this is the last report of a trial."""
        return OUTCOME in result

    def stop_all(self) -> bool:
        self._state.poll()
        return self._state.is_stopped()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._state.start(str(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if OUTCOME in result:
            self._state.end(str(trial), TrialOutcome(**result[OUTCOME]))
        elif STARTED in result:
            self._state.start_workers(str(trial))
        else:
            self._state.reach(str(trial), result[SAMPLES], result[METRIC])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._state.end(str(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Not Ray's `get_pickled_error`, which reads a file that is copied to the storage later.
        text = Path(trial.error_file).read_text() if trial.error_file else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        cause = lines[-1] if lines else "no reason is known"
        error = TrainingError(f"its driver process died: {cause}")
        self._state.end(str(trial), classify_error(error))
