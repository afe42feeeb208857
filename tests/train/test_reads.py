"""A training step reads from its device once: each further read would have the host wait, and the device run dry."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmray.data.order import Plan
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from mmray.train import loop
from mmray.train.feed import share_of
from mmray.train.step import optimizer_step
from tests.train import real_models, toy

pytestmark = pytest.mark.usefixtures("one_thread")
COPIES = ("tolist", "numpy", "cpu")  # to the host, all that a tensor holds
BY_VALUE = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")  # item() and truth are the first
QUIET = SimpleNamespace(**vars(toy.TRAIN) | {"log_every": 0, "checkpoint_every": 0})


class Operators(TorchDispatchMode):
    """Counts operators whose result, or its shape, is known to the host."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_truth = name in ("index", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        self.reads.count += by_truth or name in BY_VALUE
        return func(*args, **kwargs or {})


class Reads(TorchFunctionMode):
    """Counts what would be a wait for the device, were this one: here all lies on the CPU."""

    def __init__(self):
        super().__init__()
        self.count, self.operators = 0, Operators(self)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in COPIES
        return func(*args, **kwargs or {})

    def __enter__(self):
        self.operators.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self.operators.__exit__(*raised)


@pytest.mark.parametrize(
    "read", [Tensor.item, Tensor.tolist, bool, float, torch.nonzero, lambda tensor: tensor[tensor > 0], Tensor.numpy]
)
def test_every_sort_of_read_is_counted(read):
    with Reads() as reads:
        read(torch.ones(1))
    assert reads.count >= 1


@pytest.mark.parametrize("clip", ["global", "branches"])
@pytest.mark.parametrize("objective", [toy.objective("contrastive"), toy.Regression()])
def test_a_step_of_the_loop_between_two_lines_reads_once(monkeypatch, objective, clip):
    """The norms and the ranks' wish to stop, in one; three micro-batches."""
    plan, counts = Plan(num_rows=30, global_rows=10, world=1, micro=4, seed=1, steps=6), []
    shares = [share_of(micros) for micros in toy.steps_of(plan, 0)]
    monkeypatch.setattr(loop, "feed", lambda *_: iter(shares))
    settings = SimpleNamespace(**vars(toy.OPTIMIZER) | {"clip": clip})
    with Reads() as reads:
        seen = SimpleNamespace(on_step=lambda step, metrics: counts.append(reads.count))
        options = {"objective": objective, "optimizer": settings, "train": QUIET, "callbacks": (seen,)}
        loop.run(toy.task(toy.Branched(), plan, **options), [])
    first, *others = (after - before for before, after in zip([0, *counts], counts, strict=False))
    assert first >= 1 and others[:-1] == [1] * (plan.steps - 2)  # the last is logged


@pytest.mark.parametrize("kind", real_models.MODELS)
def test_a_step_of_a_built_in_model_reads_once(kind):
    spec, objective = real_models.MODELS[kind]
    model = build(spec, real_models.VOCAB).train()
    learner = toy.learner(model, objective=toy.objective(objective))
    share = share_of(toy.cut(synthetic_batch(spec.inputs, real_models.VOCAB, 6, "cpu"), 3))
    with Reads() as reads:
        assert optimizer_step(learner, share, lambda index: index).finite
    assert reads.count == 1


@pytest.mark.parametrize("kind", ["sigmoid", "language_modelling", "contrastive + 0.5 * matching + region_text"])
def test_a_step_of_any_objective_reads_once(kind):
    learner = toy.learner(toy.Toy(kind=kind), objective=toy.objective(kind))
    share = share_of(toy.cut(toy.rows(9, 0), 4))
    with Reads() as reads:
        assert optimizer_step(learner, share, lambda index: index).finite
    assert reads.count == 1
