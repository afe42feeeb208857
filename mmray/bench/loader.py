"""`mmray bench loader`: rate of the stream against PyTorch DataLoaders over the same images.

Prepares the images twice (original bytes, and re-encoded at 256 pixels), starts the consumers, and runs the arms in
ABBA order, so that each ratio compares adjacent windows on one machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch

from mmray.bench import loader_report as report
from mmray.bench import synthetic_images, timing
from mmray.bench.loader_arms import LoaderWorker, NoopReader, Source, TextbookDataset, TunedDataset, drop_page_cache
from mmray.bench.loader_report import RATIOS, ArmResult, DiskRead, HostToDevice
from mmray.bench.timing import Arrival, ProcessMonitor, describe_machine
from mmray.cluster.connect import ray_session
from mmray.config import Cluster, Inputs, Prepare
from mmray.data.prepare.pipeline import ensure_prepared
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import Blocks, ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.stream.stream import StreamDataConfig, stream_dataset
from mmray.data.text.tokenizer import load_tokenizer
from mmray.errors import UsageError
from mmray.machine import cores

GLOBAL_ROWS, CONSUMERS, SIDE = 256, 2, 224
MIN_STEPS = 12  # minimum of a stream window; its first blocks do not count
FOREVER = 10**6  # steps of a plan that no window finishes
COPY_BYTES = 2**28
EXPECTED_RATE, EXPECTED_NOOP_RATE = 600, 3000  # images/s per actor, to choose the length of a stream window
# The first blocks of a stream arrive while other actors are starting.
STREAM_WINDOWS, STREAM_SKIP = 2, 6
Notify = Callable[[str], None]
Arms = dict[str, Callable[[], list[list[Arrival]]]]


@dataclass(frozen=True)
class LoaderSettings:
    """Options of the benchmark."""

    data: str | None = None  # a prepared set or a raw source; None: synthetic photographs
    images: int = 512
    image_side: int = 256  # shorter side of the re-encoded set
    rounds: int = 2
    window_s: float = 3.0
    workers: int = 0  # 0: one per core
    block_mb: float = 24.0
    gpu_rate: float | None = None  # images/s


def bench_loader(settings: LoaderSettings, notify: Notify) -> dict[str, Any]:
    """Return {"machine", "ratios", "spread", "rows", "memory_mib", "notes"}, one row per arm (median window).

    Raises UsageError if there are fewer rows than one global batch.
    """
    actors = settings.workers or cores()
    with ray_session(Cluster(workers=max(actors, CONSUMERS))):
        bench = _bench(settings, actors, notify)
        found: dict[str, ArmResult] = {name: ArmResult() for name in bench.arms}
        rounds: list[dict[str, float]] = []
        for turn in range(settings.rounds):
            rates = {}
            for name in timing.order(list(bench.arms), turn):
                rates[name] = bench.window(name, found[name])
                notify(f"round {turn + 1} of {settings.rounds}: {name} {rates[name]:,.0f} images/s")
            rounds.append(rates)
        copied = ray.get(bench.consumers[0].copied_bytes_per_s.remote(COPY_BYTES))
    spread = timing.ratios(rounds, RATIOS)
    rates = {name: float(np.median(each.rates)) for name, each in found.items()}
    copies = HostToDevice(copied, copied / (3 * SIDE**2)) if copied is not None else None
    machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {"data_workers": actors}
    return {
        "machine": machine,
        "ratios": {name: each["median"] for name, each in spread.items()},
        "spread": spread,
        "rows": report.rows(rates, found, bench.raw, copies),
        "memory_mib": {name: each.memory_mib for name, each in found.items()},
        "notes": [
            *report.summarize(rates, bench.raw, copies, settings.gpu_rate, actors),
            report.memory_summary(found["stream prepared"].memory_mib),
        ],
    }


@dataclass
class Bench:
    """Arms by name; each function runs a window and returns the arrivals of every consumer."""

    arms: Arms
    consumers: list[Any]
    raw: DiskRead

    def window(self, name: str, found: ArmResult) -> float:
        """Run one window of an arm, record it in `found`, return its rate in images/s."""
        began_s = time.time()
        with ProcessMonitor() as watch:
            arrivals = self.arms[name]()
        skip = STREAM_SKIP if name.startswith("stream") else timing.WARMUP_ARRIVALS
        found.rates.append(timing.rate(arrivals, skip))
        cpu_s = timing.cpu_s_per_row(arrivals, watch.history, skip)
        if cpu_s is not None:
            found.cpu_ms.append({role: seconds * 1e3 for role, seconds in cpu_s.items()})
        found.first_s.append(max(each[0].at_s for each in arrivals) - began_s)
        stall_s = timing.epoch_stall_s(arrivals, skip)
        if stall_s is not None:
            found.stalls_s.append(stall_s)
        found.memory_mib |= watch.peaks_mib()
        return found.rates[-1]


def _bench(settings: LoaderSettings, actors: int, notify: Notify) -> Bench:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmray" / "bench"
    notify("preparing the images: original bytes and re-encoded")
    folder, own = _files(settings, cache)
    sets = {
        name: synthetic_images.prepare_fixture(folder, side, cache)
        for name, side in (("original", 0), ("prepared", settings.image_side))
    }
    files = synthetic_images.read_captions(folder)
    if len(files) < GLOBAL_ROWS:
        raise UsageError(f"bench loader needs {GLOBAL_ROWS} images (a global batch), got {len(files)}: raise --images")
    tokenizer = load_tokenizer("trained", sets["original"].tokenizer_json)
    everyone = [LoaderWorker.remote(rank) for rank in range(max(actors, CONSUMERS))]  # type: ignore[attr-defined]
    consumers, readers = everyone[:CONSUMERS], everyone[:actors]
    ray.get([one.copied_bytes_per_s.remote(1) for one in everyone])  # wait until all have started
    inputs, window_s = Inputs(image_side=SIDE, fit="crop", interpolation="bilinear"), settings.window_s
    rows = {name: RowReader(each, inputs, tokenizer, Prepare().max_pixels) for name, each in sets.items()}
    share, apiece = GLOBAL_ROWS // CONSUMERS, max(1, actors // CONSUMERS)
    plan = SamplePlan(num_rows=len(files), global_rows=GLOBAL_ROWS, world=CONSUMERS, micro=share, seed=0, steps=FOREVER)

    def each(group: list[Any], method: str, *arguments: Any) -> Callable[[], list[list[Arrival]]]:
        return lambda: ray.get([getattr(one, method).remote(len(group), *arguments, window_s) for one in group])

    def torch_arm(dataset: TextbookDataset | TunedDataset) -> Callable[[], list[list[Arrival]]]:
        return each(consumers, "loader", dataset, share, apiece)

    def stream_arm(
        name: str, kind: type[StreamDataConfig] = StreamDataConfig, guess: int = EXPECTED_RATE
    ) -> Callable[[], list[list[Arrival]]]:
        steps = max(MIN_STEPS, round(STREAM_WINDOWS * settings.window_s * guess * actors / plan.global_rows))
        start = ResumePoint(replace(plan, steps=steps), 0)
        return lambda: _stream(consumers, kind(start, rows[name], actors, settings.block_mb))

    source = own or sets["original"]
    cold = drop_page_cache(source)
    notify("measuring the read rate of the stored images")
    raw = _raw(each(readers, "raw", source)(), source, cold)
    original, prepared = Source(files), Source(None, sets["prepared"])
    arms: Arms = {
        "reader original": each(readers, "reader", rows["original"], plan),
        "reader prepared": each(readers, "reader", rows["prepared"], plan),
        "textbook original": torch_arm(TextbookDataset(original, tokenizer, SIDE)),
        "stream original": stream_arm("original"),
        "tuned prepared": torch_arm(TunedDataset(prepared, tokenizer, SIDE, inputs.max_tokens)),
        "stream prepared": stream_arm("prepared"),
        "stream no-op": stream_arm("prepared", NoopStream, EXPECTED_NOOP_RATE),
    }
    return Bench(arms, consumers, raw)


def _raw(arrivals: list[list[Arrival]], source: PreparedSet, cold: bool) -> DiskRead:
    rows, num_bytes = (sum(getattr(one, name) for each in arrivals for one in each) for name in ("rows", "num_bytes"))
    rate = timing.rate(arrivals, skip=0)
    where = source.storage.address + ("" if cold else " (partly from the page cache)")
    return DiskRead(rate, rate * num_bytes / rows / 1e6, where)


class NoopStream(StreamDataConfig):
    """Run the stream with actors that return zeros, to measure the overhead of Ray."""

    def dataset(self, blocks: Blocks) -> ray.data.Dataset:
        shape = (self.reader.inputs.image_side, self.reader.inputs.max_tokens)
        return stream_dataset(NoopReader, (*shape, blocks), blocks.count, self.workers, self.labels)


def _stream(consumers: list[Any], stream: StreamDataConfig) -> list[list[Arrival]]:
    """Run one window of the stream as training workers receive it; the plan ends with the window."""
    plan = stream.start.plan
    shards = stream.configure({"train": None}, plan.world)
    pairs = zip(consumers, shards, strict=True)
    arrivals: list[list[Arrival]] = ray.get([one.stream.remote(each["train"], plan) for one, each in pairs])
    return arrivals


def _files(settings: LoaderSettings, cache: Path) -> tuple[Path, PreparedSet | None]:
    """Return a folder of image files with captions (synthetic or from the user's set) and the user's set."""
    if settings.data is None:
        folder = cache / f"photos-{synthetic_images.VERSION}-{settings.images}"
        return synthetic_images.write_files(
            synthetic_images.synthetic_photos(settings.images), folder, settings.images
        ), None
    path = ensure_prepared(settings.data, str(cache), Prepare(), notify=lambda *_: None, progress=lambda _: None)
    prepared = PreparedSet.open(str(path))
    folder = cache / f"{path.name}-{prepared.fingerprint[:8]}-{settings.images}"
    synthetic_images.write_files(synthetic_images.sample_rows(prepared, settings.images), folder, settings.images)
    return folder, PreparedSet.open(str(path))  # reopened, because an open set caches data in memory
