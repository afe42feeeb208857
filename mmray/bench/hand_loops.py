"""Training loops of plain torch, as they are written by hand, to compare with mmray's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.engine import optimizer as optimizers
from mmray.engine.optimizer import lr_at
from mmray.engine.parallel.transforms import RECOMPILE_LIMIT
from mmray.engine.precision import Precision
from mmray.models.pixels import NormalizePixels

if TYPE_CHECKING:
    from mmray.config import Config

Batch = dict[str, Tensor]
MODEL_INPUTS = ("image", "input_ids", "attention_mask")


def train_by_hand(
    model: nn.Module,
    batches: Iterator[list[Batch]],
    loss_of: Callable[[Batch], Tensor],
    config: Config,
    precision: Precision,
    steps: int,
    on_step: Callable[[int], None],
) -> float:
    """Train with a loop of plain torch, whose losses equal those of mmray's loop; return the last
    loss.

    Args:
        model: The model, on the device and not wrapped.
        batches: The micro-batches of each step, on the device.
        loss_of: Called with a micro-batch; returns its part of the mean loss of the step.
        config: Settings of the optimizer, and `train.log_every`.
        precision: Autocast dtype of the forward pass, and its loss scaler.
        steps: Number of steps.
        on_step: Called with the number of steps taken, after each step.
    """
    model.train()
    optimizer = optimizers.build_optimizer(model, config.optimizer)
    scaler = precision.scaler()
    for step, micro_batches in enumerate(islice(batches, steps)):
        optimizers.set_lr(optimizer, lr_at(step, config.optimizer, steps))
        losses = []
        for micro_batch in micro_batches:
            with precision.autocast():
                loss = loss_of(micro_batch)
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        if config.optimizer.clip_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        last_loss = torch.stack(losses).sum()
        if (step + 1) % config.train.log_every == 0:
            last_loss.item()
        on_step(step + 1)
    return last_loss.item()


def baseline_loss(outputs: dict[str, Tensor]) -> Tensor:
    """Return the CLIP (softmax contrastive) loss, the mean over the rows and both directions."""
    logits = outputs["logit_scale"] * outputs["image_embed"] @ outputs["text_embed"].T
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def copy_to(device: torch.device, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield each batch on a device; it is copied in the step that uses it."""
    for batch in batches:
        yield {name: batch[name].to(device, non_blocking=True) for name in MODEL_INPUTS}


def copy_ahead(device: torch.device, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield each batch on a GPU; it is copied during the step before the one that uses it.

    The last batch is not yielded.

    Args:
        batches: Columns by name in pinned memory, of which the inputs of the model (`image`,
            `input_ids`, `attention_mask`) are copied on a side stream.
    """
    stream = torch.cuda.Stream(device)
    current = torch.cuda.current_stream(device)

    def start_copy(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            copy = {name: batch[name].to(device, non_blocking=True) for name in MODEL_INPUTS}
            return copy, stream.record_event()

    copied = start_copy(next(batches))
    for following in batches:
        batch, arrived = copied
        copied = start_copy(following)
        current.wait_event(arrived)
        for column in batch.values():
            # otherwise the allocator would reuse its memory too early
            column.record_stream(current)
        yield batch


def compile_blocks(model: nn.Module, device: torch.device) -> nn.Module:
    """Compile each block in the model's nn.ModuleList and nn.Sequential containers, in place.

    Equal blocks share their code. Shapes are static, because otherwise the later stages of a ResNet
    would run slower code of dynamic height and width.

    Args:
        device: Without effect on a CPU and on GPUs before sm70, which Triton does not support.

    Returns:
        The same model.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0):  # Triton
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        for blocks in [
            part for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)
        ]:
            for block in blocks:
                block.compile(dynamic=False)
        for layer in model.modules():
            if isinstance(layer, NormalizePixels):
                layer.compile(dynamic=False)
    return model


@contextmanager
def fast_kernels() -> Iterator[None]:
    """Return a context manager that enables TF32 products and cuDNN's measured choice of
    algorithms.

    The settings before are restored after the block.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]
