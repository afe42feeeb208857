"""Branch parallelism: the two branches of a model on two devices of one worker.

The slower branch is replicated on both devices. In each micro-batch the first device runs it on a share of the rows.
The second device runs the faster branch on all rows, and the replica on the remaining rows. The share is fitted to
measured times, so that both devices finish together. Branches share only the loss, so there is no pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from mmray.engine.metrics.timers import DeviceTimer

BRANCH_INPUTS = {"image": ("image",), "text": ("input_ids", "attention_mask")}  # columns of a batch that a branch reads
REFIT_EVERY = 50  # steps
FIRST_REFIT = 2  # steps; the initial share is not measured
Work = Callable[[], Any]


def fitted(fast_s: float, slow_s: float, replica_s: float) -> float:
    """Return the share of rows for the first device, from seconds per row of each part.

    Both devices take equally long: share x slow = fast + (1 - share) x replica, clamped to 0..1.
    """
    return min(1.0, max(0.0, (fast_s + replica_s) / max(slow_s + replica_s, 1e-12)))


class BranchParallel(nn.Module):
    """Run a model with the branches `image` and `text` on two devices; inputs and outputs are on the first.

    Only the columns that the branches read are copied to the second device.
    """

    def __init__(self, module: nn.Module, devices: tuple[torch.device, ...], slower: str):
        super().__init__()
        branches: dict[str, nn.Module] = module.branches()  # type: ignore[operator]
        self.module, self.devices, self.slower = module, devices, slower
        self.faster = next(name for name in branches if name != slower)
        self._slow, self._fast = branches[slower], branches[self.faster]
        self._replica = [deepcopy(self._slow).to(devices[1])]  # in a list, so it is not in this module's state dict
        _send_to(self._fast, devices)
        self.share, self._steps = 0.5, 0
        self._watches = {name: DeviceTimer(devices[name != "slow"]) for name in ("slow", "fast", "replica")}
        self._rows = dict.fromkeys(self._watches, 0)
        self._seconds = dict.fromkeys(self._watches, 0.0)  # since the last refit
        self._busy_s = [0.0, 0.0]
        self._spans = [DeviceTimer(device) for device in devices]  # of the concurrent work, including waits
        self._second = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmray-branch")
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call the join's backward

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's outputs on the first device."""
        rows = len(batch["valid"])
        cut = round(self.share * rows)
        mine, rest = ({name: tensor[part] for name, tensor in batch.items()} for part in (slice(cut), slice(cut, rows)))
        slow, replica, fast = [], [], []

        def first() -> None:
            if cut:
                slow.append(self._timed("slow", cut, lambda: self._slow(*self._inputs(self.slower, mine, 0))))

        def second() -> None:
            fast.append(self._timed("fast", rows, lambda: self._fast(*self._inputs(self.faster, batch, 1))))
            if cut < rows:
                there = self._inputs(self.slower, rest, 1)
                replica.append(self._timed("replica", rows - cut, lambda: self._replica[0](*there)))

        self._both(first, second)
        pieces = [*slow, *replica], fast
        slow_out, fast_out = (torch.cat([piece.detach().to(self.devices[0]) for piece in part]) for part in pieces)
        if torch.is_grad_enabled():
            slow_out, fast_out = _Join.apply(self._anchor, self, (slow, replica, fast), slow_out, fast_out)
        embeds = {f"{self.slower}_embed": slow_out, f"{self.faster}_embed": fast_out}
        return embeds | self.module.scalar_outputs()  # type: ignore[operator]

    def backward(self, pieces: tuple[list[Tensor], ...], of_slow: Tensor, of_fast: Tensor) -> None:
        """Run the backward on both devices concurrently, from the gradients of the joined outputs."""
        slow, replica, fast = pieces
        cut = len(slow[0]) if slow else 0

        def first() -> None:
            self._timed("slow", 0, lambda: _backward(slow, of_slow[:cut]))

        def second() -> None:
            self._timed("fast", 0, lambda: _backward(fast, of_fast))
            self._timed("replica", 0, lambda: _backward(replica, of_slow[cut:]))

        self._both(first, second)

    def collect_gradients(self) -> None:
        """Add the replica's gradients to those of the original branch."""
        for own, copy in zip(self._slow.parameters(), self._replica[0].parameters(), strict=True):
            if copy.grad is None:
                continue
            gradient = copy.grad.to(own.device)
            own.grad = gradient if own.grad is None else own.grad + gradient
            copy.grad = None

    def drop_gradients(self) -> None:
        """Drop the replica's gradients of an abandoned step."""
        self._replica[0].zero_grad(set_to_none=True)

    def copy_anew(self) -> None:
        """Copy weights and buffers to the replica after a load."""
        self._replica[0].load_state_dict(self._slow.state_dict())

    @torch.no_grad()
    def spread_weights(self) -> None:
        """Copy the weights to the replica after an update; refit the share every REFIT_EVERY steps."""
        for own, copy in zip(self._slow.parameters(), self._replica[0].parameters(), strict=True):
            copy.copy_(own, non_blocking=True)
        self._steps += 1
        if self._steps == FIRST_REFIT or self._steps % REFIT_EVERY == 0:
            self._refit()

    def idle(self) -> dict[str, float]:
        """Return the idle share of each device since the last call, and the share of rows.

        An idle share is a fraction of the time of concurrent work; without overlap it would be about one half.
        """
        self._look()
        span_s = max(*(watch.pop_s() for watch in self._spans), 1e-12)
        shares = {f"branches/idle_share_{index}": max(0.0, 1 - b / span_s) for index, b in enumerate(self._busy_s)}
        self._busy_s = [0.0, 0.0]
        return shares | {"branches/rows_share_0": self.share}

    def _refit(self) -> None:
        seconds = self._look()
        a_row = {name: seconds[name] / rows for name, rows in self._rows.items() if rows}
        if "fast" in a_row and a_row.keys() & {"slow", "replica"}:
            slow, replica = (a_row.get(name) for name in ("slow", "replica"))
            self.share = fitted(a_row["fast"], slow or replica or 0.0, replica or slow or 0.0)
        self._rows = dict.fromkeys(self._rows, 0)
        self._seconds = dict.fromkeys(self._rows, 0.0)

    def _look(self) -> dict[str, float]:
        """Return the seconds of each part since the last refit."""
        for name, watch in self._watches.items():
            took_s = watch.pop_s()
            self._seconds[name] += took_s
            self._busy_s[name != "slow"] += took_s
        return self._seconds

    def _timed(self, name: str, rows: int, work: Work) -> Any:
        self._rows[name] += rows
        with self._watches[name].running():
            return work()

    def _inputs(self, branch: str, batch: dict[str, Tensor], device: int) -> tuple[Tensor, ...]:
        return tuple(batch[name].to(self.devices[device], non_blocking=True) for name in BRANCH_INPUTS[branch])

    def _both(self, first: Work, second: Work) -> None:
        """Run the work of both devices concurrently; the second thread inherits grad mode and autocast."""
        kind, grad = self.devices[0].type, torch.is_grad_enabled()
        on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def work() -> None:
            here = torch.cuda.device(self.devices[1]) if kind == "cuda" else nullcontext()
            # Run its backward in this thread: the first device's autograd thread waits for it, so it would deadlock.
            alone = torch.autograd.set_multithreading_enabled(False)
            autocast = torch.autocast(kind, dtype, enabled=on, cache_enabled=False)
            with here, alone, torch.set_grad_enabled(grad), autocast:
                second()

        with self._spans[0].running(), self._spans[1].running():
            other = self._second.submit(work)
            try:
                first()
            finally:
                other.result()


def _backward(outputs: list[Tensor], gradient: Tensor) -> None:
    """Run the backward of the outputs (at most one) that require gradients."""
    for output in outputs:
        if output.requires_grad:
            output.backward(gradient.to(output.device))


def _send_to(branch: nn.Module, devices: tuple[torch.device, ...]) -> None:
    """Move a branch to the second device; hooks copy its inputs there and its output back."""
    branch.to(devices[1])
    branch.register_forward_pre_hook(lambda _, given: tuple(value.to(devices[1]) for value in given))
    branch.register_forward_hook(lambda _, given, output: output.to(devices[0]))


class _Join(torch.autograd.Function):
    """Join the outputs of both devices; the backward runs on both."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, model: BranchParallel, pieces: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.model, ctx.pieces = model, pieces
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.model.backward(ctx.pieces, *gradients)
        return None, None, None, *(None for _ in gradients)
