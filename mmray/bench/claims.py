"""`mmray bench claims`: the textbook's recipe beside mmray's, and what each difference between them adds.

The composer. The articles from which this project grew say: preprocessing in parallel gives 40 % more, and mixed
precision with accumulation 30 % more on each GPU. Each row adds one thing to the row above it; all run in turn (ABBA)
on the same real images, and whether a claim came out is computed from them, on the hardware that is named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mmray.bench import synthetic_images, timing
from mmray.bench.loader_arms import TEXTBOOK_TOKENS, Source, Textbook
from mmray.bench.machine import describe
from mmray.bench.recipe_ranks import Rank, Recipe
from mmray.bench.spawn import device_of
from mmray.bench.timing import Arrival
from mmray.cluster.connect import joined
from mmray.config import Config
from mmray.data.stream.order import Plan, Start
from mmray.data.stream.reader import RowReader
from mmray.data.stream.stream import Stream
from mmray.data.text.tokenizer import TextEncoder, load_tokenizer
from mmray.engine.batch import shape_of
from mmray.errors import UsageError
from mmray.machine import cores

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
    with joined(config.cluster), tempfile.TemporaryDirectory(prefix="mmray-bench-") as folder:
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
            plan = Plan(
                num_rows=images,
                global_rows=world * rows,
                world=world,
                micro=rows,
                seed=config.train.seed,
                steps=count,
            )
            stream = Stream(Start(plan, 0), reader, actors, BLOCK_MB)
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
