"""Sweep folder: which one a command uses, which rows it keeps; signals during a sweep."""

import json
import math
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mmray.config import recipes, to_yaml
from mmray.config.search_space import Range, Space
from mmray.errors import ForceExit, TrainingError, UsageError
from mmray.sweep_files import SWEEP
from mmray.training.monitor import signal_handlers
from mmray.training.run_dir import RunDir
from mmray.tuning import ray_tune, search
from mmray.tuning.results import TrialOutcome, promoted, select_best
from mmray.tuning.sweep import (
    STOP_FILE,
    Budget,
    Sweep,
    SweepDir,
    SweepState,
    TimeLeft,
    resolve_sweep_dir,
)
from mmray.tuning.trials import Share, SweepPlan
from tests.training.runs import Silent

SAMPLE = recipes.load("sample")
IDENTITY = {"space": {"batch.micro": [8, 16]}, "goal": "loss", "rungs": [16, 64]}


def base(storage, **run):
    return SAMPLE.replace(run=SAMPLE.run.replace(storage=str(storage), **run))


def started(config, status="stopped", identity=IDENTITY):
    sweep = resolve_sweep_dir(config, identity, Silent())
    sweep.path.mkdir(parents=True, exist_ok=True)
    sweep.write("recipe.yaml", to_yaml(config))
    sweep.write_json("sweep.json", {"kind": "sweep", "status": status, **identity})
    return sweep


def test_unnamed_sweep_resumes_until_finished(tmp_path):
    first = started(base(tmp_path))
    assert first.path == tmp_path / "sample-tune"
    assert resolve_sweep_dir(base(tmp_path), IDENTITY, Silent()).path == first.path
    for other in ({"rungs": [64]}, {"goal": "recall"}):  # whose values are of another kind
        assert (
            resolve_sweep_dir(base(tmp_path), IDENTITY | other, Silent()).path.name
            == "sample-tune-2"
        )
    started(base(tmp_path), "finished")
    reporter = Silent()
    resolve_sweep_dir(base(tmp_path), IDENTITY, reporter)
    assert reporter.notes == [("not resumed", f"{tmp_path / 'sample-tune'} has finished")]
    assert resolve_sweep_dir(base(tmp_path), IDENTITY, Silent()).path.name == "sample-tune-2"


def plan_for(folder, goal="loss", rungs=(100, 400, 1600)):
    return SweepPlan(SAMPLE, goal, rungs, folder, recipe_rows=128)


class Reporter(Silent):
    """Keeps trial, status and number of rungs of each reported row, and the last time left."""

    def __init__(self):
        super().__init__()
        self.rows, self.time_left = [], None

    def table(self, rows, rungs, time_left):
        self.time_left = time_left

    def progress(self, row, rungs):
        self.rows.append((row["trial"], row["status"], len(row["rungs"])))


def alone(_):
    return Share()


def start(state, name):
    """Start a trial and its workers."""
    state.start(name)
    state.start_workers(name)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def begin(tmp_path):
    """Start the state of a command of one sweep."""
    sweep = started(base(tmp_path))

    def begin(goal="loss", **options):
        plan = plan_for(sweep.path, goal)
        return SweepState(sweep, plan, Reporter(), sweep.read_rows(), clock=Clock(), **options)

    return begin


def test_rows_have_rungs_and_the_way_each_trial_ended(begin):
    state = begin()
    names = [state.add({"optimizer.lr": lr}) for lr in (1e-3, 1e-2, 1e-1, 1.0)]
    assert names == ["t001", "t002", "t003", "t004"]
    for name in names[:3]:
        start(state, name)
        state.clock.now_s += 10
        state.reach(name, {"samples": 100, "value": 2.0})
    state.end("t002")  # by the scheduler
    state.clock.now_s += 5
    state.reach("t001", {"samples": 400, "value": 1.5})
    state.reach("t001", {"samples": 1600, "value": 1.0})
    state.end("t001")
    state.end("t003", TrialOutcome("failed", "evaluate/loss is not finite"))
    rows = state.folder.read_rows()
    assert [(row["status"], len(row["rungs"])) for row in rows.values()] == [
        ("finished", 3),
        ("pruned", 1),
        ("failed", 1),
    ]
    assert [each["elapsed_s"] for each in rows["t001"]["rungs"]] == [10, 35, 35]
    assert (rows["t001"]["eval_loss"], rows["t002"]["eval_loss"], rows["t003"]["error"]) == (
        *(1.0, 2.0),
        "evaluate/loss is not finite",
    )
    assert state.reporter.rows[-2:] == [("t001", "finished", 3), ("t003", "failed", 1)]
    assert select_best(list(rows.values()), "loss")["best"] == "t001"


