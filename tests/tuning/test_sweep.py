"""Sweep folder: which one a command uses, which rows it keeps; signals during a sweep."""

import math
import signal

import pytest

from mmray.config import recipes, to_yaml
from mmray.config.search_space import Space
from mmray.data.prepare.pipeline import PrepareProgress
from mmray.errors import ForceExit, TrainingError, UsageError
from mmray.report.sweep import SweepRecord
from mmray.sweep_files import Rung, TrialRow
from mmray.training.monitor import signal_handlers
from mmray.tuning import ray_tune, search
from mmray.tuning.results import TrialOutcome, recommend_trial
from mmray.tuning.rungs import select_promoted
from mmray.tuning.sweep import STOP_FILE, SweepState, resolve_sweep_dir
from mmray.tuning.trials import SweepPlan, SweepRequest, parse_budget
from tests.spaces import parse_space
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


RATES = parse_space(["optimizer.lr=1e-3,1e-2,1e-1,1,2e-2,3e-2,4e-2"])


def plan_for(folder, goal="loss", rungs=(100, 400, 1600), space=RATES, budget_s=None):
    request = SweepRequest(SAMPLE, SAMPLE.train, space, goal, budget_s=budget_s)
    return SweepPlan(request, rungs, folder=folder)


class Reporter(Silent):
    """Keeps trial, status and number of rungs of each reported row, and the last progress."""

    def __init__(self):
        super().__init__()
        self.rows, self.last_progress = [], None

    def prepare_progress(self, progress):
        self.last_progress = progress

    def trial(self, row, num_rungs):
        self.rows.append((row.trial, row.status, len(row.rungs)))


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def begin(tmp_path):
    """Start the state of a command of one sweep."""
    sweep = started(base(tmp_path))

    def begin(**options):
        return SweepState(sweep, plan_for(sweep.path, **options), Reporter(), clock=Clock())

    return begin


def pass_time(state, seconds):
    state.clock.now_s += seconds


def reach(state, name, samples, value, status="paused"):
    """Train a trial to a rung."""
    state.start(name)
    state.end(name, TrialOutcome(status), Rung(samples, value))


def test_rows_have_rungs_and_the_way_each_trial_ended(begin):
    state = begin()
    names = [state.add({"optimizer.lr": lr}) for lr in (1e-3, 1e-2, 1e-1, 1.0)]
    assert names == ["t001", "t002", "t003", "t004"]
    for name in names[:3]:
        reach(state, name, 100, 2.0)
    state.prune_paused(keep=["t001", "t003"])
    reach(state, "t001", 400, 1.5)
    state.folder.run("t001").path.mkdir(parents=True)
    state.folder.run("t001").write_json("result.json", {"elapsed_s": 35.0})
    reach(state, "t001", 1600, 1.0, "finished")
    state.start("t003")
    state.end("t003", TrialOutcome("failed", "evaluate/loss is not finite"))
    state.end("t003", TrialOutcome("stopped"))  # it has ended before
    rows = {row.trial: row for row in SweepRecord.read(state.folder.path).trials}
    assert [(row.status, len(row.rungs)) for row in rows.values()] == [
        ("finished", 3),
        ("pruned", 1),
        ("failed", 1),
        ("waiting", 0),
    ]
    assert [row.elapsed_s for row in rows.values()] == [35, 0, 0, 0]
    assert (rows["t001"].value("loss"), rows["t002"].value("loss")) == (1.0, 2.0)
    assert rows["t003"].error == "evaluate/loss is not finite"
    assert state.reporter.rows[-2:] == [("t001", "finished", 3), ("t003", "failed", 1)]
    assert recommend_trial(list(rows.values()), "loss").best == "t001"


