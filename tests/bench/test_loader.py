"""Loader benchmark: all loaders return the same images; the benchmark runs end to end."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from mmray.bench import loader, synthetic_images
from mmray.bench.loader import LoaderSettings, bench_loader
from mmray.bench.loader_arms import NoopReader, Source, TextbookDataset, TunedDataset, _read_raw, drop_page_cache
from mmray.bench.loader_arms import loader as torch_loader
from mmray.bench.loader_report import RATIOS
from mmray.bench.timing import WARMUP_ARRIVALS, Arrival, ProcessMonitor, cpu_s_per_row, cpu_seconds, process_role
from mmray.config import Inputs
from mmray.data.images.decode import decode
from mmray.data.stream.order import Blocks, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import UsageError
from tests.made import make_set, row


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Six synthetic photographs as files, as a prepared set of the same bytes, and a tokenizer."""
    items = list(synthetic_images.synthetic_photos(6))
    folder = synthetic_images.write_files(iter(items), tmp_path_factory.mktemp("photos") / "files", 6)
    prepared = make_set(
        tmp_path_factory.mktemp("set"), [row(n, data=data, texts=[text]) for n, (data, text) in enumerate(items)]
    )
    return synthetic_images.read_captions(folder), prepared, train_tokenizer([text for _, text in items], 60)


def test_synthetic_photographs_are_deterministic_and_cost_like_real_ones():
    first, again = list(synthetic_images.synthetic_photos(3)), list(synthetic_images.synthetic_photos(2))
    assert first[:2] == again and first[0] != first[1]
    assert Image.open(io.BytesIO(first[0][0])).size == (500, 375)
    assert 70_000 < np.mean([len(data) for data, _ in first]) < 150_000
    assert 5 <= len(first[0][1].split()) <= 60


