"""The memory probe finds the largest size that fits and leaves the state unchanged; a step that runs out retries."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mmray.engine import loop, memory_probe
from mmray.engine.collectives import Group
from mmray.engine.prefetch import make_local_batch, split_micro_batches
from mmray.errors import OutOfMemoryError, TrainingError
from tests.engine import toy
from tests.engine.test_loop import Checkpoints, plan_of, train


def probe(state, rows_per_rank=12, micro=None, batch_of=lambda rows: toy.rows(rows, 0)):
    return memory_probe.probe_memory(state, batch_of, rows_per_rank, micro)


def state_with(max_rows=10**9, **fault):
    return toy.train_state(toy.MemoryLimitedToy(toy.MemoryFault(max_rows=max_rows, **fault)))


@pytest.fixture
def without_votes(monkeypatch):
    """Groups of several ranks without a process group."""
    monkeypatch.setattr(Group, "all_reduce_min", lambda self, value: value)


@pytest.mark.parametrize(("limit", "micro"), [(99, 12), (11, 6), (5, 3), (1, 1)])
def test_auto_micro_finds_largest_halving_of_share_that_fits(limit, micro):
    assert probe(state_with(limit)).micro == micro


def test_too_large_batch_is_refused_before_data_is_read():
    with pytest.raises(OutOfMemoryError, match=r"micro-batch of 8 rows does not fit: lower --batch.micro"):
        probe(state_with(7), 16, 8)
    with pytest.raises(OutOfMemoryError, match="a single row does not fit"):
        probe(state_with(0), 16)
    broken = lambda rows: toy.rows(rows, 0) | {"input_ids": torch.full((rows, 6), 99)}  # noqa: E731
    with pytest.raises(TrainingError, match="cannot process a synthetic micro-batch of 4 rows"):
        probe(state_with(), 16, 4, broken)


ALLOCATION_ERRORS = [
    lambda _: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda _: RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    lambda _: RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    lambda _: MemoryError(),
]


@pytest.mark.parametrize("point", ["forward", "synchronising backward"])
@pytest.mark.parametrize("error", ALLOCATION_ERRORS)
def test_all_allocation_errors_count_as_oom_and_the_step_is_retried(error, point):
    assert probe(state_with(5, error=error)).micro == 3
    log, notes, fault = toy.Lines(), [], toy.MemoryFault(point, at_step=2, error=error)
    expected, model = toy.Toy().double(), toy.MemoryLimitedToy(fault).double()
    train(expected, plan_of(4, micro=5))
    options = {"callbacks": (fault,), "log": log, "note": lambda text, label: notes.append(text)}
    train(model, plan_of(4, micro=5), **options)
    assert log.of("batch/micro") == [2, 2] and fault.raised
    toy.assert_equal_weights(toy.flat(model), toy.flat(expected))
    reason = str(error("")) or "MemoryError"  # an error without message is named by its type
    assert len(notes) == 1 and f"more: {reason}); retrying the same rows with 2 at a time" in notes[0]


def test_oom_while_counting_flops_halves_the_micro_batch():
    log, fault = toy.Lines(), toy.MemoryFault(max_rows=2)
    outcome = train(toy.MemoryLimitedToy(fault), plan_of(4, micro=5), callbacks=(fault,), log=log)
    assert (outcome.status, outcome.skipped_steps) == ("finished", 0)
    assert log.of("batch/micro") == [2, 2] and log[-1]["throughput/tflops_per_device"] > 0


@pytest.mark.parametrize(("world", "expected"), [(1, False), (4, True)])
def test_probe_holds_gradients_like_ddp_buckets(without_votes, world, expected):
    """DDP's buckets are allocated during the forward, but a group of one has none."""
    held = []

    class Watched(toy.Toy):
        def forward(self, batch):
            held.append(all(weight.grad is not None for weight in self.parameters()))
            return super().forward(batch)

    state = replace(toy.train_state(Watched()), group=Group(rank=0, world=world))
    probe(state, 4)
    assert held[0] is expected and held[-1] is False  # the last one checks which weights get a gradient
    assert all(weight.grad is None for weight in state.model.parameters())