def test_same_command_keeps_names_and_rungs_of_trials(begin):
    first = begin()
    for lr in (1e-3, 1e-2):
        reach(first, first.add({"optimizer.lr": lr}), 100, 2.0)
    first.start("t002")
    # Killed while t002 runs. The second command gets its trials in another order.
    second = begin()
    suggested = [second.add({"optimizer.lr": lr}) for lr in (1e-2, 1e-3, 1e-3, 1e-1)]
    assert suggested == ["t002", "t001", "t001", "t003"]
    assert [row.status for row in second.rows.values()] == ["paused", "stopped", "waiting"]
    reach(second, "t002", 400, 1.5)
    assert second.reporter.rows == [("t002", "paused", 2)]
    assert second.rows["t001"] == first.rows["t001"]
    assert second.rows["t002"].rungs == (Rung(100, 2.0), Rung(400, 1.5))


def test_budget_is_a_time():
    assert [parse_budget(text) for text in ("2h", "0.5h", "30m", None)] == [7200, 1800, 1800, None]
    for wrong in ("2", "h", "0h", "2 hours", "40gpu-hours"):
        with pytest.raises(UsageError, match="write a time such as 2h"):
            parse_budget(wrong)


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
        TrialRow(f"t{number}", "paused", rungs=(Rung(100, float(number)),))
        for number in range(1, count + 1)
    ]
    assert select_promoted([TrialRow("failed", "failed"), *rows], 0, maximize) == names
    assert select_promoted(rows, 1, maximize) == []


def poll(state):
    """Return whether Ray Tune would end, as it asks several times a second."""
    state.poll()
    return state.is_stopped()


def test_spent_budget_stops_running_trials_and_kills_one_that_does_not_stop(begin):
    state = begin(budget_s=30)
    for lr in (1e-3, 1e-2):
        state.start(state.add({"optimizer.lr": lr}))
    stop = state.folder.path / STOP_FILE
    pass_time(state, 29)
    assert not poll(state) and not stop.exists()
    pass_time(state, 1)
    assert not poll(state) and stop.exists()  # requested; two trials run
    state.end("t001", TrialOutcome("stopped"))
    assert not poll(state) and state.stop_reason == "budget"
    pass_time(state, SAMPLE.cluster.state_limits_s["saving"] + 1)
    assert poll(state)
    state.end("t002", TrialOutcome("stopped"))
    assert [row.status for row in state.rows.values()] == ["stopped", "stopped"]


def test_time_of_a_killed_command_counts_for_the_budget(begin):
    first = begin(budget_s=60)
    first.start(first.add({"optimizer.lr": 1e-3}))
    for _ in range(12):
        pass_time(first, 4)
        assert not poll(first)
    # Killed after 48 s; the time was last saved at 48 s or up to 10 s before.
    second = begin(budget_s=60)
    assert 38 < second.elapsed_s <= 48
    assert second.rows["t001"].status == "stopped"
    second.start(second.add({"optimizer.lr": 1e-3}))
    pass_time(second, 22)
    assert not poll(second) and second.stop_reason == "budget"  # requested
    assert poll(begin(budget_s=30))


def test_progress_counts_the_samples_of_the_planned_rungs(begin):
    state = begin()
    reach(state, state.add({"optimizer.lr": 1e-3}), 100, 2.0)
    # 7 trials train to 100 samples, 2 of them to 1600.
    assert state.reporter.last_progress == PrepareProgress("tune", 100, 3700, unit="samples")


@pytest.fixture
def simulated(monkeypatch):
    """Train by a formula instead of in runs: the loss is 1 / samples, times the distance of the
    rate from 0.01. A rate above 0.03 diverges.

    Returns the names of the trials of each call.
    """
    calls = []

    def run_trials(state, num_concurrent, rung, names):
        calls.append(list(names))
        for name in names:
            state.start(name)
            rate = state.rows[name].settings["optimizer.lr"]
            if rate > 0.03:
                state.end(name, TrialOutcome("failed", "evaluate/loss is not finite"))
                continue
            samples = state.plan.rungs[rung]
            value = (1 + abs(math.log10(rate) + 2)) / samples
            is_last = rung == len(state.plan.rungs) - 1
            reach(state, name, samples, value, "finished" if is_last else "paused")
            if state.stop_reason is not None:
                return

    monkeypatch.setattr(search, "run_trials_on_ray_tune", run_trials)
    monkeypatch.setattr(search, "plan_concurrency", lambda *_: 1)
    return calls


def rates_of(*rates):
    return Space({"optimizer.lr": rates})


