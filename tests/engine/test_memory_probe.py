"""The memory probe finds a size that fits and leaves the state unchanged; a step that runs out of
memory retries.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine import memory_probe
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.parallel.transforms import is_forced_eager
from mmray.engine.prefetch import make_local_batch, split_micro_batches
from mmray.errors import OutOfMemoryError, TrainingError
from tests.engine import fake_cuda, toy
from tests.engine.ranks import KINDS
from tests.engine.test_loop import plan_of, train


def probe(state, rows_per_rank=12, micro=None, batch_of=lambda rows: toy.rows(rows, 0)):
    world = state.group.world_size
    shape = BatchShape(rows_per_rank * world, micro or rows_per_rank, world, auto=micro is None)
    found, table = memory_probe.probe_memory(state, batch_of, shape)
    return found.micro_batch_size, table


def state_with(max_rows=10**9, **fault):
    return toy.train_state(toy.MemoryLimitedToy(toy.MemoryFault(max_rows=max_rows, **fault)))


@pytest.mark.parametrize(
    ("limit", "rows", "micro"),
    [
        (99, 12, 12),
        (11, 12, 6),
        (5, 12, 4),
        (1, 12, 1),
        (1, 2, 1),
        (99, 1, 1),
        (682, 683, 342),
        (40, 683, 32),
        (50, 683, 46),
        (6, 683, 6),
    ],
)
def test_auto_micro_is_an_even_part_of_a_ranks_rows_near_the_limit(limit, rows, micro):
    """Also of a prime number of rows; 683 rows in 15 micro-batches are 46 and fewer."""
    assert probe(state_with(limit), rows)[0] == micro


class Search(memory_probe.MemoryProbe):
    """A search among some rows on a device that fits some of them, each of 45 bytes; in compiled
    graphs of `compiled_bytes`.
    """

    def __init__(self, device, limit=10**6, together=False, rows=256, compiled_bytes=45):
        shape = BatchShape(rows, rows, world_size=1, auto=True)
        super().__init__(toy.train_state(toy.Toy()), None, shape)
        self._group = Group(device=torch.device(device))
        self._together, self.limit, self.tried = together, limit, []
        self.compiled_bytes, self.states = compiled_bytes, []

    def try_step(self, size, rows):
        self.tried.append(size)
        self.states.append((is_forced_eager(), torch.backends.cudnn.benchmark))
        saved = size * (45 if is_forced_eager() else self.compiled_bytes)
        return saved if saved <= 45 * self.limit else None


def free_bytes_of(monkeypatch, rows):
    """Let the memory that is free be that of the activations of some rows, of 45 bytes each."""
    free = 45 * memory_probe.PEAK_PER_SAVED * rows + 1
    monkeypatch.setattr(memory_probe, "free_bytes", lambda *_: free)


@pytest.mark.parametrize(
    ("limit", "free", "tried", "micro"),
    [
        (40, 40, [1, 2, 4, 8, 16, 32, 64, 32], 32),
        (50, 50, [1, 2, 4, 8, 16, 32, 64, 32, 43], 43),
        (50, 90, [1, 2, 4, 8, 16, 32, 64, 32, 86, 43], 43),
        (40, 90, [1, 2, 4, 8, 16, 32, 64, 32, 86, 43], 32),
        (999, 999, [1, 2, 4, 8, 16, 32, 64, 128, 256, 256], 256),
        (3, 3, [1, 2, 4, 2, 3], 3),
        (1, 1, [1, 2, 1], 1),
    ],
)
def test_search_on_a_gpu_doubles_until_a_step_does_not_fit(monkeypatch, limit, free, tried, micro):
    """Then it takes a step with all rows, and one of the size that the bytes of that predict; if
    more bytes are free than can be used, smaller ones.
    """
    free_bytes_of(monkeypatch, free)
    search = Search("cuda", limit)
    assert search.search() == (micro, 45 * micro) and search.tried == tried


@pytest.mark.parametrize(
    ("compiled_bytes", "tried"),
    [
        (30, [1, 2, 4, 8, 16, 32, 64, 100, 50, 100]),
        (45, [1, 2, 4, 8, 16, 32, 64, 100, 50]),
    ],
)
def test_search_takes_the_bytes_of_the_compiled_graphs(monkeypatch, compiled_bytes, tried):
    """The doubling is eager, without cuDNN's benchmark, which would time kernels of each size."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    free_bytes_of(monkeypatch, 90)
    search = Search("cuda", 90, rows=100, compiled_bytes=compiled_bytes)
    assert search.search() == (tried[-1], compiled_bytes * tried[-1]) and search.tried == tried
    assert search.states == [(True, False)] * 8 + [(False, True)] * (len(tried) - 8)


