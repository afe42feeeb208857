"""Checks that a device takes the steps of a CPU: command.py on a real one,
tests/engine/test_on_gpu.py on fake GPUs.

Runs in float64 of a tiny model of each kind. A check returns what it measured and raises
AssertionError.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mmray import config
from mmray.bench.step import Bench, build_bench, micro_batches, synthetic_run
from mmray.data.stream.order import SamplePlan
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.loop import train_loop
from mmray.engine.parallel.cuda_graphs import graph_branches
from mmray.engine.parallel.transforms import branches_of
from mmray.engine.run_state import LoadCheckpointFn

VOCAB = 40
SHAPE = {"width": 16, "depth": 1, "heads": 2}
INPUTS = config.Inputs(image_side=16, max_tokens=6)
IMAGE_INPUTS = config.ClipInputs(**dict(INPUTS), clip_s=0)
IMAGE = config.ClipImage(**SHAPE, patch=8)
TEXT = config.ClipText(**SHAPE)
TOWERS = {
    "image": config.ImageTower(name="convnet", width=8, depth=2),
    "text": config.TextTower(**SHAPE),
}
MODELS: dict[str, tuple[config.Model, str]] = {
    "clip": (config.Clip(inputs=INPUTS, image=IMAGE, text=TEXT, embed_dim=8), "contrastive"),
    "siglip": (config.Siglip(inputs=INPUTS, image=IMAGE, text=TEXT), "sigmoid"),
    "naflex": (
        config.Naflex(
            inputs=config.NaflexInputs(patch=4, max_patches=16, max_tokens=6),
            image=config.NaflexImage(**SHAPE),
            text=TEXT,
        ),
        "sigmoid",
    ),
    "fusion": (
        config.Towers(
            inputs=IMAGE_INPUTS,
            **TOWERS,
            cross=config.CrossAttention(**SHAPE),
            embed_dim=8,
            matching=True,
            classes=3,
        ),
        "contrastive + 0.5 * matching + classification",
    ),
}
ACCUMULATED = BatchShape(global_batch_size=8, micro_batch_size=3, world_size=1)
WHOLE = replace(ACCUMULATED, micro_batch_size=8)
STEPS = 3
# The last step has rows that are not valid, and a micro-batch of only these.
NUM_ROWS = 20
SETTINGS: dict[str, Any] = {
    "precision": "fp32",
    "compile": "none",
    "log_every": 2,
    "checkpoint_every": 0,
}
OPTIMIZER = config.Optimizer(lr=0.01, warmup_steps=2)
CPU = torch.device("cpu")
# Largest difference of weights in float64 from a run on a CPU.
TOLERANCE = 1e-9


def bench_of(kind: str, device: torch.device, double: bool = True, **settings: Any) -> Bench:
    """Build a tiny model with the same initial weights on each device, and synthetic batches.

    Args:
        kind: Name of the tiny model: `clip`, `siglip` or `fusion`.
        device: The device of the model.
        double: Whether the model is in float64 instead of float32.
        settings: Fields of the section `train`, such as `precision="bf16"`.

    Returns:
        A Bench, which has the model and the batches; `train` trains it.
    """
    model, objective = MODELS[kind]
    tiny = config.Config(
        model=model.replace(vocab_size=VOCAB),
        objective=config.Objective(kind=objective),
        optimizer=OPTIMIZER,
        train=config.Train(**SETTINGS | settings),
    )
    micro = ACCUMULATED.micro_batch_size
    rows = ACCUMULATED.global_batch_size
    return build_bench(tiny, Group(device=device), micro, rank_rows=rows, double=double)


def train(
    bench: Bench,
    shape: BatchShape = ACCUMULATED,
    steps: int = STEPS,
    num_rows: int = 2**30,
    first: int = 0,
    load: LoadCheckpointFn | None = None,
    **options: Any,
) -> Tensor:
    """Train a tiny model, and return its final weights in one vector on the CPU.

    Args:
        bench: Model and batches.
        shape: Global batch and micro-batch in rows; by default 8, in micro-batches of 3.
        steps: Number of steps, by default 3.
        num_rows: Number of valid rows; steps after them have padding.
        first: First step that is taken, from 0; with `load` the step of the checkpoint.
        load: Loads the checkpoint to resume from; None: start at step 0.
        options: Other fields of TrainSpec, such as `callbacks`.
    """
    plan = SamplePlan(num_rows, shape.global_batch_size, 1, bench.config.train.seed, steps)
    spec = synthetic_run(bench.config, bench.group, bench.model, plan, shape, **options)
    outcome = train_loop(spec, micro_batches(plan, shape, bench.batches, first), load)
    assert (outcome.status, outcome.steps) == ("finished", steps), outcome
    return flat(bench.model)


def flat(model: nn.Module) -> Tensor:
    """Return all parameters of a model in one vector on the CPU."""
    return torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])


def compare(limit: float, **pairs: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Compare pairs of tensors.

    Args:
        limit: Largest allowed absolute difference.
        pairs: Two tensors of one shape by name.

    Returns:
        The largest absolute difference of each pair by name.

    Raises:
        AssertionError: A difference is above the limit, or NaN.
    """
    differences = {name: (one - other).abs().max().item() for name, (one, other) in pairs.items()}
    for name, difference in differences.items():
        assert difference <= limit, (
            f"{name}: weights differ by {difference:.3g}, at most {limit:g} expected"
        )
    return differences


