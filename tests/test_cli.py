"""The command line without Ray: parsing, messages, exit codes."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from mmray import cli
from mmray.cli.args import command
from mmray.cli.sets import _train_command
from mmray.cli.train import _print_next_commands
from mmray.config import CustomModel, Siglip, from_yaml, to_yaml
from mmray.config.model import KINDS
from mmray.config.search_space import setting_value
from mmray.console.reporter import ConsoleReporter
from mmray.data.store.stored_row import Row
from mmray.data.text.tokenizer import train_tokenizer
from mmray.version import VERSION
from tests.checkpoints import save_checkpoint
from tests.conftest import ROOT
from tests.made import CAPTIONS, make_set
from tests.training import runs


@pytest.fixture
def typed(capfd):
    """Run a command; return its exit code and its output."""

    def run(*words):
        try:
            code = cli.run(list(words), ConsoleReporter(Console(force_terminal=False, width=100)))
        except SystemExit as end:  # tyro exits the process after --help and unknown flags
            code = end.code
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_printed_config_loads_as_recipe(typed, tmp_path):
    code, out, _ = typed("train", "sample", "--batch.micro", "16", "--print-config")
    assert code == 0 and from_yaml(out, "printed").batch.micro == 16
    (tmp_path / "mine.yaml").write_text(out)
    assert typed("train", str(tmp_path / "mine.yaml"), "--print-config")[1] == out


def test_prepare_of_conversations_names_the_recipe_that_trains_them(typed, prepares_here, tmp_path):
    turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": 0, "messages": turns}) + "\n")
    code, out, err = typed("prepare", str(tmp_path / "rows.jsonl"), str(tmp_path / "set"))
    assert code == 0 and f"mmray train vlm --data.train {tmp_path}/set" in " ".join(out.split()), (
        err
    )


def test_command_for_conversations_about_videos_has_frames(tmp_path):
    content = [{"type": "text", "text": "why"}]
    turns = [{"role": role, "content": content} for role in ("user", "assistant")]
    prepared = make_set(tmp_path / "set", [Row("k", [], [], messages=turns)])
    manifest = replace(prepared.manifest, media_kinds={"": {"image video": 1}})
    command = _train_command(str(tmp_path / "set"), manifest)
    assert command == f"mmray train vlm --data.train {tmp_path}/set --model.inputs.frames 16"


def test_prepare_of_preferences_names_the_commands_of_dpo(typed, prepares_here, tmp_path):
    row = {"prompt": "why", "chosen": "because", "rejected": "no"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    code, out, err = typed("prepare", str(tmp_path / "rows.jsonl"), str(tmp_path / "set"))
    assert code == 0, err
    dpo = f"vlm --model.weights DIR --data.train {tmp_path}/set --objective.kind dpo"
    assert f"mmray score {tmp_path}/set --weights DIR && mmray train {dpo}" in " ".join(out.split())


LENGTH = ["clip", "--batch.micro", "8", "--batch.accumulation=2"]
OWN = ["--model.kind", "mine:Net", "--model.settings"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--data.shuffle", "false", "--augment.crop-scale", "0.5", "1"],
            {"augment.crop_scale": [0.5, 1.0]},
        ),
        *(
            (["--batch.group-by-length", *word], {"batch.group_by_length": True})
            for word in (["true"], ["True"], [])
        ),
        *(
            ([f"--batch.group-by-length={word}"], {"batch.group_by_length": True})
            for word in ("true", "True")
        ),
        (
            ["--data.shuffle=false", "--batch.group-by-length"],
            {"data.shuffle": False, "batch.group_by_length": True},
        ),
        # `true` is a class name here
        (["--evaluate.classes", "true", "null"], {"evaluate.classes": ["true", "null"]}),
        (
            ["--evaluate.limit", "None", "--evaluate.loss-batch=None"],
            {"evaluate.limit": None, "evaluate.loss_batch": None},
        ),
        (
            [*OWN, "deep", "true", "width", "3", "name", "x"],
            {"model.settings": {"deep": True, "width": 3, "name": "x"}},
        ),
        ([*OWN, "thin", "false", "rate", "0.5"], {"model.settings": {"thin": False, "rate": 0.5}}),
        # clip sets epochs and a global batch
        (["clip", "--train.steps", "7"], {"train.steps": 7, "train.epochs": None}),
        (LENGTH, {"batch.micro": 8, "batch.accumulation": 2, "batch.global": None}),
        ([*LENGTH, "--batch.global", "64"], {"batch.global": 64}),
    ],
)
def test_flags_change_settings(typed, words, expected):
    code, out, _ = typed("train", *words, "--print-config")
    config = from_yaml(out, "printed")
    assert code == 0 and {key: setting_value(config, key) for key in expected} == expected


@pytest.mark.parametrize("verb", ["train", "tune"])
def test_model_kind_is_selected_by_name(typed, verb):
    code, out, _ = typed(
        verb, "clip", "--model.kind", "siglip", "--model.logit-bias", "-5", "--print-config"
    )
    model = from_yaml(out, "printed").model
    assert (
        code == 0
        and isinstance(model, Siglip)
        and model.logit_bias == -5
        and model.inputs.max_tokens == 77
    )
    # Without the box around the help, whose lines break at any place.
    told = "".join(typed(verb, "clip", "--help")[1].replace("│", "").split())
    assert f"--model.kind{{{','.join(KINDS)}}}|package.module:Class" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "did you mean `train`"),
        (["train", "sampel"], "did you mean `sample`"),
        (["train", "nowhere.yaml"], "cannot read the recipe nowhere.yaml"),
        (
            ["train", "--batch.micro", "0"],
            "batch.micro: input should be greater than or equal to 1 (got 0)",
        ),
        (["train", "--batch.micr", "3"], "--batch.micro"),
        (
            ["train", "--train.steps", "3", "--train.epochs", "2"],
            "error: train: give one of steps, samples, epochs (got steps, epochs)",
        ),
        (
            ["train", "--batch.global", "1", "--cluster.workers", "2"],
            "1 rows are fewer than 2 workers",
        ),
        (
            [
                "tune",
                "sample",
                "--cluster.workers",
                "2",
                "--space",
                "batch.micro=128",
            ],
            "64 rows per worker (batch.global 128 on 2 workers)",
        ),
        (["evaluate", "nowhere"], "nowhere does not exist"),
        (["export", ".", "out"], "is not a run: it has no config.yaml"),
        (["bench", "everything"], "unknown benchmark `everything`"),
        (["bench", "step", "--pairs", "0"], "--pairs: must be above 0 (got 0)"),
        (
            ["bench", "loader", "--images", "32"],
            "--images 32: bench loader needs at least 256, a global batch",
        ),
        (["bench", "loader", "--window-s=-1"], "--window-s: must be above 0 (got -1.0)"),
        (
            ["tune", "sample", "--goal", "loss", "--budget", "2 hours"],
            "--budget 2 hours: write a time such as 2h",
        ),
        (["tune", "sample", "--concurrency", "0"], "--concurrency: must be above 0 (got 0)"),
        (
            ["doctor", "--json", "no/such/x.json"],
            "--json no/such/x.json: folder no/such does not exist; create it",
        ),
        (
            ["train", "--optimizer.betas", "1.5", "0.9"],
            "optimizer.betas.0: input should be less than 1 (got 1.5)",
        ),
    ],
)
def test_invalid_arguments_exit_with_2(typed, words, said):
    code, _, err = typed(*words)
    assert code == 2
    assert said in " ".join(err.split())


def test_json_file_without_access_is_a_usage_error(typed, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # permissions do not bind root
    code, _, err = typed("runs", str(tmp_path), "--json", str(tmp_path / "x.json"))
    assert code == 2 and "x.json: not writable; choose another file" in err


def test_storage_errors_exit_with_4(typed, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "runs/x")

    monkeypatch.setitem(cli.COMMANDS, "runs", full)
    assert typed("runs")[::2] == (4, "error: [Errno 28] No space left on device: 'runs/x'\n")


def test_refusal_of_a_store_has_a_hint(typed, monkeypatch):
    def refused(*_):
        raise OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body.")

    monkeypatch.setitem(cli.COMMANDS, "runs", refused)
    code, _, error = typed("runs")
    assert code == 4 and "ACCESS_DENIED" in error and "AWS_PROFILE" in error


ENDLESS = """
import time
from mmray import cli
def endless(argv, screen):
    {work}
