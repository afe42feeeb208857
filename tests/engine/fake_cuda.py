"""Fake GPUs: tensors that report device `cuda` but compute on the CPU.

As on a real GPU, an operator refuses tensors on different devices. Host synchronizations are
counted: reading a value from the device, or waiting for a copy. So tests can check that each tensor
of a step is on the right device. Not
covered: speed, memory, GPU arithmetic, stream ordering, and the autograd hooks that DDP and FSDP
need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmray.engine.prefetch import LocalBatch
from tests.gpu.device_checks import count_syncs

aten = torch.ops.aten
DEVICES = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
BY_VALUE = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
)


BACKWARD_PASSES = itertools.count()


class SyncCounter:
    """Counts host synchronizations: reads of device values, data-dependent shapes, and copies to
    the device.
    """

    count = 0


class DeviceTensor(Tensor):
    """A tensor that reports `device`; `data_on_cpu` has the data."""

    data_on_cpu: Tensor
    # otherwise a copy on the CPU would be of this class
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor, device: torch.device) -> DeviceTensor:
        layout = {"strides": data.stride(), "storage_offset": data.storage_offset()}
        tensor = Tensor._make_wrapper_subclass(
            cls, data.size(), dtype=data.dtype, device=device, **layout
        )
        tensor.data_on_cpu = data
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.data_on_cpu}, {self.device})"

    def tolist(self) -> Any:
        SyncCounter.count += 1
        return self.data_on_cpu.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def untyped_storage(self) -> Any:
        return self.data_on_cpu.untyped_storage()


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator, on the device of its tensors or the requested one."""
    tensors = tensors_in((args, kwargs))
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    requested = kwargs.get("device")
    device = (
        torch.device(requested)
        if requested is not None
        else on_device[0].device
        if on_device
        else CPU
    )
    if not on_device and device.type == "cpu":
        return func(*args, **kwargs)
    indices = tensors_in(args[1]) if func in INDEXING else []
    _check_devices(func, tensors, indices)
    SyncCounter.count += _synchronizes(func, args, kwargs, tensors, indices, device)
    if requested is not None:
        kwargs = kwargs | {"device": CPU}
    args, kwargs = map_tensors(
        lambda it: it.data_on_cpu if isinstance(it, DeviceTensor) else it, (args, kwargs)
    )
    out = ON_CPU.get(func, func)(*args, **kwargs)
    if device.type == "cpu":
        return out
    # In-place operators return their argument.
    inputs = {
        id(tensor.data_on_cpu if isinstance(tensor, DeviceTensor) else tensor): tensor
        for tensor in tensors
    }
    device = device if device.index is not None else DEVICES[0]
    return map_tensors(
        lambda it: inputs[id(it)] if id(it) in inputs else DeviceTensor(it, device), out
    )


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Apply a function to each tensor in nested containers; several times faster than torch's
    pytree.
    """
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, list | tuple):
        return type(values)([map_tensors(function, value) for value in values])
    if isinstance(values, dict):
        return {name: map_tensors(function, value) for name, value in values.items()}
    return values


def tensors_in(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple | dict):
            tensors += tensors_in(value)
    return tensors


def _synchronizes(
    func: Any,
    args: Any,
    kwargs: Any,
    tensors: list[Tensor],
    indices: list[Tensor],
    device: torch.device,
) -> bool:
    """Whether the operator synchronizes: a copy, a scalar read, or a data-dependent shape."""
    if func in COPIES:
        to, origin = (tensors[0], tensors[1]) if func is aten.copy_.default else (None, tensors[0])
        target = device if to is None else to.device
        blocking = not (kwargs.get("non_blocking") or (to is not None and args[2:] == (True,)))
        return blocking and (target.type == "cpu") != (origin.device.type == "cpu")
    if not any(isinstance(tensor, DeviceTensor) for tensor in tensors):
        return False
    # A mask needs the number of true values; indices on the host are copied first.
    on_host = (not isinstance(index, DeviceTensor) and index.ndim > 0 for index in indices)
    return func in BY_VALUE or any(index.dtype == torch.bool for index in indices) or any(on_host)


def _check_devices(func: Any, tensors: list[Tensor], indices: list[Tensor]) -> None:
    """Raise RuntimeError for mixed devices; scalars and indices may be on the host."""
    if func in COPIES or len({tensor.device for tensor in tensors}) < 2:
        return
    exempt = {
        id(tensor)
        for tensor in [*indices, *(t for t in tensors if t.ndim == 0 and t.device == CPU)]
    }
    devices = sorted({str(tensor.device) for tensor in tensors if id(tensor) not in exempt})
    if len(devices) > 1:
        raise RuntimeError(
            f"expected all tensors on the same device, but {func} has tensors on {devices}"
        )


def _float32_softmax(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda values, dim, to_float: operator(
        values.float() if to_float else values, dim, False
    )


def _backward_in(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda gradient, output, dim, dtype: operator(gradient, output, dim, gradient.dtype).to(
        dtype
    )


# CPU kernels do not support half-precision inputs with float32 output.
ON_CPU = {
    aten._softmax.default: _float32_softmax(aten._softmax),
    aten._log_softmax.default: _float32_softmax(aten._log_softmax),
    aten._softmax_backward_data.default: _backward_in(aten._softmax_backward_data),
    aten._log_softmax_backward_data.default: _backward_in(aten._log_softmax_backward_data),
}


class DispatchMode(TorchDispatchMode):
    """Intercepts operators that create tensors on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Intercepts functions that fill device memory without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return torch.tensor(*args, **kwargs).to(device)
        if func is Tensor.new_tensor:
            like, data = args
            return torch.tensor(data, dtype=like.dtype, **kwargs).to(like.device)
        return func(*args, **kwargs)


