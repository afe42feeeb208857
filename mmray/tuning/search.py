"""Run a sweep: trials train to rungs, the best ones continue, one is recommended and cooled down.

Successive halving, which has a fixed cost (Jamieson & Talwalkar 2016), and population based
training run one `Tuner.fit` per rung. Ray Tune's ASHA does not wait for the slowest trial, but
continues the first ones without a comparison.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mmray import plugins
from mmray.cluster import placement
from mmray.cluster.capacity import fits
from mmray.cluster.connect import asks_for_cluster, ray_session
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Config, to_yaml
from mmray.errors import MmrayError, ResourceError, TrainingError, UsageError
from mmray.report.run import read_lines
from mmray.report.sweep import GOALS, LEARNING_GOALS
from mmray.report.write import write_report_safely
from mmray.storage.lease import Lease
from mmray.storage.storage import parallel_map
from mmray.training.backend import num_gpus
from mmray.training.driver import train
from mmray.training.local import count_gpus
from mmray.training.ray_backend import (
    check_capacity,
    check_storage,
    is_single_node,
    resource_demand,
)
from mmray.training.resolve import resolve_run
from mmray.training.run_dir import collect_environment
from mmray.tuning import population
from mmray.tuning import trials as trial_module
from mmray.tuning.ray_tune import ENVIRONMENT, fit
from mmray.tuning.results import Row, flag_unequal_losses, promoted, rung_value, select_best
from mmray.tuning.suggestions import distinct_settings
from mmray.tuning.sweep import (
    STOP_FILE,
    Sweep,
    SweepDir,
    SweepReporter,
    SweepState,
    resolve_sweep_dir,
)
from mmray.tuning.trials import FeasibleSpace, Share, SweepPlan, Trial, starting_points

FREE_WAIT_S = 10.0  # decode actors release their CPUs with a delay
MAX_CONCURRENT = 64
DRIVER_GIB = 1.0  # memory of the driver process of a trial, on the head node


def search(sweep: Sweep, reporter: SweepReporter) -> tuple[SweepDir, dict[str, Any], list[Row]]:
    """Run all trials, of which some may fail, and recommend the best measured one. Raises
    MmrayError.

    Returns the folder, the content of sweep.json, and the rows of the trials.
    """
    sweep = replace(sweep, space=trial_module.parse_values(sweep.base, sweep.space))
    corners = trial_module.corner_trials(sweep.base, sweep.space)
    if sweep.scheduler == "pbt":
        population.check_sweep(sweep.space, sweep.goal, sweep.searcher)
    if sweep.searcher == "optuna":
        plugins.check_installed("optuna", "--search optuna", "optuna")
        if sweep.space.num_samples is None:
            raise UsageError(
                "--search optuna: give --samples N, because lists without a range are a grid"
            )
    os.environ.update(ENVIRONMENT)
    with ray_session(trial_module.largest_cluster(corners)):
        feasible = check_corners(corners, sweep.goal, reporter)
        searched = sweep.trial_settings, sweep.base, sweep.space, sweep.goal
        plan = trial_module.build_plan(
            *searched, feasible, sweep.scheduler, recipe_rows=sweep.recipe_rows
        )
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
    """Prepare each distinct data set once.

    Raises the last error if no trial of the space is feasible.
    """
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
            # as in the trial
            check_capacity(config.with_cluster(workers=config.cluster.max_workers))
            if (need := f"{key} {trial.shape and trial.shape.global_batch_size}") not in checked:
                resolved = resolve_run(config, reporter)
                checked.add(need)
                if goal in LEARNING_GOALS and resolved.eval_set is None:
                    advice = "prepare it with --holdout, or give --data.eval"
                    raise UsageError(f"--goal {goal}: the set holds no rows out; {advice}")
                held_out = (
                    resolved.eval_set.storage.address if resolved.eval_set and data.eval else None
                )
                sets[key] = {"train": resolved.data_identity["train"], "eval": held_out}
                num_rows = max(num_rows, resolved.data_identity["num_rows"])
                held_out_rows = max(
                    held_out_rows, resolved.eval_set.num_rows if resolved.eval_set else 0
                )
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
    """Run the remaining trials, cool the best one down and rank all; trials.jsonl is updated after
    each rung.
    """
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
    reporter.log(
        f"{count} with {rungs} samples each, {at_a_time}, {measured} measured before", "trials"
    )
    reporter.log(sweep.goal, "goal")
    failure: TrainingError | None = None
    try:
        run_trials(state, sweep, share)
    except TrainingError as error:  # raised after the results so far are written
        failure = error
    rows = sorted(state.rows.values(), key=lambda row: row["trial"])
    best = select_best(rows, sweep.goal)
    if plan.learning:
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
    """Return the estimated seconds of GPUs (workers, on CPUs) that full trials of the pruned ones
    would have taken.
    """
    return sum(
        (plan.rungs[-1] - row["rungs"][-1]["samples"])
        / row["samples_per_s"]
        * row["workers"]
        * num_gpus(plan.base)
        for row in rows
        if row["status"] == "pruned" and row["samples_per_s"]
    )


def cool_down(trial: Trial, state: SweepState) -> Row | None:
    """Continue the best trial's run with a decaying learning rate. A stop request stops the sweep
    too.

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
    """Return how many of `count` trials run at a time, and the share of each.

    A single one has all, as a run has.
    """
    demands = [resource_demand(config) for config in configs]
    demand = max(
        demands, key=lambda each: each.workers * sum(each.per_worker.values()) + each.data_cpus
    )
    single_node = all(is_single_node(config) for config in configs)  # trials would slow each other
    total, pools = placement.alive_nodes(), placement.autoscaling_pools()
    head_gib = max(
        (node.resources.get("memory", 0.0) for node in total if HEAD_RESOURCE in node.resources),
        default=0,
    )
    drivers = max(1, int(head_gib / 2**30 / DRIVER_GIB)) if head_gib else MAX_CONCURRENT
    wanted = min(count, sweep.concurrency or (1 if single_node else min(drivers, MAX_CONCURRENT)))
    if sweep.concurrency and not pools and all(config.cluster.wait_for_nodes for config in configs):
        return Share(wanted)  # the user declares that nodes will be added, and for how many trials
    cpus = None
    if wanted > 1 and placement.available_cores_if_local() and "GPU" not in demand.per_worker:
        # `auto` would be all cores
        cpus = trial_module.cpus_of_share(total[0].resources["CPU"], wanted, demand)
        demand = replace(demand, per_worker=demand.per_worker | {"CPU": cpus})
    free = placement.wait_for_free_nodes(demand, FREE_WAIT_S if fits(demand, total) else 0.0)
    num_trials, decode_actors = trial_module.trial_concurrency(free, total, demand, wanted, pools)
    return Share(num_trials, decode_actors, cpus) if num_trials > 1 else Share(1)


