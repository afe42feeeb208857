"""Fake GPUs: tensors that report device `cuda` but compute on the CPU.

As on a real GPU, an operator refuses tensors on different devices. Host synchronizations are counted: reading a value
from the device, or waiting for a copy. So tests can check that each tensor of a step is on the right device. Not
covered: speed, memory, GPU arithmetic, stream ordering, and the autograd hooks that DDP and FSDP need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmray.engine.prefetch import LocalBatch
from tests.engine.fake_cuda_autograd import backward

aten = torch.ops.aten
DEVICES = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")
MEMORY = {"allocated_bytes.all.peak": 2**30, "reserved_bytes.all.peak": 2**31}
BETWEEN_DEVICES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
BY_VALUE = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)


class Waits:
    """Counts host synchronizations: reads of device values, data-dependent shapes, and copies to the device."""

    count = 0


class OnDevice(Tensor):
    """A tensor that reports `device`; `here` has the data on the CPU."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # otherwise a copy on the CPU would be of this class

    @staticmethod
    def __new__(cls, here: Tensor, device: torch.device) -> OnDevice:
        layout = {"strides": here.stride(), "storage_offset": here.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, here.size(), dtype=here.dtype, device=device, **layout)
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.here}, {self.device})"

    def tolist(self) -> Any:
        Waits.count += 1
        return self.here.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def untyped_storage(self) -> Any:
        return self.here.untyped_storage()


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator, on the device of its tensors or the requested one."""
    given = _tensors((args, kwargs))
    there = [tensor for tensor in given if isinstance(tensor, OnDevice)]
    asked = kwargs.get("device")
    place = torch.device(asked) if asked is not None else there[0].device if there else CPU
    if not there and place.type == "cpu":
        return func(*args, **kwargs)
    _check_places(func, given)
    Waits.count += _waits(func, args, kwargs, given, place)
    if asked is not None:
        kwargs = kwargs | {"device": CPU}
    args, kwargs = _with(lambda tensor: tensor.here if isinstance(tensor, OnDevice) else tensor, (args, kwargs))
    out = ON_CPU.get(func, func)(*args, **kwargs)
    if place.type == "cpu":
        return out
    # In-place operators return their argument.
    known = {id(tensor.here if isinstance(tensor, OnDevice) else tensor): tensor for tensor in given}
    where = place if place.index is not None else DEVICES[0]

    def placed(tensor: Tensor) -> Tensor:
        return known[id(tensor)] if id(tensor) in known else OnDevice(tensor, where)

    return _with(placed, out)


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _with(lambda tensor: found.append(tensor) or tensor, values)
    return found


def _with(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply a function to each tensor in nested lists and tuples."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)([_with(change, value) for value in values])
    if isinstance(values, dict):
        return {name: _with(change, value) for name, value in values.items()}
    return values


def _waits(func: Any, args: Any, kwargs: Any, given: list[Tensor], place: torch.device) -> bool:
    """Whether the operator synchronizes: a copy, a scalar read, or a data-dependent shape."""
    if func in BETWEEN_DEVICES:
        to, origin = (given[0].device, given[1].device) if func is aten.copy_.default else (place, given[0].device)
        blocking = not (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,)))
        return blocking and (to.type == "cpu") != (origin.type == "cpu")
    if not any(isinstance(tensor, OnDevice) for tensor in given):
        return False
    # A mask needs the number of true values; indices on the host are copied first.
    by_index = func in INDEXING and any(index.dtype == torch.bool or _on_host(index) for index in _indices(func, args))
    return by_index or func in BY_VALUE


def _indices(func: Any, args: Any) -> list[Tensor]:
    return _tensors(args[1]) if func in INDEXING else []


def _on_host(tensor: Tensor) -> bool:
    return not isinstance(tensor, OnDevice) and tensor.ndim > 0


def _check_places(func: Any, given: list[Tensor]) -> None:
    """Raise RuntimeError for mixed devices; scalars and indices may be on the host."""
    if func in BETWEEN_DEVICES:
        return
    indices = [tensor for tensor in given[1:] if not tensor.is_floating_point()] if func in INDEXING else []
    freely = {id(tensor) for tensor in [*indices, *(t for t in given if t.ndim == 0 and t.device == CPU)]}
    places = sorted({str(tensor.device) for tensor in given if id(tensor) not in freely})
    if len(places) > 1:
        raise RuntimeError(f"expected all tensors on the same device, but {func} is given some on {places}")


def _softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return aten._softmax(values.float() if half_to_float else values, dim, False)


def _log_softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return aten._log_softmax(values.float() if half_to_float else values, dim, False)


def _softmax_backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return aten._softmax_backward_data(gradient, output, dim, gradient.dtype).to(dtype)


def _log_softmax_backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return aten._log_softmax_backward_data(gradient, output, dim, gradient.dtype).to(dtype)


# CPU kernels do not support half-precision inputs with float32 output.
ON_CPU = {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
}


class Operators(TorchDispatchMode):
    """Intercepts operators that create tensors on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Functions(TorchFunctionMode):
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