def test_same_command_keeps_names_rungs_and_time_of_trials(begin):
    first = begin()
    for lr in (1e-3, 1e-2):
        start(first, name := first.add({"optimizer.lr": lr}))
        first.clock.now_s += 10
        first.reach(name, {"samples": 100, "value": 2.0})
    first.end("t001")
    # Killed while t002 runs. The second command gets its trials in another order.
    second = begin()
    assert [second.add({"optimizer.lr": lr}) for lr in (1e-2, 1e-3, 1e-3)] == [
        "t002",
        "t001",
        "t003",
    ]
    for name in ("t002", "t001"):
        start(second, name)
        second.reach(name, {"samples": 100, "value": 2.0})  # reported again without training
    second.end("t001")
    second.clock.now_s += 7
    second.reach("t002", {"samples": 400, "value": 1.5})
    assert second.reporter.rows == [("t001", "pruned", 1), ("t002", "running", 2)]
    assert second.rows["t001"] == first.rows["t001"]
    assert [each["samples"] for each in second.rows["t002"]["rungs"]] == [100, 400]


@pytest.mark.parametrize(
    ("text", "budget", "spent"),
    [
        ("2h", Budget(seconds=7200), (7200, 0)),
        ("30m", Budget(seconds=1800), (1800, 0)),
        ("0.5gpu-hours", Budget(gpu_seconds=1800), (9, 1800)),
        (None, Budget(), None),
    ],
)
def test_budget_is_a_time_or_gpu_hours(text, budget, spent):
    assert Budget.parse(text) == budget and not budget.is_spent(8, 8)
    assert spent is None or budget.is_spent(*spent)
    for wrong in ("2", "h", "0h", "2 hours"):
        with pytest.raises(UsageError, match="write a time such as 2h"):
            Budget.parse(wrong)


@pytest.mark.parametrize(
    ("count", "maximize", "names"),
    [
        (8, False, ["t1", "t2"]),
        (12, False, ["t1", "t2", "t3"]),
        (12, True, ["t12", "t11", "t10"]),
        (1, False, ["t1"]),
    ],
)
def test_best_quarter_of_the_trials_that_reached_a_rung_continues(count, maximize, names):
    rows = [
        {"trial": f"t{n}", "rungs": [{"samples": 100, "value": float(n)}]}
        for n in range(1, count + 1)
    ]
    assert promoted([{"trial": "failed", "rungs": []}, *rows], 0, maximize) == names
    assert promoted(rows, 1, maximize) == []


def test_spent_budget_stops_running_trials_and_kills_one_that_does_not_stop(begin):
    state = begin(budget=Budget(gpu_seconds=30))
    for lr in (1e-3, 1e-2):
        start(state, state.add({"optimizer.lr": lr}))
    stop = state.folder.path / STOP_FILE
    state.clock.now_s += 14
    assert not state.is_stopped() and not stop.exists() and state.gpu_seconds == 28
    state.clock.now_s += 1
    assert not state.is_stopped() and stop.exists()  # requested; two trials run
    state.end("t001", TrialOutcome("stopped"))
    assert not state.is_stopped() and state.stop_reason == "budget"
    state.clock.now_s += SAMPLE.cluster.state_limits_s["saving"] + 1
    assert state.is_stopped()
    state.end("t002", TrialOutcome("stopped"))
    assert [row["status"] for row in state.rows.values()] == ["stopped", "stopped"]