def check_run(kind: str, device: torch.device) -> dict[str, float]:
    """Check that training on a device gives the weights of a CPU, and a resumed run those of a
    whole one.

    The runs train a tiny model with EMA and activation checkpointing.

    Args:
        kind: Name of the tiny model: `clip`, `siglip` or `fusion`.
        device: The device to check.

    Returns:
        The largest differences of the weights: `from_cpu` and `resumed`.

    Raises:
        AssertionError: A difference is above the tolerance.
    """
    states: dict[int, Any] = {}

    def save(step: int, state: dict[str, Any], _metrics: Any, _last: bool) -> None:
        states[step] = tree_map_only(
            Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state
        )

    settings: dict[str, Any] = {
        "activation_checkpointing": ("image", "text"),
        "ema": 0.9,
    }
    # The second step has rows that are not valid, and a micro-batch of only these.
    length: dict[str, Any] = {"steps": 2, "num_rows": 12}
    saving = bench_of(kind, device, checkpoint_every=1, **settings)
    whole = train(saving, save=save, **length)
    resuming = bench_of(kind, device, **settings)
    resumed = train(resuming, first=1, load=lambda _: states[1], **length)
    on_cpu = train(bench_of(kind, CPU), **length)
    return compare(TOLERANCE, from_cpu=(whole, on_cpu), resumed=(resumed, whole))


def check_accumulation(kind: str, device: torch.device) -> dict[str, float]:
    """Check that training with accumulated micro-batches gives the weights of the whole batch in
    one pass.

    Args:
        kind: Name of the tiny model: `clip`, `siglip` or `fusion`.
        device: The device to check.

    Returns:
        The largest difference of the weights: `from_whole`.

    Raises:
        AssertionError: The difference is above the tolerance.
    """
    whole = train(bench_of(kind, device), WHOLE, num_rows=NUM_ROWS)
    accumulated = train(bench_of(kind, device), num_rows=NUM_ROWS)
    return compare(TOLERANCE, from_whole=(accumulated, whole))


def check_compiled(kind: str, device: torch.device) -> dict[str, float]:
    """Check that training with compiled branches (such as the image encoder) gives the weights of
    eager ones.

    All micro-batches have one shape, because each shape is compiled separately.

    Args:
        kind: Name of the tiny model: `clip`, `siglip` or `fusion`.
        device: The device to check.

    Returns:
        The largest difference of the weights: `from_eager`.

    Raises:
        AssertionError: The difference is above the tolerance.
    """
    torch._dynamo.reset()
    shape = replace(ACCUMULATED, micro_batch_size=4)
    compiled = train(bench_of(kind, device, compile=compile_backend(device)), shape)
    return compare(TOLERANCE, from_eager=(compiled, train(bench_of(kind, device), shape)))