@pytest.mark.parametrize(("device", "together"), [("cpu", False), ("cpu", True), ("cuda", True)])
@pytest.mark.parametrize(
    ("rows_in_memory", "tried"), [(0, [1, 1]), (9, [1, 2, 4, 8, 8]), (13, [1, 2, 4, 8, 8, 13])]
)
def test_search_tries_what_is_expected_to_fit_where_failing_ends_the_attempt(
    monkeypatch, device, together, rows_in_memory, tried
):
    """The kernel would kill a process, and ranks that search together wait for each other."""
    free_bytes_of(monkeypatch, rows_in_memory)
    search = Search(device, together=together)
    assert search.search()[0] == tried[-1] and search.tried == tried


def test_storages_at_reused_addresses_count_again_and_shared_ones_once():
    """A later micro-batch gets the addresses of tensors that the first one freed."""
    model, sizes = torch.nn.Linear(4, 4), []
    saved = memory_probe.SavedBytes(model)
    with saved.scope():
        for _ in range(3):
            inputs = torch.ones(1000, 4)
            outputs = model(inputs).exp().sum() + model(inputs).exp().sum()
            sizes.append(saved._bytes)
            outputs.backward()
            assert saved._bytes == 0
    assert sizes == [3 * 16_000] * 3  # the inputs, and both outputs; not the weights
    assert saved.peak == 3 * 16_000


class TwoRanks(Group):
    """A group of two ranks with the same rows that records its collectives."""

    def __init__(self, device, calls):
        super().__init__(0, 2, device)
        self.__dict__["calls"] = calls

    def all_reduce_sum(self, tensor):
        self.calls.append(("all-reduce", tensor.nbytes))
        return tensor.mul_(2)

    def all_reduce_min(self, value):
        return value


def test_search_keeps_headroom_after_communication_buffers_are_allocated(monkeypatch):
    """A GPU of 100 bytes, of which 40 are in use; a row takes one.

    A configured size needs no headroom.
    """
    calls, reserved, create = [], [], torch.empty

    class LimitedToy(toy.Toy):
        def forward(self, batch):
            calls.append(("forward", len(batch["valid"])))
            reserved_rows = sum(size for tensor, size in reserved if tensor() is not None)
            if len(batch["valid"]) + reserved_rows > 60:
                raise torch.OutOfMemoryError("no memory")
            return super().forward(batch)

    def empty(*size, **options):
        tensor = create(*size, **options)
        if options.get("dtype") is torch.uint8:
            reserved.append((weakref.ref(tensor), size[0]))
        return tensor

    with fake_cuda.fake_gpus(monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60, 100))
        monkeypatch.setattr(torch, "empty", empty)
        device = fake_cuda.DEVICES[0]
        model = LimitedToy().to(device)
        state = replace(toy.train_state(model, Group(device=device)), group=TwoRanks(device, calls))

        def batch_of(rows):
            return {name: column.to(device) for name, column in toy.rows(rows, 0).items()}

        for rows, micro, expected in ((60, None, 30), (55, None, 55), (60, 60, 60)):
            assert probe(state, rows, micro, batch_of)[0] == expected
    assert [name for name, _ in calls[:2]] == ["all-reduce", "forward"] and calls[0][
        1
    ] == 25 * 2**20


def test_too_large_micro_batch_is_halved_before_data_is_read():
    """As FSDP does it, too: test_shards.py."""
    message = r"in the dry run with micro-batches of 8 rows .*; continuing with 4 at a time"
    with pytest.raises(OutOfMemoryError, match=message) as error:
        probe(state_with(7), 16, 8)
    assert error.value.retry_shape.micro_batch_size == 4
    with pytest.raises(OutOfMemoryError, match=r"micro-batches of 1 rows .*single row") as error:
        probe(state_with(0), 16, 1)
    assert error.value.retry_shape is None


