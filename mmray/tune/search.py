"""Run a sweep on a Ray cluster: Ray Tune starts `mmray train` in actors on the head node; results are in its folder."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune

from mmray.cluster import placement
from mmray.cluster.capacity import fits
from mmray.cluster.connect import ray_session
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Config, to_yaml
from mmray.config.search_space import Space
from mmray.errors import ResourceError, TrainingError, UsageError
from mmray.report.write import write_report_safely
from mmray.storage.lease import Lease
from mmray.train.driver import train
from mmray.train.monitor import signal_handlers
from mmray.train.ray_backend import check_capacity, is_single_node, num_decode_actors, resource_demand, run_in_thread
from mmray.train.resolve import resolve_run
from mmray.train.run_dir import collect_environment
from mmray.tune import trials as trial_module
from mmray.tune.results import Row, TrialOutcome, build_row, classify_error, select_best
from mmray.tune.sweep import SweepDir, SweepReporter, SweepState, resolve_sweep_dir
from mmray.tune.trials import Trial

FREE_WAIT_S = 10.0  # decode actors release their CPUs with a delay
# `verbose=0` disables only the older reporter of Ray Tune; trials must keep the working directory.
_ENVIRONMENT = {"RAY_AIR_NEW_OUTPUT": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
# The driver of a trial runs on the head node and requests no CPU, because a small machine needs all of them for data.
_DRIVER_RESOURCES = {HEAD_RESOURCE: 0.001}


@dataclass(frozen=True)
class Sweep:
    """A search request."""

    base: Config  # with the length of the recipe (steps, samples or epochs), for best.yaml
    trial_settings: Config  # equal, but with the length of a trial if the user gave one
    space: Space
    goal: str = "throughput"
    concurrency: int | None = None  # None: 1 on a single machine, as many as fit on a cluster


def search(sweep: Sweep, reporter: SweepReporter) -> tuple[Path, dict[str, Any], list[Row]]:
    """Run all trials, of which some may fail, and recommend the best measured one. Raises MmrayError.

    Returns the folder, the content of sweep.json, and the rows of the trials.
    """
    trials = trial_module.build_trials(sweep.base, sweep.space)
    os.environ.update(_ENVIRONMENT)
    with ray_session(trial_module.largest_cluster(trials)):
        trials = mark_infeasible(trials)
        trials, feasible_trials, num_rows = resolve_trials(trials, sweep, reporter)
        samples = trial_module.samples_per_trial(sweep.trial_settings, trials, num_rows)
        identity = {"space": trial_module.searched_values(trials), "samples_per_trial": samples}
        folder = resolve_sweep_dir(sweep.base, identity)
        with Lease(folder.path, activity="in use for a sweep"):
            folder.write("recipe.yaml", to_yaml(sweep.base))
            trial_configs = {
                name: trial_module.trial_config(trial, samples, num_rows, folder.path, sweep.goal)
                for name, trial in feasible_trials.items()
            }
            if warning := trial_module.warmup_warning(list(trial_configs.values()), num_rows, sweep.goal):
                reporter.log(warning, "warm-up")
            return _search(sweep, trials, trial_configs, identity, folder, reporter)


def mark_infeasible(trials: list[Trial]) -> list[Trial]:
    """Mark trials that do not fit the cluster. Raises ResourceError if no trial is feasible."""
    checked, error = [], None
    for trial in trials:
        try:
            if not trial.infeasible:
                check_capacity(trial.config.with_cluster(workers=trial.config.cluster.max_workers))  # as in the trial
        except ResourceError as caught:
            trial, error = replace(trial, infeasible=str(caught)), caught
        checked.append(trial)
    if error is not None and all(trial.infeasible for trial in checked):
        raise error
    return checked


def resolve_trials(
    trials: list[Trial], sweep: Sweep, reporter: SweepReporter
) -> tuple[list[Trial], dict[str, Trial], int]:
    """Prepare each distinct data set once. Raises UsageError if no trial is feasible with its data.

    Returns all trials with the infeasible ones marked, the feasible ones with prepared data, and the number of rows.
    """
    checked: list[Trial] = []
    error: UsageError | None = None
    feasible_trials: dict[str, Trial] = {}
    sets: dict[str, dict[str, str | None]] = {}
    num_rows = 0
    for trial in trials:
        checked.append(trial)
        if trial.infeasible:
            continue
        data = trial.config.data
        key = f"{data.train} {data.eval} {trial.config.prepare.model_dump_json()}"
        config = trial.config.replace(data=data.replace(**sets.get(key, {})))
        try:
            resolved_run = resolve_run(config, reporter)
        except UsageError as caught:
            checked[-1], error = replace(trial, infeasible=str(caught)), caught
            continue
        if sweep.goal == "recall" and resolved_run.eval_set is None:
            raise UsageError("--goal recall: the set holds no rows out; prepare it with --holdout, or give --data.eval")
        held_out = resolved_run.eval_set.storage.address if resolved_run.eval_set and data.eval else None
        sets[key] = {"train": resolved_run.data_identity["train"], "eval": held_out}
        feasible_trials[trial.name] = replace(trial, config=config.replace(data=config.data.replace(**sets[key])))
        num_rows = max(num_rows, resolved_run.data_identity["num_rows"])
    if error is not None and not feasible_trials:
        raise error
    return checked, feasible_trials, num_rows


def _search(
    sweep: Sweep,
    trials: list[Trial],
    trial_configs: dict[str, Config],
    identity: dict[str, Any],
    folder: SweepDir,
    reporter: SweepReporter,
) -> tuple[Path, dict[str, Any], list[Row]]:
    """Run the remaining trials and rank all; update sweep.json and trials.jsonl after each trial."""
    start_s, earlier_s = time.monotonic(), (folder.read_json("sweep.json") or {}).get("elapsed_s", 0.0)
    infeasible = {t.name: build_row(t, TrialOutcome("infeasible", t.infeasible)) for t in trials if t.infeasible}
    measured = folder.reusable_rows(trials)
    state = SweepState(folder, {trial.name: trial for trial in trials}, infeasible | measured, reporter)
    pending = {name: config for name, config in trial_configs.items() if name not in measured}
    num_concurrent, remaining = plan_concurrency(pending, sweep.concurrency)
    summary = {
        "kind": "sweep",
        "recipe": sweep.base.recipe,
        **identity,
        "goal": sweep.goal,
        "status": "running",
        "concurrency": num_concurrent,
        "elapsed_s": earlier_s,
        "environment": collect_environment(),
        "recommendation": None,
    }
    folder.write_json("sweep.json", summary)
    folder.write_rows(list(state.rows.values()))
    reporter.log(str(folder.path), "sweep")
    samples, skipped = identity["samples_per_trial"], f"{len(measured)} already measured, {len(infeasible)} infeasible"
    reporter.log(f"{len(trials)} with {samples:,} samples each, {num_concurrent} at a time, {skipped}", "trials")
    reporter.log(sweep.goal, "goal")
    failure: TrainingError | None = None
    if remaining:
        reporter.status(f"running {len(remaining)} trials")
        try:
            run_trials(state, remaining, num_concurrent)
        except TrainingError as error:  # raised after the results so far are written
            failure = error
    rows = [state.rows[trial.name] for trial in trials]
    best = select_best(rows, sweep.goal, sweep.base.objective.kind == "contrastive")
    elapsed_s, statuses = earlier_s + time.monotonic() - start_s, {row["status"] for row in rows}
    status = "failed" if failure else next((each for each in ("stopped", "finished") if each in statuses), "failed")
    summary |= {"status": status, "elapsed_s": elapsed_s, "recommendation": best}
    if best is not None:
        folder.write("best.yaml", to_yaml(trial_module.to_recipe(state.trials[best["best"]])))
    folder.write_json("sweep.json", summary)
    write_report_safely(folder.path, reporter.log)
    if failure is not None:
        raise failure
    return folder.path, summary, rows


def plan_concurrency(trial_configs: dict[str, Config], limit: int | None) -> tuple[int, dict[str, Config]]:
    """Return the number of concurrent trials and their configs with decode actors."""
    if not trial_configs:
        return 1, trial_configs
    demands = [resource_demand(config) for config in trial_configs.values()]
    demand = max(demands, key=lambda each: each.workers * sum(each.per_worker.values()) + each.data_cpus)
    single_node = all(is_single_node(config) for config in trial_configs.values())  # trials would slow each other
    wanted = min(limit or (1 if single_node else len(trial_configs)), len(trial_configs))
    total, pools = placement.alive_nodes(), placement.autoscaling_pools()
    free = placement.wait_for_free_nodes(demand, FREE_WAIT_S if fits(demand, total) else 0.0)
    num_concurrent, actors = trial_module.trial_concurrency(free, total, demand, wanted, pools)
    return num_concurrent, {
        name: config  # concurrent trials share the cluster, so each gets a fixed number of decode actors
        if isinstance(config.data.workers, int)
        else config.replace(data=config.data.replace(workers=min(num_decode_actors(config), actors)))
        for name, config in trial_configs.items()
    }


def run_trials(state: SweepState, trial_configs: dict[str, Config], num_concurrent: int) -> None:
    """Run Ray Tune in a thread while this thread handles signals. Each trial gets a row."""
    callback, scratch = _TuneCallback(state), state.folder.path / "ray"
    for folder in (scratch, *(state.folder.path / "trials" / name for name in trial_configs)):  # trials do not resume
        shutil.rmtree(folder, ignore_errors=True)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(_run_trial, configs=trial_configs), _DRIVER_RESOURCES),
        param_space={"trial": tune.grid_search(list(trial_configs))},
        # Actors are reused because importing torch takes several seconds.
        tune_config=tune.TuneConfig(max_concurrent_trials=num_concurrent, reuse_actors=True),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(scratch),
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
        raise TrainingError(f"Ray Tune failed: {error}. Rerun the same command; measured trials are kept") from error
    finally:
        for name in trial_configs:
            state.end(name, TrialOutcome("stopped"))
        shutil.rmtree(scratch, ignore_errors=True)


def _run_trial(params: dict[str, Any], configs: dict[str, Config]) -> None:
    """Train one config and report the outcome to Ray Tune; a failure is reported instead of raised."""
    start_s = time.monotonic()
    try:
        train(configs[params["trial"]], _TrialReporter())
        outcome = TrialOutcome("finished", None, time.monotonic() - start_s)
    except Exception as error:  # noqa: BLE001 - any error is the outcome of this trial only
        outcome = classify_error(error, time.monotonic() - start_s)
    tune.report({"outcome": outcome._asdict()})


class _TrialReporter:
    """RunReporter of a trial: lets Ray Tune stop it at each step; its metrics are read from its folder."""

    def log(self, *_: Any) -> None: ...
    def status(self, *_: Any) -> None: ...
    def phase(self, *_: Any) -> None: ...
    def prepare_progress(self, *_: Any) -> None: ...

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        tune.report({"step": metrics["step"]})


class _TuneCallback(tune.Stopper, tune.Callback):
    """Passes outcomes of trials to the sweep; pickled without state, because Ray Tune's restore is not used."""

    def __init__(self, state: SweepState):
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._state.stop.is_set()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "outcome" in result:
            self._state.end(trial.config["trial"], TrialOutcome(**result["outcome"]))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        error = trial.get_pickled_error() or TrainingError("its driver process died; see the logs of the head node")
        self._state.end(trial.config["trial"], classify_error(error))
