"""Sweep folder: which one a command uses, which rows it keeps; signals during a sweep."""

import json
import signal

import pytest

from mmray.config import recipes, to_yaml
from mmray.errors import ForceExit, TrainingError, UsageError
from mmray.train.monitor import signal_handlers
from mmray.tune import search
from mmray.tune.results import TrialOutcome
from mmray.tune.sweep import SweepState, resolve_sweep_dir
from mmray.tune.trials import Trial
from tests.train.runs import Silent

IDENTITY = {"space": {"batch.micro": [8, 16]}, "samples_per_trial": 64}


def base(storage, **run):
    sample = recipes.load("sample")
    return sample.replace(run=sample.run.replace(storage=str(storage), **run))


def started(config, status="stopped", identity=IDENTITY):
    sweep = resolve_sweep_dir(config, identity)
    sweep.path.mkdir(exist_ok=True)
    sweep.write("recipe.yaml", to_yaml(config))
    sweep.write_json("sweep.json", {"kind": "sweep", "status": status, **identity})
    return sweep


def test_unnamed_sweep_resumes_until_finished(tmp_path):
    first = started(base(tmp_path))
    assert first.path == tmp_path / "sample-tune"
    assert resolve_sweep_dir(base(tmp_path), IDENTITY).path == first.path
    assert resolve_sweep_dir(base(tmp_path), IDENTITY | {"samples_per_trial": 65}).path.name == "sample-tune-2"
    started(base(tmp_path), "finished")
    assert resolve_sweep_dir(base(tmp_path), IDENTITY).path.name == "sample-tune-2"


def test_failure_of_ray_tune_is_recorded_and_raised(tmp_path, monkeypatch):
    def fail(state, *_):
        state.end("t001", TrialOutcome("stopped"))
        raise TrainingError("Ray Tune failed")

    monkeypatch.setattr(search, "run_trials", fail)
    monkeypatch.setattr(search, "plan_concurrency", lambda runs, _: (1, runs))
    config, trials = base(tmp_path), [Trial("t001", {}, None)]
    sweep = started(config)
    with pytest.raises(TrainingError, match="Ray Tune failed"):
        search._search(search.Sweep(config, config, None), trials, {"t001": config}, IDENTITY, sweep, Silent())
    assert sweep.read_json("sweep.json")["status"] == "failed" and (sweep.path / "report.html").exists()


def test_named_sweep_with_other_settings_is_refused_with_differences(tmp_path):
    config = base(tmp_path, name="mine")
    started(config)
    assert resolve_sweep_dir(config, IDENTITY).path == tmp_path / "mine"
    changed = config.replace(optimizer=config.optimizer.replace(lr=0.5))
    for other, identity, message in (
        (config, IDENTITY | {"space": {"batch.micro": [8]}}, r"space: .*\[8, 16\]\} -> .*\[8\]\}"),
        (changed, IDENTITY, r"optimizer.lr: 0.002 -> 0.5"),
        (base(tmp_path, name="mine", resume="never"), IDENTITY, r"choose another --run\.name"),
        (base(tmp_path, name="other", resume="must"), IDENTITY, "no sweep at"),
        (base("s3://bucket/runs"), IDENTITY, "a sweep needs a folder that all nodes share"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve_sweep_dir(other, identity)


def test_new_settings_storage_and_cache_are_not_differences(tmp_path):
    config = base(tmp_path, name="mine")
    recipe = started(config).path / "recipe.yaml"
    recipe.write_text("".join(line for line in recipe.read_text().splitlines(True) if "clip_norm" not in line))
    free = {"local_cache": "/cache", "local_cache_gb": 3.0, "cache": "elsewhere"}
    other = config.with_cluster(address="head:6379").replace(data=config.data.replace(**free))
    assert resolve_sweep_dir(other, IDENTITY).path == tmp_path / "mine"
    with pytest.raises(UsageError, match=r"cluster\.workers: 1 -> 3"):
        resolve_sweep_dir(config.with_cluster(workers=3), IDENTITY)


def test_unrelated_folder_is_not_changed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not a sweep"):
        resolve_sweep_dir(base(tmp_path, name="mine"), IDENTITY)


def test_finished_rows_are_kept_if_settings_match(tmp_path):
    sweep = started(base(tmp_path))
    statuses = ["finished", "out_of_memory", "failed", "stopped", "infeasible"]
    rows = [{"trial": f"t{n}", "status": status, "settings": {"batch.micro": n}} for n, status in enumerate(statuses)]
    sweep.write_rows(rows[::-1])
    assert [json.loads(line) for line in (sweep.path / "trials.jsonl").read_text().splitlines()] == rows
    trials = [Trial(row["trial"], row["settings"], None) for row in rows]
    assert list(sweep.reusable_rows(trials)) == ["t0", "t1"]
    assert list(sweep.reusable_rows([Trial("t0", {"batch.micro": 99}, None), *trials[1:]])) == ["t1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_ctrl_c_exits_without_interpreter_shutdown(number):
    state = SweepState(None, {}, {}, Silent())
    with signal_handlers(state.on_signal):
        signal.raise_signal(number)
        assert state.stop.is_set()
        with pytest.raises(ForceExit):
            signal.raise_signal(number)