cli.COMMANDS["endless"] = endless
cli.main(["endless"])
"""
JOINED = """
    from mmray.cluster.connect import ray_session
    from mmray.config import Cluster
    with ray_session(Cluster()):
        print("begun", flush=True); time.sleep(60)
"""


@pytest.mark.parametrize(
    "work",
    ['print("begun", flush=True); time.sleep(60)', pytest.param(JOINED, marks=pytest.mark.cluster)],
)
def test_terminated_command_exits_with_130(work):
    """SIGTERM, as `ray job stop` sends it; Ray's own handler would exit with 15."""
    command = [sys.executable, "-c", ENDLESS.format(work=work.strip())]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "begun\n"
    running.terminate()
    _, said = running.communicate(timeout=60)
    assert (running.returncode, "interrupted" in said) == (130, True), said


@pytest.mark.parametrize(
    "words",
    [["train", "--print-config"], ["runs", ".", "--json", "-"], ["--help"], ["train", "--help"]],
)
def test_closed_pipe_ends_a_command_silently(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "mmray", *words], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_deleted_working_directory_is_a_usage_error(tmp_path, monkeypatch, capfd):
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(["runs"])
    assert (ended.value.code, capfd.readouterr().err) == (
        2,
        "error: the working directory was deleted; change to another one\n",
    )


