"""Run a sweep: trials train to rungs, the best ones continue, and one is recommended.

Successive halving runs Ray Tune once per rung.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from mmray.cluster.connect import asks_for_cluster, ray_session
from mmray.cluster.run_resources import (
    check_capacity,
    check_storage,
    is_single_node,
)
from mmray.config import Config, to_yaml
from mmray.config.sets import format_eval_sets
from mmray.errors import MmrayError, ResourceError, TrainingError, UsageError
from mmray.report.sweep import SweepRecord
from mmray.report.write import write_report_safely
from mmray.storage.lease import Lease
from mmray.sweep_files import GOALS
from mmray.training.resolve import resolve_run
from mmray.training.run_dir import collect_environment
from mmray.training.workers.local import count_gpus
from mmray.tuning.concurrency import plan_concurrency
from mmray.tuning.ray_tune import ENVIRONMENT, run_trials_on_ray_tune
from mmray.tuning.results import recommend_trial
from mmray.tuning.rungs import select_promoted
from mmray.tuning.suggestions import random_settings
from mmray.tuning.sweep import STOP_FILE, SweepReporter, SweepState, resolve_sweep_dir
from mmray.tuning.trials import (
    SweepRequest,
    Trial,
    TrialData,
    build_plan,
    corner_trials,
    describe_space,
    largest_cluster,
    typed_space,
    warmup_warning,
)


def search(request: SweepRequest, reporter: SweepReporter) -> SweepRecord:
    """Run or resume a sweep (trials that train one recipe with different settings), and return its
    record.

    An unfinished sweep of the recipe with the same space, goal and trial lengths in `run.storage`
    is resumed; otherwise a new one is started. A trial that fails does not end the sweep; its row
    has the reason.

    Args:
        request: Recipe (`base`, which also has the folder), search space, goal, training length and
            budget.
        reporter: Receives the rows of trials and log lines.

    Returns:
        A SweepRecord: `folder`, `summary` (content of sweep.json) and `trials`, a TrialRow per
        trial.

    Raises:
        MmrayError: The request is invalid, no trial is feasible, or Ray Tune failed.
    """
    request = replace(request, space=typed_space(request.base, request.space))
    corners = corner_trials(request.base, request.space, request.goal)
    os.environ.update(ENVIRONMENT)
    with ray_session(largest_cluster(corners), log=reporter.log):
        feasible, data = prepare_data(corners, request.goal, reporter)
        plan = build_plan(request, feasible, data)
        identity = {
            "space": describe_space(request.space),
            "goal": request.goal,
            "rungs": list(plan.rungs),
        }
        folder = resolve_sweep_dir(request.base, identity, reporter)
        with Lease(folder.path, activity="in use for a sweep"):
            folder.write("recipe.yaml", to_yaml(request.base))
            configs = [trial.config for trial in feasible]
            num_concurrent = plan_concurrency(
                configs, request.concurrency, request.space.num_trials
            )
            local = num_concurrent == 1 and run_without_ray_train(configs)
            plan = replace(plan, folder=folder.path, local=local)
            if not local:
                check_storage(request.base)  # Once for all trials.
            summary = {
                "kind": "sweep",
                "recipe": request.base.recipe,
                **identity,
                "concurrency": num_concurrent,
                "environment": collect_environment(),
            }
            state = SweepState(folder, plan, reporter, summary)
            log_plan(state, num_concurrent)
            run_sweep(state, configs)
    return SweepRecord.read(folder.path)


def prepare_data(
    trials: Sequence[Trial], goal: str, reporter: SweepReporter
) -> tuple[list[Trial], TrialData]:
    """Prepare the data of all trials.

    Args:
        trials: Trials at the corners of the search space.
        goal: `throughput`, `loss` or `recall`; the last two need held-out rows.

    Returns:
        The feasible trials, and their data. A trial is not feasible if its batch settings
        contradict each other, it needs more resources than the cluster has, or it cannot use the
        data.

    Raises:
        MmrayError: The last such error, if no trial is feasible.
    """
    feasible: list[Trial] = []
    error: MmrayError | None = None
    data = TrialData()
    checked: set[int] = set()
    for trial in trials:
        if trial.shape is None:
            continue
        config = trial.config.replace(data=trial.config.data.replace(**data.sets))
        try:
            check_capacity(config.with_cluster(workers=config.cluster.max_workers))
            if trial.shape.global_batch_size not in checked:
                data = _open_data(config, goal, reporter)
                checked.add(trial.shape.global_batch_size)
        except (ResourceError, UsageError) as caught:
            error = caught
            continue
        feasible.append(replace(trial, config=config))
    if not feasible and error is not None:
        raise error
    return feasible, data


def _open_data(config: Config, goal: str, reporter: SweepReporter) -> TrialData:
    resolved = resolve_run(config, reporter)
    held_out = resolved.eval_sets
    if "" not in held_out and held_out and GOALS[goal].eval_metric:
        raise UsageError(
            f"--goal {goal} compares trials on one set; set --data.eval to one without a name "
            f"(got {config.data.eval})"
        )
    if not held_out and GOALS[goal].eval_metric:
        raise UsageError(
            f"--goal {goal}: the set has no held-out rows; prepare it with --holdout, or give "
            "--data.eval"
        )
    sets = {"train": resolved.data_identity["train"]}
    if config.data.eval:
        sets["eval"] = format_eval_sets(
            [
                each._replace(address=str(held_out[each.name].folder))
                for each in config.data.eval_sets
            ]
        )
    held_out_rows = sum(each.num_rows for each in held_out.values())
    return TrialData(sets, resolved.data_identity["num_rows"], held_out_rows)


def run_without_ray_train(configs: Sequence[Config]) -> bool:
    """Return whether `mmray train` would run all these configs in a process of this machine."""
    on_cluster = any(
        asks_for_cluster(config.cluster) or not is_single_node(config.cluster) for config in configs
    )
    return not on_cluster and count_gpus() == 0


def log_plan(state: SweepState, num_concurrent: int) -> None:
    """Log the folder, the trials and the goal (such as `loss`) of a sweep before it starts.

    Args:
        state: The sweep, with the rows of trials that earlier commands have trained.
        num_concurrent: Number of trials at a time.
    """
    request = state.plan.request
    num_trials = request.space.num_trials
    rungs = " to ".join(f"{samples:,}" for samples in state.plan.rungs)
    at_a_time = f"{num_concurrent} at a time"
    if num_concurrent < min(request.concurrency or 1, num_trials):
        at_a_time += (
            f" (as many of --concurrency {request.concurrency} as fit; on the cores of one machine "
            "set --cluster.cpus-per-worker)"
        )
    measured = sum(bool(row.rungs) for row in state.rows.values())
    trials = f"{num_trials} with {rungs} samples each, {at_a_time}, {measured} measured before"
    state.reporter.log(str(state.folder.path), "sweep")
    state.reporter.log(trials, "trials")
    state.reporter.log(request.goal, "goal")
    warning = warmup_warning(state.plan)
    if warning is not None:
        state.reporter.log(warning, "warm-up")


def run_sweep(state: SweepState, configs: Sequence[Config]) -> None:
    """Run the remaining trials, recommend the best one, and write sweep.json, best.yaml and the
    report.

    These files have the results so far also if an error is raised.

    Args:
        configs: Configs at the corners of the search space; each must get enough resources.

    Raises:
        TrainingError: Ray Tune itself failed.
    """
    state.write_summary("running")
    failure: TrainingError | None = None
    try:
        run_trials(state, configs)
    except TrainingError as error:
        failure = error
    best = recommend_trial(list(state.rows.values()), state.plan.request.goal)
    if best is not None:
        trial = state.plan.trial(best.best, state.rows[best.best].settings)
        recipe = to_yaml(state.plan.best_recipe(trial))
        state.folder.write("best.yaml", f"# {best.why}\n{recipe}")
    else:  # one of an earlier command
        (state.folder.path / "best.yaml").unlink(missing_ok=True)
    if failure is not None or (best is None and state.stop_reason is None):
        status = "failed"
    else:
        status = state.stop_reason or "finished"
    state.write_summary(status, best)
    write_report_safely(state.folder.path, state.reporter.log)
    if failure is not None:
        raise failure


def run_trials(state: SweepState, configs: Sequence[Config]) -> None:
    """Run successive halving: Ray Tune once per rung, with the best trials of the rung before.

    Returns early if the sweep was stopped. Results are in the rows of `state` and in trials.jsonl;
    a failed trial has its error there.

    Args:
        configs: Configs at the corners of the search space, by which the number of trials at a time
            is planned.

    Raises:
        TrainingError: Ray Tune itself failed.
    """
    request = state.plan.request
    (state.folder.path / STOP_FILE).unlink(missing_ok=True)
    settings = random_settings(request.base, request.space)
    names = list(dict.fromkeys(map(state.add, settings)))  # draws may be equal
    for rung, samples in enumerate(state.plan.rungs):
        if state.stop_reason is not None:
            return
        if rung > 0:
            maximize = GOALS[request.goal].maximize
            names = select_promoted(list(state.rows.values()), rung - 1, maximize)
            state.prune_paused(keep=names)
        names = [name for name in names if not state.has_reached(name, rung)]
        if not names:
            continue
        title = f"training to {samples:,} samples"
        state.reporter.status(title if rung == 0 else f"{title}: {', '.join(names)}")
        num_concurrent = plan_concurrency(configs, request.concurrency, len(names))
        run_trials_on_ray_tune(state, num_concurrent, rung, names)
    if state.stop_reason is None:
        state.prune_paused()
