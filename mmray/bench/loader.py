"""`mmray bench loader`: how fast rows reach the training workers, beside the loaders that one would use instead.

The composer: makes or takes image files, prepares them twice (bytes as they are, and re-encoded at 256), starts the
consumers, and runs each arm in windows in turn (ABBA), so that a ratio is of windows side by side on one machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch

from mmray.bench import loader_report as told
from mmray.bench import synthetic_images, timing
from mmray.bench.loader_arms import Blank, Consumer, Source, Textbook, Tuned, forget_cached
from mmray.bench.loader_report import RATIOS, Copies, Found, Raw
from mmray.bench.timing import Arrival, ProcessWatch, created_bytes, describe
from mmray.cluster.connect import ray_session
from mmray.config import Cluster, Inputs, Prepare
from mmray.data.prepare.pipeline import Progress, ensure_prepared, prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import Blocks, ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.stream.stream import StreamDataConfig, stream_dataset
from mmray.data.text.tokenizer import load_tokenizer
from mmray.errors import UsageError
from mmray.machine import cores

GLOBAL_ROWS, CONSUMERS, SIDE = 256, 2, 224
LEAST_STEPS = 12  # of a stream's window: the first blocks do not count
FOREVER = 10**6  # steps of a plan whose end no window reaches
COPY_BYTES = 2**28
GUESS, GUESS_BLANK = 600, 3000  # images a second and actor, from which the length of a stream's window follows
# A prepare starts its own processes, some of them while it is under way, and only a longer window outweighs that.
PREPARE_WINDOWS = 3
LEAST_SHARDS = 16  # of such a window: its clock's ticks
# A stream's first block comes from the actor that is there first, and its rate is that of all of them.
STREAM_WINDOWS, STREAM_SKIP = 2, 6
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


def bench_loader(settings: Settings, say: Say) -> dict[str, Any]:
    """{"machine", "ratios", "spread", "rows", "memory_mib", "notes"}: a row an arm, images/s being the median window.

    Raises UsageError where there are fewer rows than one global batch.
    """
    actors = settings.workers or cores()
    with ray_session(Cluster(workers=max(actors, CONSUMERS))):
        bench = _bench(settings, actors, say)
        found: dict[str, Found] = {name: Found() for name in bench.arms}
        rounds: list[dict[str, float]] = []
        for turn in range(settings.rounds):
            rates = {}
            for name in timing.order(list(bench.arms), turn):
                rates[name] = bench.window(name, found[name])
                say(f"round {turn + 1} of {settings.rounds}: {name} {rates[name]:,.0f} images/s")
            rounds.append(rates)
        copied = ray.get(bench.consumers[0].copied_bytes_per_s.remote(COPY_BYTES))
    spread = timing.ratios(rounds, RATIOS)
    rates = {name: float(np.median(each.rates)) for name, each in found.items()}
    copies = Copies(copied, copied / (3 * SIDE**2)) if copied is not None else None
    machine = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {"data_workers": actors}
    return {
        "machine": machine,
        "ratios": {name: each["median"] for name, each in spread.items()},
        "spread": spread,
        "rows": told.rows(rates, found, bench.raw, copies),
        "memory_mib": {name: each.memory_mib for name, each in found.items()},
        "notes": [
            *told.notes(rates, bench.raw, copies, settings.gpu_rate, actors),
            *told.processors(found),
            told.memory(found["stream prepared"].memory_mib),
        ],
    }


@dataclass
class Bench:
    """The arms by name, each a function that runs a window and returns the arrivals of every consumer."""

    arms: Arms
    consumers: list[Any]
    raw: Raw

    def window(self, name: str, found: Found) -> float:
        """Run a window of an arm; its rate."""
        stored, began_s = created_bytes(), time.time()
        with ProcessWatch() as watch:
            arrivals = self.arms[name]()
        skip = STREAM_SKIP if name.startswith("stream") else timing.SKIP
        found.rates.append(timing.rate(arrivals, skip))
        cpu_s = timing.cpu_s_per_row(arrivals, watch.history, skip)
        if cpu_s is not None:
            found.cpu_ms.append({role: seconds * 1e3 for role, seconds in cpu_s.items()})
        found.first_s.append(max(each[0].at_s for each in arrivals) - began_s)
        stall_s = timing.epoch_stall_s(arrivals, skip)
        if stall_s is not None:
            found.stalls_s.append(stall_s)
        rows = sum(arrival.rows for each in arrivals for arrival in each)
        found.rows_per_block = rows / sum(len(each) for each in arrivals)
        found.stored_bytes.append((created_bytes() - stored) / rows)  # all that a stream makes arrives: its plan ends
        found.memory_mib |= watch.peaks_mib()
        return found.rates[-1]


def _bench(settings: Settings, actors: int, say: Say) -> Bench:
    place = Path(tempfile.gettempdir()) / "mmray-bench"
    say("preparing the images as they are, and re-encoded")
    folder, own = _files(settings, place)
    sets = {
        name: synthetic_images.prepared(folder, side, place)
        for name, side in (("original", 0), ("prepared", settings.image_side))
    }
    files = synthetic_images.read_captions(folder)
    if len(files) < GLOBAL_ROWS:
        raise UsageError(f"bench loader: {len(files)} images are fewer than a global batch of {GLOBAL_ROWS}")
    tokenizer = load_tokenizer("trained", sets["original"].tokenizer_json)
    everyone = [Consumer.remote(rank) for rank in range(max(actors, CONSUMERS))]  # type: ignore[attr-defined]
    consumers, readers = everyone[:CONSUMERS], everyone[:actors]
    ray.get([one.copied_bytes_per_s.remote(1) for one in everyone])  # they are there; no window pays for their start
    inputs, window_s = Inputs(image_side=SIDE, fit="crop", interpolation="bilinear"), settings.window_s
    rows = {name: RowReader(each, inputs, tokenizer, Prepare().max_pixels) for name, each in sets.items()}
    share, apiece = GLOBAL_ROWS // CONSUMERS, max(1, actors // CONSUMERS)
    plan = SamplePlan(num_rows=len(files), global_rows=GLOBAL_ROWS, world=CONSUMERS, micro=share, seed=0, steps=FOREVER)

    def each(group: list[Any], method: str, *arguments: Any) -> Callable[[], list[list[Arrival]]]:
        return lambda: ray.get([getattr(one, method).remote(len(group), *arguments, window_s) for one in group])

    def torch_arm(dataset: Textbook | Tuned) -> Callable[[], list[list[Arrival]]]:
        return each(consumers, "loader", dataset, share, apiece)

    def stream_arm(
        name: str, kind: type[StreamDataConfig] = StreamDataConfig, guess: int = GUESS
    ) -> Callable[[], list[list[Arrival]]]:
        steps = max(LEAST_STEPS, round(STREAM_WINDOWS * settings.window_s * guess * actors / plan.global_rows))
        start = ResumePoint(replace(plan, steps=steps), 0)
        return lambda: _stream(consumers, kind(start, rows[name], actors, settings.block_mb))

    source = own or sets["original"]
    cold = forget_cached(source)
    say("reading what the images weigh, once")
    raw = _raw(each(readers, "raw", source)(), source, cold)
    original, prepared = Source(files), Source(None, sets["prepared"])
    arms: Arms = {
        "decode": each(readers, "decode", files),
        "prepare": partial(_prepare, folder, round(PREPARE_WINDOWS * window_s * GUESS * actors)),
        "reader original": each(readers, "reader", rows["original"], plan),
        "reader prepared": each(readers, "reader", rows["prepared"], plan),
        "textbook original": torch_arm(Textbook(original, tokenizer, SIDE)),
        "stream original": stream_arm("original"),
        "tuned original": torch_arm(Tuned(original, tokenizer, SIDE, inputs.max_tokens)),
        "tuned prepared": torch_arm(Tuned(prepared, tokenizer, SIDE, inputs.max_tokens)),
        "stream prepared": stream_arm("prepared"),
        "stream blank": stream_arm("prepared", BlankStream, GUESS_BLANK),
    }
    return Bench(arms, consumers, raw)


def _raw(arrivals: list[list[Arrival]], source: PreparedSet, cold: bool) -> Raw:
    rows, num_bytes = (sum(getattr(one, name) for each in arrivals for one in each) for name in ("rows", "num_bytes"))
    rate = timing.rate(arrivals, skip=0)
    where = source.storage.address + ("" if cold else ", some of it perhaps from memory")
    return Raw(rate, rate * num_bytes / rows / 1e6, where)


def _prepare(folder: Path, num_rows: int) -> list[list[Arrival]]:
    """A window of `mmray prepare` over the files as they are: an arrival for each shard that it has written."""
    arrivals: list[Arrival] = []

    def report(progress: Progress) -> None:
        new = progress.done_rows - sum(arrival.rows for arrival in arrivals)
        if progress.stage == "pack" and new:
            arrivals.append(Arrival(time.time(), new))

    apiece = max(1, min(Prepare().rows_per_shard, num_rows // LEAST_SHARDS))
    settings = Prepare(duplicates="keep", max_bad_fraction=1.0, rows_per_shard=apiece)
    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        prepare(str(synthetic_images.repeated(folder, num_rows)), f"{out}/set", settings, report)
    return [arrivals]


class BlankStream(StreamDataConfig):
    """The same stream with nothing in it: what it costs is Ray's own."""

    def dataset(self, blocks: Blocks) -> ray.data.Dataset:
        shape = (self.reader.inputs.image_side, self.reader.inputs.max_tokens)
        return stream_dataset(Blank, (*shape, blocks), blocks.count, self.workers, self.labels)