def test_trial_that_only_an_earlier_command_suggested_is_promoted(begin, simulated):
    first = begin()
    for lr in (1e-3, 1e-2, 2e-2):
        reach(first, first.add({"optimizer.lr": lr}), 100, abs(lr - 1e-2))
    state = begin(space=rates_of(1e-3))
    search.run_trials(state, [])
    assert simulated == [["t002", "t001"], ["t002", "t001"]]
    assert state.rows["t002"].settings == {"optimizer.lr": 1e-2}
    assert state.rows["t002"].status == "finished"


def test_halving_continues_where_the_earlier_command_stopped(begin, simulated):
    for stop_after in (2, 99):
        state = begin(space=rates_of(1e-3, 1e-2, 2e-2, 3e-2, 4e-2))

        def trial(row, num_rungs, state=state, stop_after=stop_after):
            if row.trial == f"t{stop_after:03}" and row.rungs:
                state.on_signal(signal.SIGINT, None)

        state.reporter.trial = trial
        search.run_trials(state, [])
    assert simulated == [
        ["t001", "t002", "t003", "t004", "t005"],
        ["t003", "t004", "t005"],
        ["t002", "t003"],
        ["t002", "t003"],
    ]
    statuses = [row.status for row in state.rows.values()]
    assert statuses == ["pruned", "finished", "finished", "pruned", "failed"]


def test_sweep_can_be_on_an_object_store(s3):
    sweep = started(base(f"{s3.address}/runs"))
    state = SweepState(sweep, plan_for(sweep.path), Reporter(), clock=Clock())
    state.start(name := state.add({"optimizer.lr": 1e-3}))
    state.on_signal(signal.SIGINT, None)
    assert (sweep.path / STOP_FILE).exists() and state.plan.folder == sweep.path
    state.end(name, TrialOutcome("paused"), Rung(100, 2.0))
    again = resolve_sweep_dir(base(f"{s3.address}/runs"), IDENTITY, Silent())
    assert SweepRecord.read(again.path).trials == list(state.rows.values())
    config = state.plan.run_config(state.plan.trial(name, state.rows[name].settings), 100)
    assert config.run.storage.startswith(f"{s3.address.partition('?')[0]}/runs/sample-tune/trials")


def test_failure_of_ray_tune_is_recorded_and_raised(begin, monkeypatch):
    def fail(*_):
        raise TrainingError("Ray Tune failed")

    monkeypatch.setattr(search, "run_trials", fail)
    state = begin()
    with pytest.raises(TrainingError, match="Ray Tune failed"):
        search.run_sweep(state, [])
    assert state.folder.read_json("sweep.json")["status"] == "failed"
    assert (state.folder.path / "report.html").exists()


def test_stopped_sweep_recommends_the_best_so_far(begin, monkeypatch):
    def run_trials(state, _):
        reach(state, state.add({"optimizer.lr": 1e-2}), 100, 1.0)
        state.on_signal(signal.SIGINT, None)
        state.stop_all()

    monkeypatch.setattr(search, "run_trials", run_trials)
    state = begin()
    search.run_sweep(state, [])
    summary = state.folder.read_json("sweep.json")
    assert (summary["status"], summary["recommendation"]["best"]) == ("stopped", "t001")
    assert "lr: 0.01" in (state.folder.path / "best.yaml").read_text()


def test_recipe_of_an_earlier_command_is_removed_if_its_trial_fails(begin, simulated):
    space = rates_of(4e-2, 5e-2)
    first = begin(space=space)
    reach(first, first.add({"optimizer.lr": 4e-2}), 100, 1.0)
    first.folder.write("best.yaml", "lr: 0.04")
    state = begin(space=space)
    search.run_sweep(state, [])
    assert [row.status for row in state.rows.values()] == ["failed", "failed"]
    assert state.folder.read_json("sweep.json")["recommendation"] is None
    assert not (state.folder.path / "best.yaml").exists()


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

    ray_tune._TuneCallback(state, 100).on_trial_error(1, [], DeadTrial())
    assert state.rows[name].error == "its driver process died: Memory on the node was low"


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
