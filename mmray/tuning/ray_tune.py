"""Trials as Ray Tune trials: one `Tuner.fit` that suggests, schedules and stops them. Each is a run
of `mmray train`.

A trial trains to its next rung, ends its workers with a checkpoint, reports, and resumes if it
continues.

`Tuner.restore` is not used, because it does not restore the rungs of the scheduler and reads
pickles: a repeated command starts Ray Tune again, and for ASHA and Optuna trials report their
finished rungs again from trials.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.basic_variant import BasicVariantGenerator

from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Config
from mmray.errors import ResourceError, TrainingError
from mmray.report.run import read_lines
from mmray.report.sweep import GOALS
from mmray.storage.paths import remove_tree
from mmray.sweep_files import TRIALS
from mmray.training.coordinator import IMPORTING
from mmray.training.driver import train
from mmray.training.monitor import RunReporter, signal_handlers
from mmray.training.ray_backend import check_capacity, num_decode_actors, ray_storage, run_in_thread
from mmray.tuning import trials as trial_module
from mmray.tuning.results import ENDED, Row, TrialOutcome, classify_error, rung_value
from mmray.tuning.suggestions import build_optuna, tune_space
from mmray.tuning.sweep import STOP_FILE, Sweep, SweepState
from mmray.tuning.trials import Share, SweepPlan, Trial

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
METRIC = "value"  # what trials report to Ray Tune; `samples` is its time
STARTED = "started"  # in a report when the workers of a trial have started
# the only parameter of a trial with known settings; Optuna suggests settings, which have a `.`
NAME = "trial"


def fit(
    state: SweepState, sweep: Sweep, share: Share, num_rungs: int, names: list[str] | None
) -> None:
    """Run Ray Tune in a thread while this thread handles signals: `names` up to a rung, or what
    Optuna suggests.
    """
    plan, callback, num_concurrent = (
        replace(state.plan, share=share),
        _TuneCallback(state),
        share.num_trials,
    )
    recorded, scratch = dict(state.rows), state.folder.path / "ray"
    remove_tree(scratch)
    searcher: ConcurrencyLimiter | BasicVariantGenerator = BasicVariantGenerator(
        max_concurrent=num_concurrent
    )
    if names is None:
        earlier = [row["settings"] for row in recorded.values()]
        searcher = build_optuna(sweep.base, sweep.space, earlier, num_concurrent)
    arguments = {"plan": plan, "recorded": recorded, "num_rungs": num_rungs}
    arguments["settings"] = {name: trial.settings for name, trial in state.trials.items()}
    # ASHA could decide differently about a trial that it has pruned, so pruned trials are not
    # resumed.
    arguments["ended"] = (*ENDED, "pruned") if sweep.scheduler == "asha" else ENDED
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(_run_trial, **arguments), _DRIVER_RESOURCES),
        param_space={NAME: tune.grid_search(names)}
        if names
        else tune_space(sweep.base, sweep.space),
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max" if GOALS[plan.goal].maximize else "min",
            num_samples=1 if names else sweep.space.num_samples or 1,
            search_alg=searcher,
            scheduler=build_scheduler(plan) if sweep.scheduler == "asha" else None,
            trial_name_creator=callback.name,
            reuse_actors=True,  # importing torch takes several seconds
        ),
        run_config=tune.RunConfig(
            name="tune",
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
        for name in list(state.running):
            state.end(name, TrialOutcome("stopped"))
        remove_tree(scratch)


def build_scheduler(plan: SweepPlan) -> ASHAScheduler | None:
    """Return the scheduler that ends trials at rungs (ASHA, Li et al. 2020); None without rungs."""
    if len(plan.rungs) == 1:
        return None
    shape: dict[str, Any] = {
        "grace_period": plan.rungs[0],
        "reduction_factor": trial_module.REDUCTION,
    }
    return ASHAScheduler(time_attr="samples", max_t=plan.rungs[-1], **shape)


def _run_trial(
    params: dict[str, Any],
    plan: SweepPlan,
    settings: dict[str, dict[str, Any]],
    recorded: dict[str, Row],
    num_rungs: int,
    ended: tuple[str, ...],
) -> None:
    """Train from rung to rung and report each to Ray Tune, which may end this function in a report.

    Rungs that were finished before are only reported. A failure is reported instead of raised.
    """
    name = tune.get_context().get_trial_name()
    reporter = _TrialReporter(lambda: tune.report(last | {STARTED: True}))
    row = recorded.get(name, {"status": "new", "rungs": [], "settings": settings.get(name, params)})
    last: dict[str, Any] = {}

    def report(result: dict[str, Any]) -> None:
        last.update(result)
        tune.report(result)

    for rung in row["rungs"]:
        report({"samples": rung["samples"], METRIC: rung["value"]})
    outcome = TrialOutcome(row["status"], row.get("error"))
    if outcome.status not in ended:
        try:
            trial = plan.trial(name, row["settings"])
            outcome = train_rungs(trial, plan, len(row["rungs"]), num_rungs, reporter, report)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - any error is the outcome of this trial only
            outcome = classify_error(error)
    tune.report(last | {"outcome": outcome._asdict()})  # with the last value, for the searcher


def train_rungs(
    trial: Trial,
    plan: SweepPlan,
    done: int,
    num_rungs: int,
    reporter: RunReporter,
    report: Callable[[dict[str, Any]], None],
) -> TrialOutcome:
    """Train to each rung after the first `done`; return how the trial ended.

    Raises what its run raises.
    """
    if trial.infeasible:
        return TrialOutcome("infeasible", trial.infeasible)
    rows = [] if done else list(read_lines(plan.folder / TRIALS))
    if reason := trial_module.larger_than_out_of_memory(trial, rows):
        return TrialOutcome("infeasible", reason)
    try:
        check_capacity(trial.config.with_cluster(workers=trial.config.cluster.max_workers))
    except ResourceError as error:
        return TrialOutcome("infeasible", str(error))
    stop = (plan.folder / STOP_FILE).exists
    for samples in plan.rungs[done:num_rungs]:
        if stop():
            return TrialOutcome("stopped")
        config = sized(plan.config(trial, samples), plan.share)
        run = train(config, reporter, should_stop=stop, local=plan.local, check_storage=False)
        if run.result["status"] != "finished":
            return TrialOutcome("stopped")
        value = rung_value(list(read_lines(run.path / "metrics.jsonl")), plan.goal)
        if isinstance(value, str):
            return TrialOutcome("failed", value)
        report({"samples": samples, METRIC: value})
    return TrialOutcome("finished" if num_rungs == len(plan.rungs) else "paused")


def sized(config: Config, share: Share) -> Config:
    """Return the config with the decode actors and the CPUs of its share, where the config has
    `auto`.
    """
    if share.cpus_per_worker is not None and config.cluster.cpus_per_worker == "auto":
        config = config.with_cluster(cpus_per_worker=share.cpus_per_worker)
    if isinstance(config.data.workers, int) or share.decode_actors is None:
        return config
    return config.replace(
        data=config.data.replace(workers=min(num_decode_actors(config), share.decode_actors))
    )


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
    """Connects Ray Tune with the state of the sweep; pickled without state, because Ray Tune's
    restore is not used.
    """

    def __init__(self, state: SweepState):
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __deepcopy__(self, _: Any) -> _TuneCallback:
        return self  # Ray Tune copies what names its trials

    def name(self, trial: Any) -> str:
        return trial.config.get(NAME) or self._state.add(trial.config)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return "outcome" in result  # the last result of a trial, without a metric

    def stop_all(self) -> bool:
        return self._state.is_stopped()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._state.start(str(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "outcome" in result:
            self._state.end(str(trial), TrialOutcome(**result["outcome"]))
        elif STARTED in result:
            self._state.start_workers(str(trial))
        else:
            self._state.reach(str(trial), {"samples": result["samples"], "value": result[METRIC]})

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._state.end(str(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Not Ray's `get_pickled_error`, which reads a file that is copied to the storage later.
        text = Path(trial.error_file).read_text() if trial.error_file else ""
        cause = next(
            (line.strip() for line in reversed(text.splitlines()) if line.strip()),
            "no reason is known",
        )
        self._state.end(
            str(trial), classify_error(TrainingError(f"its driver process died: {cause}"))
        )
