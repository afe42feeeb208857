"""The training workers of `bench claims`: the textbook's loop over any batches, and mmray's loop over its stream.

Ray actors, so that a stream can be dealt to them; the loops themselves know nothing of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
import torch
from torch import Tensor

from mmray import objectives
from mmray.bench import bare
from mmray.bench.loader_arms import Textbook, loader
from mmray.bench.spawn import join
from mmray.bench.timing import Arrival
from mmray.data.stream.collate import steps_of
from mmray.data.stream.order import Plan
from mmray.data.stream.stream import blocks_of
from mmray.engine import loop, optimizer
from mmray.engine.parallel import wrap as parallel
from mmray.engine.precision import choose
from mmray.engine.state import Task
from mmray.models.build import build

if TYPE_CHECKING:
    from mmray.config import Config

Batch = dict[str, Tensor]
Item = TypeVar("Item")
INPUTS = ("image", "input_ids", "attention_mask")


@dataclass(frozen=True)
class Recipe:
    """How an arm trains: number format, micro-batches to a step, and whether captions keep their padding."""

    precision: str = "fp32"
    accumulation: int = 1
    trim: bool = True


@ray.remote(num_cpus=0)
class Rank:
    """One training worker; every arm begins with a fresh copy of the model."""

    def __init__(self, rank: int, config: Config, kind: str, folder: str) -> None:
        self.config, self.group = config, join(rank, config, kind, folder, device_index=0)
        torch.manual_seed(config.train.seed)
        self.model = build(config.model, config.model.vocab_size, None).to(self.group.device)

    def torch_loader(self, dataset: Textbook, rows: int, workers: int, recipe: Recipe, count: int) -> list[Arrival]:
        """`count` micro-batches from a DataLoader of `workers` processes (0: this one)."""
        return self._train(loader(dataset, self.group.rank, self.group.world, rows, workers), recipe, count)

    def stream(self, iterator: Any, plan: Plan, recipe: Recipe) -> list[Arrival]:
        """The same loop, fed by mmray's stream to the stream's end."""
        return self._train(_micros(blocks_of(iterator), plan), recipe, plan.steps)

    def mmray(self, iterator: Any, plan: Plan) -> list[Arrival]:
        """mmray whole: its loop, its exact accumulation, its choice of precision, over its stream."""
        clock = _Clock(self.group.device, plan.share)
        task = Task(
            model=deepcopy(self.model),
            objective=objectives.build(self.config.objective),
            plan=plan,
            group=self.group,
            train=self.config.train,
            optimizer=self.config.optimizer,
            callbacks=(clock,),
        )
        loop.run(task, clock.begun(steps_of(blocks_of(iterator), plan)))
        return clock.arrivals

    def _train(self, batches: Iterable[Batch], recipe: Recipe, count: int) -> list[Arrival]:
        """The textbook's loop: a contrastive loss of each micro-batch by itself, gradients added up over several."""
        net = parallel.wrap(deepcopy(self.model).train(), self.group)
        precision = choose(recipe.precision, self.group.device)
        updates, scaler = optimizer.build(net, self.config.optimizer), precision.scaler()
        clock = _Clock(self.group.device, 0)
        for index, given in enumerate(islice(clock.begun(batches), count)):
            batch = {name: given[name].to(self.group.device, non_blocking=True) for name in INPUTS}
            if recipe.trim:
                batch = _trimmed(batch)
            last = (index + 1) % recipe.accumulation == 0
            with parallel.synchronised(net, last=last):
                with precision.autocast():
                    outputs = net(batch)
                loss = bare.contrastive(outputs, self.group.world)
                scaler.scale(loss / recipe.accumulation).backward()
            if last:
                scaler.step(updates)
                scaler.update()
                updates.zero_grad(set_to_none=True)
            clock.tick(len(batch["image"]))
        return clock.arrivals


@dataclass
class _Clock:
    """When the first rows were there, and when each step was done; also a callback of mmray's loop.

    It runs from the first rows, not from a later step: rows that are read while the first steps train would come free.
    """

    device: torch.device
    rows: int
    arrivals: list[Arrival] = field(default_factory=list)

    def begun(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same items; the clock starts with the first."""
        for item in items:
            if not self.arrivals:
                self.arrivals.append(Arrival(time.time(), 0))
            yield item

    def tick(self, rows: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what was only queued is not done
        self.arrivals.append(Arrival(time.time(), rows))

    def on_step(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        self.tick(self.rows)


def _trimmed(batch: Batch) -> Batch:
    """Captions cut to the longest of the batch."""
    longest = int(batch["attention_mask"].sum(1).max())
    return {name: column[:, :longest] if column.ndim == 2 else column for name, column in batch.items()}


def _micros(blocks: Iterable[dict[str, np.ndarray]], plan: Plan) -> Iterator[Batch]:
    for step in steps_of(blocks, plan):
        yield from step