def _stream(consumers: list[Any], stream: StreamDataConfig) -> list[list[Arrival]]:
    """A window of mmray's stream, as training workers get it. Its plan ends with it: no actor is left in mid-block."""
    plan = stream.start.plan
    shards = stream.configure({"train": None}, plan.world)
    pairs = zip(consumers, shards, strict=True)
    arrivals: list[list[Arrival]] = ray.get([one.stream.remote(each["train"], plan) for one, each in pairs])
    return arrivals


def _files(settings: Settings, place: Path) -> tuple[Path, PreparedSet | None]:
    """A folder of image files with captions, drawn, or taken from the user's set; and that set."""
    if settings.data is None:
        folder = place / f"photos-{synthetic_images.VERSION}-{settings.images}"
        return synthetic_images.write_files(synthetic_images.photos(settings.images), folder, settings.images), None
    path = ensure_prepared(settings.data, str(place), Prepare(), notify=lambda *_: None, progress=lambda _: None)
    prepared = PreparedSet.open(str(path))
    folder = place / f"{path.name}-{prepared.fingerprint[:8]}-{settings.images}"
    synthetic_images.write_files(synthetic_images.rows_of(prepared, settings.images), folder, settings.images)
    return folder, PreparedSet.open(str(path))  # anew: what was read of it stays in memory while it is open
