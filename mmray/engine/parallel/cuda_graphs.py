"""CUDA graphs: the forward of a branch and its backward as one launch each, instead of thousands.

With few rows a GPU computes faster than the host launches kernels; a graph removes that limit. It
reads and writes fixed addresses, so each shape of the inputs has graphs of its own, and the memory
of their activations stays allocated. The rest of a step is unchanged: loss and optimizer.

Only for steps of one pass on one rank. Gradients stay in the memory of the graph, which its next
forward overwrites, so they must be used before it: with several micro-batches they would be wrong.
DDP keeps autograd nodes of another stream, which ends a capture.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmray.engine.batch import BatchShape
from mmray.engine.parallel.strategy import strategy_class
from mmray.engine.parallel.transforms import (
    buffers_of,
    is_forced_eager,
    may_draw_random_numbers,
    with_buffers,
)
from mmray.errors import first_line

if TYPE_CHECKING:
    from mmray.config import Train

MAX_GRAPHS = 8  # graphs of a branch: captions have few padded lengths
# Eager calls with a shape before its capture: they compile, and many shapes come only once.
EAGER_CALLS = 2
FREE_FRACTION = 0.4  # share of a GPU's memory that graphs leave to evaluation and other shapes
# of operators that cannot be captured; the branch then runs without graphs
CAPTURE_ERRORS = (RuntimeError, TypeError, AttributeError)
HOST_SHARE = 0.95  # share of the time of a forward, from which on graphs are used
Notify = Callable[[str, str], None]  # label, text: a console line


def graph_branches(
    branches: dict[str, nn.Module],
    train: Train,
    batch_shape: BatchShape,
    device: torch.device,
    notify: Notify,
) -> str:
    """Let branches of the model, such as its image encoder, run as CUDA graphs if
    `train.cuda_graphs` allows it.

    A deep copy of a branch has no graphs.
    """
    if device.type != "cuda" or not branches:
        return ""
    reason = unsupported_setting(train, batch_shape)
    if reason:
        return f"no CUDA graphs: {reason}"
    reasons = {name: unsupported_layer(branch) for name, branch in branches.items()}
    for name, branch in branches.items():
        if not reasons[name]:
            branch._compiled_call_impl = BranchGraphs(name, branch, CudaRecorder(device), notify)
    with_graphs = ", ".join(name for name, reason in reasons.items() if not reason)
    without = [f"not for {name}: {reason}" for name, reason in reasons.items() if reason]
    return "; ".join([f"CUDA graphs for {with_graphs or 'no branch'}", *without])


def unsupported_setting(train: Train, batch_shape: BatchShape) -> str:
    """Return why no branch can run as CUDA graphs with these settings; empty if some can.

    Args:
        batch_shape: Global batch and micro-batch of all steps.
    """
    if train.cuda_graphs == "off":
        return "train.cuda_graphs is off"
    if strategy_class(train).num_devices > 1:
        return f"train.parallel {train.parallel} copies between devices in a forward"
    if batch_shape.world_size > 1:
        return f"several workers (train.parallel {train.parallel})"
    if batch_shape.accumulation > 1:
        return "several micro-batches a step"
    if train.activation_checkpointing:
        return "train.activation_checkpointing is set"
    return ""


def unsupported_layer(branch: nn.Module) -> str:
    """Return why a branch of the model cannot run as CUDA graphs, such as dropout; empty if it can.

    Args:
        branch: A part of the model, such as the image encoder.
    """
    for layer in branch.modules():
        # BatchNorm and similar layers of timm; frozen ones are in evaluation mode.
        if layer.training and any(name.startswith("running_") for name in layer._buffers):
            return f"{type(layer).__name__} updates running statistics"
    if may_draw_random_numbers(branch):
        return "it has dropout, or layers of other packages"
    return ""


class BranchGraphs:
    """Runs a branch of the model, such as its image encoder: eagerly at first, and from the third
    call with the same shapes of inputs on as CUDA graphs.

    It is called with the same arguments as the branch, and returns what that returns.

    Args:
        name: Name of the branch, for messages.
        recorder: Captures the graphs, which share its memory.
        notify: Called with (label, line) if a capture fails.
    """

    def __init__(
        self, name: str, branch: nn.Module, recorder: CudaRecorder, notify: Notify
    ) -> None:
        self._name = name
        self._branch = branch
        # a branch without blocks is compiled as a whole
        self._eager: Callable[..., Any] = branch._compiled_call_impl or branch._call_impl
        self._recorder = recorder
        self._notify = notify
        # A scope of preserve_buffers has copies, which are freed at its end.
        self._buffers = buffers_of(branch)
        self._calls: Counter[Any] = Counter()
        self._host_shares: dict[Any, Callable[[], float]] = {}
        self._graphs: dict[Any, BranchGraph] = {}
        self._failed = False
        self._pending: Callable[[], PendingBackward | None] = lambda: None

    @property
    def num_graphs(self) -> int:
        """Number of shapes of inputs for which CUDA graphs have been captured."""
        return len(self._graphs)

    def __call__(self, *inputs: Tensor, **options: object) -> Any:
        weights = [weight for weight in self._branch.parameters() if weight.requires_grad]
        if options or not self._can_replay(inputs, weights):
            return self._eager(*inputs, **options)
        device_type = inputs[0].device.type
        autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        key = autocast, tuple((value.shape, value.dtype) for value in inputs)
        if key not in self._graphs:
            self._calls[key] += 1
            if self._calls[key] == EAGER_CALLS:
                output, self._host_shares[key] = self._recorder.timed(lambda: self._eager(*inputs))
                return output
            if self._calls[key] == EAGER_CALLS + 1:
                self._capture(key, inputs, weights)
        if key not in self._graphs:
            return self._eager(*inputs)
        pending = PendingBackward()
        self._pending = weakref.ref(pending)
        return _Replay.apply(self._graphs[key], pending, *inputs, *weights)

    def _can_replay(self, inputs: tuple[Any, ...], weights: list[nn.Parameter]) -> bool:
        if self._failed or is_forced_eager() or not self._branch.training:
            return False
        if not torch.is_grad_enabled() or not weights:
            return False
        if self._pending() is not None:
            return False  # it would overwrite the activations that the backward still needs
        if any(weight.grad is not None for weight in weights):
            return False  # accumulation: they may be in memory that the forward overwrites
        return all(isinstance(value, Tensor) and not value.requires_grad for value in inputs)

    def _capture(
        self, key: Hashable, inputs: tuple[Tensor, ...], weights: list[nn.Parameter]
    ) -> None:
        if self.num_graphs >= MAX_GRAPHS:
            return
        if self._host_shares.pop(key)() < HOST_SHARE:
            return  # the device is busy anyway
        problem = ""
        try:
            with with_buffers(self._buffers):
                graph = BranchGraph(self._eager, inputs, weights, self._recorder)
            if self._recorder.free_fraction() < FREE_FRACTION:
                problem = f"they would leave less than {FREE_FRACTION:.0%} of the memory free"
            self._graphs[key] = graph
        except CAPTURE_ERRORS as error:
            problem = first_line(error)
        if problem:
            self._failed = True
            self._graphs.clear()
            self._notify("device", f"no CUDA graphs for {self._name}: {problem}")


class PendingBackward:
    """A marker whose lifetime shows whether the backward of a graph's forward is still to come.

    BranchGraphs creates one for each forward, without arguments, and keeps a weak reference. The
    autograd graph of the output holds the marker, so it is freed when the backward has run or the
    output is dropped.
    """


class BranchGraph:
    """CUDA graphs of a branch (a part of the model) for one shape of its inputs, and the tensors
    that they read and write.

    `replay(inputs)` takes tensors of the same shapes and returns the output; `replay_backward`
    takes the gradient at it and returns those of the weights.

    Args:
        call: The branch in eager or compiled code, called with the inputs as arguments; returns one
            tensor.
        inputs: Tensors with the shapes and dtypes of the inputs.
        weights: Trainable weights of the branch.
        recorder: Captures the graphs, which share its memory.

    Raises:
        RuntimeError: An operator cannot be captured, or memory runs out.
        TypeError: The branch does not return one tensor.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        weights: list[nn.Parameter],
        recorder: CudaRecorder,
    ) -> None:
        """Capture the forward and the backward of `call`."""
        device_type = inputs[0].device.type
        output: Tensor | None = None  # with its autograd graph
        self.weights = weights
        self._inputs = [value.clone() for value in inputs]

        def forward() -> Tensor:
            nonlocal output
            # The graph must cast weights itself, and only it may read the results. (Without the
            # cache of autocast torch would compile all blocks again.)
            torch.clear_autocast_cache()
            output = call(*self._inputs)
            torch.clear_autocast_cache()
            if not isinstance(output, Tensor):
                raise TypeError(f"it returns a {type(output).__name__} instead of a tensor")
            return output.detach()

        def backward() -> tuple[Tensor | None, ...]:
            assert output is not None
            with torch.autocast(device_type, enabled=False):
                return torch.autograd.grad(
                    output, weights, self._output_gradient, allow_unused=True
                )

        def both() -> None:
            self._output_gradient = torch.zeros_like(forward())
            backward()

        recorder.warm_up(both)
        output = None
        self._output, self._replay_forward = recorder.record(forward)
        self._gradients, self._replay_backward = recorder.record(backward)
        output = None  # graphs of other shapes may use the memory of the activations

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the captured forward of the branch (a part of the model) with other inputs."""
        for fixed, value in zip(self._inputs, inputs, strict=True):
            fixed.copy_(value)
        self._replay_forward()
        return self._output.clone()

    def replay_backward(self, output_gradient: Tensor) -> list[Tensor | None]:
        """Run the backward of the last forward."""
        self._output_gradient.copy_(output_gradient)
        self._replay_backward()
        return [None if value is None else value.detach() for value in self._gradients]


class _Replay(torch.autograd.Function):
    """Replay of a branch; its inputs include the weights, to which it returns gradients."""

    @staticmethod
    def forward(ctx: Any, graph: BranchGraph, pending: PendingBackward, *tensors: Tensor) -> Tensor:
        ctx.graph = graph
        ctx.pending = pending
        ctx.num_inputs = len(tensors) - len(graph.weights)
        return graph.replay(tensors[: ctx.num_inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> Any:
        gradients = ctx.graph.replay_backward(output_gradient)
        ctx.pending = None
        return (None, None, *[None] * ctx.num_inputs, *gradients)


class CudaRecorder:
    """Records the kernels of a function, such as the forward of a branch, as a CUDA graph, which
    repeats them without launching each.

    Graphs of one recorder share memory, so a repetition must have ended before the next one, also
    of another function, starts.

    `record(function)` returns the result of `function()`, and a function without arguments that
    repeats its kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def timed(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Run a function and measure how much of its time the host needs to launch its kernels.

        Args:
            function: Called without arguments.

        Returns:
            Its result, and a function that waits for the GPU and returns the host's share of the
            time: near 1 if the GPU waits for launches, near 0 if the host is far ahead.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        start.record(stream)
        start_s = time.perf_counter()
        result = function()
        host_s = time.perf_counter() - start_s
        end.record(stream)

        def host_share() -> float:
            end.synchronize()
            return 1e3 * host_s / start.elapsed_time(end)

        return result, host_share

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run a function on the stream of the captures, where cuBLAS allocates its workspace.

        Args:
            function: Called without arguments.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture the kernels of a function as a CUDA graph.

        Args:
            function: Called once, without arguments.

        Returns:
            Its result, which no kernel has computed yet, and a function that runs the graph and
            writes the results to the same tensors.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # thread_local: the thread that prefetches batches may allocate memory meanwhile
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = function()
        except RuntimeError as error:
            if torch.cuda.current_stream(self._device) == stream:
                raise
            self._end_invalid_capture(graph, stream)
            # The error of the operator names the cause; `error` only reports that there was one.
            cause = error.__context__
            raise (cause if isinstance(cause, CAPTURE_ERRORS) else error) from None
        return result, graph.replay

    def _end_invalid_capture(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """Undo what torch does not after an operator that cannot be captured.

        Its stream is still current. In torch 2.11 its pool is also still open, so that memory that
        another stream has used is never free again, and the random number generator refuses to
        draw.
        """
        torch.cuda.set_stream(stream)
        graph.reset()  # closes the pool in newer versions of torch
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
            torch._C._cuda_releasePool(stream.device_index, self._pool)
        valid = torch.cuda.CUDAGraph()
        with torch.cuda.graph(valid, stream=self._stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self._device)  # a valid capture resets the generator

    def free_fraction(self) -> float:
        """Return the fraction of the GPU's memory, 0 to 1, that no process uses.

        torch's cached memory is freed first.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return free / total