def test_help_lists_commands_and_flags(typed):
    code, out, _ = typed("train", "--help")
    assert (
        code == 0
        and "--batch.global" in out
        and ("Rows per optimizer step over all workers") in out
    )
    code, out, _ = typed()
    assert code == 0 and all(f"mmray {verb}" in out for verb in cli.COMMANDS)


def paint(color: str, *, coats: int | str = "auto", reporter: object = None) -> str:
    """Paint a wall.

    Args:
        color: name of a color, such as
            `red`.
        coats: number of coats.
    """
    return f"{coats} coats of {color}"


def test_command_has_arguments_and_help_of_its_function(typed, monkeypatch):
    @command(paint, name="paint")
    def run(console, **arguments):
        console.log(paint(**arguments, reporter=console))

    monkeypatch.setitem(cli.COMMANDS, "paint", run)
    assert typed("paint", "--color", "blue", "--coats", "2")[:2] == (0, "2 coats of blue\n")
    code, out, _ = typed("paint", "--help")
    text = " ".join(out.replace("│", "").split())
    assert code == 0 and "usage: mmray paint [-h] --color STR [--coats STR]" in text
    assert "Name of a color, such as `red`. (required)" in text and "reporter" not in text
    assert "mmray paint     Paint a wall\n" in typed("--help")[1]


OWN_MODEL = """
from torch import nn


class Net(nn.Module):
    def __init__(self, spec, vocab_size):
        super().__init__()
        self.words = nn.Embedding(vocab_size, 2)

    def forward(self, batch):
        return {"words": self.words(batch["input_ids"])}
"""


