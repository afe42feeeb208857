"""The memory probe finds the largest size that fits and leaves the state unchanged; a step that runs out retries."""

from __future__ import annotations

import pytest
import torch

from mmray.engine import memory_probe
from mmray.engine.prefetch import make_local_batch, split_micro_batches
from mmray.errors import OutOfMemoryError, TrainingError
from tests.engine import toy
from tests.engine.test_loop import Checkpoints, plan_of, train


def probe(state, rows_per_rank=12, micro=None, batch_of=lambda rows: toy.rows(rows, 0)):
    return memory_probe.probe_memory(state, batch_of, rows_per_rank, micro)


def state_with(max_rows=10**9, **fault):
    return toy.train_state(toy.MemoryLimitedToy(toy.MemoryFault(max_rows=max_rows, **fault)))


@pytest.mark.parametrize(("limit", "micro"), [(99, 12), (11, 6), (5, 3), (1, 1)])
def test_auto_micro_finds_largest_halving_of_share_that_fits(limit, micro):
    assert probe(state_with(limit))[0] == micro


def test_all_rows_are_tried_one_by_one_if_two_do_not_fit(monkeypatch):
    tried, try_step = [], memory_probe._try_step
    monkeypatch.setattr(memory_probe, "_try_step", lambda *args: tried.append(args[4:6]) or try_step(*args))
    assert probe(state_with(1), rows_per_rank=2)[0] == 1
    assert tried == [(1, 1), (2, 2), (2, 1), (1, 1)]


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


@pytest.mark.parametrize("point", ["forward", "synchronizing backward"])
@pytest.mark.parametrize("error", ALLOCATION_ERRORS)
def test_all_allocation_errors_count_as_oom_and_the_step_is_retried(error, point):
    assert probe(state_with(5, error=error))[0] == 3
    log, notes, fault = toy.Lines(), [], toy.MemoryFault(point, at_step=2, error=error)
    expected, model = toy.Toy().double(), toy.MemoryLimitedToy(fault).double()
    train(expected, plan_of(4, micro=5))
    options = {"callbacks": (fault,), "log": log, "notify": lambda label, text: notes.append(text)}
    train(model, plan_of(4, micro=5), **options)
    assert log.of("batch/micro") == [2, 2] and fault.raised
    toy.assert_equal_weights(toy.flat(model), toy.flat(expected))
    reason = str(error("")) or "MemoryError"  # an error without message is named by its type
    assert len(notes) == 1 and f"(rank 0: {reason}); retrying the same rows with 2 at a time" in notes[0]


def test_probe_leaves_state_unchanged():
    model = toy.Toy(dropout=0.3, batch_norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    probe(toy.train_state(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_smaller_micro_keeps_rows_and_equal_counts_on_ranks():
    rows = toy.rows(10, 0, invalid=(4, 5, 6, 7, 8, 9))
    batch = make_local_batch(toy.cut(rows, 4))
    smaller = split_micro_batches(batch, 2)
    assert smaller.sizes == (2, 2, 2, 2, 2)
    assert smaller.is_dummy == (False, False, True, True, True)
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
    assert raised.value.retry_micro == 0