def check_graphs(kind: str, device: torch.device) -> dict[str, float]:
    """Check that training with branches (such as the image encoder) as CUDA graphs gives the
    weights of eager ones.

    A step of several micro-batches must use no graphs.

    Args:
        kind: Name of the tiny model: `clip` or `siglip`.
        device: The device to check; on a CPU no graphs are captured.

    Returns:
        The largest difference of the weights for each backend of torch.compile: `none` (not
        compiled), and `inductor` on a GPU or `aot_eager` on a CPU.

    Raises:
        AssertionError: A difference is above the tolerance, or graphs were not used as expected.
    """
    notes: list[str] = []

    def use_graphs(bench: Bench, shape: BatchShape) -> str:
        branches = branches_of(bench.model)
        return graph_branches(
            branches, bench.config.train, shape, device, lambda _, text: notes.append(text)
        )

    differences: dict[str, float] = {}
    line = use_graphs(bench_of(kind, device), ACCUMULATED)
    assert device.type != "cuda" or line == "no CUDA graphs: several micro-batches a step", line
    for backend in ("none", compile_backend(device)):
        torch._dynamo.reset()
        eager = train(bench_of(kind, device, compile=backend), WHOLE, steps=8)
        bench = bench_of(kind, device, compile=backend)
        line = use_graphs(bench, WHOLE)
        assert device.type != "cuda" or line.startswith("CUDA graphs for image"), line
        graphed = train(bench, WHOLE, steps=8)
        assert not notes, notes
        for branch in branches_of(bench.model).values() if device.type == "cuda" else ():
            graphs: Any = branch._compiled_call_impl
            assert graphs.num_graphs > 0, "nothing was captured"
        differences |= compare(TOLERANCE, **{backend: (graphed, eager)})
    return differences


def compile_backend(device: torch.device) -> str:
    """Return the backend of torch.compile for a device: `inductor` on a GPU, `aot_eager` on a CPU,
    which needs no C++ compiler.
    """
    return "inductor" if device.type == "cuda" else "aot_eager"


def check_branches(kind: str, device: torch.device) -> dict[str, float]:
    """Check that training with image and text branch on two devices gives the weights of a model on
    the CPU.

    In half precision the weights must be finite.

    Args:
        kind: Name of the tiny model: `clip` or `siglip`.
        device: `cpu`, or the first of two GPUs.

    Returns:
        The largest difference of the weights: `from_cpu`.

    Raises:
        AssertionError: The difference is above the tolerance, or weights are not finite.
    """
    for precision in ("bf16", "fp16"):
        bench = bench_of(kind, device, double=False, precision=precision, parallel="branches")
        assert bool(train(bench).isfinite().all()), "weights are not finite"
    on_two = train(bench_of(kind, device, parallel="branches"), num_rows=NUM_ROWS)
    on_cpu = train(bench_of(kind, CPU), num_rows=NUM_ROWS)
    return compare(TOLERANCE, from_cpu=(on_two, on_cpu))


