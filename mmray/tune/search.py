"""Run a sweep on a Ray cluster: Ray Tune suggests, schedules and stops trials; each is a run of `mmray train`.

A trial trains to its next rung, ends its workers with a checkpoint, reports, and resumes if it continues. Successive
halving, which has a fixed cost (Jamieson & Talwalkar 2016), and population based training run one `Tuner.fit` per rung.
Ray Tune's ASHA does not wait for the slowest trial, but continues the first ones without a comparison.

A repeated command starts Ray Tune again. For ASHA and Optuna, trials report their finished rungs again from
trials.jsonl. `Tuner.restore` is not used, because it does not restore the rungs of the scheduler and reads pickles.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.basic_variant import BasicVariantGenerator

from mmray import plugins
from mmray.cluster import placement
from mmray.cluster.capacity import fits
from mmray.cluster.connect import asks_for_cluster, ray_session
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Config, to_yaml
from mmray.config.search_space import Space
from mmray.errors import MmrayError, ResourceError, TrainingError, UsageError
from mmray.report.run import read_lines
from mmray.report.sweep import GOALS, LEARNING_GOALS, TRIALS
from mmray.report.write import write_report_safely
from mmray.storage.lease import Lease
from mmray.storage.paths import remove_tree
from mmray.storage.storage import parallel_map
from mmray.train.backend import num_gpus
from mmray.train.coordinator import IMPORTING
from mmray.train.driver import train
from mmray.train.local import count_gpus
from mmray.train.monitor import RunReporter, signal_handlers
from mmray.train.ray_backend import (
    check_capacity,
    check_storage,
    is_single_node,
    num_decode_actors,
    ray_storage,
    resource_demand,
    run_in_thread,
)
from mmray.train.resolve import resolve_run
from mmray.train.run_dir import collect_environment
from mmray.tune import population
from mmray.tune import trials as trial_module
from mmray.tune.results import (
    ENDED,
    Row,
    TrialOutcome,
    classify_error,
    flag_unequal_losses,
    promoted,
    rung_value,
    select_best,
)
from mmray.tune.suggestions import build_optuna, distinct_settings, tune_space
from mmray.tune.sweep import STOP_FILE, Budget, SweepDir, SweepReporter, SweepState, resolve_sweep_dir
from mmray.tune.trials import FeasibleSpace, Share, SweepPlan, Trial, starting_points

FREE_WAIT_S = 10.0  # decode actors release their CPUs with a delay
MAX_CONCURRENT = 64
DRIVER_GIB = 1.0  # memory of the driver process of a trial, on the head node
# `verbose=0` disables only the older reporter of Ray Tune; trials must keep the working directory. A trial that ends
# with an error reports no metric.
_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
}
# The driver of a trial runs on the head node and requests no CPU, because a small machine needs all of them for data.
_DRIVER_RESOURCES = {HEAD_RESOURCE: 0.001}
METRIC = "value"  # what trials report to Ray Tune; `samples` is its time
STARTED = "started"  # in a report when the workers of a trial have started
NAME = "trial"  # the only parameter of a trial with known settings; Optuna suggests settings, which have a `.`


@dataclass(frozen=True)
class Sweep:
    """A search request."""

    base: Config  # with the length of the recipe (steps, samples or epochs), for best.yaml
    trial_settings: Config  # equal, but with the length of a trial if the user gave one
    space: Space
    goal: str
    concurrency: int | None = None  # None: 1 on a single machine, as many as fit on a cluster
    searcher: str = "random"  # or `optuna`
    scheduler: str = "halving"  # or `asha`, `pbt`
    budget: Budget = field(default_factory=Budget)
    recipe_rows: int | None = None  # global batch of the recipe; `base` has none if accumulation is searched


def search(sweep: Sweep, reporter: SweepReporter) -> tuple[SweepDir, dict[str, Any], list[Row]]:
    """Run all trials, of which some may fail, and recommend the best measured one. Raises MmrayError.

    Returns the folder, the content of sweep.json, and the rows of the trials.
    """
    sweep = replace(sweep, space=trial_module.parse_values(sweep.base, sweep.space))
    corners = trial_module.corner_trials(sweep.base, sweep.space)
    if sweep.scheduler == "pbt":
        population.check_sweep(sweep.space, sweep.goal, sweep.searcher)
    if sweep.searcher == "optuna":
        plugins.check_installed("optuna", "--search optuna", "optuna")
        if sweep.space.num_samples is None:
            raise UsageError("--search optuna: give --samples N, because lists without a range are a grid")
    os.environ.update(_ENVIRONMENT)
    with ray_session(trial_module.largest_cluster(corners)):
        feasible = check_corners(corners, sweep.goal, reporter)
        searched = sweep.trial_settings, sweep.base, sweep.space, sweep.goal
        plan = trial_module.build_plan(*searched, feasible, sweep.scheduler, recipe_rows=sweep.recipe_rows)
        space = trial_module.describe_space(sweep.space)
        identity = {"space": space, "goal": sweep.goal, "rungs": list(plan.rungs)}
        folder = resolve_sweep_dir(sweep.base, identity, reporter)
        with Lease(folder.path, activity="in use for a sweep"):
            folder.write("recipe.yaml", to_yaml(sweep.base))
            configs = [trial.config for trial in feasible.corners]
            share = partial(plan_share, configs, sweep)
            local = share(sweep.space.num_trials).num_trials == 1 and are_local(configs)
            plan = replace(plan, folder=folder.path, on_gpus=uses_gpus(sweep.base), local=local)
            if not local:
                check_storage(plan.base)  # once for all trials
            if warning := trial_module.warmup_warning(plan):
                reporter.log(warning, "warm-up")
            return _search(sweep, plan, share, identity, folder, reporter)


def check_corners(corners: list[Trial], goal: str, reporter: SweepReporter) -> FeasibleSpace:
    """Prepare each distinct data set once. Raises the last error if no trial of the space is feasible."""
    feasible: list[Trial] = []
    error: MmrayError | None = None
    sets: dict[str, dict[str, str | None]] = {}
    checked: set[str] = set()
    num_rows = held_out_rows = 0
    for trial in corners:
        if trial.infeasible:
            continue
        key, data = trial_module.data_key(trial.config), trial.config.data
        config = trial.config.replace(data=data.replace(**sets.get(key, {})))
        try:
            check_capacity(config.with_cluster(workers=config.cluster.max_workers))  # as in the trial
            if (need := f"{key} {trial.shape and trial.shape.global_rows}") not in checked:
                resolved = resolve_run(config, reporter)
                checked.add(need)
                if goal in LEARNING_GOALS and resolved.eval_set is None:
                    advice = "prepare it with --holdout, or give --data.eval"
                    raise UsageError(f"--goal {goal}: the set holds no rows out; {advice}")
                held_out = resolved.eval_set.storage.address if resolved.eval_set and data.eval else None
                sets[key] = {"train": resolved.data_identity["train"], "eval": held_out}
                num_rows = max(num_rows, resolved.data_identity["num_rows"])
                held_out_rows = max(held_out_rows, resolved.eval_set.num_rows if resolved.eval_set else 0)
            feasible.append(replace(trial, config=config))
        except (ResourceError, UsageError) as caught:
            error = caught
    if not feasible and error is not None:
        raise error
    return FeasibleSpace(feasible, sets, num_rows, held_out_rows)


def _search(
    sweep: Sweep,
    plan: SweepPlan,
    share: Callable[[int], Share],
    identity: dict[str, Any],
    folder: SweepDir,
    reporter: SweepReporter,
) -> tuple[SweepDir, dict[str, Any], list[Row]]:
    """Run the remaining trials, cool the best one down and rank all; trials.jsonl is updated after each rung."""
    count = sweep.space.num_trials
    num_concurrent = share(count).num_trials
    planned = trial_module.planned_samples(count, plan.rungs, sweep.scheduler)
    summary = {
        "kind": "sweep",
        "recipe": sweep.base.recipe,
        **identity,
        "searcher": sweep.searcher,
        "scheduler": sweep.scheduler,
        "concurrency": num_concurrent,
        "device": "gpu" if plan.on_gpus else "cpu",
        "environment": collect_environment(),
    }
    state = SweepState(folder, plan, reporter, folder.read_rows(), sweep.budget, summary, planned)
    state.write_summary(status="running", recommendation=None)
    reporter.log(str(folder.path), "sweep")
    rungs = " to ".join(f"{samples:,}" for samples in plan.rungs)
    measured = sum(bool(row["rungs"]) for row in state.rows.values())
    at_a_time = f"{num_concurrent} at a time"
    if num_concurrent < min(sweep.concurrency or 1, count):
        at_a_time += f" (as many of --concurrency {sweep.concurrency} as fit)"
    reporter.log(f"{count} with {rungs} samples each, {at_a_time}, {measured} measured before", "trials")
    reporter.log(sweep.goal, "goal")
    failure: TrainingError | None = None
    try:
        run_trials(state, sweep, share)
    except TrainingError as error:  # raised after the results so far are written
        failure = error
    rows = sorted(state.rows.values(), key=lambda row: row["trial"])
    best = select_best(rows, sweep.goal)
    flag_unequal_losses(rows)
    folder.write_rows(rows)
    if best is not None:
        trial = plan.trial(best["best"], state.rows[best["best"]]["settings"])
        folder.write("best.yaml", f"# {best['why']}\n" + to_yaml(plan.recipe(trial)))
        complete = state.rows[trial.name]["status"] == "finished"
        if complete and failure is None and not state.is_stopped() and plan.can_cool_down(trial):
            state.write_summary(recommendation=best)  # in case the cooldown is killed
            write_report_safely(folder.path, reporter.log)
            state.start(trial.name)
            best["cooldown"] = cool_down(trial, state)
            state.end(trial.name)
    status = "failed" if failure else state.stop_reason or ("finished" if best else "failed")
    saved = 0.0 if sweep.scheduler == "pbt" else saved_gpu_seconds(rows, plan) / 3600
    state.write_summary(status=status, recommendation=best, saved_gpu_hours=saved)
    write_report_safely(folder.path, reporter.log)
    if failure is not None:
        raise failure
    return folder, state.summary, rows


def saved_gpu_seconds(rows: list[Row], plan: SweepPlan) -> float:
    """Return the estimated seconds of GPUs (workers, on CPUs) that full trials of the pruned ones would have taken."""
    return sum(
        (plan.rungs[-1] - row["rungs"][-1]["samples"]) / row["samples_per_s"] * row["workers"] * num_gpus(plan.base)
        for row in rows
        if row["status"] == "pruned" and row["samples_per_s"]
    )


def cool_down(trial: Trial, state: SweepState) -> Row | None:
    """Continue the best trial's run with a decaying learning rate. A stop request stops the sweep too.

    Returns {samples, value}, or None if it failed or was stopped.
    """
    plan, reporter = state.plan, state.reporter
    reporter.status(f"cooldown of {trial.name}")
    state.start_workers(trial.name)
    try:
        config = plan.config(trial, plan.cooldown_samples(trial), cooldown=True)
        run = train(config, reporter, should_stop=state.is_budget_spent, local=plan.local)
    except MmrayError as error:
        reporter.log(f"{error}; best.yaml is valid without it", "cooldown")
        return None
    if run.result["status"] != "finished":
        state.stop_reason = "budget" if state.is_budget_spent() else "stopped"
        return None
    lines = list(read_lines(run.path / "metrics.jsonl"))
    value = rung_value(lines, plan.goal)
    return {"samples": lines[-1]["rows_stop"], "value": value} if isinstance(value, float) else None


def uses_gpus(config: Config) -> bool:
    return "GPU" in resource_demand(config).per_worker


def plan_share(configs: list[Config], sweep: Sweep, count: int) -> Share:
    """Return how many of `count` trials run at a time, and the share of each. A single one has all, as a run has."""
    demands = [resource_demand(config) for config in configs]
    demand = max(demands, key=lambda each: each.workers * sum(each.per_worker.values()) + each.data_cpus)
    single_node = all(is_single_node(config) for config in configs)  # trials would slow each other
    total, pools = placement.alive_nodes(), placement.autoscaling_pools()
    head_gib = max((node.resources.get("memory", 0.0) for node in total if HEAD_RESOURCE in node.resources), default=0)
    drivers = max(1, int(head_gib / 2**30 / DRIVER_GIB)) if head_gib else MAX_CONCURRENT
    wanted = min(count, sweep.concurrency or (1 if single_node else min(drivers, MAX_CONCURRENT)))
    if sweep.concurrency and not pools and all(config.cluster.wait_for_nodes for config in configs):
        return Share(wanted)  # the user declares that nodes will be added, and for how many trials
    cpus = None
    if wanted > 1 and placement.available_cores_if_local() and "GPU" not in demand.per_worker:
        cpus = trial_module.cpus_of_share(total[0].resources["CPU"], wanted, demand)  # `auto` would be all cores
        demand = replace(demand, per_worker=demand.per_worker | {"CPU": cpus})
    free = placement.wait_for_free_nodes(demand, FREE_WAIT_S if fits(demand, total) else 0.0)
    num_trials, decode_actors = trial_module.trial_concurrency(free, total, demand, wanted, pools)
    return Share(num_trials, decode_actors, cpus) if num_trials > 1 else Share(1)


def are_local(configs: list[Config]) -> bool:
    """Return whether `mmray train` would run these without Ray. Not on GPUs, which Ray hides from a trial's driver."""
    on_cluster = any(asks_for_cluster(config.cluster) or not is_single_node(config) for config in configs)
    return not on_cluster and count_gpus() == 0


