"""`mmray bench loader`: how fast rows reach the training workers, beside the loaders that one would use instead.

The composer: makes or takes image files, prepares them twice (bytes as they are, and re-encoded at 256), starts the
consumers, and runs each arm in windows in turn (ABBA), so that a ratio is of windows side by side on one machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from mmray.bench import photos, windows
from mmray.bench.actors import Consumer
from mmray.bench.machine import describe
from mmray.bench.processes import ProcessWatch
from mmray.bench.torch_loaders import Source, Textbook, Tuned
from mmray.bench.windows import Arrival
from mmray.cluster.join import joined
from mmray.config import Cluster, Inputs, Prepare
from mmray.data.order import Plan, Start
from mmray.data.prepare import Progress, prepare
from mmray.data.reader import RowReader
from mmray.data.sets import ensure_prepared
from mmray.data.store import PreparedSet
from mmray.data.stream import Stream
from mmray.data.text import load_tokenizer
from mmray.errors import UsageError

GLOBAL_ROWS, CONSUMERS, SIDE = 256, 2, 224
LEAST_STEPS = 12  # of a stream's window: the first blocks do not count
FOREVER = 10**6  # steps of a plan whose end no window reaches
SHOWN = ("Consumer", "DataLoader worker", "stream actor", "SplitCoordinator", "driver", "raylet")
COPY_BYTES = 2**28
GUESS = 600  # images a second and actor, from which the length of a stream's window follows
SHARDS = 16  # of a window of `mmray prepare`: its clock's ticks
RATIOS = {
    "stream_original_vs_textbook": ("stream original", "textbook original"),
    "stream_prepared_vs_textbook": ("stream prepared", "textbook original"),
    "stream_vs_tuned": ("stream prepared", "tuned prepared"),
    "stream_original_vs_tuned": ("stream original", "tuned original"),
    "stream_vs_reader": ("stream prepared", "reader prepared"),
    "prepare_vs_decode": ("prepare", "decode"),
}
Say = Callable[[str], None]
Arms = dict[str, Callable[[], list[list[Arrival]]]]


@dataclass(frozen=True)
class Settings:
    """What is measured, and how long."""

    data: str | None = None  # a prepared set or a raw source; none: drawn photographs
    images: int = 512
    image_side: int = 256  # of the re-encoded set
    rounds: int = 2
    window_s: float = 3.0
    workers: int = 0  # 0: one a core
    block_mb: float = 24.0
    gpu_rate: float | None = None  # images/s


@dataclass
class Found:
    """What the windows of one arm showed."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # a row's, of all processes
    first_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    bytes_per_image: float | None = None
    memory_mib: dict[str, tuple[int, float]] = field(default_factory=dict)


def bench_loader(settings: Settings, say: Say) -> dict[str, Any]:
    """{"machine", "ratios", "spread", "rows", "memory_mib", "notes"}: a row an arm, images/s being the median window.

    Raises UsageError where there are fewer rows than one global batch.
    """
    cores = os.cpu_count() or 1
    actors = settings.workers or cores
    with joined(Cluster(workers=max(actors, CONSUMERS))):
        bench = _bench(settings, actors, say)
        found: dict[str, Found] = {name: Found() for name in bench.arms}
        rounds: list[dict[str, float]] = []
        for turn in range(settings.rounds):
            rates = {}
            for name in windows.order(list(bench.arms), turn):
                rates[name] = bench.window(name, found[name])
                say(f"round {turn + 1} of {settings.rounds}: {name} {rates[name]:,.0f} images/s")
            rounds.append(rates)
        copied = ray.get(bench.consumers[0].copied_bytes_per_s.remote(COPY_BYTES))
    return _result(settings, actors, found, rounds, copied)