def test_time_of_a_killed_command_counts_for_the_budget(begin):
    budgets = {"budget": Budget(seconds=60), "summary": {"kind": "sweep"}, "planned_samples": 400}
    first = begin(**budgets)
    start(first, first.add({"optimizer.lr": 1e-3}))
    for _ in range(12):
        first.clock.now_s += 4
        assert not first.is_stopped()
    # Killed after 48 s; the time was last saved at 48 s or up to 10 s before.
    second = begin(**budgets)
    assert 38 < second.elapsed_s <= 48 and 38 < second.gpu_seconds <= 48
    assert second.rows["t001"]["status"] == "stopped"
    start(second, second.add({"optimizer.lr": 1e-3}))
    second.clock.now_s += 22
    assert not second.is_stopped() and second.stop_reason == "budget"  # requested
    assert begin(budget=Budget(gpu_seconds=30)).is_stopped()


def test_waiting_for_workers_takes_no_gpu_hours(begin):
    state = begin(budget=Budget(gpu_seconds=30))
    state.start(name := state.add({"optimizer.lr": 1e-3}))
    state.clock.now_s += 100
    assert not state.is_stopped() and state.gpu_seconds == 0 and state.stop_reason is None
    for _ in range(2):  # again after the first of its runs
        state.start_workers(name)
        state.clock.now_s += 20
    assert state.gpu_seconds == 40 and not state.is_stopped() and state.stop_reason == "budget"
    state.end(name, TrialOutcome("paused"))
    assert state.rows[name]["elapsed_s"] == 40


def test_failing_storage_is_retried_because_its_error_would_end_all_trials(begin, monkeypatch):
    monkeypatch.setattr("mmray.tuning.sweep.STORAGE_RETRIES_S", (0.0, 0.0))
    state, write, failures = begin(), SweepDir.write_rows, 2

    def failing(folder, rows):
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError("no route to host")
        write(folder, rows)

    monkeypatch.setattr(SweepDir, "write_rows", failing)
    state.start(name := state.add({"optimizer.lr": 1e-3}))
    assert state.folder.read_rows().keys() == {name}
    assert [text for label, text in state.reporter.notes if label == "storage"] == [
        f"cannot access {state.folder.path}: no route to host; retrying in 0 s"
    ] * 2
    failures = 3
    with pytest.raises(OSError, match="no route to host"):
        state.end(name)


def test_time_left_follows_the_samples_and_the_budget(begin):
    state = begin(budget=Budget(gpu_seconds=100), planned_samples=400)
    start(state, name := state.add({"optimizer.lr": 1e-3}))
    state.clock.now_s += 20
    state.is_stopped()
    assert state.reporter.time_left == TimeLeft(20, None, 80)
    state.reach(name, {"samples": 100, "value": 2.0})
    assert state.time_left() == TimeLeft(20, 60, 80)
    assert begin(budget=Budget(seconds=30)).time_left() == TimeLeft(20, None, 10)


def test_child_has_the_rungs_of_its_parent_and_its_name_in_later_commands(begin):
    state = begin()
    start(state, parent := state.add({"optimizer.lr": 1e-3}))
    state.clock.now_s += 10
    state.reach(parent, {"samples": 100, "value": 2.0})
    state.end(parent, TrialOutcome("paused"))
    child = state.add_child(parent, {"optimizer.lr": 2e-3}, 100)
    row = state.folder.read_rows()[child]
    assert (child, row["status"], row["parent"]) == (
        "t002",
        "paused",
        {"trial": parent, "samples": 100},
    )
    assert row["rungs"] == [
        {"samples": 100, "value": 2.0, "elapsed_s": 0.0}
    ] and not state.has_reached(child, 1)
    again = begin()
    assert [again.add({"optimizer.lr": lr}) for lr in (1e-3, 2e-3)] == ["t001", "t003"]
    assert [again.add_child(parent, {"optimizer.lr": 2e-3}, samples) for samples in (100, 400)] == [
        "t002",
        "t004",
    ]


