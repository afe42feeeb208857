"""Step benchmark: all loops take the same steps; failures of worker processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from unittest.mock import Mock

import pytest
import torch

from mmray.bench import hand_loops, step
from mmray.bench.step import (
    WARMUP_STEPS,
    Bench,
    bench_step,
    build_bench,
    measure_loops,
)
from mmray.config import (
    Batch,
    Cluster,
    Config,
    ImageTower,
    Inputs,
    Objective,
    Optimizer,
    TextTower,
    Train,
    TwoTower,
)
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.errors import ResourceError, TrainingError, UsageError
from mmray.training.workers.local import measure_in_worker
from tests.engine.fake_cuda import DEVICES, gpus, has_gpus

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("forked_children")


def tiny(workers: int = 1, **sections: object) -> Config:
    model = TwoTower(
        inputs=Inputs(image_side=16, max_tokens=6),
        image=ImageTower(name="convnet", width=8, depth=2),
        text=TextTower(width=8, depth=1, heads=2),
        vocab_size=32,
        embed_dim=8,
    )
    cluster = Cluster(workers=workers, accelerator="cpu", cpus_per_worker=1)
    given = {
        "model": model,
        "batch": Batch(micro=4),
        "cluster": cluster,
        "train": Train(steps=1, log_every=4),
    }
    return Config(**given | sections)


def collect(
    copies: list[torch.nn.Module], make: Callable[..., torch.nn.Module]
) -> Callable[..., torch.nn.Module]:
    def collecting(*args: object, **options: object) -> torch.nn.Module:
        copies.append(make(*args, **options))
        return copies[-1]

    return collecting


def assert_equal_runs(copies: list[torch.nn.Module], start: torch.nn.Module) -> None:
    ours, theirs = (model.state_dict() for model in copies)
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6), name
    assert any(not torch.equal(ours[name], value) for name, value in start.state_dict().items())


def test_best_loop_takes_the_steps_of_the_accumulated_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The global batch in one pass, with the weights of the benchmark and its frozen parameters."""
    bench = build_bench(
        tiny(optimizer=Optimizer(freeze=("text.project.*",))), Group(), micro=4, rank_rows=12
    )
    copies: list[torch.nn.Module] = []
    monkeypatch.setattr(step, "deepcopy", collect(copies, deepcopy))
    monkeypatch.setattr(step, "build", collect(copies, step.build))
    _, accumulated_loss = bench.loop_window(8, accumulated=True)
    _, best_loss = bench.best_window(8, bench.best_rows())
    assert_equal_runs([copies[0], copies[-1]], bench.model)
    assert not copies[-1].text.project.weight.requires_grad
    assert best_loss == pytest.approx(accumulated_loss, rel=1e-4)


def test_best_loop_takes_the_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows in even parts: 5 are those of a limit of 6."""
    bench = build_bench(tiny(), Group(), micro=4, rank_rows=10)
    forward = type(bench.model).forward

    def forward_limited(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> object:
        if len(batch["valid"]) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(model, batch)

    monkeypatch.setattr(type(bench.model), "forward", forward_limited)
    assert bench.best_rows() == 5


def test_best_loop_compiles_static_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage has other sizes than the first, which torch would take for dynamic ones."""
    compiled, graphs = torch.nn.Module.compile, []

    def record(graph: torch.nn.Module, inputs: list[object]) -> torch.nn.Module:
        graphs.append([value for value in inputs if not isinstance(value, torch.Tensor)])
        return graph

    def compile_recorded(block: torch.nn.Module, **options: object) -> None:
        compiled(block, backend=record, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_recorded)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    bench = build_bench(tiny(), Group(), micro=4)
    torch.compiler.reset()
    hand_loops.compile_blocks(bench.model, DEVICES[0])(bench.batches[0])
    torch.compiler.reset()
    assert len(graphs) >= 3  # two stages and a layer
    assert not any(graphs)  # a dynamic size is an input of the graph


@pytest.mark.gpu
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("precision", "rel"), [("fp32", 1e-4), ("bf16", 0.02)] if has_gpus() else [("fp32", 1e-4)]
)
def test_both_loops_take_the_same_steps_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, precision: str, rel: float
) -> None:
    with gpus(monkeypatch):
        bench = build_bench(
            tiny(train=Train(steps=1, log_every=4, precision=precision)),
            Group(device=DEVICES[0]),
            4,
        )
        took_s, loop_loss = bench.loop_window(4)
        _, bare_loss = bench.bare_window(4)
        with monkeypatch.context() as patch:
            # a fake GPU cannot run compiled code
            patch.setattr(step, "compile_blocks", lambda model, device: model)
            _, best_loss = bench.best_window(4, 4)
    assert took_s > 0 and loop_loss == pytest.approx(bare_loss, rel=rel)
    assert loop_loss == pytest.approx(best_loss, rel=0.02)  # in bf16


