"""`mmray bench claims`: the textbook's recipe beside mmray's, and what each difference between them adds.

The composer. The articles from which this project grew say: preprocessing in parallel gives 40 % more, and mixed
precision with accumulation 30 % more on each GPU. Each row adds one thing to the row above it; all run in turn (ABBA)
on the same real images, and whether a claim came out is computed from them, on the hardware that is named.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
import torch
from torch import Tensor

from mmray import objectives
from mmray.bench import step as bare
from mmray.bench import synthetic_images, timing
from mmray.bench.loader_arms import TEXTBOOK_TOKENS, Source, Textbook, loader
from mmray.bench.spawn import device_of, join
from mmray.bench.timing import Arrival, describe
from mmray.cluster.connect import ray_session
from mmray.config import Config
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.stream.stream import StreamDataConfig, iter_blocks
from mmray.data.text.tokenizer import TextEncoder, load_tokenizer
from mmray.engine import loop, optimizer
from mmray.engine.batch import shape_of
from mmray.engine.parallel import wrap as parallel
from mmray.engine.precision import choose
from mmray.engine.state import Task
from mmray.errors import UsageError
from mmray.machine import cores
from mmray.models.build import build

if TYPE_CHECKING:
    from mmray.config import Config


# The training workers of `bench claims`: the textbook's loop over any batches, and mmray's loop over its stream.
#
# Ray actors, so that a stream can be dealt to them; the loops themselves know nothing of Ray.
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

    def stream(self, iterator: Any, plan: SamplePlan, recipe: Recipe) -> list[Arrival]:
        """The same loop, fed by mmray's stream to the stream's end."""
        return self._train(_micros(iter_blocks(iterator), plan), recipe, plan.steps)

    def mmray(self, iterator: Any, plan: SamplePlan) -> list[Arrival]:
        """mmray whole: its loop, its exact accumulation, its choice of precision, over its stream."""
        clock = _Clock(self.group.device, plan.rank_rows)
        task = Task(
            model=deepcopy(self.model),
            objective=objectives.build(self.config.objective),
            plan=plan,
            group=self.group,
            train=self.config.train,
            optimizer=self.config.optimizer,
            callbacks=(clock,),
        )
        loop.run(task, clock.begun(iter_micro_batches(iter_blocks(iterator), plan)))
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
            with parallel.maybe_no_sync(net, last=last):
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


def _micros(blocks: Iterable[dict[str, np.ndarray]], plan: SamplePlan) -> Iterator[Batch]:
    for step in iter_micro_batches(blocks, plan):
        yield from step


ACCUMULATION = 4
LEAST_MICROS = 16  # in each window: the two or three that are read before its clock starts must not count for much
BLOCK_MB = 0.001  # a block is one micro-batch: what Ray costs counts in full, and no window is one block read before
SHRUNK_SIDE = 256
CLAIMS = {  # name: (arm, its yardstick, what the articles say)
    "DataLoader workers": ("textbook", "textbook, no workers", 1.40),
    "Ray Data stream": ("+ Ray Data stream", "no workers, no padding", 1.40),
    "AMP and accumulation": ("+ accumulation", "+ Ray Data stream", 1.30),
}
Say = Callable[[str], None]
Arms = dict[str, Callable[[int], list[list[Arrival]]]]


def bench_claims(config: Config, images: int, rounds: int, window_s: float, say: Say) -> dict[str, Any]:
    """{"machine", "ratios", "spread", "rows", "notes"}: a row an arm with samples/s and its ratio to the textbook's.

    A window takes about `window_s` seconds of the textbook's arm, and as many micro-batches in every other.
    Raises UsageError for an objective that the textbook's loop does not know, and for too few images.
    """
    if config.objective.kind != "contrastive":
        raise UsageError(f"bench claims: the textbook's loop knows `contrastive`, not `{config.objective.kind}`")
    with ray_session(config.cluster), tempfile.TemporaryDirectory(prefix="mmray-bench-") as folder:
        arms = _arms(config, images, folder, say)
        calibration = timing.rate(arms["textbook"](ACCUMULATION), skip=0)
        micro_s = shape_of(config.batch, config.cluster.most_workers).micro * config.cluster.most_workers / calibration
        count = ACCUMULATION * max(-(-LEAST_MICROS // ACCUMULATION), round(window_s / micro_s / ACCUMULATION))
        found: list[dict[str, float]] = []
        for turn in range(rounds):
            rates = {}
            for name in timing.order(list(arms), turn):
                rates[name] = timing.rate(arms[name](count), skip=0)
                say(f"round {turn + 1} of {rounds}: {name} {rates[name]:,.1f} samples/s")
            found.append(rates)
    return _result(config, list(arms), found)


def _arms(config: Config, images: int, folder: str, say: Say) -> Arms:
    """The arms by name, each a function that runs so many micro-batches and returns the arrivals of every rank."""
    place = Path(tempfile.gettempdir()) / "mmray-bench"
    say("preparing the images, starting the workers")
    source = synthetic_images.write_files(
        synthetic_images.photos(images), place / f"photos-{synthetic_images.VERSION}-{images}", images
    )
    sets = {side: synthetic_images.prepared(source, side, place) for side in (0, SHRUNK_SIDE)}
    tokenizer = load_tokenizer("trained", sets[0].tokenizer_json)
    world, rows = config.cluster.most_workers, shape_of(config.batch, config.cluster.most_workers).micro
    if world * rows > images:
        raise UsageError(f"bench claims: {images} images are fewer than a batch of {world * rows}; give more --images")
    kind, inputs = device_of(config).type, config.model.inputs
    start = Rank.options(num_gpus=int(kind == "cuda")).remote  # type: ignore[attr-defined]
    ranks = [start(rank, _with_model(config, tokenizer), kind, folder) for rank in range(world)]
    captions = synthetic_images.read_captions(source)
    dataset = Textbook(Source(captions), tokenizer, inputs.image_side, textbook_tokens(config))
    actors = cores() if config.data.workers == "auto" else config.data.workers

    def from_loader(workers: int, recipe: Recipe) -> Callable[[int], list[list[Arrival]]]:
        return lambda count: ray.get([one.torch_loader.remote(dataset, rows, workers, recipe, count) for one in ranks])

    def from_stream(side: int, recipe: Recipe | None) -> Callable[[int], list[list[Arrival]]]:
        reader = RowReader(sets[side], inputs, tokenizer, config.prepare.max_pixels)

        def run(count: int) -> list[list[Arrival]]:
            plan = SamplePlan(
                num_rows=images,
                global_rows=world * rows,
                world=world,
                micro=rows,
                seed=config.train.seed,
                steps=count,
            )
            stream = StreamDataConfig(ResumePoint(plan, 0), reader, actors, BLOCK_MB)
            pairs = list(zip(ranks, stream.configure({"train": None}, world), strict=True))
            if recipe is None:
                return list(ray.get([one.mmray.remote(each["train"], plan) for one, each in pairs]))
            return list(ray.get([one.stream.remote(each["train"], plan, recipe) for one, each in pairs]))

        return run

    return {
        "textbook, no workers": from_loader(0, Recipe(trim=False)),
        "textbook": from_loader(max(1, cores() // world), Recipe(trim=False)),
        "no workers, no padding": from_loader(0, Recipe()),
        "+ Ray Data stream": from_stream(0, Recipe()),
        "+ AMP": from_stream(0, Recipe("bf16")),
        "+ accumulation": from_stream(0, Recipe("bf16", ACCUMULATION)),
        "mmray": from_stream(SHRUNK_SIDE, None),
    }


def textbook_tokens(config: Config) -> int:
    """To how many tokens the textbook pads: to all that the text branch takes, of a CLIP or SigLIP the recipe's."""
    return config.model.inputs.max_tokens if config.model.kind in ("clip", "siglip") else TEXTBOOK_TOKENS


