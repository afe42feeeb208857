"""A sweep from space to recommendation on a Ray cluster: the room's composer, and the only file of it that touches Ray.

Ray Tune starts the trials, as many at a time as the cluster holds. A trial is a function in an actor on the head that
drives one run, by the same `train` as `mmray train`, into a run folder of its own. What a trial measured is read from
that folder, so a sweep is as good a record as its runs are; Tune's own state is a scratch folder, removed at the end.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import tune

from mmray.cluster import nodes
from mmray.cluster.capacity import Demand, Node, concurrent
from mmray.cluster.join import joined
from mmray.config import Config, to_yaml
from mmray.config.space import Space
from mmray.errors import TrainingError, UsageError
from mmray.report.at_end import draw_at_end
from mmray.train.board import hearing
from mmray.train.lease import Lease
from mmray.train.resources import data_actors, demand_of
from mmray.train.rundir import environment
from mmray.train.trainer import settle
from mmray.tune import sweepdir
from mmray.tune.drive import drive
from mmray.tune.fit import largest, room_for
from mmray.tune.plan import Trial, as_run, best_recipe, samples_per_trial, searched, trials_of, warm_up_doubt, widest
from mmray.tune.rank import recommend
from mmray.tune.rows import Ended, ended_by, infeasible_row
from mmray.tune.running import Row, Running, SweepListener
from mmray.tune.sweepdir import KIND, SweepDir

POLL_S = 0.25
FREE_AFTER_S = 10.0  # the actors that prepared the data give their CPUs back a moment later
# Tune prints through its older reporter, which `verbose=0` silences; trials stay in the folder the user stands in.
_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
}
# A trial's driver takes no CPU: on a laptop the last one is the data's. It sits on the head, where a run's driver does.
_DRIVER = {"node:__internal_head__": 0.001}


@dataclass(frozen=True)
class Sweep:
    """What is asked for. `base` is the recipe whole; `length` holds what was typed as the length of a trial."""

    base: Config
    length: Config
    space: Space
    goal: str = "throughput"
    concurrency: int | None = None  # trials at a time; None: one on a lone machine, else as many as fit


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended; `summary` is what sweep.json says."""

    path: Path
    summary: dict[str, Any]
    rows: list[Row]


def search(sweep: Sweep, listener: SweepListener) -> SweepOutcome:
    """Try every combination and recommend the best, where one could be measured. Raises MmrayError.

    A trial that fails is a row, not an error: the others go on.
    """
    trials = trials_of(sweep.base, sweep.space)
    os.environ.update(_ENVIRONMENT)
    with joined(widest(trials)):
        configs, num_rows = _settled(trials, sweep, listener)
        samples = samples_per_trial(sweep.length, trials, num_rows)
        identity = {"space": searched(trials), "samples_per_trial": samples}
        folder = sweepdir.decide(sweep.base, identity)
        lease = Lease(folder.path)
        lease.acquire()
        try:
            sweepdir.create(folder, sweep.base)
            placed = [replace(trial, config=configs[trial.name]) for trial in trials if trial.name in configs]
            runs = {trial.name: as_run(trial, samples, num_rows, folder.path, sweep.goal) for trial in placed}
            doubt = warm_up_doubt(list(runs.values()), num_rows, sweep.goal)
            if doubt is not None:
                listener.note(doubt, "warm-up")
            return _search(sweep, trials, runs, identity, folder, listener)
        finally:
            lease.release()


def _search(
    sweep: Sweep,
    trials: list[Trial],
    runs: dict[str, Config],
    identity: dict[str, Any],
    folder: SweepDir,
    listener: SweepListener,
) -> SweepOutcome:
    """Run what is not done yet, then rank; sweep.json and trials.jsonl are true at every moment in between."""
    began_s, before_s = time.monotonic(), (folder.read_json("sweep.json") or {}).get("elapsed_s", 0.0)
    rows = {trial.name: infeasible_row(trial) for trial in trials if trial.infeasible}
    kept = folder.kept({trial.name: trial.settings for trial in trials})
    running = Running(folder, {trial.name: trial for trial in trials}, rows | kept, listener)
    todo = {name: run for name, run in runs.items() if name not in kept}
    at_once, runs_now = _at_once(todo, sweep.concurrency)
    summary = {
        "kind": KIND,
        "recipe": sweep.base.recipe,
        **identity,
        "goal": sweep.goal,
        "status": "running",
        "concurrency": at_once,
        "elapsed_s": before_s,
        "environment": environment(),
        "recommendation": None,
    }
    folder.write_json("sweep.json", summary)
    folder.write_rows(list(running.rows.values()))
    running.announce(identity, sweep.goal, len(kept), at_once)
    if todo:
        _run(running, runs_now, at_once)
    found = recommend(list(running.rows.values()), sweep.goal, sweep.base.objective.kind == "contrastive")
    summary |= {
        "status": running.status(),
        "elapsed_s": before_s + time.monotonic() - began_s,
        "recommendation": found,
    }
    if found is not None:
        folder.write("best.yaml", to_yaml(best_recipe(running.trials[found["best"]])))
    folder.write_json("sweep.json", summary)
    draw_at_end(folder.path, listener.note)
    return SweepOutcome(folder.path, summary, running.table())


