"""Table, JSON and notes of `bench loader` for fixed windows, and the images it selects; without Ray."""

import io
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from mmray.bench import loader, synthetic_images
from mmray.bench.loader import Bench, LoaderSettings, bench_loader
from mmray.bench.loader_report import RATIOS, DiskRead
from mmray.bench.timing import Arrival
from mmray.cli.bench import bench
from mmray.cli.console import Terminal
from mmray.config import Prepare
from tests.made import make_set, row

RATES = {  # images/s of each arm
    "reader original": 400.0,
    "reader prepared": 1500.0,
    "textbook original": 190.0,
    "stream original": 380.0,
    "tuned prepared": 1200.0,
    "stream prepared": 900.0,
    "stream no-op": 3600.0,
}
FIRST_S, STALL_S, ROWS, SKIPPED, COUNTED = 1.5, 0.25, 32, 6, 13
CORES_BUSY = 1.8


def arrivals(rate, stall_s):
    """Arrivals of two consumers at `rate` rows/s in total, with one longer wait at the start of an epoch."""
    every_s = 2 * ROWS / rate - stall_s / COUNTED
    at_s = FIRST_S + every_s * np.arange(1 + SKIPPED + COUNTED)
    at_s[SKIPPED + 5 :] += stall_s
    return [[Arrival(at, ROWS, int(number >= SKIPPED + 5)) for number, at in enumerate(at_s)]] * 2


class FakeMonitor:
    """A machine on which 1.8 cores are busy."""

    def __init__(self):
        self.history = [(sample / 10, {"stream actor": CORES_BUSY * sample / 10}) for sample in range(1000)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def peaks_mib(self):
        return {"driver": (1, 210.0), "stream actor": (4, 321.0), "DataLoader worker": (4, 654.0)}


@pytest.fixture
def with_a_gpu(monkeypatch):
    """Fixed windows of four actors, and a device that copies 6 GB/s."""
    arms = {name: partial(arrivals, rate, STALL_S * name.startswith("stream")) for name, rate in RATES.items()}
    copies = SimpleNamespace(copied_bytes_per_s=SimpleNamespace(remote=lambda _: 6e9))
    made = Bench(arms, [copies], DiskRead(5000.0, 550.0, "/data/mine"))
    monkeypatch.setattr(loader, "_bench", lambda *_: made)
    monkeypatch.setattr(loader, "ray_session", lambda _: nullcontext())
    monkeypatch.setattr(loader, "ProcessMonitor", FakeMonitor)
    monkeypatch.setattr(loader, "time", SimpleNamespace(time=lambda: 0.0))
    monkeypatch.setattr(loader.ray, "get", lambda what: what)


def test_table_and_json_have_every_column(with_a_gpu, tmp_path):
    out, file = io.StringIO(), tmp_path / "loader.json"
    words = ["loader", "--rounds", "1", "--workers", "4", "--gpu-rate", "2000", "--json", str(file)]
    assert bench(words, Terminal(Console(file=out, width=120, highlight=False, soft_wrap=True))) == 0
    told = [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in out.getvalue().splitlines()]
    assert "img/s MB/s CPU ms first s stall s worker MiB" in told
    assert "raw read 5,000 550 - - - -" in told
    assert "textbook original 190 - 9.47 1.50 - 654" in told
    assert "stream prepared 900 - 2.00 1.50 0.25 321" in told
    assert "host to device 39,860 6,000 - - - -" in told
    assert any("stream_prepared_vs_textbook" in line and "4.737 (median of 1 pairs" in line for line in told)
    written = json.loads(file.read_text())
    assert list(written) == ["machine", "ratios", "spread", "rows", "memory_mib", "notes"]
    assert written["machine"]["data_workers"] == 4 and list(written["ratios"]) == list(RATIOS)
    assert [each["arm"] for each in written["rows"]] == ["raw read", *RATES, "host to device"]
    (stream,) = [each for each in written["rows"] if each["arm"] == "stream prepared"]
    assert stream == {
        "arm": "stream prepared",
        "images_per_s": 900.0,
        "cpu_ms_per_image": 2.0,
        "cpu_ms_by_role": {"stream actor": 2.0},
        "first_batch_s": 1.5,
        "epoch_stall_s": 0.25,
        "peaks_mib": {"DataLoader worker": 654.0, "stream actor": 321.0, "driver": 210.0},
    }
    assert set(written["notes"]) <= set(told)


def test_notes_name_the_bottleneck_and_the_cpu_workers_a_device_needs(with_a_gpu):
    notes = bench_loader(LoaderSettings(rounds=2, workers=4, gpu_rate=2000.0), lambda _: None)["notes"]
    assert notes[:6] == [
        "raw read: 550 MB/s from /data/mine",
        "host to device: 6.0 GB/s, pinned",
        "original: the bottleneck is reading and decoding on the CPU",
        "original: a device of 2,000 images/s needs 22 CPU workers of this kind",
        "prepared: the bottleneck is the stream itself (Ray, and copies of blocks)",
        "prepared: a device of 2,000 images/s needs 9 CPU workers of this kind",
    ]
    slow = bench_loader(LoaderSettings(rounds=1, workers=4, gpu_rate=120.0), lambda _: None)["notes"]
    assert "original: the bottleneck is the device" in slow


def files(folder):
    return [(Path(name).read_bytes(), text) for name, text in synthetic_images.read_captions(folder)]


def test_images_are_sampled_evenly_from_the_given_set(tmp_path):
    """Two sets of the same name give two folders; asking for more images than rows gives all rows."""
    sets = [
        make_set(tmp_path / parent / "mine", [row(number + shift) for number in range(100)])
        for parent, shift in (("a", 0), ("b", 100))
    ]
    folders = []
    for made in sets:
        folder, own = loader._files(LoaderSettings(data=made.storage.address, images=10), tmp_path / "cache")
        assert own is not None and own.num_rows == 100 and own.fingerprint == made.fingerprint
        chosen = made.read(np.arange(0, 100, 11))
        assert files(folder) == [(each.image, each.texts[0]) for each in chosen]
        folders.append(folder)
    assert folders[0] != folders[1]
    folder, _ = loader._files(LoaderSettings(data=sets[0].storage.address, images=500), tmp_path / "cache")
    assert files(folder) == [(each.image, each.texts[0]) for each in sets[0].read(np.arange(100))]


def test_raw_source_is_prepared_without_synthetic_images(tmp_path, monkeypatch):
    made, asked = make_set(tmp_path / "prepared", [row(number) for number in range(3)]), []

    def prepare(source, cache, settings, notify, progress):
        asked.append((source, cache, settings))
        return tmp_path / "prepared"

    monkeypatch.setattr(loader, "ensure_prepared", prepare)
    monkeypatch.setattr(
        synthetic_images, "synthetic_photos", lambda num: ((bytes([number]), "drawn") for number in range(num))
    )
    folder, own = loader._files(LoaderSettings(data="my.jsonl", images=3), tmp_path / "cache")
    assert asked == [("my.jsonl", str(tmp_path / "cache"), Prepare())]
    assert own.fingerprint == made.fingerprint and [len(data) > 1 for data, _ in files(folder)] == [True] * 3
    folder, own = loader._files(LoaderSettings(images=3), tmp_path / "cache")
    assert own is None and files(folder) == [(bytes([number]), "drawn") for number in range(3)] and len(asked) == 1
