"""Trials as trials of Ray Tune, which starts and stops them. Each is a run of `mmray train`.

A trial trains to its next rung, ends its workers with a checkpoint, reports, and resumes if it
continues. `Tuner.restore` is not used, because it reads pickles: a repeated command starts Ray Tune
again with the trials that have not reached the rung.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search.basic_variant import BasicVariantGenerator

from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.cluster.run_resources import check_capacity
from mmray.errors import ResourceError, TrainingError
from mmray.storage.paths import read_lines, remove_tree
from mmray.sweep_files import Rung
from mmray.training import RunReporter
from mmray.training.driver import train
from mmray.training.monitor import signal_handlers
from mmray.training.workers.backend import run_in_thread
from mmray.training.workers.ray_trainer import ray_storage
from mmray.tuning.results import TrialOutcome, classify_error, newest_value
from mmray.tuning.sweep import STOP_FILE, SweepState
from mmray.tuning.trials import SweepPlan, Trial

# `verbose=0` disables only the older reporter of Ray Tune; trials must keep the working directory.
ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
}
# The driver of a trial runs on the head node and requests no CPU, because a small machine needs all
# of them for data.
_DRIVER_RESOURCES = {HEAD_RESOURCE: 0.001}
# Keys of the report of a trial: its outcome, and the value at the rung unless it failed.
OUTCOME = "outcome"
VALUE = "value"
NAME = "trial"  # the only parameter of a trial


def run_trials_on_ray_tune(
    state: SweepState, num_concurrent: int, rung: int, names: Sequence[str]
) -> None:
    """Train trials to a rung with Ray Tune.

    Ray Tune runs in a thread, while the calling thread handles signals. The rows of the trials in
    `state`, and in trials.jsonl, are updated meanwhile.

    Args:
        rung: Index of the rung, from 0.

    Raises:
        TrainingError: Ray Tune itself failed.
    """
    scratch = state.folder.path / "ray"
    remove_tree(scratch)
    trainable = tune.with_parameters(
        _run_trial,
        plan=state.plan,
        settings={name: state.rows[name].settings for name in names},
        rung=rung,
    )
    sweep_name = state.folder.path.name
    trainable.__name__ = sweep_name  # what Ray's dashboard calls the actors of trials
    callback = _TuneCallback(state, state.plan.rungs[rung])
    tuner = tune.Tuner(
        tune.with_resources(trainable, _DRIVER_RESOURCES),
        param_space={NAME: tune.grid_search(list(names))},
        tune_config=tune.TuneConfig(
            search_alg=BasicVariantGenerator(max_concurrent=num_concurrent),
            trial_name_creator=_name_of,
            reuse_actors=True,  # Importing torch takes several seconds.
        ),
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


def _name_of(trial: TuneTrial) -> str:
    return str(trial.config[NAME])


def _run_trial(
    params: dict[str, Any], plan: SweepPlan, settings: dict[str, dict[str, Any]], rung: int
) -> None:
    """Train a trial to a rung, and report its value and outcome to Ray Tune. A failure is reported
    instead of raised.
    """
    name = params[NAME]
    value = None
    # An error is the outcome of this trial only.
    try:
        trial = plan.trial(name, settings[name])
        outcome, value = train_to_rung(trial, plan, rung, _TrialReporter())
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        outcome = classify_error(error)
    tune.report({OUTCOME: outcome._asdict(), VALUE: value})


def train_to_rung(
    trial: Trial, plan: SweepPlan, rung: int, reporter: RunReporter
) -> tuple[TrialOutcome, float | None]:
    """Train a trial to a rung.

    Returns:
        How it ended: `finished` at the last rung of the plan, `paused` at an earlier one, `stopped`
        if a stop was requested, `infeasible`, or `failed` if the goal was not measured; and its
        value if it has reached the rung.

    Raises:
        MmrayError: The run of the trial failed.
    """
    if trial.infeasible:
        return TrialOutcome("infeasible", trial.infeasible), None
    try:
        check_capacity(trial.config.with_cluster(workers=trial.config.cluster.max_workers))
    except ResourceError as error:
        return TrialOutcome("infeasible", str(error)), None
    should_stop = (plan.folder / STOP_FILE).exists
    if should_stop():
        return TrialOutcome("stopped"), None
    config = plan.run_config(trial, plan.rungs[rung])
    run = train(config, reporter, should_stop=should_stop, local=plan.local, check_storage=False)
    if run.result["status"] != "finished":
        return TrialOutcome("stopped"), None
    value = newest_value(list(read_lines(run.path / "metrics.jsonl")), plan.request.goal)
    if isinstance(value, str):
        return TrialOutcome("failed", value), None
    return TrialOutcome("finished" if rung == len(plan.rungs) - 1 else "paused"), value


class _TrialReporter:
    """RunReporter of a trial without output: its metrics are read from its folder."""

    def status(self, *_: object) -> None: ...
    def log(self, *_: object) -> None: ...
    def phase(self, *_: object) -> None: ...
    def prepare_progress(self, *_: object) -> None: ...
    def step(self, *_: object) -> None: ...


class _TuneCallback(tune.Stopper, tune.Callback):
    """Connects Ray Tune with the state of the sweep.

    Pickled without state, because Ray Tune's restore is not used.
    """

    def __init__(self, state: SweepState, samples: int) -> None:
        self._state = state
        self._samples = samples  # of the rung

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether this is the last report of a trial, as each is."""
        return True

    def stop_all(self) -> bool:
        self._state.poll()
        return self._state.is_stopped()

    def on_trial_start(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: object
    ) -> None:
        self._state.start(str(trial))

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: object,
    ) -> None:
        value = result[VALUE]
        rung = None if value is None else Rung(self._samples, value)
        self._state.end(str(trial), TrialOutcome(**result[OUTCOME]), rung)

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: object
    ) -> None:
        # Not Ray's `get_pickled_error`, which reads a file that is copied to the storage later.
        text = Path(trial.error_file).read_text() if trial.error_file else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        cause = lines[-1] if lines else "no reason is known"
        error = TrainingError(f"its driver process died: {cause}")
        self._state.end(str(trial), classify_error(error))