def test_files_are_written_once_without_leftovers(tmp_path):
    items = [(b"one", "a"), (b"two", "b")]
    folder = synthetic_images.write_files(iter(items), tmp_path / "x", 2)
    assert synthetic_images.write_files(iter([]), tmp_path / "x", 2) == folder
    assert [Path(name).read_bytes() for name, _ in synthetic_images.read_captions(folder)] == [b"one", b"two"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_all_loaders_return_the_same_images(made):
    files, prepared, tokenizer = made
    plan = SamplePlan(6, 6, 1, 6, seed=0, steps=1, shuffle=False)
    inputs = Inputs(image_side=224, fit="crop", interpolation="bilinear", max_tokens=160)
    block = RowReader(prepared, inputs, tokenizer, 10**7).block(plan, np.arange(6))
    for source in (Source(files), Source(None, prepared)):
        tuned = TunedDataset.collate([TunedDataset(source, tokenizer, 224, 160)[index] for index in range(6)])
        assert np.abs(tuned["image"].numpy().astype(int) - block["image"]).max() <= 2
        assert np.array_equal(tuned["input_ids"].numpy(), block["input_ids"])
        assert tuned["attention_mask"].sum(1).tolist() == block["num_tokens"].tolist()
        textbook = TextbookDataset(source, tokenizer, 224)[3]
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        pixels = (textbook["image"] * std[:, None, None] + mean[:, None, None]) * 255
        cut = 375 * 224 / 256  # crops after resizing to 256
        box = ((500 - cut) / 2, (375 - cut) / 2, (500 + cut) / 2, (375 + cut) / 2)
        image = Image.fromarray(decode(prepared.read(np.array([3]))[0].image))
        square = image.resize((224, 224), Image.Resampling.BILINEAR, box=box)
        assert np.abs(pixels.numpy() - np.asarray(square).transpose(2, 0, 1)).mean() < 6  # uncropped: 29
        length = int(block["num_tokens"][3])
        assert textbook["input_ids"].shape == (512,) and textbook["attention_mask"].sum() == length
        assert textbook["input_ids"][:length].tolist() == block["input_ids"][3, :length].tolist()


def test_raw_read_reads_each_image_once_from_disk(made):
    _, prepared, _ = made
    assert drop_page_cache(prepared)  # the set is not changed
    arrivals = list(_read_raw(prepared, 0, 1))
    sizes = [len(row.image) for row in prepared.read(np.arange(6))]
    assert [(each.rows, each.num_bytes) for each in arrivals] == [(0, 0), (6, sum(sizes))]


def test_loader_continues_across_epochs(made):
    files, _, tokenizer = made
    batches = iter(torch_loader(TunedDataset(Source(files), tokenizer, 32, 16), rank=0, world=2, batch=2, workers=0))
    assert [len(next(batches)["image"]) for _ in range(7)] == [2] * 7  # 3 rows per epoch


def test_memory_is_reported_by_role():
    with ProcessMonitor() as watch:
        held = np.ones(60_000_000)
        while "driver" not in watch.peaks_mib():
            pass
    number, mib = watch.peaks_mib()["driver"]
    assert len(held) and number == 1 and mib > 400
    assert process_role(["ray::MapWorker(MapBatches(Decoder)).submit"], None) == "stream actor"
    assert process_role(["ray::LoaderWorker.stream"], psutil.Process()) == "LoaderWorker"
    assert process_role(["/usr/lib/ray/raylet --x"], None) == "raylet"


def test_cpu_time_is_the_difference_between_samples():
    history = [(0.0, {"a": 5.0}), (1.0, {"a": 6.0}), (2.0, {"a": 8.0, "b": 1.0}), (3.0, {"a": 10.0, "b": 1.5})]
    assert cpu_seconds(history, 0.5, 3.5) == ({"a": 4.0, "b": 1.5}, 1.0, 3.0)
    assert cpu_seconds(history, 0.5, 1.5) is None
    consumers = [[Arrival(second / 10, 4) for second in range(40)]] * 2  # 80 rows/s from 0.2 s
    assert cpu_s_per_row(consumers, history) == pytest.approx({"a": 4 / 160, "b": 1.5 / 160})


def test_process_monitor_reports_cpu_time_by_role():
    with ProcessMonitor() as watch:
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.8: pass"], check=True)
    role = Path(sys.executable).name
    (_, before), (_, after) = watch.history[0], watch.history[-1]
    assert 0.4 < after[role] - before.get(role, 0.0) < 1.2  # Python processes of other tests may be running


def test_noop_block_has_shape_of_real_block(made):
    _, prepared, tokenizer = made
    plan = SamplePlan(6, 4, 2, 2, seed=0, steps=1)
    block = RowReader(prepared, Inputs(image_side=32), tokenizer, 10**7).block(plan, plan.positions(0, 1))
    blank = NoopReader(32, block["input_ids"].shape[1], Blocks(plan, 0, 1))({"id": np.array([1])})
    assert {name: (each.shape, each.dtype) for name, each in blank.items()} == {
        name: (each.shape, each.dtype) for name, each in block.items()
    }
    assert blank["pos"].tolist() == block["pos"].tolist() and blank["valid"].tolist() == block["valid"].tolist()


@pytest.mark.cluster
def test_bench_loader_end_to_end(local_ray, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loader, "GLOBAL_ROWS", 16)
    monkeypatch.setattr(loader, "SIDE", 96)
    monkeypatch.setattr(loader, "MIN_STEPS", WARMUP_ARRIVALS + 4)
    said = []
    result = bench_loader(
        LoaderSettings(images=20, image_side=48, rounds=1, window_s=0.1, gpu_rate=500.0, block_mb=0.25), said.append
    )
    arms = {each["arm"]: each for each in result["rows"]}
    assert list(result["ratios"]) == list(RATIOS)
    assert result["ratios"]["stream_vs_tuned"] == pytest.approx(
        arms["stream prepared"]["images_per_s"] / arms["tuned prepared"]["images_per_s"], rel=0.01
    )
    assert arms["stream original"]["epoch_stall_s"] is not None and arms["raw read"]["mb_per_s"] > 1
    assert any("the bottleneck is" in note for note in result["notes"])
    assert any("CPU workers" in note for note in result["notes"]) and len(said) == 1 + len(arms)
    assert all(arms[f"stream {name}"]["first_batch_s"] > 0 for name in ("original", "prepared"))
    assert {"driver", "stream actor", "LoaderWorker"} <= set(result["memory_mib"]["stream prepared"])
    assert "stream actor" in result["notes"][-1]
    with pytest.raises(UsageError, match="got 4: raise --images"):
        bench_loader(LoaderSettings(images=4, rounds=1), said.append)
