"""`mmray bench loader`: rate of the stream against PyTorch DataLoaders over the same images."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from mmray.bench import synthetic_images
from mmray.bench.baselines import (
    Arrival,
    LoaderWorker,
    TextbookDataset,
    TunedDataset,
    receive_batches,
    receive_stream,
    rows_per_s,
)
from mmray.bench.results import compare, describe_machine
from mmray.cluster.connect import ray_session
from mmray.config import Cluster, Data, Inputs, Prepare
from mmray.data.prepare.pipeline import ensure_prepared
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.errors import UsageError
from mmray.machine import cores

GLOBAL_BATCH_SIZE = 256
CONSUMERS = 2
SIDE = 224
BLOCK_MB = Data().block_mb
PREPARED_SIDE = 256  # shorter side of the re-encoded set
MIN_STEPS = 12  # minimum of a stream window; its first blocks do not count
EXPECTED_RATE = 600  # images/s per actor, to choose the length of a stream window
# The first blocks of a stream arrive while other actors start, so its windows last longer.
STREAM_WINDOW_FACTOR = 2
RATIOS = {
    "stream_original_vs_textbook": ("stream original", "textbook original"),
    "stream_prepared_vs_textbook": ("stream prepared", "textbook original"),
    "stream_vs_tuned": ("stream prepared", "tuned prepared"),
}
Notify = Callable[[str], None]
# Measures one loader, and returns the arrivals of each consumer.
RunWindow = Callable[[], list[list[Arrival]]]


def bench_loader(
    notify: Notify,
    data: str | None = None,
    images: int = 512,
    rounds: int = 2,
    window_s: float = 3.0,
    workers: int = 0,
    gpu_rate: float | None = None,
) -> dict[str, Any]:
    """Compare mmray's stream with PyTorch DataLoaders over the same images on this machine.

    Args:
        notify: Called with one line of text about the progress.
        data: A prepared set or a raw source; None: synthetic photographs.
        rounds: How often each loader is measured; the loaders take turns.
        window_s: Approximate seconds of each measurement.
        workers: Decode actors of the stream, and DataLoader workers in total; 0: one per core.
        gpu_rate: Images/s that a device consumes, for `notes`; None: unknown.

    Returns:
        What `compare_loaders` returns for the RATIOS, and `notes` (texts).

    Raises:
        UsageError: There are too few images or blocks, or an argument is invalid.
    """
    if images < GLOBAL_BATCH_SIZE:
        raise UsageError(
            f"--images {images}: bench loader needs at least {GLOBAL_BATCH_SIZE}, a global batch"
        )
    if workers < 0:
        raise UsageError(f"--workers {workers}: must be 0 (one per core) or more")
    actors = workers or cores()

    def build() -> dict[str, RunWindow]:
        return _build_loaders(data, images, window_s, actors, notify)

    result = compare_loaders(build, actors, rounds, RATIOS, notify)
    rates = {row["arm"]: row["images_per_s"] for row in result["rows"]}
    notes = [] if gpu_rate is None else format_needs(rates, gpu_rate, actors)
    return result | {"notes": notes}


def compare_loaders(
    build: Callable[[], dict[str, RunWindow]],
    actors: int,
    rounds: int,
    ratios: Mapping[str, tuple[str, str]],
    notify: Notify,
    rate: str = "images_per_s",
) -> dict[str, Any]:
    """Measure loaders in turn, in a Ray session on this machine.

    Args:
        build: Returns the loaders by name; called in the session.
        ratios: By name two loaders whose rates are compared.
        notify: Called with one line of text after each measurement.
        rate: Name of the rows/s in the result.

    Returns:
        `machine` (with `data_workers`, the number of actors), and the `ratios`, `spread` and `rows`
        of `compare`. A row has the rate and `first_batch_s`.

    Raises:
        UsageError: A measurement had too few blocks.
    """

    def measure(name: str, run: RunWindow) -> dict[str, float]:
        start_s = time.time()
        arrivals = run()
        values = {rate: rows_per_s(arrivals)}
        if values[rate] == 0:
            raise UsageError(f"{name}: too few blocks to measure a rate; raise --window-s")
        values["first_batch_s"] = max(each[0].at_s for each in arrivals) - start_s
        return values

    with ray_session(Cluster(workers=max(actors, CONSUMERS))):
        arms = {name: partial(measure, name, run) for name, run in build().items()}
        result = compare(arms, rounds, rate, ratios, notify)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"machine": describe_machine(device) | {"data_workers": actors}} | result


def _build_loaders(
    data: str | None, images: int, window_s: float, actors: int, notify: Notify
) -> dict[str, RunWindow]:
    """Prepare the images and start the processes; return the loaders by name."""
    cache = cache_folder()
    notify("preparing the images: original bytes and re-encoded")
    folder = write_images(data, images, cache)
    sets = {}
    files = synthetic_images.read_captions(folder)
    for name, side in (("original", 0), ("prepared", PREPARED_SIDE)):
        prepare = Prepare(image_side=side, duplicates="keep", max_bad_fraction=1.0)
        source = str(folder / synthetic_images.CAPTIONS)
        sets[name] = prepare_in(source, cache / folder.name, prepare)
    if len(files) < GLOBAL_BATCH_SIZE:
        raise UsageError(
            f"bench loader needs {GLOBAL_BATCH_SIZE} images (a global batch), "
            f"and {data} has {len(files)}"
        )
    tokenizer_json = load_tokenizer("trained", sets["original"].tokenizer_json)
    inputs = Inputs(image_side=SIDE, fit="crop", interpolation="bilinear")
    runs = LoaderRuns(len(files), GLOBAL_BATCH_SIZE, EXPECTED_RATE, window_s, actors)
    row_readers = {
        name: RowReader(each, inputs, tokenizer_json, Prepare().max_pixels)
        for name, each in sets.items()
    }
    textbook = TextbookDataset(files, tokenizer_json, SIDE)
    tuned = TunedDataset(sets["prepared"], tokenizer_json, SIDE, inputs.max_tokens)
    return {
        "textbook original": runs.loader(textbook),
        "stream original": runs.stream(row_readers["original"]),
        "tuned prepared": runs.loader(tuned),
        "stream prepared": runs.stream(row_readers["prepared"]),
    }


def cache_folder() -> Path:
    """Return the folder that keeps the inputs of benchmarks."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmray" / "bench"


