"""The training loop that one writes by hand: the yardstick for mmray's own. Nothing in it but the work itself.

No accumulation, no stream, no order, no checkpoints, no counting of rows, no guard against NaN; what is left is what
every image-text loop has to do. It takes the same steps as train/loop.py (a test holds their weights side by side).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.engine import optimizer as optimizers
from mmray.engine.collectives import Group
from mmray.engine.parallel import wrap as parallel
from mmray.engine.precision import choose
from mmray.engine.schedule import lr_at

if TYPE_CHECKING:
    from mmray.config import Config

Batch = dict[str, Tensor]


def train(
    model: nn.Module,
    batches: list[Batch],
    config: Config,
    device: torch.device,
    steps: int,
    on_step: Callable[[int], None],
) -> float:
    """Take `steps` steps on this rank's batches, one global batch each; returns the last loss."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    net = parallel.wrap(model.train(), Group.current(device))  # the same DDP: it is not what is compared
    precision = choose(config.train.precision, device)
    optimizer, scaler = optimizers.build(model, config.optimizer), precision.scaler()
    for step, batch in enumerate(islice(cycle(batches), steps)):
        optimizers.set_lr(optimizer, lr_at(step, config.optimizer, steps))
        batch = {name: batch[name].to(device, non_blocking=True) for name in ("image", "input_ids", "attention_mask")}
        with precision.autocast():
            outputs = net(batch)
        loss = contrastive(outputs, world)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if config.optimizer.clip_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % config.train.log_every == 0:
            loss.item()
        on_step(step + 1)
    return loss.item()


def contrastive(outputs: dict[str, Tensor], world: int) -> Tensor:
    """CLIP's loss over all ranks' rows, the whole of it on every rank; the gradient reaches this rank's rows."""
    image, text = outputs["image_embed"], outputs["text_embed"]
    if world > 1:
        image, text = _everyone(torch.cat([image, text], dim=1)).chunk(2, dim=1)
    logits = outputs["logit_scale"] * image @ text.T
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def _everyone(rows: Tensor) -> Tensor:
    """All ranks' rows, this rank's own among them with their graph."""
    world = dist.get_world_size()
    rows.register_hook(lambda gradient: gradient * world)  # one rank alone brings it, and DDP will average
    parts = [torch.empty_like(rows) for _ in range(world)]
    dist.all_gather(parts, rows.detach())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)
