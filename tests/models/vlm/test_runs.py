"""Whole runs of a vision-language model with batches by tokens: killed and resumed, on other
numbers of ranks, and on Ray.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest

import mmray
from mmray import cli
from mmray.config import Prepare, to_yaml
from mmray.console.reporter import ConsoleReporter
from mmray.data.prepare import map_shards
from mmray.data.prepare.pipeline import prepare
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group
from mmray.errors import UsageError
from mmray.training import driver, run_dir
from mmray.training.saved_model import load_run_config
from tests.data.media.synthetic import encode_audio, encode_video
from tests.engine.conftest import spawn_ranks
from tests.models.vlm import token_runs, two_ranks
from tests.models.vlm.folders import OMNI
from tests.training.runs import Silent, expected_marks, lines, marks, same_weights


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "set"
    token_runs.make_prepared(folder)
    return str(folder)


@pytest.fixture(scope="module")
def calm(folder_of, prepared, tmp_path_factory):
    """A run of one rank that nothing disturbs."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    token_runs.run(token_runs.config_of(folder_of("qwen3_vl"), prepared, folder), Group())
    return folder


def losses(folder):
    return [line["train/loss"] for line in lines(folder)]


def test_run_takes_the_rows_of_the_order(calm):
    expected = expected_marks(token_runs.STEPS, token_runs.NUM_ROWS, 6)
    assert marks(calm) == list(expected)


@pytest.fixture(scope="module")
def two(calm, folder_of, prepared, tmp_path_factory):
    """Two ranks that resume the run `calm`, sharded: folder of their run, and scores by rank."""
    folder = tmp_path_factory.mktemp("two")
    config = token_runs.config_of(folder_of("qwen3_vl"), prepared, folder / "run")
    checkpoint = calm / "checkpoints" / "step-3"
    return folder / "run", spawn_ranks(two_ranks.resume, folder, 2, config, str(checkpoint))


def test_run_resumed_by_two_ranks_takes_the_rows_and_losses_of_one(two, calm):
    folder, _ = two
    assert marks(folder) == marks(calm)[3:]
    assert losses(folder) == pytest.approx(losses(calm)[3:], rel=1e-4)


def test_sharded_model_generates_the_answers_of_one_rank(two, folder_of, prepared, tmp_path):
    config = token_runs.config_of(folder_of("qwen3_vl"), prepared, tmp_path / "run")
    expected = two_ranks.evaluate(config, Group(), "ddp")
    assert expected["answered"] == 3
    for scores in two[1]:
        assert scores == pytest.approx(expected, rel=1e-9)