@dataclass
class Bench:
    """The arms by name, each a function that runs a window and returns the arrivals of every consumer."""

    arms: Arms
    consumers: list[Any]

    def window(self, name: str, found: Found) -> float:
        """Run a window of an arm; its rate."""
        began_s = time.time()
        with ProcessWatch() as watch:
            arrivals = self.arms[name]()
        found.rates.append(windows.rate(arrivals))
        cpu_s = windows.cpu_s_per_row(arrivals, watch.history)
        if cpu_s is not None:
            found.cpu_ms.append(cpu_s * 1e3)
        found.first_s.append(max(each[0].at_s for each in arrivals) - began_s)
        stall_s = windows.epoch_stall_s(arrivals)
        if stall_s is not None:
            found.stalls_s.append(stall_s)
        rows = sum(arrival.rows for each in arrivals for arrival in each)
        found.bytes_per_image = sum(arrival.num_bytes for each in arrivals for arrival in each) / rows or None
        found.memory_mib |= watch.peaks_mib()
        return found.rates[-1]


def _bench(settings: Settings, actors: int, say: Say) -> Bench:
    place = Path(tempfile.gettempdir()) / "mmray-bench"
    say("preparing the images as they are, and re-encoded")
    folder = _files(settings, place)
    sets = {
        name: photos.prepared(folder, side, place)
        for name, side in (("original", 0), ("prepared", settings.image_side))
    }
    files = photos.read_captions(folder)
    if len(files) < GLOBAL_ROWS:
        raise UsageError(f"bench loader: {len(files)} images are fewer than a global batch of {GLOBAL_ROWS}")
    tokenizer = load_tokenizer("trained", sets["original"].tokenizer_json)
    everyone = [Consumer.remote(rank) for rank in range(max(actors, CONSUMERS))]  # type: ignore[attr-defined]
    consumers, readers = everyone[:CONSUMERS], everyone[:actors]
    ray.get([one.copied_bytes_per_s.remote(1) for one in everyone])  # they are there; no window pays for their start
    inputs, window_s = Inputs(image_side=SIDE, fit="crop", interpolation="bilinear"), settings.window_s
    rows = {name: RowReader(each, inputs, tokenizer, Prepare().max_pixels) for name, each in sets.items()}
    share, apiece = GLOBAL_ROWS // CONSUMERS, max(1, actors // CONSUMERS)
    plan = Plan(len(files), GLOBAL_ROWS, CONSUMERS, share, seed=0, steps=FOREVER)

    def each(group: list[Any], method: str, *arguments: Any) -> Callable[[], list[list[Arrival]]]:
        return lambda: ray.get([getattr(one, method).remote(len(group), *arguments, window_s) for one in group])

    def torch_arm(dataset: Textbook | Tuned) -> Callable[[], list[list[Arrival]]]:
        return each(consumers, "loader", dataset, share, apiece)

    def stream_arm(name: str) -> Callable[[], list[list[Arrival]]]:
        return partial(_stream, consumers, rows[name], plan, settings, actors)

    original, prepared = Source(files), Source(None, sets["prepared"])
    arms: Arms = {
        "raw read": each(readers, "raw", files),
        "decode": each(readers, "decode", files),
        "prepare": partial(_prepare, folder, round(window_s * GUESS * actors)),
        "reader original": each(readers, "reader", rows["original"], plan),
        "reader prepared": each(readers, "reader", rows["prepared"], plan),
        "textbook original": torch_arm(Textbook(original, tokenizer, SIDE)),
        "stream original": stream_arm("original"),
        "tuned original": torch_arm(Tuned(original, tokenizer, SIDE, inputs.max_tokens)),
        "tuned prepared": torch_arm(Tuned(prepared, tokenizer, SIDE, inputs.max_tokens)),
        "stream prepared": stream_arm("prepared"),
    }
    return Bench(arms, consumers)