def test_probe_leaves_state_unchanged():
    model = toy.Toy(dropout=0.3, batch_norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    probe(toy.train_state(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_memory_table_counts_bytes():
    state = state_with()
    table, double = (probe(state, 12, micro).table for micro in (6, 12))
    weights = sum(parameter.nbytes for parameter in state.model.parameters())
    assert table["memory/parameters_gib"] == table["memory/gradients_gib"] == weights / 2**30
    assert table["memory/optimizer_gib"] == pytest.approx(2 * weights / 2**30, rel=0.1)
    assert double["memory/activations_gib"] == pytest.approx(2 * table["memory/activations_gib"], rel=0.2)


@pytest.mark.parametrize("kind", ["contrastive", "sigmoid", "matching"])
def test_probe_for_several_ranks_has_their_columns_without_collectives(without_votes, kind):
    """Ranks try different sizes, so their collectives would have different shapes."""
    widths = []
    state = toy.train_state(toy.Toy(kind=kind), objective=toy.objective(kind))
    if kind == "contrastive":
        compute_loss = state.objective.compute_loss
        state.objective.compute_loss = lambda *args: (widths.append(len(args[-1]["valid"])), compute_loss(*args))[1]
    assert probe(replace(state, group=Group(rank=1, world=4)), 8, 8).micro == 8
    assert set(widths) == ({32} if kind == "contrastive" else set())  # four times the negatives


def test_smaller_micro_keeps_rows_and_equal_counts_on_ranks():
    rows = toy.rows(10, 0, invalid=(4, 5, 6, 7, 8, 9))
    batch = make_local_batch(toy.cut(rows, 4))
    smaller = split_micro_batches(batch, 2)
    assert smaller.sizes == (2, 2, 2, 2, 2)
    assert smaller.is_filler == (False, False, True, True, True)
    assert smaller.rows == batch.rows == 10
    keys = torch.cat([micro["key"][micro["valid"]] for micro in smaller.micro_batches])
    assert torch.equal(keys, rows["key"][:4])
    assert split_micro_batches(batch, 4) is batch


def test_reduced_micro_batch_is_kept_over_restarts_until_changed():
    checkpoints, fault = Checkpoints(), toy.MemoryFault("forward", at_step=2)
    train(toy.MemoryLimitedToy(fault), plan_of(6, micro=5), save=checkpoints.save, callbacks=(fault,))
    assert checkpoints.load(3)["progress"]["micro"] == 2
    for requested, probed, expected in ((5, 0, 2), (10, 0, 10), (10, 5, 2), (10, 10, 10), (10, 2, 2)):
        log = toy.Lines()
        train(toy.Toy(), plan_of(6, micro=requested), checkpoints.load(3), first=3, log=log, micro=probed)
        assert set(log.of("batch/micro")) == {expected}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("allocation failed in evaluation"), MemoryError()])
def test_oom_in_evaluation_does_not_halve_the_micro_batch(error):
    """Evaluation has its own batch size."""

    def evaluate(step, _):
        raise error

    message = r"after step 2 \((allocation failed in evaluation|MemoryError)\): .* --evaluate\.batch"
    with pytest.raises(OutOfMemoryError, match=message) as raised:
        train(toy.Toy(), plan_of(4, micro=5), evaluate=evaluate, evaluate_every=2)
    assert raised.value.micro == 0


def test_oom_in_optimizer_restarts_with_smaller_micro_batches(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("allocation failed in the optimizer")

    monkeypatch.setattr(loop, "set_lr", lambda optimizer, lr: setattr(optimizer, "step", fail))
    with pytest.raises(OutOfMemoryError, match="allocation failed in the optimizer") as raised:
        train(toy.Toy(), plan_of(4, micro=5))
    assert raised.value.micro == 2


PAGE_FAULTS = """
import resource
import numpy as np
from mmray.engine.memory_probe import keep_freed_memory

def work():
    whole = np.ones(50 * 2**20, np.uint8)
    return np.ones(20 * 2**20, np.uint8)[0] + whole[0]

def count_faults():
    work(), work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(count_faults(), int(keep_freed_memory()), count_faults())
"""


def test_freed_memory_is_reused_without_page_faults():
    """70 MB are 17,920 pages of 4 KiB, or 35 large ones."""
    process = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True)
    default, glibc, kept = map(int, process.stdout.split())
    if not glibc:
        pytest.skip("not glibc's allocator")
    assert kept < default / 10