class HostCopies:
    """Replaces DCP's pinned staging, which needs a driver."""

    should_synchronize_after_execute = False

    def __init__(self, options: Any) -> None: ...

    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}

    def close(self) -> None: ...


class Inline:
    """An executor that runs at once, because torch modes are set per thread."""

    def __init__(self, *_: Any, **__: Any): ...

    def shutdown(self, **_: Any) -> None: ...

    def submit(self, work: Any, *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*given))
        return future


class Stream:
    """A stream that keeps what was recorded or waited for."""

    def __init__(self, device: Any = None):
        self.events: list[Event] = []

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        self.events.append(event)


class Event:
    """An event; consecutive events are a millisecond apart."""

    def __init__(self, enable_timing: bool = False): ...

    def record(self, stream: Stream) -> None:
        stream.events.append(self)

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def of_cuda(capability: tuple[int, int]) -> dict[str, Any]:
    """Replacements of functions of torch.cuda, by name."""
    current, state = Stream(), torch.zeros(16, dtype=torch.uint8)
    random = {"get_rng_state": lambda device=None: state, "set_rng_state": lambda state, device=None: None}
    about = SimpleNamespace(uuid="none", major=capability[0])
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: len(DEVICES),
        "current_device": lambda: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "manual_seed": lambda seed: None,
        **random,
        **{f"random.{name}": stand_in for name, stand_in in random.items()},
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 2**30,
        "memory_stats": lambda device=None: MEMORY,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
        "get_device_properties": lambda device=None: about,
        "Stream": Stream,
        "Event": Event,
        "stream": _on,
        "current_stream": lambda device=None: current,
    }


@contextmanager
def made_up_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> Iterator[type[Waits]]:
    """Two fake GPUs in this process and a counter of host synchronizations."""
    with FakeTensorMode():
        pass  # torch notices that there is no driver and requests no streams from here on
    with monkeypatch.context() as inside:
        for name, stand_in in of_cuda(capability).items():
            inside.setattr(f"torch.cuda.{name}", stand_in)
        inside.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        inside.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        inside.setattr(nn.Module, "to", _moved)
        inside.setattr("torch.backends.cudnn.enabled", False)
        inside.setattr("torch.autograd.graph._engine_run_backward", backward)
        inside.setattr("torch.autograd._engine_run_backward", backward)
        inside.setattr("mmray.engine.checkpoint.manager.DefaultStager", HostCopies)
        inside.setattr("mmray.engine.prefetch.ThreadPoolExecutor", Inline)
        inside.setattr("mmray.engine.parallel.branches.ThreadPoolExecutor", Inline)
        Waits.count = 0
        with Functions(), Operators():
            yield Waits


def share_on(share: LocalBatch, device: torch.device) -> LocalBatch:
    """A local batch whose micro-batches are on a device."""
    return replace(
        share, micro_batches=[{name: it.to(device) for name, it in micro.items()} for micro in share.micro_batches]
    )


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    yield


def _moved(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """Replaces `nn.Module.to`, which would assign device tensors to CPU weights."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor if "memory_format" in options and tensor.ndim != 4 else tensor.to(*args, **options)

    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(moved(weight.detach()), weight.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved(buffer)
    return module