def _settled(trials: list[Trial], sweep: Sweep, listener: SweepListener) -> tuple[dict[str, Config], int]:
    """Configs of the feasible trials with their data prepared, once for all that share it; and the rows of the set."""
    configs: dict[str, Config] = {}
    places: dict[str, dict[str, str | None]] = {}
    num_rows = 0
    for trial in trials:
        if trial.config is None or trial.shape is None:
            continue
        asked = trial.config
        key = f"{asked.data.train} {asked.data.eval} {asked.prepare.model_dump_json()}"
        config = asked.model_copy(update={"data": asked.data.model_copy(update=places.get(key, {}))})
        ready = settle(config, listener)
        if sweep.goal == "recall" and ready.eval_set is None:
            raise UsageError("--goal recall: the set holds no rows out; prepare it with --holdout, or give --data.eval")
        held_out = ready.eval_set.place.address if ready.eval_set and asked.data.eval else None
        places[key] = {"train": ready.data["train"], "eval": held_out}
        configs[trial.name] = config.model_copy(update={"data": config.data.model_copy(update=places[key])})
        num_rows = max(num_rows, ready.data["num_rows"])
    return configs, num_rows


def _at_once(runs: dict[str, Config], asked: int | None) -> tuple[int, dict[str, Config]]:
    """How many trials run side by side, and their configs with the data actors that they then have.

    On a lone machine one: two would share its cores and memory bandwidth, and neither's samples/s would be true.
    Raises ResourceError where not even one fits.
    """
    if not runs:
        return 1, runs
    demand = largest([demand_of(config) for config in runs.values()])
    wanted = min(asked or (1 if len(ray.nodes()) == 1 else len(runs)), len(runs))
    waits = any(config.cluster.grows for config in runs.values())
    at_once, actors = room_for(_free_nodes(demand), nodes.nodes(), demand, wanted, nodes.pools(), waits)
    return at_once, {name: _with_actors(config, actors) for name, config in runs.items()}


def _with_actors(config: Config, at_most: int) -> Config:
    """The config with its data actors counted: in a sweep, `auto` is a share of the cluster."""
    if isinstance(config.data.workers, int):
        return config
    actors = min(data_actors(config), at_most)
    return config.model_copy(update={"data": config.data.model_copy(update={"workers": actors})})


def _free_nodes(demand: Demand) -> list[Node]:
    """What is free on each node, after a moment for what has just ended to let go of what a trial needs."""
    waiting = concurrent(demand, nodes.nodes(), 1) == 1
    until = time.monotonic() + FREE_AFTER_S
    while True:
        free = nodes.free_nodes()
        if not waiting or concurrent(demand, free, 1) or time.monotonic() > until:
            return free
        time.sleep(POLL_S)


def _run(running: Running, runs: dict[str, Config], at_once: int) -> None:
    """Ray Tune in a thread, so that this one can draw and hear Ctrl-C; every trial that began has a row afterwards."""
    news: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
    for name in runs:
        running.folder.clear_trial(name)
    scratch = running.folder.path / "ray"
    shutil.rmtree(scratch, ignore_errors=True)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(_trial, configs=runs), _DRIVER),
        param_space={"trial": tune.grid_search(list(runs))},
        # One actor drives many trials: importing torch anew costs each several seconds.
        tune_config=tune.TuneConfig(max_concurrent_trials=at_once, reuse_actors=True),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(scratch),
            verbose=0,
            stop=_Stopper(running.stop),
            callbacks=[_Telling(news)],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )
    failure: list[BaseException] = []
    thread = threading.Thread(target=partial(_fit, tuner, failure), name="mmray-tune", daemon=True)
    with _stopping(running):
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            _hear(running, news)
    _hear(running, news)
    for name in list(running.live):
        running.end(name, Ended("stopped"))
    shutil.rmtree(scratch, ignore_errors=True)
    if failure:
        raise TrainingError(f"Ray Tune gave up: {failure[0]}") from failure[0]


def _fit(tuner: tune.Tuner, failure: list[BaseException]) -> None:
    try:
        tuner.fit()
    except BaseException as error:  # noqa: BLE001 - carried over to the main thread, which raises it
        failure.append(error)


def _hear(running: Running, news: queue.SimpleQueue[tuple[str, str, Any]]) -> None:
    """Take in what Tune's thread has heard, and show how the trials stand."""
    while not news.empty():
        what, name, value = news.get()
        if what == "ended":
            running.end(name, value)
        else:
            running.now(name, value)
    running.listener.trials(running.table())


@contextmanager
def _stopping(running: Running) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the trials that run and keeps what is measured; the second leaves at once."""

    def ask(_: int, __: FrameType | None) -> None:
        if running.stop.is_set():
            raise KeyboardInterrupt
        running.stop.set()
        running.listener.note("with what is measured; once more leaves at once", "stopping")

    with hearing(ask):
        yield


def _trial(given: dict[str, Any], configs: dict[str, Config]) -> None:
    drive(configs[given["trial"]], tune.report)


class _Stopper(tune.Stopper):
    """Ends the experiment once the event is set. Tune stores it for a restore that never comes: without the event."""

    def __init__(self, stop: threading.Event):
        self._stop = stop

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._stop.is_set()


class _Telling(tune.Callback):
    """Puts what Tune's thread hears of the trials into a queue."""

    def __init__(self, news: queue.SimpleQueue[tuple[str, str, Any]]):
        self._news = news

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._tell(trial, "now", {"status": "running", "doing": "starting"})

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "ended" in result:
            self._tell(trial, "ended", Ended(**result["ended"]))
        else:
            self._tell(trial, "now", result["now"])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        error = trial.get_pickled_error() or TrainingError("its driver died; the head's logs say why")
        self._tell(trial, "ended", ended_by(error))

    def _tell(self, trial: Any, what: str, value: Any) -> None:
        self._news.put((what, trial.config["trial"], value))