def sized(config: Config, share: Share) -> Config:
    """Return the config with the decode actors and the CPUs of its share, where the config has `auto`."""
    if share.cpus_per_worker is not None and config.cluster.cpus_per_worker == "auto":
        config = config.with_cluster(cpus_per_worker=share.cpus_per_worker)
    if isinstance(config.data.workers, int) or share.decode_actors is None:
        return config
    return config.replace(data=config.data.replace(workers=min(num_decode_actors(config), share.decode_actors)))


def build_scheduler(plan: SweepPlan) -> ASHAScheduler | None:
    """Return the scheduler that ends trials at rungs (ASHA, Li et al. 2020); None without rungs."""
    if len(plan.rungs) == 1:
        return None
    shape: dict[str, Any] = {"grace_period": plan.rungs[0], "reduction_factor": trial_module.REDUCTION}
    return ASHAScheduler(time_attr="samples", max_t=plan.rungs[-1], **shape)


def run_trials(state: SweepState, sweep: Sweep, share: Callable[[int], Share]) -> None:
    """Train all trials to the first rung and the chosen ones on, or leave the choice to Ray Tune's ASHA.

    share: of a number of trials.
    """
    plan, space = state.plan, sweep.space
    (state.folder.path / STOP_FILE).unlink(missing_ok=True)
    names = None  # suggested by Optuna
    if sweep.searcher == "random":
        points = starting_points(sweep.base, space)
        settings = distinct_settings(sweep.base, space, points, space.seed)
        names = [state.add(each) for each in itertools.islice(settings, space.num_samples)]
        started = [row for row in state.rows.values() if row["parent"] is None]
        if len(names) > len(started) < len(state.rows):
            text = f"{len(started)} as before, instead of {len(names)}: this population was copied from them already"
            state.reporter.log(f"{text}; use another --run.name for a larger one", "trials")
    if sweep.scheduler == "asha":
        fit(state, sweep, share(space.num_trials), len(plan.rungs), names)
    else:
        for rung, samples in enumerate(plan.rungs):
            if rung:
                names = continued(state, sweep, rung)
            remaining = names and [name for name in names if not state.has_reached(name, rung)]
            # If the next generation exists, the trials that failed at this rung are replaced already.
            replaced = any(row["parent"] and row["parent"]["samples"] == samples for row in state.rows.values())
            if remaining == [] or replaced or state.stop_reason is not None:
                continue
            if rung:
                state.prune_paused(names or ())
            title = f"training to {samples:,} samples"
            state.reporter.status(f"{title}: {', '.join(remaining)}" if remaining and rung else title)
            fit(state, sweep, share(len(remaining or names or ()) or space.num_trials), rung + 1, remaining)
    if state.stop_reason is None:
        state.prune_paused()


