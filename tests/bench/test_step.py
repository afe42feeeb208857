"""Step benchmark: both loops take the same steps; windows, ratios and step counts."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from mmray.bench import step
from mmray.bench import step as bare
from mmray.bench.step import Bench, Window, bench_step, build_bench, measure
from mmray.config import Batch, Cluster, Config, ImageTower, Inputs, Objective, Optimizer, TextTower, Train, TwoTower
from mmray.engine.collectives import Group
from mmray.errors import ResourceError, UsageError


def tiny(workers: int = 1, **sections: object) -> Config:
    model = TwoTower(
        inputs=Inputs(image_side=16, max_tokens=6),
        image=ImageTower(name="convnet", width=8, depth=2),
        text=TextTower(width=8, depth=1, heads=2),
        vocab_size=32,
        embed_dim=8,
    )
    cluster = Cluster(workers=workers, accelerator="cpu")
    given = {"model": model, "batch": Batch(micro=4), "cluster": cluster, "train": Train(steps=1, log_every=4)}
    return Config(**given | sections)


def test_both_loops_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = build_bench(tiny(), Group(), micro=4)
    copies = []

    def kept(model: torch.nn.Module) -> torch.nn.Module:
        copies.append(deepcopy(model))
        return copies[-1]

    monkeypatch.setattr(step, "deepcopy", kept)
    _, loop_loss = bench.loop_window(8)
    _, bare_loss = bench.bare_window(8)
    ours, theirs = (model.state_dict() for model in copies)
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6), name
    assert any(not torch.equal(ours[name], value) for name, value in bench.model.state_dict().items())
    assert loop_loss == pytest.approx(bare_loss, rel=1e-4)


def test_windows_alternate_and_ratios_pair_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    seconds = {"loop": 2.0, "bare": 1.5}
    bench = build_bench(tiny(), Group(), micro=4)

    def arm(name: str) -> object:
        return lambda self, steps: (order.append(name), (seconds[name], 0.5))[1]

    monkeypatch.setattr(Bench, "loop_window", arm("loop"))
    monkeypatch.setattr(Bench, "bare_window", arm("bare"))
    rows = measure(bench, pairs=4, window_s=3.0)
    assert order[2:] == ["loop", "bare", "bare", "loop"] * 2
    assert [row["loop_vs_bare"] for row in rows] == [0.75] * 4
    steps = 12  # 3 s at 4 steps per 1.5 s are 8 steps; 2 of warm-up make 10, rounded up to intervals of 4
    assert rows[0]["bare_samples_per_s"] == round(4 * (steps - 2) / 1.5, 2)


def test_window_time_excludes_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(clock))
    window = Window(last_step=6, device=torch.device("cpu"))
    for number in range(1, 7):
        window.on_step(number)
    assert window.took_s == 4.0


def test_two_workers_end_to_end(tmp_path: Path) -> None:
    sensitive = Optimizer(lr=1.0, eps=1.0, warmup_steps=0, clip_norm=0)  # eps: gradient scale matters
    result = bench_step(tiny(workers=2, optimizer=sensitive), pairs=2, window_s=0.05)
    ratios = [row["loop_vs_bare"] for row in result["rows"]]
    assert result["ratios"]["loop_vs_bare"] == pytest.approx(sum(ratios) / 2)
    assert result["batch"] == "micro 4 x accumulation 1 x workers 2 = 8 rows per step"
    assert result["spread"]["loop_vs_bare"] == {"min": min(ratios), "max": max(ratios), "pairs": 2}
    for row in result["rows"]:
        assert row["loop_loss"] == pytest.approx(row["bare_loss"], rel=1e-4)  # over the rows of both ranks
        assert row["loop_samples_per_s"] > 0
    assert result["machine"]["cores"] > 0
    json.dumps(result)


def test_bare_loss_equals_clip_loss() -> None:
    eye = torch.eye(3)
    loss = bare.baseline_loss({"image_embed": eye, "text_embed": eye, "logit_scale": torch.tensor(2.0)}, world=1)
    e2 = torch.tensor(2.0).exp()
    assert loss.item() == pytest.approx(-(e2 / (e2 + 2)).log().item(), rel=1e-6)


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="contrastive"):
        bench_step(tiny(objective=Objective(kind="my.package:Mine")))
    if torch.cuda.device_count() < 64:
        with pytest.raises(ResourceError, match="64 workers"):
            bench_step(tiny(cluster=Cluster(workers=64, accelerator="gpu"), batch=Batch(micro=4)))


def test_model_is_configured_as_in_a_worker() -> None:
    train = Train(steps=1, log_every=4, deterministic=True, activation_checkpointing=("text",), compile="eager")
    try:
        bench = build_bench(tiny(optimizer=Optimizer(freeze=("image.*",)), train=train), Group(), micro=4)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    learning = {name.split(".")[0] for name, weight in bench.model.named_parameters() if weight.requires_grad}
    assert learning == {"text", "log_scale"}
    copy = bench._copy()
    assert all(branch._compiled_call_impl is not None for branch in copy.branches().values())  # only deepcopy drops it
    blocks = [part for part in copy.text.modules() if "forward" in vars(part)]
    assert blocks and all(part.forward.args[0].__self__ is part for part in blocks)


def test_pretrained_recipe_needs_no_weights() -> None:
    spec = tiny().model
    named = spec.model_copy(update={"text": spec.text.model_copy(update={"weights": "a-name-on-no-hub"})})
    bench = build_bench(tiny(model=named), Group(), micro=2)
    assert bench.model(bench.batches[0])["text_embed"].shape == (2, 8)