def test_batch_that_cannot_be_processed_is_refused_before_data_is_read():
    with pytest.raises(OutOfMemoryError, match="a single row does not fit"):
        probe(state_with(0), 16)
    broken = lambda rows: toy.rows(rows, 0) | {"input_ids": torch.full((rows, 6), 99)}  # noqa: E731
    with pytest.raises(TrainingError, match="cannot process a synthetic micro-batch of 4 rows"):
        probe(state_with(), 16, 4, broken)


ALLOCATION_ERRORS = [
    lambda _: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    lambda _: RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    lambda _: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"
    ),
    lambda _: MemoryError(),
]


@pytest.mark.parametrize("point", ["forward", "embedding", "synchronizing backward"])
@pytest.mark.parametrize("error", ALLOCATION_ERRORS)
def test_all_allocation_errors_count_as_oom_and_the_step_is_retried(error, point):
    assert probe(state_with(5, error=error))[0] == 4
    log, notes, fault = toy.Lines(), [], toy.MemoryFault(point, at_step=2, error=error)
    expected, model = toy.Toy().double(), toy.MemoryLimitedToy(fault).double()
    train(expected, plan_of(4), micro=5)
    options = {"callbacks": (fault,), "log": log, "notify": lambda label, text: notes.append(text)}
    train(model, plan_of(4), **options, micro=5)
    assert log.of("batch/micro") == [3, 3] and fault.raised
    toy.assert_equal_weights(toy.flat(model), toy.flat(expected))
    reason = str(error("")) or "MemoryError"  # an error without message is named by its type
    assert len(notes) == 1
    assert f"(rank 0: {reason}); continuing with 3 at a time" in notes[0]


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
    assert split_micro_batches(batch, 3).sizes == (2, 2, 2, 2, 2)  # evenly, not 3 and 1


def limit_rows(fault, *limits):
    """A callback that limits the rows of a micro-batch from the second step on: one limit a step,
    then the last.
    """
    return SimpleNamespace(
        on_step=lambda step, _: setattr(fault, "max_rows", limits[min(step, len(limits)) - 1])
    )


@pytest.mark.parametrize("kind", ["contrastive", *KINDS])
def test_halved_micro_batches_give_the_weights_of_a_run_that_never_ran_out_of_memory(kind):
    """Ten rows: in the first step 7 and 3, in the second 4, 3 and 3, in the third 2, 2, 2, 1, 2 and
    1.
    """
    expected, log, notes = toy.Toy(kind=kind).double(), toy.Lines(), []
    train(expected, plan_of(4), objective=toy.objective(kind), micro=10)
    fault = toy.MemoryFault()
    model, settings = toy.MemoryLimitedToy(fault, kind).double(), toy.train_settings(log_every=1)
    options = {"log": log, "notify": lambda _, text: notes.append(text), "train": settings}
    options |= {"callbacks": (limit_rows(fault, 4, 2),)}
    train(model, plan_of(4), objective=toy.objective(kind), **options, micro=7)
    assert log.of("batch/micro") == [7, 4, 2, 2] and len(notes) == 2
    toy.assert_equal_weights(
        toy.flat(model), toy.flat(expected), toy.flat(toy.Toy(kind=kind).double())
    )


def test_micro_batch_of_a_share_without_divisors_is_halved_once():
    """A share of 1366 rows is 2 x 683, so its divisors are far apart."""
    plan = SamplePlan(num_rows=4096, global_batch_size=1366, world_size=1, seed=1, steps=3)
    expected, fault = toy.Toy().double(), toy.MemoryFault()
    log, settings = toy.Lines(), toy.train_settings(log_every=1)
    train(expected, plan, micro=1366)
    model = toy.MemoryLimitedToy(fault).double()
    train(model, plan, micro=64, log=log, train=settings, callbacks=(limit_rows(fault, 40),))
    assert log.of("batch/micro") == [64, 32, 32]
    toy.assert_equal_weights(toy.flat(model), toy.flat(expected), toy.flat(toy.Toy().double()))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("allocation failed in evaluation"), MemoryError()]
)
def test_oom_in_evaluation_does_not_halve_the_micro_batch(error):
    """Evaluation has its own batch size."""

    def evaluate(step, _):
        raise error

    message = (
        r"after step 2 \((allocation failed in evaluation|MemoryError)\): .* --evaluate\.batch"
    )
    with pytest.raises(OutOfMemoryError, match=message) as raised:
        train(toy.Toy(), plan_of(4), evaluate=evaluate, evaluate_every=2, micro=5)
    assert raised.value.retry_shape is None