def continued(state: SweepState, sweep: Sweep, rung: int) -> list[str]:
    """Return the trials that continue to the rung, counted from 0: the best ones, or the next generation of PBT."""
    maximize = GOALS[state.plan.goal].maximize
    if sweep.scheduler != "pbt":
        return promoted(list(state.rows.values()), rung - 1, maximize)
    if state.stop_reason is not None:
        return []
    parent_samples = state.plan.rungs[rung - 1]
    members = [row for row in state.rows.values() if (row["parent"] or {"samples": 0})["samples"] < parent_samples]
    size = min(sweep.space.num_trials, sum(row["parent"] is None for row in members))
    survivors, children = population.next_generation(members, rung - 1, size, sweep.space, maximize)
    names = [state.add_child(child.parent, child.settings, parent_samples) for child in children]
    trials = state.folder.path / "trials"
    copies = zip(children, names, strict=True)
    parallel_map(lambda each: population.copy_run(trials / each[0].parent, trials / each[1], each[0].settings), copies)
    return [*survivors, *names]


def fit(state: SweepState, sweep: Sweep, share: Share, num_rungs: int, names: list[str] | None) -> None:
    """Run Ray Tune in a thread while this thread handles signals: `names` up to a rung, or what Optuna suggests."""
    plan, callback, num_concurrent = replace(state.plan, share=share), _TuneCallback(state), share.num_trials
    recorded, scratch = dict(state.rows), state.folder.path / "ray"
    remove_tree(scratch)
    searcher: ConcurrencyLimiter | BasicVariantGenerator = BasicVariantGenerator(max_concurrent=num_concurrent)
    if names is None:
        earlier = [row["settings"] for row in recorded.values()]
        searcher = build_optuna(sweep.base, sweep.space, earlier, num_concurrent)
    arguments = {"plan": plan, "recorded": recorded, "num_rungs": num_rungs}
    arguments["settings"] = {name: trial.settings for name, trial in state.trials.items()}
    # ASHA could decide differently about a trial that it has pruned, so pruned trials are not resumed.
    arguments["ended"] = (*ENDED, "pruned") if sweep.scheduler == "asha" else ENDED
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(_run_trial, **arguments), _DRIVER_RESOURCES),
        param_space={NAME: tune.grid_search(names)} if names else tune_space(sweep.base, sweep.space),
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
        raise TrainingError(f"Ray Tune failed: {error}. Rerun the same command; measured trials are kept") from error
    finally:
        for name in list(state.running):
            state.end(name, TrialOutcome("stopped"))
        remove_tree(scratch)


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
    """Train to each rung after the first `done`; return how the trial ended. Raises what its run raises."""
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
    """Connects Ray Tune with the state of the sweep; pickled without state, because Ray Tune's restore is not used."""

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
        cause = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason is known")
        self._state.end(str(trial), classify_error(TrainingError(f"its driver process died: {cause}")))