@pytest.fixture
def simulated(monkeypatch):
    """Train by a formula instead of in runs: the loss is 1 / samples, times the distance of the
    rate from 0.01.

    A rate above 0.03 diverges. Returns the names of the trials of each call and the sweep's
    functions.
    """
    calls = []

    def fit(state, sweep, share, num_rungs, names):
        calls.append(list(names))
        for name in names:
            start(state, name)
            state.clock.now_s += 1
            rate, samples = (
                state.rows[name]["settings"]["optimizer.lr"],
                state.plan.rungs[num_rungs - 1],
            )
            if rate > 0.03:
                state.end(name, TrialOutcome("failed", "evaluate/loss is not finite"))
                continue
            state.reach(
                name, {"samples": samples, "value": (1 + abs(math.log10(rate) + 2)) / samples}
            )
            state.end(
                name, TrialOutcome("finished" if num_rungs == len(state.plan.rungs) else "paused")
            )
            if state.stop_reason is not None:
                return

    def copy_run(parent, child, settings):
        assert RunDir(child.parent.parent).read_json(SWEEP) is not None
        calls.append((parent.name, child.name))

    monkeypatch.setattr(search, "fit", fit)
    monkeypatch.setattr(search.population, "copy_run", copy_run)
    return calls


POPULATION = Space({"optimizer.lr": Range(1e-4, 1.0, log=True)}, 8)


def test_population_based_training_replaces_the_worst_and_diverged_trials(begin, simulated):
    state = begin()
    sweep = Sweep(SAMPLE, SAMPLE, POPULATION, "loss", scheduler="pbt")
    search.run_trials(state, sweep, alone)
    first, *others = simulated
    assert len(first) == 8
    diverged = [name for name in first if state.rows[name]["status"] == "failed"]
    assert diverged and all(state.rows[name]["rungs"] == [] for name in diverged)
    groups = [names for names in others if isinstance(names, list)]
    # the population has the same size at each rung
    assert [len(names) for names in groups] == [8, 8]
    copies = [names for names in others if isinstance(names, tuple)]
    assert {child for _, child in copies} == state.rows.keys() - set(first)
    best = select_best(list(state.rows.values()), "loss")
    assert state.rows[best["best"]]["status"] == "finished" and {
        row["status"] for row in state.rows.values()
    } == {
        *("finished", "pruned", "failed"),
    }
    worst = max(
        state.rows[name]["rungs"][0]["value"] for name in first if state.rows[name]["rungs"]
    )
    assert worst not in [state.rows[name]["rungs"][0]["value"] for name in groups[0]]
    state.prune_paused()
    assert state.time_left().estimated_s is not None


def test_stopped_population_continues_with_the_same_children(begin, simulated):
    sweep = Sweep(SAMPLE, SAMPLE, POPULATION, "loss", scheduler="pbt")
    whole = begin()
    search.run_trials(whole, sweep, alone)
    expected, rows = list(simulated), dict(whole.rows)
    whole.folder.write_rows([])
    simulated.clear()
    for stop_after in (8, 11, 99):  # trials trained by a command
        state, count = begin(), 0

        def progress(row, rungs, state=state, stop_after=stop_after):
            nonlocal count
            count += row["status"] == "running"
            if count == stop_after:
                state.request_stop("stopped", "stopping")

        state.reporter.progress = progress
        search.run_trials(state, sweep, alone)
    assert {name: row["settings"] for name, row in state.rows.items()} == {
        name: row["settings"] for name, row in rows.items()
    }
    assert {name: row["parent"] for name, row in state.rows.items()} == {
        name: row["parent"] for name, row in rows.items()
    }
    trained = [name for names in simulated if isinstance(names, list) for name in names]
    assert set(trained) == {name for names in expected if isinstance(names, list) for name in names}


def test_population_that_was_copied_does_not_grow(begin, simulated):
    sweep = Sweep(SAMPLE, SAMPLE, POPULATION, "loss", scheduler="pbt")
    search.run_trials(begin(), sweep, alone)
    simulated.clear()
    larger = replace(sweep, space=replace(POPULATION, num_samples=12))
    state = begin()
    search.run_trials(state, larger, alone)
    assert [names for names in simulated if isinstance(names, list)] == []  # trained
    assert "8 as before, instead of 12" in "".join(text for _, text, *_ in state.reporter.notes)