def backward(
    roots: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
    keep_graph: bool,
    create_graph: bool,
    inputs: tuple[Tensor, ...] = (),
    *_: Any,
    **__: Any,
) -> tuple[Tensor | None, ...]:
    """Run the graph like torch's engine, which without a CUDA driver fails to get streams even for
    fake tensors.
    """

    def edge_of(tensor: Tensor) -> tuple[Any, int]:
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        return edge.node, edge.output_nr

    pending: dict[Any, list[Tensor | None]] = {}
    summed: dict[tuple[Any, int], Tensor] = {}

    def add(edge: tuple[Any, int], gradient: Tensor) -> None:
        """Add a gradient to an input of a node, in the shape, dtype and device that the node
        expects.
        """
        node, slot = edge
        expected = node._input_metadata[slot]
        if gradient.device != expected.device:
            raise RuntimeError(
                f"{node.name()} on {expected.device} gets a gradient on {gradient.device}"
            )
        if gradient.shape != expected.shape:
            gradient = gradient.sum_to_size(expected.shape)
        gradient = gradient.to(expected.dtype)
        slots = pending.setdefault(node, [None] * len(node._input_metadata))
        before = slots[slot]
        slots[slot] = summed[edge] = gradient if before is None else before + gradient

    wanted = [edge_of(tensor) for tensor in inputs]
    # Without a number of the pass, each saved tensor of a checkpointed block recomputes the block.
    number = next(BACKWARD_PASSES)
    with mock.patch.object(torch._C, "_current_graph_task_id", lambda: number), torch.no_grad():
        for root, gradient in zip(roots, gradients, strict=True):
            add(edge_of(root), gradient)
        for node in _topological_order([edge_of(root)[0] for root in roots]):
            received = pending.pop(node, None)
            if received is None or (wanted and "AccumulateGrad" in node.name()):
                continue
            out = node(*received) if callable(node) else node.apply(*received)
            for edge, gradient in zip(
                node.next_functions, out if isinstance(out, tuple) else (out,), strict=False
            ):
                if edge[0] is not None and gradient is not None:
                    add(edge, gradient)
    return tuple(summed.get(edge) for edge in wanted)