def _with_model(config: Config, tokenizer: str) -> Config:
    """The recipe with a model that every arm can train: its vocabulary, and room for the textbook's padding."""
    vocab_size = TextEncoder(tokenizer, 8).vocab_size
    inputs = config.model.inputs.replace(max_tokens=textbook_tokens(config))
    return config.replace(model=config.model.replace(vocab_size=vocab_size, inputs=inputs))


def _result(config: Config, arms: list[str], found: list[dict[str, float]]) -> dict[str, Any]:
    to_textbook = timing.ratios(found, {name: (name, "textbook") for name in arms})
    claims = timing.ratios(found, {name: (over, under) for name, (over, under, _) in CLAIMS.items()})
    machine = describe(device_of(config))
    rows = [
        {
            "arm": name,
            "samples_per_s": round(float(np.median([rates[name] for rates in found])), 3),
            "vs_textbook": to_textbook[name]["median"],
        }
        for name in arms
    ]
    return {
        "machine": machine,
        "ratios": {name: each["median"] for name, each in claims.items()},
        "spread": claims,
        "rows": rows,
        "notes": [verdict(name, claims[name]["median"], machine) for name in claims],
    }


def verdict(name: str, ratio: float, machine: dict[str, Any]) -> str:
    """One line: what was said, what was measured, on what."""
    over, under, said = CLAIMS[name]
    where = f"{machine['cores']} cores of {machine['cpu']}"
    if machine["device"] != "cpu":
        where = f"{machine['device']} with {where}"
    came_out = "reproduced" if ratio >= said else "not reproduced"
    return f"+{said - 1:.0%} by {name}: {came_out} on {where} ({over} : {under} = {ratio:.2f})"