def are_local(configs: list[Config]) -> bool:
    """Return whether `mmray train` would run these without Ray.

    Not on GPUs, which Ray hides from a trial's driver.
    """
    on_cluster = any(
        asks_for_cluster(config.cluster) or not is_single_node(config) for config in configs
    )
    return not on_cluster and count_gpus() == 0


def run_trials(state: SweepState, sweep: Sweep, share: Callable[[int], Share]) -> None:
    """Train all trials to the first rung and the chosen ones on, or leave the choice to Ray Tune's
    ASHA.

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
            text = (
                f"{len(started)} as before, instead of {len(names)}: this population was "
                "copied from them already"
            )
            state.reporter.log(f"{text}; use another --run.name for a larger one", "trials")
    if sweep.scheduler == "asha":
        fit(state, sweep, share(space.num_trials), len(plan.rungs), names)
    else:
        for rung, samples in enumerate(plan.rungs):
            if rung:
                names = continued(state, sweep, rung)
            remaining = names and [name for name in names if not state.has_reached(name, rung)]
            # If the next generation exists, the trials that failed at this rung are replaced
            # already.
            replaced = any(
                row["parent"] and row["parent"]["samples"] == samples for row in state.rows.values()
            )
            if remaining == [] or replaced or state.stop_reason is not None:
                continue
            if rung:
                state.prune_paused(names or ())
            title = f"training to {samples:,} samples"
            state.reporter.status(
                f"{title}: {', '.join(remaining)}" if remaining and rung else title
            )
            fit(
                state,
                sweep,
                share(len(remaining or names or ()) or space.num_trials),
                rung + 1,
                remaining,
            )
    if state.stop_reason is None:
        state.prune_paused()


def continued(state: SweepState, sweep: Sweep, rung: int) -> list[str]:
    """Return the trials that continue to the rung, counted from 0: the best ones, or the next
    generation of PBT.
    """
    maximize = GOALS[state.plan.goal].maximize
    if sweep.scheduler != "pbt":
        return promoted(list(state.rows.values()), rung - 1, maximize)
    if state.stop_reason is not None:
        return []
    parent_samples = state.plan.rungs[rung - 1]
    members = [
        row
        for row in state.rows.values()
        if (row["parent"] or {"samples": 0})["samples"] < parent_samples
    ]
    size = min(sweep.space.num_trials, sum(row["parent"] is None for row in members))
    survivors, children = population.next_generation(members, rung - 1, size, sweep.space, maximize)
    names = [state.add_child(child.parent, child.settings, parent_samples) for child in children]
    trials = state.folder.path / "trials"
    copies = zip(children, names, strict=True)
    parallel_map(
        lambda each: population.copy_run(
            trials / each[0].parent, trials / each[1], each[0].settings
        ),
        copies,
    )
    return [*survivors, *names]