def _topological_order(roots: list[Any]) -> list[Any]:
    seen, order, stack = set(), [], [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend(
                (following, False) for following, _ in node.next_functions if following is not None
            )
    return order[::-1]


class HostBuffers:
    """Replaces DCP's pinned buffers, which need a driver."""

    def __init__(self, pin_memory: bool) -> None: ...

    def stage(self, tensors: dict[str, Tensor], non_blocking: bool) -> dict[str, Tensor]:
        return {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}

    def close(self) -> None: ...


class ThreadWithModes(ThreadPoolExecutor):
    """An executor whose work sees the fake GPUs, because torch modes are set per thread."""

    def submit(self, work: Any, *args: Any) -> Future[Any]:
        def work_with_modes() -> Any:
            with FunctionMode(), DispatchMode():
                return work(*args)

        return super().submit(work_with_modes)


def make_event(enable_timing: bool = False, blocking: bool = False) -> Any:
    """An event; consecutive events are a millisecond apart."""
    waits = {"record": ignore, "synchronize": ignore, "query": lambda: True}
    return SimpleNamespace(**waits, elapsed_time=lambda other: 1.0)


def make_stream(device: Any = None) -> Any:
    none = {
        "record_event": make_event,
        "wait_event": ignore,
        "wait_stream": ignore,
        "synchronize": ignore,
    }
    return SimpleNamespace(device=device, **none)


def ignore(*_: Any, **__: Any) -> None: ...


class HostRegistry:
    """Memory registered with cudaHostRegister: its size by address."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.sizes[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.sizes[address]
        return 0

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(start <= address < start + size for start, size in self.sizes.items())


def cuda_functions() -> dict[str, Any]:
    """Replacements of functions of torch.cuda, by name."""
    state = torch.zeros(16, dtype=torch.uint8)
    values: dict[str, Any] = {
        "is_available": True,
        "device_count": len(DEVICES),
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_rng_state": state,
        "random.get_rng_state": state,
        "max_memory_allocated": 2**30,
        "memory_stats": {"allocated_bytes.all.peak": 2**30, "reserved_bytes.all.peak": 2**31},
        "is_bf16_supported": True,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_properties": SimpleNamespace(major=9),
        "mem_get_info": (2**30, 2**31),
        "utilization": 50,
        "is_current_stream_capturing": False,
        "current_stream": make_stream(),
        "stream": nullcontext(),
    }
    without_effect = ("_lazy_init", "manual_seed", "set_rng_state", "random.set_rng_state")
    without_effect += (
        "memory._set_allocator_settings",
        "synchronize",
        "set_device",
        "empty_cache",
        "reset_peak_memory_stats",
    )
    functions = {name: lambda *_, _value=value, **__: _value for name, value in values.items()}
    return (
        functions
        | dict.fromkeys(without_effect, ignore)
        | {"Stream": make_stream, "Event": make_event}
    )


@contextmanager
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SyncCounter]]:
    """Two fake GPUs in this process and a counter of host synchronizations."""
    with FakeTensorMode():
        pass  # torch notices that there is no driver and requests no streams from here on
    with monkeypatch.context() as patch:
        for name, replacement in cuda_functions().items():
            patch.setattr(f"torch.cuda.{name}", replacement)
        registry = HostRegistry()
        patch.setattr("torch.cuda.cudart", lambda: registry)
        patch.setattr(Tensor, "is_pinned", lambda tensor: registry.is_pinned(tensor))
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(nn.Module, "to", _move_module)
        patch.setattr("torch.backends.cudnn.enabled", False)
        patch.setattr("torch.backends.cudnn.benchmark", False)
        patch.setattr("torch.backends.cudnn.allow_tf32", True)
        patch.setattr("torch.set_float32_matmul_precision", ignore)
        patch.setattr("torch.autograd.graph._engine_run_backward", backward)
        patch.setattr("torch.autograd._engine_run_backward", backward)
        patch.setattr("mmray.engine.checkpoint.staging.StateDictStager", HostBuffers)
        patch.setattr("mmray.engine.prefetch.ThreadPoolExecutor", ThreadWithModes)
        # these tensors only run
        patch.setattr("mmray.engine.parallel.device_defaults.compile_problem", lambda _: "fake")
        SyncCounter.count = 0
        with FunctionMode(), DispatchMode():
            yield SyncCounter


def _move_module(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """Replaces `nn.Module.to`, which would assign device tensors to CPU weights."""

    def moved(tensor: Tensor) -> Tensor:
        return (
            tensor
            if "memory_format" in options and tensor.ndim != 4
            else tensor.to(*args, **options)
        )

    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(moved(weight.detach()), weight.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved(buffer)
    return module


def local_batch_on(batch: LocalBatch, device: torch.device) -> LocalBatch:
    """The local batch with its micro-batches on a device."""
    return replace(batch, micro_batches=map_tensors(lambda it: it.to(device), batch.micro_batches))


def has_gpus(count: int = 1) -> bool:
    return torch.cuda.device_count() >= count


@contextmanager
def gpus(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> Iterator[Any]:
    """`count` GPUs, real if this machine has enough, and a counter of host synchronizations."""
    if not has_gpus(count):
        with fake_gpus(monkeypatch) as syncs:
            yield syncs
        return
    with count_syncs() as syncs:
        yield syncs