def test_export_imports_model_from_working_directory(tmp_path, monkeypatch):
    """In an installed script, Python's path has the script's folder instead of the working
    directory.
    """
    config = runs.config("none", tmp_path, "one")
    model = CustomModel(kind="mine_here:Net", inputs=config.model.inputs, vocab_size=90)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config.model_copy(update={"model": model})))
    (run / "tokenizer.json").write_text(train_tokenizer(CAPTIONS, 60))
    save_checkpoint(run / "checkpoints", 1, {"model": {"words.weight": torch.ones(90, 2)}}, {})
    (tmp_path / "mine_here.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", ".")])
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", "run", "out"])
    assert ended.value.code == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_checkout_that_is_not_installed_prints_its_version(tmp_path):
    """`-S` leaves out the installed packages, except for those that are added again by path."""
    packages = sysconfig.get_paths()["purelib"]
    without = tmp_path / "packages"
    without.mkdir()
    for package in Path(packages).iterdir():
        if "mmray" not in package.name:
            (without / package.name).symlink_to(package)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "mmray", "--version"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{without}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"mmray {VERSION}\n"), done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_script_completes_commands_flags_and_values(tmp_path):
    script = tmp_path / "mmray.sh"
    command = [sys.executable, "-m", "mmray", "--tyro-print-completion", "bash"]
    script.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    call = (
        'source "$1"; shift; COMP_WORDS=(mmray "$@"); COMP_CWORD=$#; _tyro_mmray mmray; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    for words, expected in (
        (["tr"], "train"),
        (["train", "clip", "--batch.mic"], "--batch.micro"),
        (["train", "--train.precision", "fp1"], "fp16"),
        (["tune", "clip", "--goal", "l"], "loss"),
        (["prepare", "a", "b", "--max-b"], "--max-bad-fraction"),
        (["bench", "lo"], "loader"),
    ):
        bash = ["bash", "-c", call, "bash", str(script), *words]
        completed = subprocess.run(bash, capture_output=True, text=True)
        assert completed.stdout.split() == [expected], (words, completed)


def test_completion_of_tcsh_names_the_package_that_it_needs(typed, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, err = typed("--tyro-print-completion", "tcsh")
    assert code == 2 and "pip install shtab" in " ".join(err.split())


@pytest.mark.parametrize("scores", [{}, {"loss": 1.0}])
def test_next_commands_are_quoted_and_evaluate_only_held_out_rows(capsys, scores):
    run = SimpleNamespace(path=Path("/data/my runs/a b"))
    result = {"status": "finished", "steps": 3, "best": None, "scores": scores}
    _print_next_commands(run, result, ConsoleReporter())
    evaluation = ["next       mmray evaluate '/data/my runs/a b'"] * bool(scores)
    exported = "next       mmray export '/data/my runs/a b' 'exported/a b'"
    assert capsys.readouterr().out.splitlines() == [*evaluation, exported]


def test_evaluation_flags_override_run_settings(typed, tmp_path, monkeypatch):
    config = runs.config("none", tmp_path, "one")
    own = config.evaluate.model_copy(update={"limit": 7, "classes": ("cat",)})
    (tmp_path / "config.yaml").write_text(to_yaml(config.model_copy(update={"evaluate": own})))
    received = {}

    def evaluate_model(*_, **arguments):
        received.update(arguments)
        return {"loss": 1.0}

    monkeypatch.setattr("mmray.training.evaluate_export.evaluate_model", evaluate_model)

    def settings(*words):
        assert typed("evaluate", str(tmp_path), *words)[0] == 0
        return received["settings"]

    saved = own.outside_run(None)
    assert settings() == saved and saved.limit == 7
    words = ["--evaluate.classes", "fox", "dog", "--evaluate.batch", "3", "--workers=1"]
    assert settings(*words) == saved.replace(classes=("fox", "dog"), batch=3)
    assert received["workers"] == 1 and received["accelerator"] is None
    # The default of the class is a value too.
    assert settings("--evaluate.classes").classes == ()
    assert settings("--evaluate.loss-batch=9", "--evaluate.num_generations", "2") == saved.replace(
        loss_batch=9, num_generations=2
    )
    assert settings("--data", "other") == saved.replace(limit=None)
    assert settings("--data", "other", "--evaluate.limit", "9").limit == 9
    code, _, err = typed("evaluate", str(tmp_path), "--workers", "0")
    assert code == 2 and "--workers: must be above 0 (got 0)" in err
