"""Evaluation and export use a run's weights or EMA weights, and the rows it held out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mmray
from mmray import cli
from mmray.config import Batch, Clip, ClipImage, ClipText, Config, Inputs, Lora, to_yaml
from mmray.console.reporter import ConsoleReporter
from mmray.data.prepare import pipeline as prepare_module
from mmray.data.text.tokenizer import TextEncoder, train_tokenizer
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group
from mmray.engine.run_state import EMA_KEY
from mmray.errors import UsageError
from mmray.evaluation.build import best_metric
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.models.lora import merge_adapters
from mmray.storage.paths import AnyPath, to_path
from mmray.training import evaluate_export, run_dir, saved_model
from mmray.training.saved_model import SavedModel, interpolate_from_start, load_model
from tests.checkpoints import save_checkpoint
from tests.data.prepare.test_pipeline import make_source, run_here
from tests.made import CAPTIONS, make_set, noisy, row
from tests.training import runs


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_ema_weights_are_used_if_present(tmp_path: Path, ema: float) -> None:
    config = runs.config("none", tmp_path, "one", ema=ema)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 20})})
    torch.manual_seed(0)
    model = build(config.model, 20)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    start = model.log_scale.item()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    average.update_parameters(model)
    state = {EMA_KEY: average.state_dict()} if ema else {}
    meta = {"architecture": model.architecture()}
    found = load_model(
        config, save_checkpoint(tmp_path, 3, {"model": model.state_dict()} | state, meta)
    )
    assert found.log_scale.item() == pytest.approx(start + (0.5 if ema else 1))
    expected = average.module if ema else model
    assert all(
        torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True)
    )


def test_interpolated_weights_lie_between_start_and_end(tmp_path: Path) -> None:
    """Also the weights of an adapter, which is merged first; a random start is refused."""
    tokenizer = train_tokenizer(CAPTIONS, 60)
    inputs = Inputs(image_side=32, max_tokens=8)
    shape = {"width": 32, "depth": 1, "heads": 2}
    image = ClipImage(patch=8, **shape)
    spec = Clip(inputs=inputs, image=image, text=ClipText(**shape), embed_dim=16, vocab_size=60)
    torch.manual_seed(0)
    values = spec.model_dump(mode="json")
    weights = export(build(spec, 60), values, tokenizer, tmp_path / "start")
    spec = spec.model_copy(update={"weights": str(weights), "lora": Lora(rank=2)})
    config = Config(recipe="mine", model=spec)
    start = build(spec.model_copy(update={"lora": Lora()}), 60).state_dict()
    model = build(spec, 60)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_()
    merged = merge_adapters(model)
    end = {name: weight.clone() for name, weight in merged.state_dict().items()}
    assert any(not torch.equal(end[name], start[name]) for name in end)
    interpolate_from_start(merged, config.model, 0.25)
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, 0.75 * start[name] + 0.25 * end[name])
    with pytest.raises(UsageError, match="between 0"):
        interpolate_from_start(merged, config.model, 1.5)
    random = spec.model_copy(update={"weights": "none"})
    with pytest.raises(UsageError, match="this run has random ones"):
        interpolate_from_start(merged, random, 0.5)


def test_interpolated_weights_are_evaluated_on_named_sets(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, without_ray: None
) -> None:
    """Each share has the metrics of its export."""
    tokenizer = train_tokenizer(CAPTIONS, 60)
    shape = {"width": 16, "depth": 1, "heads": 2}
    inputs = Inputs(image_side=16, max_tokens=8)
    image = ClipImage(patch=8, **shape)
    spec = Clip(inputs=inputs, image=image, text=ClipText(**shape), embed_dim=8, vocab_size=60)
    torch.manual_seed(0)
    start = export(build(spec, 60), spec.model_dump(mode="json"), tokenizer, tmp_path / "start")
    config = runs.config("none", tmp_path, "run")
    config = config.replace(model=spec.replace(weights=str(start)), recipe="mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "tokenizer.json").write_text(tokenizer)
    torch.manual_seed(1)
    trained = build(spec, 60)
    meta = {"architecture": trained.architecture(), "rows_consumed": 0}
    save_checkpoint(folder / "checkpoints", 3, {"model": trained.state_dict()}, meta)
    words = ["a", "red", "much", "longer", "caption"]
    captions = [
        " ".join(word for bit, word in enumerate(words) if number >> bit & 1)
        for number in range(1, 32)
    ]
    for name, first in (("one", 0), ("two", 16)):
        numbers = range(first, first + 15)
        make_set(tmp_path / name, [row(n, noisy(n), [captions[n]]) for n in numbers])
    data = f"one={tmp_path / 'one'}, two={tmp_path / 'two'}"
    command = ["evaluate", str(folder), "--data", data, "--json", str(tmp_path / "out.json")]
    found = []
    for share in ("0", "0.5", "1"):
        assert cli.run([*command, "--interpolate", share], ConsoleReporter()) == 0
        found.append(json.loads((tmp_path / "out.json").read_text())["metrics"])
        out = tmp_path / f"export-{share}"
        mmray.export(folder, out, interpolate=float(share), reporter=runs.Silent())
        expected = mmray.evaluate(
            mmray.pretrained_config(str(out)), data, batch=8, reporter=runs.Silent()
        )
        for name, value in expected.items():
            if "loss" not in name:  # of another global batch
                assert found[-1][name] == pytest.approx(value, abs=1e-6)
    assert found[0] != found[2]
    assert cli.run([*command, "--interpolate", "1.5"], ConsoleReporter()) == 2
    assert "must be between 0 (the start) and 1" in capsys.readouterr().err


def test_default_set_is_what_the_run_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "map_tasks", run_here)
    monkeypatch.setattr(evaluate_export, "needs_ray", lambda _: False)
    monkeypatch.chdir(tmp_path)
    trained_on = make_set(
        tmp_path / "set", [row(number) for number in range(6)], [row(number) for number in (7, 8)]
    )
    (tmp_path / "data.json").write_text(json.dumps({"train": str(tmp_path / "set")}))
    config = runs.config(tmp_path / "set", tmp_path, "one")
    config = config.replace(prepare=config.prepare.replace(holdout=0.2))  # of training sources

    def held_out(eval_set: str | None, data: str | None = None, split: str | None = None) -> int:
        given = config.replace(data=config.data.replace(eval=eval_set or data))
        split = split or (config.data.eval_split if data is None else "test")
        return evaluate_export._open_held_out(given, tmp_path, split, runs.Silent())[""].num_rows

    raw = str(make_source(tmp_path / "raw", 5))
    assert trained_on.num_rows == 8
    assert (held_out(None), held_out(None, split="train"), held_out(str(tmp_path / "set"))) == (
        2,
        6,
        2,
    )
    assert held_out(raw) == 5  # a run takes a source for data.eval, so evaluation does
    assert held_out(None, data=raw) == held_out(None, data=raw, split="train") == 5
    make_set(tmp_path / "set", [row(number) for number in range(6)])
    with pytest.raises(UsageError, match=r"set has no splits, so the run held out no rows: .*--da"):
        held_out(None)  # not the rows that it trained on
    assert held_out(None, data=str(tmp_path / "set")) == 6
    (tmp_path / "set").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"set, which does not exist now: .* --data SET"):
        held_out(None)


def test_evaluation_of_branches_needs_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_export, "needs_ray", lambda _: False)
    manifest = SimpleNamespace(text_columns=(), class_names=())
    held_out = {"": SimpleNamespace(num_rows=1, folder=tmp_path, manifest=manifest)}
    monkeypatch.setattr(evaluate_export, "_open_held_out", lambda *_: held_out)
    monkeypatch.setattr(evaluate_export, "score_model", lambda config, *_, **__: config)
    monkeypatch.setattr(evaluate_export, "count_gpus", lambda: 2)
    config = runs.config("none", tmp_path, "one", parallel="branches").with_cluster(
        accelerator="cpu"
    )
    reporter = runs.Silent()
    found: Any = evaluate_export._evaluate(
        SavedModel(config, "{}", tmp_path / "step-1"), tmp_path, None, None, reporter, 1.0
    )
    assert (config.train.parallel, found.train.parallel) == ("branches", "single")
    assert reporter.notes[1:] == [
        ("warning", "evaluating on the CPU; --accelerator gpu uses a GPU (2 found)")
    ]


def made_run(folder: AnyPath, tmp_path: Path, **recalls: float | None) -> AnyPath:
    """A run with checkpoints `step_N` that have these metrics."""
    config = runs.config("none", tmp_path, "one")
    tokenizer = train_tokenizer(CAPTIONS, 60)
    size = TextEncoder(tokenizer, 8).vocab_size
    config = config.model_copy(update={"model": config.model.with_vocab(size, None)})
    run_dir.write_run_files(folder, config, {}, tokenizer)
    for name, recall in recalls.items():
        step = int(name.removeprefix("step_"))
        torch.manual_seed(step)
        model = build(config.model, size)
        metrics = {} if recall is None else {best_metric(config): recall}
        meta = {"architecture": model.architecture(), "metrics": metrics}
        save_checkpoint(folder / "checkpoints", step, {"model": model.state_dict()}, meta)
    return folder


def test_run_on_object_store_is_exported_to_object_store(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = made_run(to_path(f"{s3.address}/one"), tmp_path, step_3=0.5)
    assert cli.run(["export", str(folder), f"{s3.address}/exported"], ConsoleReporter()) == 0
    assert f'mmray.load("{s3.address}/exported")' in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert mmray.load(f"{s3.address}/exported").embed_texts(["a red one"]).shape == (1, 16)


def test_export_of_best_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = made_run(tmp_path / "one", tmp_path, step_3=0.25, step_6=0.5, step_9=0.125)

    def exported(*words: str) -> Any:
        assert (
            cli.run(["export", str(folder), str(tmp_path / "out"), *words], ConsoleReporter()) == 0
        )
        return mmray.load(tmp_path / "out").model.state_dict()["text.project.weight"]

    def saved(step: int) -> Any:
        return state_io.load_weights(folder / "checkpoints" / f"step-{step}")["text.project.weight"]

    assert torch.equal(exported(), saved(9))
    assert torch.equal(exported("--step", "best"), saved(6))
    assert torch.equal(exported("--step", "3"), saved(3))
    (folder / "checkpoints" / "step-6" / "shard-1-of-1.safetensors").write_bytes(b"")
    assert (
        cli.run(
            ["export", str(folder), str(tmp_path / "other"), "--step", "best"], ConsoleReporter()
        )
        == 2
    )
    assert re.search(
        r"no valid .* --step best; checkpoints: .*\n.*step-6 is not valid", capfd.readouterr().err
    )
    never = made_run(tmp_path / "two", tmp_path, step_3=None)
    assert (
        cli.run(
            ["export", str(never), str(tmp_path / "other"), "--step", "best"], ConsoleReporter()
        )
        == 2
    )
    assert "none has evaluate/recall_at_1/mean: the run holds out no rows" in capfd.readouterr().err


def test_elastic_run_is_evaluated_with_fewer_workers(tmp_path: Path) -> None:
    """Two workers took two micro-batches each of 16 rows; one worker that evaluates takes four."""
    held_out = make_set(tmp_path / "set", [row(number) for number in range(5)])
    config = runs.config(tmp_path / "set", tmp_path, "one")
    model = config.model.model_copy(update={"vocab_size": 60})
    config = config.model_copy(
        update={"model": model, "batch": Batch(micro=4, accumulation=2, global_=16)}
    )
    built = build(config.model, 60)
    found = save_checkpoint(
        tmp_path, 3, {"model": built.state_dict()}, {"architecture": built.architecture()}
    )
    progress: list[int] = []
    scores = evaluate_export.score_model(
        config,
        Group(),
        lambda message: progress.append(message["rows"]),
        SavedModel(config, held_out.tokenizer_json or "", found),
        {"": held_out},
    )
    assert scores["rows"] == sum(progress) == 5 and scores["loss"] > 0


@pytest.mark.parametrize(
    ("num_gpus", "needs_ray", "given", "workers"),
    [(0, False, None, 1), (2, False, None, 2), (2, False, 3, 3), (0, True, None, 64)],
)
def test_evaluation_on_one_machine_has_as_many_workers_as_it_has_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    needs_ray: bool,
    given: int | None,
    workers: int,
) -> None:
    """Not as many as the cluster that trained the run, unless one is connected."""
    config = runs.config("none", tmp_path, "one").with_cluster(workers=64)
    opened = SavedModel(config, "{}", tmp_path)
    monkeypatch.setattr(saved_model, "open_run", lambda *_: opened)
    monkeypatch.setattr(evaluate_export, "needs_ray", lambda _: needs_ray)
    monkeypatch.setattr(evaluate_export, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(evaluate_export, "_evaluate", lambda saved, *_: saved.config)
    found: Any = evaluate_export.evaluate_model(
        tmp_path, None, None, None, None, runs.Silent(), workers=given
    )
    assert found.cluster.max_workers == workers