def check_half_precision(kind: str, device: torch.device, syncs: Any = None) -> dict[str, float]:
    """Check bf16 and fp16 against fp32, and that the host waits for the device once in a step.

    The loss of bf16 must be close to that of fp32, the one of fp16 finite.

    Args:
        kind: Name of the tiny model: `clip`, `siglip` or `fusion`.
        device: The device to check.
        syncs: Object whose attribute `count` (int) is the number of host synchronizations so far;
            None: torch counts them.

    Returns:
        The losses of the last step: `fp32`, `bf16` and `fp16`.

    Raises:
        AssertionError: A loss, a weight or the number of synchronizations is not as expected.
    """
    losses = {}
    for name in ("fp32", "bf16", "fp16"):
        with nullcontext(syncs) if syncs else count_syncs() as counter:
            callback = SyncsPerStep(counter)
            bench = bench_of(kind, device, double=False, precision=name, ema=0.9, log_every=100)
            weights = train(bench, num_rows=NUM_ROWS, callbacks=(callback,))
        expected = [1 if device.type == "cuda" else 0] * (STEPS - 2)
        counts = callback.per_step()[1:-1]  # the model moves in the first step; the last one logs
        places = getattr(counter, "places", "")
        assert counts == expected, (
            f"{name}: host synchronizations by step {counts}, not {expected}: {places}"
        )
        assert weights.dtype == torch.float32 and bool(weights.isfinite().all()), (
            f"{name}: weights are not finite"
        )
        assert callback.lines[-1]["memory/peak_gib"] > 0, callback.lines[-1]
        losses[name] = callback.lines[-1]["train/loss"]
    assert abs(losses["bf16"] / losses["fp32"] - 1) < 0.05 and losses["bf16"] != losses["fp32"], (
        losses
    )
    # its first steps may be skipped, until the loss scale fits
    assert math.isfinite(losses["fp16"]), losses
    return losses


CHECKS: tuple[tuple[Callable[..., dict[str, float]], tuple[str, ...]], ...] = (
    (check_run, tuple(MODELS)),
    (check_accumulation, tuple(MODELS)),
    (check_half_precision, tuple(MODELS)),
    (check_branches, ("clip", "siglip")),
    (check_graphs, ("clip", "siglip")),
    (check_compiled, tuple(MODELS)),
)


@dataclass
class SyncCounter:
    """Host synchronizations with a GPU so far, and the lines of Python that caused them.

    `count_syncs()` makes it and fills `caught`; after its block the numbers stay as they are.
    `count` is the number of synchronizations, and `places` the number by source line.

    Attributes:
        caught: Warnings that were caught: one of torch per synchronization, and unrelated ones.
    """

    caught: list[warnings.WarningMessage] = field(default_factory=list)

    @property
    def places(self) -> Counter[str]:
        """Number of host synchronizations so far by source line, such as `engine/step.py:12`."""
        sync_warnings = [
            warning
            for warning in self.caught
            if "synchronizing CUDA operation" in str(warning.message)
        ]
        return Counter(
            f"{'/'.join(Path(warning.filename).parts[-2:])}:{warning.lineno}"
            for warning in sync_warnings
        )

    @property
    def count(self) -> int:
        """Number of host synchronizations so far."""
        return self.places.total()


@contextmanager
def count_syncs() -> Iterator[SyncCounter]:
    """Return a context manager that counts the host synchronizations with a GPU in its block.

    It yields a SyncCounter, with the `count` so far, and `places`, the counts by source line.

    It uses the warnings of torch.cuda.set_sync_debug_mode. Without CUDA the count is 0.
    """
    if not torch.cuda.is_available():
        yield SyncCounter()
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield SyncCounter(caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class SyncsPerStep:
    """Callback of a training loop that records host synchronizations and logged metrics by step.

    The loop calls `on_step(step, metrics)`; `per_step()` returns the numbers as a list.

    Args:
        syncs: Object whose attribute `count` (int) is the number of host synchronizations so far.

    Attributes:
        counts: Values of `syncs.count`: the first when the callback is constructed, then one after
            each step.
        lines: Metrics of each logged step: dicts with `step` and values by name, such as
            `train/loss`.
    """

    def __init__(self, syncs: Any) -> None:
        self.syncs = syncs
        self.counts = [syncs.count]
        self.lines: list[dict[str, Any]] = []

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Record the number of host synchronizations so far, and the metrics of a logged step.

        Args:
            step: Number of steps taken.
            metrics: Metrics of the step; None if it was not logged.
        """
        self.counts.append(self.syncs.count)
        self.lines += [metrics] if metrics else []

    def per_step(self) -> list[int]:
        """Return the number of host synchronizations in each step."""
        return [after - before for before, after in pairwise(self.counts)]
