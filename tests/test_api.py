"""mmray from Python: the same configs, commands and errors as on the command line."""

import json
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import mmray
from mmray import api, cli
from mmray.cli.train import train
from mmray.config import Batch, Prepare, recipes, to_yaml
from mmray.config.model_kinds import Clip
from mmray.config.search_space import DEFAULT_SAMPLES, Range
from mmray.console.reporter import ConsoleReporter
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.report.sweep import SweepRecord
from tests.checkpoints import save_checkpoint
from tests.conftest import ROOT
from tests.made import CAPTIONS, make_set, noisy, row
from tests.report.factories import line, make_run, make_whole_run
from tests.training import runs

LAZY = """
import sys
import mmray
heavy = {"torch", "torchvision", "ray", "transformers", "pydantic", "pyarrow", "numpy", "rich"}
heavy &= set(sys.modules)
assert not heavy, heavy
assert callable(mmray.train) and mmray.prepare and mmray.Config and mmray.Run and mmray.MmrayError
heavy = {"torch", "ray", "transformers", "plotly"} & set(sys.modules)
assert not heavy, heavy
"""


def test_import_is_lazy_and_has_all_public_names():
    subprocess.run([sys.executable, "-c", LAZY], cwd=ROOT, check=True)
    public = set(mmray.__all__) - {"__version__"}
    assert all(callable(getattr(mmray, name)) for name in public)
    assert mmray.tune is api.tune
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mmray.trian


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Arguments with which the packages below are called, from Python and from commands."""
    received = []

    def keep(place, result):
        def call(*given, **named):
            given = [value for value in given if not isinstance(value, (ConsoleReporter, float))]
            named = {name: value for name, value in named.items() if name != "reporter"}
            received.append(([each for each in given if not callable(each)], named))
            return result

        monkeypatch.setattr(f"mmray.{place}", call)

    trained = make_run(tmp_path / "trained")
    outcome = SimpleNamespace(path=trained, already_done=True, result={"steps": 9})
    keep("training.driver.train", outcome)
    # The command reads a row of the set that it has prepared.
    keep("data.prepare.pipeline.prepare", make_set(tmp_path / "out", [row(0)]).manifest)
    keep("training.evaluate_export.evaluate_model", {"loss": 1.0})
    keep("training.evaluate_export.export_model", tmp_path)
    return received


@pytest.fixture
def sweeps(monkeypatch, tmp_path):
    """Requests of sweeps, and configs of batch shapes to measure, that would run."""
    received = []
    recommendation = {"best": "t001", "why": "fast"}
    summary = {"status": "finished", "elapsed_s": 1, "recommendation": recommendation}
    summary["goal"] = "loss"
    (tmp_path / "sweep.json").write_text(json.dumps(summary))
    (tmp_path / "trials.jsonl").write_text('{"trial": "t001", "status": "finished"}\n')

    def search(request, reporter):
        received.append(request)
        return SweepRecord.read(tmp_path)

    def probe_shapes(base, reporter):
        received.append(base)
        return SweepRecord.read(tmp_path)

    monkeypatch.setattr("mmray.tuning.search.search", search)
    monkeypatch.setattr("mmray.tuning.shape_probe.probe_shapes", probe_shapes)
    return received


@pytest.mark.parametrize(
    ("recipe", "sections", "words"),
    [
        ("clip", {"data": "prepared/my"}, ["--data.train", "prepared/my"]),
        ("clip", {"data": ROOT / "my"}, ["--data.train", str(ROOT / "my")]),
        ("sample", {"data": {"limit": 9, "eval": "b"}}, ["--data.limit", "9", "--data.eval", "b"]),
        # instead of the recipe's epochs
        ("clip", {"train": {"steps": 10}}, ["--train.steps", "10"]),
        (
            "clip",
            {"batch": {"micro": 64, "global": 1024}},
            ["--batch.micro", "64", "--batch.global", "1024"],
        ),
        (
            "clip",
            {"batch": {"micro": 64, "global_": 128}},
            ["--batch.micro", "64", "--batch.global", "128"],
        ),
        (
            "clip",
            {"batch": {"micro": 8, "accumulation": 2}},
            ["--batch.micro", "8", "--batch.accumulation", "2"],
        ),
        ("sample", {"model": {"inputs": {"max_tokens": 16}}}, ["--model.inputs.max-tokens", "16"]),
        ("clip", {"model": {"kind": "siglip"}}, ["--model.kind", "siglip"]),
        (
            "sample",
            {"cluster": {"workers": "1-4"}, "run": {"name": "x"}},
            ["--cluster.workers", "1-4", "--run.name", "x"],
        ),
    ],
)
def test_sections_are_the_flags(calls, recipe, sections, words):
    mmray.train(recipe, **sections)
    [(given, _)] = calls
    assert given[0] == train.parse([recipe, *words])["settings"]


def test_weights_define_inputs_as_on_the_command_line(calls, tmp_path):
    sizes = {"layers": 2, "patch_size": 8, "image_size": 40, "width": 64}
    declared = {
        "model_cfg": {"embed_dim": 32, "vision_cfg": sizes, "text_cfg": {"context_length": 9}},
        "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "resize_mode": "squash"},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(declared))
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(CAPTIONS, 64))
    weights = tmp_path / "w.safetensors"
    weights.touch()
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"recipe: clip\nmodel: {{weights: {weights}, inputs: {{max_tokens: 5}}}}\n")

    mmray.train("clip", model={"weights": weights})
    mmray.train("clip", model={"weights": weights, "inputs": {"image_side": 48}})
    mmray.train(recipe)
    given = [arguments[0] for arguments, _ in calls]
    words = ["--model.weights", str(weights)]
    assert given == [
        train.parse(line)["settings"]
        for line in (
            ["clip", *words],
            ["clip", *words, "--model.inputs.image-side", "48"],
            [str(recipe)],
        )
    ]
    first, second, third = [config.model.inputs for config in given]
    assert (first.image_side, first.max_tokens, first.fit) == (40, 9, "squash")
    assert first.mean == (0.1, 0.2, 0.3) and first.tokenizer == str(tmp_path / "tokenizer.json")
    assert (second.image_side, second.fit, third.max_tokens) == (48, "squash", 5)


def test_config_objects_and_files_replace_recipe_names(calls, tmp_path):
    config = recipes.load("clip").replace(batch=Batch(micro=3, global_=6))
    (tmp_path / "mine.yaml").write_text(to_yaml(config))
    mmray.train(config)
    mmray.train(tmp_path / "mine.yaml")
    mmray.train("clip", batch=Batch(micro=3, global_=6))
    mmray.train("sample", model=Clip(vocab_size=7))
    configs = [given[0] for given, _ in calls]
    assert configs[:3] == [config] * 3
    assert configs[3].model == Clip(vocab_size=7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mmray.train("clpi"), "there is no recipe `clpi`; did you mean `clip`?"),
        (
            lambda: mmray.train(batch={"micr": 3}),
            "batch.micr: unknown setting; did you mean `micro`?",
        ),
        (lambda: mmray.train(bacth={"micro": 3}), "bacth: unknown setting; did you mean `batch`?"),
        (
            lambda: mmray.train(model={"inputs": {"image_sde": 3}}),
            "unknown setting; did you mean `image_side`?",
        ),
        (
            lambda: mmray.train(batch={"micro": 0}),
            "batch.micro: input should be greater than or equal to 1 (got 0)",
        ),
        (
            lambda: mmray.prepare("a", "b", holdut=0.1),
            "prepare.holdut: unknown setting; did you mean `holdout`?",
        ),
        (lambda: mmray.evaluate("nowhere"), "nowhere does not exist"),
        (lambda: mmray.export(".", "out"), "is not a run: it has no config.yaml"),
        (lambda: mmray.Run("nowhere"), "is not a run: it has no config.yaml"),
        (
            lambda: mmray.tune(space={"batch.micro": [8, 8]}),
            "--space batch.micro=8,8: a value is empty, or listed twice",
        ),
        (
            lambda: mmray.tune(space={"batch.micro": [8]}, goal="speed"),
            "unknown goal `speed`; known: throughput",
        ),
        (
            lambda: mmray.tune(space={"batch.micro": [8]}, concurrency=0),
            "--concurrency: must be above 0 (got 0)",
        ),
        (
            lambda: mmray.tune(space={"batch.global": [0]}, goal="loss"),
            "batch.global: input should be greater than or equal to 1",
        ),
    ],
)
def test_errors_are_those_of_the_command_line(call, message):
    with pytest.raises(mmray.MmrayError) as raised:
        call()
    assert message in str(raised.value) and raised.type is UsageError


def test_unknown_setting_reads_as_in_a_recipe_file(tmp_path, capfd):
    (tmp_path / "mine.yaml").write_text("recipe: sample\nbatch: {micr: 3}\n")
    assert cli.run(["train", str(tmp_path / "mine.yaml")], ConsoleReporter()) == 2
    with pytest.raises(UsageError) as raised:
        mmray.train(batch={"micr": 3})
    assert str(raised.value) in " ".join(capfd.readouterr().err.split())


def test_tune_has_base_trial_length_and_space(sweeps):
    listed = {"batch.global": [512, 1024], "optimizer.lr": "loguniform(1e-5,1e-3)"}
    mmray.tune("clip", space=listed, samples=3, goal="loss", train={"steps": 5})
    request = sweeps.pop()
    assert (request.goal, request.length.steps, request.base.batch.global_) == ("loss", 5, 1024)
    assert request.base.train == recipes.load("clip").train
    assert request.space.axes["batch.global"] == (512, 1024) and request.space.num_samples == 3
    mmray.tune("clip", goal="recall", budget="2h")
    request = sweeps.pop()
    assert request.budget_s == 7200
    assert request.space.axes == {"optimizer.lr": Range(1e-6, 1e-4, log=True)}
    assert request.space.num_samples == DEFAULT_SAMPLES


def test_goal_throughput_with_listed_shapes_compares_them_in_trials(sweeps):
    listed = {"batch.micro": [8, 16], "batch.accumulation": [1, 2]}
    mmray.tune("sample", space=listed, goal="throughput", budget="1h")
    request = sweeps.pop()
    assert (request.goal, request.budget_s) == ("throughput", 3600)
    assert request.space.num_trials == 4
    mmray.tune("sample", space={"batch.global": [64, 128]}, goal="throughput")
    mmray.tune("sample")
    assert sweeps.pop(0).space.axes == {"batch.global": (64, 128)}
    assert sweeps == [recipes.load("sample")]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {
                "space": {"batch.micro": "8,16", "batch.accumulation": "1,2"},
                "train": {"steps": 5},
            },
            "--space batch.micro=8,16 --space batch.accumulation=1,2 --train.steps 5",
        ),
        (
            {"goal": "recall", "budget": "2h", "run": {"name": "x"}},
            "--goal recall --budget 2h --run.name x",
        ),
        ({"space": {"batch.global": "64,128"}}, "--space batch.global=64,128"),
        (
            {"goal": "loss", "batch": {"micro": 8, "accumulation": 2}},
            "--goal loss --batch.micro 8 --batch.accumulation 2",
        ),
        ({}, ""),
    ],
)
def test_command_tunes_what_the_function_tunes(sweeps, arguments, line):
    mmray.tune("clip", **arguments)
    assert cli.run(["tune", "clip", *line.split()], ConsoleReporter()) == 0
    from_python, from_command = sweeps
    assert from_python == from_command


def test_functions_do_what_their_commands_do(calls, tmp_path):
    run = make_run(tmp_path / "run", evaluate={"limit": 7})
    out = str(tmp_path / "out")
    mmray.prepare(tmp_path / "a", out, holdout=0.1, columns=["image=url"], retry_quarantined=True)
    mmray.evaluate(
        run, data=tmp_path, step="best", workers=2, accelerator="cpu", classes=["cat", "dog"]
    )
    mmray.export(str(run), out, step=5)
    from_python = list(calls)
    calls.clear()
    for command in (
        f"prepare {tmp_path}/a {out} --holdout 0.1 --columns image=url --retry-quarantined",
        f"evaluate {run} --data {tmp_path} --step best --workers 2 --accelerator cpu "
        "--evaluate.classes cat dog",
        f"export {run} {out} --step 5",
    ):
        assert cli.run(command.split(), ConsoleReporter()) == 0
    assert from_python == calls
    settings = recipes.sample().evaluate.outside_run(None).replace(classes=("cat", "dog"))
    assert settings.limit is None  # that of the run is for its held-out rows
    assert calls == [
        ([f"{tmp_path}/a", out, Prepare(holdout=0.1, columns=("image=url",)), True], {}),
        (
            [run, str(tmp_path)],
            {
                "settings": settings,
                "interpolate": 1.0,
                "step": "best",
                "workers": 2,
                "accelerator": "cpu",
                **dict.fromkeys(("split", "where", "captions", "address")),
            },
        ),
        ([run, out, 5, False, "transformers"], {}),
    ]


class Listener:
    """A reporter that keeps messages and metrics."""

    def __init__(self):
        self.logged = []
        self.steps = []
        self.titles = []
        self.status = self.phase = self.titles.append

    def log(self, text, label=""):
        self.logged.append((label, text))

    def prepare_progress(self, progress):
        self.titles.append(progress.stage)

    def step(self, metrics, total_steps):
        self.steps.append((metrics["step"], total_steps))


def test_run_reads_its_files(tmp_path):
    run = mmray.Run(str(make_whole_run(tmp_path / "run")))
    assert run.result["status"] == "finished" and repr(run) == f"Run('{tmp_path}/run')"
    assert len(run.history) == 20 and run.metrics["recall_at_1/image_to_text"] == 1.0
    assert run.metrics["train/loss"] == run.history[-1]["train/loss"] and run.metrics["step"] == 20
    assert (
        run.report() == tmp_path / "run" / "report.html"
        and run.report(tmp_path / "page.html").exists()
    )
    started = mmray.Run(make_run(tmp_path / "started", [line(3)]))
    assert started.metrics == line(3) and started.result == {}
    assert mmray.Run(make_run(tmp_path / "empty")).metrics == {}


def test_exported_run_loads(tmp_path):
    config = runs.config("none", tmp_path, "run")
    tokenizer = train_tokenizer(CAPTIONS, 60)
    vocab_size = len(json.loads(tokenizer)["model"]["vocab"])
    config = config.replace(model=config.model.replace(vocab_size=vocab_size))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "tokenizer.json").write_text(tokenizer)
    save_checkpoint(
        folder / "checkpoints", 1, {"model": build(config.model, vocab_size).state_dict()}, {}
    )
    out = mmray.export(mmray.Run(folder), tmp_path / "out")
    assert torch.isfinite(mmray.load(out).embed_images([noisy(1)])).all()


@pytest.fixture
def jupyter(monkeypatch):
    """A Jupyter kernel with and without ipywidgets, of which rich uses `display` and `Output`;
    displayed texts.
    """
    displayed = []

    class Output:
        def __init__(self):
            self.closed = False

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def clear_output(self, wait):
            pass

        def close(self):
            displayed.append("closed")

    def show(what):
        displayed.append("bar" if isinstance(what, Output) else what.text)

    def start(widgets):
        python = ModuleType("IPython")
        python.display = ModuleType("IPython.display")
        python.display.display = show
        modules = {"IPython": python, "IPython.display": python.display}
        if widgets:
            module = ModuleType("ipywidgets")
            module.Output, module.__spec__ = Output, object()
            modules["ipywidgets"] = module
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
        return ConsoleReporter(), displayed

    return start


@pytest.mark.parametrize("widgets", [True, False])
def test_notebook_shows_a_bar_with_ipywidgets_and_lines_without(jupyter, widgets):
    reporter, displayed = jupyter(widgets)
    with reporter.show_progress("starting Ray"):
        reporter.set_progress(3, 10, "loss 1.0", "step")
        if reporter._display is not None:
            reporter._display.refresh()
    text = "\n".join(displayed)
    assert ("bar" in displayed and "closed" in displayed) == widgets
    assert ("step 3/10  loss 1.0" in text) == (not widgets) and "3/10" in text


def test_prepare_train_and_evaluate_without_ray(tmp_path, capfd, monkeypatch, without_ray):
    for number in range(40):
        (tmp_path / f"{number}.png").write_bytes(noisy(number))
    rows = [{"image": f"{number}.png", "text": f"caption {number}"} for number in range(40)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    manifest = mmray.prepare(tmp_path / "my.jsonl", tmp_path / "set", holdout=0.25, vocab_size=300)
    assert manifest.num_rows == 40
    config = runs.config(tmp_path / "set", tmp_path / "runs", "one")
    config = config.with_cluster(workers=1, cpus_per_worker=1)
    sections = {
        "train": {"steps": 4, "checkpoint_every": 0},
        "batch": {"micro": 4, "global": 8},
    }
    run = mmray.train(config, **sections)
    assert run.path == tmp_path / "runs" / "one" and run.result["status"] == "finished"
    assert run.metrics["step"] == len(run.history) == 4 and (run.path / "report.html").exists()
    output = capfd.readouterr().out
    for label, text in (("prepared", "40 rows"), ("run", "runs/one"), ("finished", "4 steps in")):
        assert re.search(rf"^{label} .*{text}", output, re.M), (label, output)
    listener = Listener()
    scores = mmray.evaluate(run, batch=5, reporter=listener)
    assert scores["recall_at_1/mean"] == pytest.approx(run.metrics["recall_at_1/mean"])
    assert mmray.train(config, **sections, reporter=listener).path == run.path
    assert [label for label, _ in listener.logged] == ["evaluate", "done"]
    assert "evaluate" in listener.titles
    assert capfd.readouterr().out == ""


def test_rows_in_memory_are_prepared_and_trained(tmp_path, prepares_here, without_ray):
    rows = [{"image": noisy(number), "text": f"caption {number}"} for number in range(20)]
    recipe = runs.config("-", tmp_path, "run", steps=2).with_cluster(workers=1, cpus_per_worker=1)
    data = {"train": rows, "cache": str(tmp_path / "cache")}
    finished = [mmray.train(recipe, data=data, reporter=Listener()) for _ in range(2)]
    assert finished[0].path == finished[1].path and finished[1].result["status"] == "finished"
    # the rows, and the set that was prepared from them, are found again
    assert len(list((tmp_path / "cache").iterdir())) == 2
    with finished[0].to_ray_checkpoint().as_directory() as folder:
        assert folder == str(tmp_path / "run" / "checkpoints" / "step-2")