class LoaderRuns:
    """Runs windows of loaders in processes that are started once.

    Args:
        num_rows: Rows of the set.
        global_batch_size: Rows of a step of all consumers together.
        rate: Expected rows/s of a decode actor, which determines the steps of a stream window.
        window_s: Seconds of a window.
        actors: Decode actors of the stream, and DataLoader workers in total.
    """

    def __init__(
        self,
        num_rows: int,
        global_batch_size: int,
        rate: float,
        window_s: float,
        actors: int,
    ) -> None:
        self.workers = [LoaderWorker.remote() for _ in range(CONSUMERS)]  # type: ignore[attr-defined]
        ray.get([actor.__ray_ready__.remote() for actor in self.workers])
        expected = STREAM_WINDOW_FACTOR * window_s * rate * actors / global_batch_size
        self.plan = SamplePlan(
            num_rows=num_rows,
            global_batch_size=global_batch_size,
            world_size=CONSUMERS,
            seed=0,
            steps=max(MIN_STEPS, round(expected)),
        )
        self.window_s = window_s
        self.workers_per_consumer = max(1, actors // CONSUMERS)

    def loader(self, dataset: object) -> RunWindow:
        """Return a function that reads batches of a DataLoader in each consumer."""
        batch = self.plan.global_batch_size // CONSUMERS
        num_workers = self.workers_per_consumer
        return partial(self._run, receive_batches, dataset, batch, num_workers, self.window_s)

    def stream(self, reader: RowReader) -> RunWindow:
        """Return a function that receives a window of the stream as training workers do."""
        start = ResumePoint(self.plan, 0)
        return partial(
            self._run, receive_stream, reader, start, BLOCK_MB, self.workers_per_consumer
        )

    def _run(
        self, receive: Callable[..., list[Arrival]], *arguments: object
    ) -> list[list[Arrival]]:
        calls = [
            worker.run.remote(receive, rank, *arguments) for rank, worker in enumerate(self.workers)
        ]
        return list(ray.get(calls))


def write_images(data: str | None, images: int, cache: Path) -> Path:
    """Write image files with captions into a folder, unless an earlier call has written them.

    Args:
        data: A prepared set or a raw source, from which rows are sampled; None: synthetic
            photographs.
    """
    if data is None:
        folder = cache / f"photos-{synthetic_images.VERSION}-{images}"
        return synthetic_images.write_files(synthetic_images.synthetic_photos(images), folder)
    prepared = prepare_in(data, cache, Prepare())
    name = prepared.folder.name
    folder = cache / f"{name}-{prepared.fingerprint[:8]}-{images}"
    return synthetic_images.write_files(synthetic_images.sample_rows(prepared, images), folder)


def prepare_in(source: str, cache: Path, settings: Prepare) -> PreparedSet:
    """Prepare a source into a folder, unless it is prepared, and open the set."""
    return PreparedSet.open(
        str(ensure_prepared(source, str(cache), settings, lambda *_: None, lambda _: None))
    )


def format_needs(rates: Mapping[str, float], gpu_rate: float, actors: int) -> list[str]:
    """Return how many decode actors a device needs."""
    lines = []
    for name in ("original", "prepared"):
        needed = math.ceil(gpu_rate / (rates[f"stream {name}"] / actors))
        lines.append(f"{name}: a device of {gpu_rate:,.0f} images/s needs {needed} decode actors")
    return lines