@pytest.mark.parametrize("interrupted", ["add_child", "copy_run", "fit"])
def test_resumed_population_does_not_train_replaced_trials_again(
    begin, simulated, monkeypatch, interrupted
):
    sweep = Sweep(SAMPLE, SAMPLE, POPULATION, "loss", scheduler="pbt")
    whole = begin()
    search.run_trials(whole, sweep, alone)
    whole.folder.write_rows([])
    expected = list(simulated)
    simulated.clear()
    state, calls = begin(), 0
    unit = {"add_child": state, "copy_run": search.population, "fit": search}[interrupted]
    function = getattr(unit, interrupted)

    def interrupt(*arguments):
        nonlocal calls
        calls += 1
        if calls == 2:  # the second child of the generation, or the second rung
            raise KeyboardInterrupt
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(unit, interrupted, interrupt)
        with pytest.raises(KeyboardInterrupt):
            search.run_trials(state, sweep, alone)
    first = list(simulated[0])
    assert "failed" in {state.rows[name]["status"] for name in first}
    simulated.clear()
    again = begin()
    search.run_trials(again, sweep, alone)
    assert [names for names in simulated if isinstance(names, list)] == [
        names for names in expected[1:] if isinstance(names, list)
    ]
    assert {name: row["parent"] for name, row in again.rows.items()} == {
        name: row["parent"] for name, row in whole.rows.items()
    }


def test_trial_that_only_an_earlier_command_suggested_is_promoted(begin, simulated):
    first = begin()
    for lr in (1e-3, 1e-2, 2e-2):
        start(first, name := first.add({"optimizer.lr": lr}))
        first.reach(name, {"samples": 100, "value": abs(lr - 1e-2)})
        first.end(name, TrialOutcome("paused"))
    state = begin()
    search.run_trials(state, Sweep(SAMPLE, SAMPLE, Space({"optimizer.lr": (1e-3,)}), "loss"), alone)
    assert simulated == [["t002", "t001"], ["t002", "t001"]]
    assert (
        state.rows["t002"]["settings"] == {"optimizer.lr": 1e-2}
        and state.rows["t002"]["status"] == "finished"
    )


def test_halving_continues_where_the_earlier_command_stopped(begin, simulated):
    sweep = Sweep(SAMPLE, SAMPLE, Space({"optimizer.lr": (1e-3, 1e-2, 2e-2, 3e-2, 4e-2)}), "loss")
    for stop_after in (2, 99):
        state = begin()
        state.reporter.progress = lambda row, rungs, state=state, after=stop_after: (
            state.request_stop("stopped", "stopping")
            if row["trial"] == f"t{after:03}" and row["rungs"]
            else None
        )
        search.run_trials(state, sweep, alone)
    assert simulated == [
        ["t001", "t002", "t003", "t004", "t005"],
        ["t003", "t004", "t005"],
        *(["t002", "t003"], ["t002", "t003"]),
    ]
    assert [row["status"] for row in state.rows.values()] == [
        "pruned",
        "finished",
        "finished",
        "pruned",
        "failed",
    ]


def test_sweep_can_be_on_an_object_store(s3):
    sweep = started(base(f"{s3.address}/runs"))
    state = SweepState(sweep, plan_for(sweep.path), Reporter(), sweep.read_rows(), clock=Clock())
    start(state, name := state.add({"optimizer.lr": 1e-3}))
    state.reach(name, {"samples": 100, "value": 2.0})
    state.request_stop("stopped", "stopping")
    assert (sweep.path / STOP_FILE).exists() and state.plan.folder == sweep.path
    state.end(name, TrialOutcome("paused"))
    assert (
        resolve_sweep_dir(base(f"{s3.address}/runs"), IDENTITY, Silent()).read_rows() == state.rows
    )
    config = state.plan.config(state.trials[name], 100)
    assert config.run.storage.startswith(f"{s3.address.partition('?')[0]}/runs/sample-tune/trials")


def test_failure_of_ray_tune_is_recorded_and_raised(tmp_path, monkeypatch):
    def fail(state, *_):
        raise TrainingError("Ray Tune failed")

    monkeypatch.setattr(search, "run_trials", fail)
    config = base(tmp_path)
    sweep, folder = Sweep(config, config, Space({"optimizer.lr": (1, 2)}), "loss"), started(config)
    with pytest.raises(TrainingError, match="Ray Tune failed"):
        search._search(sweep, plan_for(folder.path), alone, IDENTITY, folder, Reporter())
    assert (
        folder.read_json("sweep.json")["status"] == "failed"
        and (folder.path / "report.html").exists()
    )