def _prepare(folder: Path, num_rows: int) -> list[list[Arrival]]:
    """A window of `mmray prepare` over the files as they are: an arrival for each shard that it has written."""
    arrivals: list[Arrival] = []

    def report(progress: Progress) -> None:
        new = progress.done_rows - sum(arrival.rows for arrival in arrivals)
        if progress.stage == "pack" and new:
            arrivals.append(Arrival(time.time(), new))

    settings = Prepare(duplicates="keep", max_bad_fraction=1.0, rows_per_shard=max(1, num_rows // SHARDS))
    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        prepare(str(photos.repeated(folder, num_rows)), f"{out}/set", settings, report)
    return [arrivals]


def _stream(
    consumers: list[Any], reader: RowReader, plan: Plan, settings: Settings, actors: int
) -> list[list[Arrival]]:
    """A window of mmray's stream, as training workers get it. Its plan ends with it: no actor is left in mid-block."""
    steps = max(LEAST_STEPS, round(settings.window_s * GUESS * actors / plan.global_rows))
    plan = replace(plan, steps=steps)
    shards = Stream(Start(plan, 0), reader, actors, settings.block_mb).configure({"train": None}, plan.world)
    pairs = zip(consumers, shards, strict=True)
    arrivals: list[list[Arrival]] = ray.get([one.stream.remote(each["train"], plan) for one, each in pairs])
    return arrivals


def _files(settings: Settings, place: Path) -> Path:
    """A folder of image files with captions: drawn, or taken from the user's set."""
    if settings.data is None:
        folder = place / f"photos-{photos.VERSION}-{settings.images}"
        return photos.write_files(photos.photos(settings.images), folder, settings.images)
    path = ensure_prepared(settings.data, str(place), Prepare(), say=lambda *_: None, progress=lambda _: None)
    prepared = PreparedSet.open(str(path))
    folder = place / f"{path.name}-{prepared.fingerprint[:8]}-{settings.images}"
    return photos.write_files(photos.rows_of(prepared, settings.images), folder, settings.images)


def _result(
    settings: Settings, actors: int, found: dict[str, Found], rounds: list[dict[str, float]], copied: float | None
) -> dict[str, Any]:
    rates = {name: float(np.median(each.rates)) for name, each in found.items()}
    rows = [_row(name, rates[name], each) for name, each in found.items()]
    if copied is not None:
        rows.append({"arm": "host to device", "images_per_s": round(copied / (3 * SIDE**2), 1)})
    spread = windows.ratios(rounds, RATIOS)
    machine = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {"data_workers": actors}
    return {
        "machine": machine,
        "ratios": {name: each["median"] for name, each in spread.items()},
        "spread": spread,
        "rows": rows,
        "memory_mib": {name: each.memory_mib for name, each in found.items()},
        "notes": _notes(settings, actors, rates, copied),
    }


def _row(name: str, rate: float, found: Found) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": name, "images_per_s": round(rate, 1)}
    row["cpu_ms_per_image"] = round(float(np.median(found.cpu_ms)), 3) if found.cpu_ms else None
    row |= dict.fromkeys(("first_batch_s", "epoch_stall_s"))
    row["peaks_mib"] = {role: found.memory_mib[role][1] for role in SHOWN if role in found.memory_mib}
    if name.startswith(("stream", "textbook", "tuned")):
        row["first_batch_s"] = round(min(found.first_s), 3)
    if name == "raw read":
        row["mb_per_s"] = round(rate * (found.bytes_per_image or 0) / 1e6, 1)
    if name.startswith("stream"):
        row["epoch_stall_s"] = round(float(np.median(found.stalls_s)), 3) if found.stalls_s else None
        row["store_bytes_per_image"] = round(found.bytes_per_image or 0)
    return row


def _notes(settings: Settings, actors: int, rates: dict[str, float], copied: float | None) -> list[str]:
    """The bottleneck by name, and the workers that a device of a given rate needs."""
    notes = []
    for name in ("original", "prepared"):
        limits = {"reading and decoding on the CPU": rates[f"reader {name}"]}
        if name == "original":
            limits["reading the files"] = rates["raw read"]
        if copied is not None:
            limits["the copy to the device"] = copied / (3 * SIDE**2)
        if settings.gpu_rate is not None:
            limits["the device"] = settings.gpu_rate
        notes.append(f"{name}: the bottleneck is {windows.bottleneck(limits, rates[f'stream {name}'])}")
        if settings.gpu_rate is not None:
            needed = windows.workers_for(settings.gpu_rate, rates[f"stream {name}"], actors)
            notes.append(f"{name}: a device of {settings.gpu_rate:,.0f} images/s needs {needed} CPU workers like these")
    return notes
