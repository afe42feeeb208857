"""The memory probe finds a size that fits and leaves the state unchanged; a step that runs out of
memory names a smaller one.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import replace

import pytest
import torch

from mmray import objectives
from mmray.config import recipes
from mmray.engine import memory_probe
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.parallel.transforms import is_forced_eager
from mmray.engine.run_state import TrainState
from mmray.errors import OutOfMemoryError, TrainingError
from mmray.models.build import build
from mmray.models.synthetic import synthetic_rows
from tests.engine import fake_cuda, toy
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


@pytest.mark.parametrize("rows", [96, 40])
def test_few_rows_predict_the_memory_of_a_given_size(rows):
    """Of one micro-batch of 40 rows, or of three."""
    config = recipes.sample()
    spec = config.model.replace(vocab_size=64)
    model = build(spec, spec.vocab_size)
    group = Group()
    state = TrainState.build(
        config.train, config.optimizer, model, objectives.build(config.objective), group
    )
    shape = BatchShape(rows, 40, world_size=1)
    sizes = []

    def batch_of(size):
        sizes.append(size)
        return synthetic_rows(model, spec, size, group.device)

    whole, predicted = (
        memory_probe.probe_memory(state, batch_of, shape, may_predict)[1]
        for may_predict in (False, True)
    )
    assert predicted == pytest.approx(whole, rel=0.02)
    assert max(sizes) == 40 and set(sizes[rows // 40 :]) == {2, 4}


def test_given_size_is_tried_unless_memory_is_ample(monkeypatch):
    """So a run that does not fit is refused as without the prediction."""
    shape = BatchShape(16, 8, world_size=1)
    free_bytes_of(monkeypatch, rows=1)
    message = r"in the dry run with micro-batches of 8 rows .*; continuing with 4 at a time"
    with pytest.raises(OutOfMemoryError, match=message):
        memory_probe.probe_memory(state_with(7), lambda rows: toy.rows(rows, 0), shape, True)


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
def test_all_allocation_errors_count_as_oom_and_name_a_smaller_micro_batch(error, point):
    assert probe(state_with(5, error=error))[0] == 4
    fault = toy.MemoryFault(point, at_step=2, error=error)
    model = toy.MemoryLimitedToy(fault).double()
    reason = re.escape(str(error("")) or "MemoryError")  # without a message, the type is named
    message = rf"step 2 .*\(rank 0: {reason}\); continuing with 3 at a time"
    with pytest.raises(OutOfMemoryError, match=message) as raised:
        train(model, plan_of(4), callbacks=(fault,), micro=5)
    assert raised.value.retry_shape.micro_batch_size == 3 and fault.raised


def test_probe_leaves_state_unchanged():
    model = toy.Toy(dropout=0.3, batch_norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    probe(toy.train_state(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random_state)


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