def test_folder_of_weights_is_evaluated_and_exported_without_training(
    folder_of, prepared, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = str(folder_of("internvl"))
    scores = tmp_path / "scores.json"
    words = ["--evaluate.num-generations", "2", "--json", str(scores)]
    command = ["evaluate", "--weights", folder, "--data", prepared, *words]
    assert cli.run(command, ConsoleReporter()) == 0
    assert " on 3 rows of " in capsys.readouterr().out
    metrics = json.loads(scores.read_text())["metrics"]
    assert (metrics["rows"], metrics["answered"]) == (3, 2)
    assert metrics["tokens"] > 0
    assert cli.run(["export", "--weights", folder, "out"], ConsoleReporter()) == 0
    assert isinstance(mmray.load("out").answer([{"role": "user", "content": "what"}]), str)


def test_killed_run_resumes_with_equal_weights(
    calm, folder_of, prepared, tmp_path, monkeypatch, without_ray
):
    """The worker process is killed after step 5."""
    monkeypatch.setattr(
        map_shards, "map_tasks", lambda work, items, **_: (work(item) for item in items)
    )
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv("MMRAY_TEST_FAULTS", str(tmp_path / "faults"))
    config = token_runs.config_of(
        folder_of("qwen3_vl"),
        prepared,
        tmp_path / "run",
        callbacks=("tests.training.faults:KillRankOneOnce",),
    )
    outcome = driver.train(config, Silent())
    assert (outcome.result["status"], outcome.result["restarts"]) == ("finished", 1)
    assert marks(outcome.path) == marks(calm)
    assert losses(outcome.path) == losses(calm)
    assert same_weights(*(final_weights(each) for each in (outcome.path, calm)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("processor_config.json", '{"image_processor": {"size": 1}}'),
        ("tokenizer.json", None),
        ("preprocessor_config.json", "{}"),  # new
    ],
)
def test_changed_file_of_the_weights_is_refused_by_name(name, content, calm, tmp_path, capsys):
    """By a resume, a restart of workers, an evaluation and an export, until it is restored."""
    run = shutil.copytree(calm, tmp_path / "run")
    config = load_run_config(run)
    weights = shutil.copytree(config.model.weights, tmp_path / "weights")
    config = config.replace(
        model=config.model.replace(weights=str(weights)),
        run=config.run.replace(name="run", storage=str(tmp_path)),
    )
    (run / "config.yaml").write_text(to_yaml(config))
    data = {"train": "made"}
    assert run_dir.select_run(config, data, 9).action == "resume"
    if content is None:
        (weights / name).unlink()
    else:
        (weights / name).write_text(content)
    problem = rf"model.weights: {name} in .*weights has changed; (copy .*run/processor|remove it)"
    with pytest.raises(UsageError, match=problem):
        run_dir.select_run(config, data, 9)
    with pytest.raises(UsageError, match=problem):
        run_dir.check_processor(run, config.model)
    for command in (["export", str(run), str(tmp_path / "out")], ["evaluate", str(run)]):
        assert cli.run(command, ConsoleReporter()) == 2
        assert re.search(problem, capsys.readouterr().err)
    if (run / "processor" / name).exists():
        shutil.copy(run / "processor" / name, weights)
    else:
        (weights / name).unlink()
    run_dir.check_processor(run, config.model)
    assert run_dir.describe_unstored_processor(run, config.model) is None
    shutil.rmtree(run / "processor")  # a run of an earlier version
    assert "no copy of the tokenizer" in run_dir.describe_unstored_processor(run, config.model)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("qwen3_vl", ("video",)), ("qwen2_audio", ("audio",)), (OMNI[1], ("video", "audio"))],
)
def test_run_on_videos_or_audio_resumes_with_equal_weights(family, kinds, folder_of, tmp_path):
    """Some rows have no video or audio; a step is of six of eight rows."""
    (tmp_path / "clip.video").write_bytes(encode_video(audio="aac"))
    (tmp_path / "clip.audio").write_bytes(encode_audio("flac", 3.0))
    rows = []
    for number in range(8):
        answer = {"role": "assistant", "content": ["red", "a blue square"][number % 2]}
        # The first kinds: none, one or all.
        media = {kind: f"clip.{kind}" for kind in kinds[: number % 3]}
        marks_of_media = "".join(f"<{kind}>" for kind in media)
        question = {"role": "user", "content": f"{marks_of_media}Which color has {number}?"}
        span = {"t0_s": 0.2 * number, "t1_s": 0.2 * number + 1.0} if media else {}
        rows.append({"messages": [question, answer], "id": str(number)} | media | span)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(str(source), str(tmp_path / "set"), Prepare(vocab_size=0, split="train"))
    frames = {"frames": 4, "frame_pixels": 64 * 64} if "video" in kinds else {}
    config = token_runs.config_of(folder_of(family), str(tmp_path / "set"), tmp_path / "run")
    inputs = config.model.inputs.replace(**frames)
    config = config.replace(model=config.model.replace(inputs=inputs))
    result = token_runs.run(config, Group())
    assert (result["status"], result["steps"]) == ("finished", token_runs.STEPS)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    resumed = config.replace(run=config.run.replace(name="resumed"))
    token_runs.run(resumed, Group(), checkpoint)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "run")[3:]
    assert same_weights(*(final_weights(tmp_path / each) for each in ("run", "resumed")))


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_two_workers_on_ray_take_the_rows_and_losses_of_one(
    local_ray, calm, folder_of, prepared, tmp_path
):
    config = token_runs.config_of(folder_of("qwen3_vl"), prepared, tmp_path / "run")
    outcome = driver.train(config.with_cluster(workers=2), Silent())
    assert (outcome.result["status"], outcome.result["restarts"]) == ("finished", 0)
    assert marks(outcome.path) == marks(calm)
    assert losses(outcome.path) == pytest.approx(losses(calm), rel=1e-4)


def final_weights(folder):
    return state_io.load_weights(folder / "checkpoints" / f"step-{token_runs.STEPS}")