def test_windows_alternate_and_ratios_pair_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    seconds = {"loop": 2.0, "bare": 1.5, "best": 1.2}

    def window(arm: str) -> Callable[..., tuple[float, float]]:
        def run(
            _: Bench, steps: int, accumulated: bool = False, rows: int = 0
        ) -> tuple[float, float]:
            order.append(f"{arm} {steps}" + " whole" * accumulated)
            return seconds[arm], 0.5

        return run

    for name in seconds:
        monkeypatch.setattr(Bench, f"{name}_window", window(name))
    # Nothing to collect: a fake window has no DDP.
    monkeypatch.setattr(step, "gc", Mock())
    result = measure_loops(build_bench(tiny(), Group(), micro=4), pairs=4, window_s=3.0)
    # 3 s at 4 steps per 1.5 s are 8 steps; 3 of warm-up make 11, for mmray's loop rounded up to
    # intervals of 4
    assert order[2:] == ["loop 12", "bare 12", "best 11", "best 11", "bare 12", "loop 12"] * 2
    assert result["ratios"]["loop_vs_bare"] == pytest.approx(0.75)
    assert result["ratios"]["loop_vs_best"] == pytest.approx(9 / 2.0 / (8 / 1.2))
    bare = result["rows"][1]
    assert (bare["arm"], bare["samples_per_s"]) == ("bare", 4 * (12 - WARMUP_STEPS) / 1.5)
    order.clear()
    bench = build_bench(tiny(), Group(), micro=4, rank_rows=8)
    result = measure_loops(bench, pairs=1, window_s=3.0)
    assert order[2:] == ["loop 12", "bare 12", "best 7", "loop 7 whole"]
    assert result["ratios"]["loop_vs_best"] == pytest.approx(1.2 / 2.0)  # of whole steps


def test_share_of_a_worker_is_measured_end_to_end() -> None:
    """A recipe of two workers and two micro-batches."""
    # eps: gradient scale matters
    sensitive = Optimizer(lr=1.0, settings={"eps": 1.0}, warmup_steps=0, clip_norm=0)
    batch = Batch(micro=2, global_=8)
    config = tiny(workers=2, optimizer=sensitive, batch=batch)
    result = bench_step(config, pairs=1, window_s=0.05)
    rows = {row["arm"]: row for row in result["rows"]}
    assert list(rows) == ["loop", "bare", "best", "accumulated"]
    for arm, base in (("loop", "bare"), ("accumulated", "best")):
        ratio = rows[arm]["samples_per_s"] / rows[base]["samples_per_s"]
        assert result["ratios"][f"loop_vs_{base}"] == ratio
        assert result["spread"][f"loop_vs_{base}"] == {"min": ratio, "max": ratio, "pairs": 1}
    batch_text = "micro 2 x accumulation 1 = 2 rows per step; loop_vs_best: 4 rows per step"
    assert result["batch"] == batch_text
    assert rows["loop"]["loss"] == pytest.approx(rows["bare"]["loss"], rel=1e-4)
    assert result["machine"]["cores"] > 0
    json.dumps(result)


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="contrastive"):
        bench_step(tiny(objective=Objective(kind="my.package:Mine")))
    if not torch.cuda.is_available():
        with pytest.raises(ResourceError, match="torch sees 0"):
            bench_step(tiny(cluster=Cluster(workers=64, accelerator="gpu"), batch=Batch(micro=4)))


def test_model_is_configured_as_in_a_worker() -> None:
    train = Train(
        steps=1,
        log_every=4,
        deterministic=True,
        activation_checkpointing=("text",),
        compile="eager",
    )
    try:
        bench = build_bench(
            tiny(optimizer=Optimizer(freeze=("image.*",)), train=train), Group(), micro=4
        )
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    learning = {
        name.split(".")[0]
        for name, weight in bench.model.named_parameters()
        if weight.requires_grad
    }
    assert learning == {"text", "log_scale"}
    copy = bench.copy_of_model(BatchShape(bench.micro, bench.micro, world_size=1))
    blocks = [part for part in copy.text.modules() if "forward" in vars(part)]
    compiled = [*copy.image.tower.stages, *blocks]
    # only deepcopy drops it
    assert all(block._compiled_call_impl is not None for block in compiled)
    assert blocks and all(part.forward.args[0].__self__ is part for part in blocks)


def test_pretrained_recipe_needs_no_weights() -> None:
    spec = tiny().model
    named = spec.replace(text=spec.text.replace(weights="a-name-on-no-hub"))
    bench = build_bench(tiny(model=named), Group(), micro=2)
    assert bench.model(bench.batches[0])["text_embed"].shape == (2, 8)


def _kill(config: object, group: object, folder: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(config: object, group: object, folder: object) -> None:
    raise torch.OutOfMemoryError("no memory for the batch\nCompile with TORCH_USE_CUDA_DSA")


def test_killed_process_is_reported() -> None:
    with pytest.raises(TrainingError, match=r"SIGKILL .*out of memory"):
        measure_in_worker(_kill, tiny())


def test_failure_reason_is_the_first_line_of_the_error() -> None:
    with pytest.raises(TrainingError) as failed:
        measure_in_worker(_fail, tiny())
    assert str(failed.value) == "OutOfMemoryError: no memory for the batch"