@pytest.mark.parametrize(
    ("trial", "run", "sweep"), [("finished", "stopped", "stopped"), ("failed", None, "finished")]
)
def test_only_a_finished_trial_is_cooled_down_and_a_stop_leaves_the_sweep_unfinished(
    tmp_path, monkeypatch, trial, run, sweep
):
    outcome, cooled = TrialOutcome(trial, "a bug of the user" if trial == "failed" else None), []

    def run_trials(state, *_):
        start(state, name := state.add({"optimizer.lr": 1e-3}))
        for samples in state.plan.rungs[: None if trial == "finished" else 1]:
            state.reach(name, {"samples": samples, "value": 1.0})
        state.end(name, outcome)

    def train(config, reporter, should_stop, local):
        cooled.append(
            (
                config.run.name,
                json.loads((folder.path / "sweep.json").read_text())["recommendation"]["best"],
            )
        )
        return SimpleNamespace(result={"status": run})

    monkeypatch.setattr(search, "run_trials", run_trials)
    monkeypatch.setattr(search, "train", train)
    config = base(tmp_path)
    request, folder = (
        Sweep(config, config, Space({"optimizer.lr": (1e-3,)}), "loss"),
        started(config),
    )
    _, summary, rows = search._search(
        request, plan_for(folder.path, rungs=(12800, 51200)), alone, IDENTITY, folder, Reporter()
    )
    assert summary["status"] == sweep and cooled == (
        [("t001", "t001")] if trial == "finished" else []
    )
    assert (rows[0]["status"], rows[0]["error"]) == outcome


def test_dead_driver_of_a_trial_is_reported_with_its_cause(begin, tmp_path):
    state = begin()
    state.start(name := state.add({"optimizer.lr": 1e-3}))
    (tmp_path / "error.txt").write_text(
        "Failure # 1 (occurred at noon)\nThe actor died.\nMemory on the node was low\n\n"
    )

    class DeadTrial:
        error_file = str(tmp_path / "error.txt")

        def __str__(self):
            return name

    ray_tune._TuneCallback(state).on_trial_error(1, [], DeadTrial())
    assert state.rows[name]["error"] == "its driver process died: Memory on the node was low"


def test_named_sweep_with_other_settings_is_refused_with_differences(tmp_path):
    config = base(tmp_path, name="mine")
    started(config)
    assert resolve_sweep_dir(config, IDENTITY, Silent()).path == tmp_path / "mine"
    changed = config.replace(optimizer=config.optimizer.replace(lr=0.5))
    for other, identity, message in (
        (config, IDENTITY | {"space": {"batch.micro": [8]}}, r"space: .*\[8, 16\]\} -> .*\[8\]\}"),
        (changed, IDENTITY, r"optimizer.lr: 0.002 -> 0.5"),
        (base(tmp_path, name="mine", resume="never"), IDENTITY, r"choose another --run\.name"),
        (base(tmp_path, name="other", resume="must"), IDENTITY, "no sweep at"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve_sweep_dir(other, identity, Silent())


def test_new_settings_storage_and_cache_are_not_differences(tmp_path):
    config = base(tmp_path, name="mine")
    recipe = started(config).path / "recipe.yaml"
    recipe.write_text(
        "".join(line for line in recipe.read_text().splitlines(True) if "clip_norm" not in line)
    )
    free = {"local_cache": "/cache", "local_cache_gb": 3.0, "cache": "elsewhere"}
    other = config.with_cluster(address="head:6379").replace(data=config.data.replace(**free))
    assert resolve_sweep_dir(other, IDENTITY, Silent()).path == tmp_path / "mine"
    with pytest.raises(UsageError, match=r"cluster\.workers: 1 -> 3"):
        resolve_sweep_dir(config.with_cluster(workers=3), IDENTITY, Silent())


def test_unrelated_folder_is_not_changed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not a sweep"):
        resolve_sweep_dir(base(tmp_path, name="mine"), IDENTITY, Silent())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_ctrl_c_exits_without_interpreter_shutdown(number, begin):
    state = begin()
    with signal_handlers(state.on_signal):
        signal.raise_signal(number)
        assert state.is_stopped() and (state.folder.path / STOP_FILE).read_text() == "stopped"
        with pytest.raises(ForceExit):
            signal.raise_signal(number)
