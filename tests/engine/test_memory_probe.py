"""The memory probe finds the largest size that fits and leaves the state unchanged."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import psutil
import pytest
import torch

from mmray.engine import loop, memory_probe
from mmray.engine import memory_probe as dry_run
from mmray.engine.collectives import Group
from mmray.engine.prefetch import make_local_batch, split_micro_batches
from mmray.errors import OutOfMemoryError, TrainingError
from tests.engine import toy
from tests.engine.test_loop import Checkpoints, plan_of, train


def state_with(most_rows: int = 10**9, group: Group | None = None):
    model = toy.Cramped(toy.Fault("nowhere", most_rows=most_rows))
    return toy.train_state(model, group)


@pytest.mark.parametrize(("room", "found"), [(99, 12), (11, 6), (5, 3), (1, 1)])
def test_auto_micro_finds_largest_halving_of_share_that_fits(room, found):
    assert memory_probe.probe_memory(state_with(room), lambda rows: toy.rows(rows, 0), 12, None).micro == found


def test_too_large_batch_is_refused_before_data_is_read():
    rows_of = lambda rows: toy.rows(rows, 0)  # noqa: E731
    with pytest.raises(OutOfMemoryError, match=r"micro-batch of 8 rows does not fit: lower --batch.micro"):
        memory_probe.probe_memory(state_with(7), rows_of, 16, 8)
    with pytest.raises(OutOfMemoryError, match="a single row does not fit"):
        memory_probe.probe_memory(state_with(0), rows_of, 16, None)
    broken = lambda rows: toy.rows(rows, 0) | {"input_ids": torch.full((rows, 6), 99)}  # noqa: E731
    with pytest.raises(TrainingError, match="cannot process a synthetic micro-batch of 4 rows"):
        memory_probe.probe_memory(state_with(), broken, 16, 4)


NO_ROOM = {
    "cublas": lambda _: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": lambda _: RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "host": lambda _: RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    "python": MemoryError,
}


@pytest.mark.parametrize("said", NO_ROOM)
def test_cuda_library_allocation_errors_count_as_oom(said):
    fault = toy.Fault("nowhere", most_rows=5, as_what=NO_ROOM[said])
    state = toy.train_state(toy.Cramped(fault))
    assert memory_probe.probe_memory(state, lambda rows: toy.rows(rows, 0), 12, None).micro == 3
    log, fault = toy.Lines(), toy.Fault("forward", at_step=2, as_what=NO_ROOM[said])
    train(toy.Cramped(fault), plan_of(4, micro=5), callbacks=(fault,), log=log)
    assert [line["batch/micro"] for line in log.lines] == [2, 2]


def test_oom_while_counting_flops_halves_the_micro_batch():
    log, fault = toy.Lines(), toy.Fault("nowhere", most_rows=2)
    outcome = train(toy.Cramped(fault), plan_of(4, micro=5), callbacks=(fault,), log=log)
    assert (outcome.status, outcome.skipped_steps) == ("finished", 0)
    assert [line["batch/micro"] for line in log.lines] == [2, 2]
    assert log.lines[-1]["throughput/tflops_per_device"] > 0


def test_probe_holds_gradients_like_ddp_buckets():
    """DDP's buckets are allocated during the forward, but a group of one has none."""
    held = []

    class Watched(toy.Toy):
        def forward(self, batch):
            held.append(all(weight.grad is not None for weight in self.parameters()))
            return super().forward(batch)

    for world, expected in ((1, False), (4, True)):
        held.clear()
        state = memory_probe.replace(toy.train_state(Watched()), group=Group(rank=0, world=world))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Group, "all_reduce_min", lambda self, value: value)
            memory_probe.probe_memory(state, lambda rows: toy.rows(rows, 0), 4, None)
        assert held[0] is expected and held[-1] is False  # the last one checks which weights get a gradient
        assert all(weight.grad is None for weight in state.model.parameters())


@pytest.mark.parametrize(("settings", "copies"), [({}, 0), ({"ema": 0.9}, 1), ({"parallel": "fsdp"}, 0)])
def test_probe_allocates_ema_weights_and_ddp_buckets(monkeypatch, settings, copies):
    """EMA weights, and buckets that are not the storage of the gradients."""
    state = memory_probe.replace(toy.train_state(toy.Toy(width=37)), group=Group(rank=0, world=2))
    train = SimpleNamespace(**vars(toy.TRAIN) | settings)
    config = SimpleNamespace(train=train, batch=SimpleNamespace(micro=4), model=None)
    shape, found = state.model.words.weight.shape, []

    def count(*_):
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        found.append(sum(tensor.shape == shape for tensor in tensors))

    monkeypatch.setattr(dry_run, "dry_run", count)
    monkeypatch.setattr(dry_run, "_sharded_copy", lambda config, state: state)
    count()
    dry_run.dry_run_job(SimpleNamespace(config=config, micro=0), state, plan_of(1, micro=4, world=2))
    assert found[1] - found[0] == copies


def test_probe_leaves_state_unchanged():
    model = toy.Toy(dropout=0.3, batch_norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.random.get_rng_state()
    memory_probe.probe_memory(toy.train_state(model), lambda rows: toy.rows(rows, 0), 12, None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), draws)


