"""Run a sweep on a Ray cluster, from search space to recommendation.

Ray Tune starts as many concurrent trials as fit. A trial is an actor on the head node that runs the same `train` as
`mmray train` in a separate run folder; its results are read from that folder. Ray Tune's state is temporary.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmray.cluster import placement
from mmray.cluster.capacity import Demand, Node, max_concurrent
from mmray.cluster.connect import ray_session
from mmray.config import Config, to_yaml
from mmray.config.search_space import Space
from mmray.errors import ResourceError, UsageError
from mmray.report.write import write_report_safely
from mmray.storage.lease import Lease
from mmray.train.resolve import resolve_run
from mmray.train.resources import check_capacity, is_single_node, num_data_actors, resource_demand
from mmray.train.run_dir import collect_environment
from mmray.tune import sweep_dir
from mmray.tune.results import infeasible_row, select_best
from mmray.tune.sweep_dir import KIND, SweepDir
from mmray.tune.sweep_state import Row, SweepListener, SweepState
from mmray.tune.trainable import run_trials
from mmray.tune.trials import (
    Trial,
    largest_cluster,
    max_demand,
    samples_per_trial,
    searched_values,
    to_recipe,
    trial_concurrency,
    trial_config,
    trials_of,
    warmup_warning,
)

POLL_S = 0.25
FREE_AFTER_S = 10.0  # data actors release their CPUs with a delay
# `verbose=0` disables only the older reporter of Ray Tune; trials must keep the working directory.
_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
}


@dataclass(frozen=True)
class Sweep:
    """A search request: `base` is the full recipe, `length` the trial length given by the user."""

    base: Config
    length: Config
    space: Space
    goal: str = "throughput"
    concurrency: int | None = None  # None: 1 on a single machine, as many as fit on a cluster


@dataclass(frozen=True)
class SweepOutcome:
    """Result of a sweep; `summary` is the content of sweep.json."""

    path: Path
    summary: dict[str, Any]
    rows: list[Row]


def search(sweep: Sweep, listener: SweepListener) -> SweepOutcome:
    """Run all trials and recommend the best measured one. Raises MmrayError.

    A failed trial is recorded as a row; the other trials continue.
    """
    trials = trials_of(sweep.base, sweep.space)
    os.environ.update(_ENVIRONMENT)
    with ray_session(largest_cluster(trials)):
        trials = filter_feasible(trials)
        configs, num_rows = _resolve_trials(trials, sweep, listener)
        samples = samples_per_trial(sweep.length, trials, num_rows)
        identity = {"space": searched_values(trials), "samples_per_trial": samples}
        folder = sweep_dir.resolve_sweep_dir(sweep.base, identity)
        lease = Lease(folder.path)
        lease.acquire()
        try:
            sweep_dir.create(folder, sweep.base)
            placed = [replace(trial, config=configs[trial.name]) for trial in trials if trial.name in configs]
            runs = {trial.name: trial_config(trial, samples, num_rows, folder.path, sweep.goal) for trial in placed}
            doubt = warmup_warning(list(runs.values()), num_rows, sweep.goal)
            if doubt is not None:
                listener.log(doubt, "warm-up")
            return _search(sweep, trials, runs, identity, folder, listener)
        finally:
            lease.release()


def filter_feasible(trials: list[Trial]) -> list[Trial]:
    """Mark trials that do not fit the cluster as infeasible. Raises ResourceError if no trial is feasible."""
    checked = [_checked(trial) for trial in trials]
    if all(trial.infeasible for trial in checked):
        reasons = (new.infeasible for old, new in zip(trials, checked, strict=True) if not old.infeasible)
        raise ResourceError(str(next(reasons)))
    return checked


def _checked(trial: Trial) -> Trial:
    if trial.config is None or trial.infeasible:
        return trial
    try:
        check_capacity(trial.config.with_cluster(workers=trial.config.cluster.max_workers))  # as in the trial
    except ResourceError as error:
        return replace(trial, infeasible=str(error))
    return trial


def _search(
    sweep: Sweep,
    trials: list[Trial],
    runs: dict[str, Config],
    identity: dict[str, Any],
    folder: SweepDir,
    listener: SweepListener,
) -> SweepOutcome:
    """Run the remaining trials and rank all; update sweep.json and trials.jsonl after each trial."""
    began_s, before_s = time.monotonic(), (folder.read_json("sweep.json") or {}).get("elapsed_s", 0.0)
    rows = {trial.name: infeasible_row(trial) for trial in trials if trial.infeasible}
    kept = folder.kept({trial.name: trial.settings for trial in trials})
    running = SweepState(folder, {trial.name: trial for trial in trials}, rows | kept, listener)
    todo = {name: run for name, run in runs.items() if name not in kept}
    at_once, runs_now = _concurrency(todo, sweep.concurrency)
    summary = {
        "kind": KIND,
        "recipe": sweep.base.recipe,
        **identity,
        "goal": sweep.goal,
        "status": "running",
        "concurrency": at_once,
        "elapsed_s": before_s,
        "environment": collect_environment(),
        "recommendation": None,
    }
    folder.write_json("sweep.json", summary)
    folder.write_rows(list(running.rows.values()))
    running.announce(identity, sweep.goal, len(kept), at_once)
    if todo:
        run_trials(running, runs_now, at_once)
    found = select_best(list(running.rows.values()), sweep.goal, sweep.base.objective.kind == "contrastive")
    summary |= {
        "status": running.status(),
        "elapsed_s": before_s + time.monotonic() - began_s,
        "recommendation": found,
    }
    if found is not None:
        folder.write("best.yaml", to_yaml(to_recipe(running.trials[found["best"]])))
    folder.write_json("sweep.json", summary)
    write_report_safely(folder.path, listener.log)
    return SweepOutcome(folder.path, summary, running.table())


def _resolve_trials(trials: list[Trial], sweep: Sweep, listener: SweepListener) -> tuple[dict[str, Config], int]:
    """Prepare each distinct data set once; return the configs of feasible trials and the number of rows."""
    configs: dict[str, Config] = {}
    places: dict[str, dict[str, str | None]] = {}
    num_rows = 0
    for trial in trials:
        if trial.config is None or trial.shape is None or trial.infeasible:
            continue
        asked = trial.config
        key = f"{asked.data.train} {asked.data.eval} {asked.prepare.model_dump_json()}"
        config = asked.replace(data=asked.data.replace(**places.get(key, {})))
        ready = resolve_run(config, listener)
        if sweep.goal == "recall" and ready.eval_set is None:
            raise UsageError("--goal recall: the set holds no rows out; prepare it with --holdout, or give --data.eval")
        held_out = ready.eval_set.storage.address if ready.eval_set and asked.data.eval else None
        places[key] = {"train": ready.data["train"], "eval": held_out}
        configs[trial.name] = config.replace(data=config.data.replace(**places[key]))
        num_rows = max(num_rows, ready.data["num_rows"])
    return configs, num_rows


def _concurrency(runs: dict[str, Config], asked: int | None) -> tuple[int, dict[str, Config]]:
    """Return the number of concurrent trials, and their configs with the number of data actors.

    The default on a single machine is 1, because concurrent trials would distort each other's samples/s.
    Raises ResourceError if no trial fits.
    """
    if not runs:
        return 1, runs
    demand = max_demand([resource_demand(config) for config in runs.values()])
    lone = all(is_single_node(config) for config in runs.values())
    wanted = min(asked or (1 if lone else len(runs)), len(runs))
    waits = any(config.cluster.wait_for_nodes for config in runs.values())
    at_once, actors = trial_concurrency(
        _free_nodes(demand), placement.alive_nodes(), demand, wanted, placement.autoscaling_pools(), waits
    )
    return at_once, {name: _with_actors(config, actors) for name, config in runs.items()}


def _with_actors(config: Config, at_most: int) -> Config:
    """Return the config with a fixed number of data actors, because concurrent trials share the cluster."""
    if isinstance(config.data.workers, int):
        return config
    actors = min(num_data_actors(config), at_most)
    return config.replace(data=config.data.replace(workers=actors))


def _free_nodes(demand: Demand) -> list[Node]:
    """Return free resources per node, after waiting up to FREE_AFTER_S for ended actors to release theirs."""
    waiting = max_concurrent(demand, placement.alive_nodes(), 1) == 1
    until = time.monotonic() + FREE_AFTER_S
    while True:
        free = placement.free_nodes()
        if not waiting or max_concurrent(demand, free, 1) or time.monotonic() > until:
            return free
        time.sleep(POLL_S)