def test_memory_table_counts_bytes():
    state = state_with()
    table = memory_probe.probe_memory(state, lambda rows: toy.rows(rows, 0), 12, 6).table
    weights = sum(parameter.nbytes for parameter in state.model.parameters())
    assert table["memory/parameters_gib"] == table["memory/gradients_gib"] == weights / 2**30
    assert table["memory/optimizer_gib"] == pytest.approx(2 * weights / 2**30, rel=0.1)
    twice = memory_probe.probe_memory(state, lambda rows: toy.rows(rows, 0), 12, 12).table
    assert twice["memory/activations_gib"] == pytest.approx(2 * table["memory/activations_gib"], rel=0.2)


def test_free_host_memory_is_the_limit_on_cpu(monkeypatch):
    one_row = memory_probe.probe_memory(state_with(), lambda rows: toy.rows(rows, 0), 12, 1).table[
        "memory/activations_gib"
    ]
    room = SimpleNamespace(available=5 * one_row * 2**30 / memory_probe.HOST_SHARE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: room)
    assert memory_probe.probe_memory(state_with(), lambda rows: toy.rows(rows, 0), 12, None).micro == 3


def test_probe_for_several_ranks_has_columns_of_the_global_batch():
    """The probe simulates a group in which all ranks have the same rows: four times the negatives."""
    widths = []
    state = toy.train_state(toy.Toy())
    measure = state.objective.compute_loss
    state.objective.compute_loss = lambda *given: (widths.append(len(given[-1]["valid"])), measure(*given))[1]
    four = memory_probe.replace(state, group=Group(rank=1, world=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_reduce_min", lambda self, value: value)
        memory_probe.probe_memory(four, lambda rows: toy.rows(rows, 0), 8, 8)
    assert set(widths) == {32}


@pytest.mark.parametrize("kind", ["sigmoid", "matching"])
def test_probe_calls_no_collectives(kind):
    """Ranks try different sizes, so their collectives would have different shapes."""
    state = toy.train_state(toy.Toy(kind=kind), objective=toy.objective(kind))
    four = memory_probe.replace(state, group=Group(rank=1, world=4))  # without a process group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_reduce_min", lambda self, value: value)
        assert memory_probe.probe_memory(four, lambda rows: toy.rows(rows, 0), 8, 4).micro == 4


def test_smaller_micro_keeps_rows_and_equal_counts_on_ranks():
    batch = toy.rows(10, 0, invalid=(4, 5, 6, 7, 8, 9))
    share = make_local_batch(toy.cut(batch, 4))
    fine = split_micro_batches(share, 2)
    assert fine.sizes == (2, 2, 2, 2, 2)
    assert fine.is_filler == (False, False, True, True, True)
    assert fine.rows == share.rows == 10
    kept = torch.cat([micro["key"][micro["valid"]] for micro in fine.micro_batches])
    assert torch.equal(kept, batch["key"][:4])
    assert split_micro_batches(share, 4) is share


def test_probed_micro_batch_is_kept_over_restarts_until_changed():
    plan, checkpoints = plan_of(6, micro=5), Checkpoints()
    fault = toy.Fault("forward", at_step=2)
    train(toy.Cramped(fault), plan, save=checkpoints.save, callbacks=(fault,))
    assert checkpoints.load(3)["progress"]["micro"] == 2
    for asked, fits, found in ((5, 0, 2), (10, 0, 10), (10, 5, 2), (10, 10, 10), (10, 2, 2)):
        log = toy.Lines()
        train(toy.Toy(), plan_of(6, micro=asked), checkpoints.load(3), first=3, log=log, micro=fits)
        assert {line["batch/micro"] for line in log.lines} == {found}


def test_oom_in_last_backward_is_retried_with_one_rank():
    models = [
        toy.Toy().double(),
        toy.Cramped(toy.Fault("synchronising backward", at_step=2)).double(),
    ]
    for model in models:
        callbacks = (model.fault,) if isinstance(model, toy.Cramped) else ()
        train(model, plan_of(4, micro=5), callbacks=callbacks)
    assert models[1].fault.raised
    torch.testing.assert_close(toy.flat(models[1]), toy.flat(models[0]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room to score"), MemoryError()])
def test_oom_in_evaluation_does_not_halve_the_micro_batch(error):
    """Evaluation has its own batch size."""

    def evaluate(step, _):
        raise error

    said = r"after step 2 \((no room to score|MemoryError)\): .* --evaluate\.batch"
    with pytest.raises(OutOfMemoryError, match=said) as raised:
        train(toy.Toy(), plan_of(4, micro=5), evaluate=evaluate, evaluate_every=2)
    assert raised.value.micro == 0


@pytest.mark.parametrize("place", ["forward", "synchronising backward"])
def test_error_without_message_is_reported_by_type(place):
    told, fault = [], toy.Fault(place, at_step=2, as_what=lambda _: MemoryError())
    train(toy.Cramped(fault), plan_of(4, micro=5), callbacks=(fault,), note=lambda text, label: told.append(text))
    assert len(told) == 1 and "more: MemoryError); retrying the same rows with 2 at a time" in told[0]


def test_oom_in_optimizer_restarts_with_smaller_micro_batches(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room for a state")

    monkeypatch.setattr(loop, "set_lr", lambda optimizer, lr: setattr(optimizer, "step", full))
    with pytest.raises(OutOfMemoryError, match="no room for a state") as raised:
        train(toy.Toy(), plan_of(4, micro=5))
    assert raised.value.micro == 2
