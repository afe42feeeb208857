"""Loader benchmark: all loaders return the same images; rates, ratios and notes; one run end to
end.
"""

import io
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from mmray.bench import loader, synthetic_images
from mmray.bench.baselines import (
    WARMUP_ARRIVALS,
    Arrival,
    TextbookDataset,
    TunedDataset,
    rows_per_s,
)
from mmray.bench.loader import RATIOS, bench_loader, format_needs
from mmray.cli.bench import bench
from mmray.config import Inputs
from mmray.console.reporter import ConsoleReporter
from mmray.data.images.decode import decode
from mmray.data.media.clips import ClipColumns
from mmray.data.store.stored_row import Media, Row
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import UsageError
from tests.benchmarks import clips
from tests.made import make_set, row

RATES = {  # images/s of each loader
    "textbook original": 190.0,
    "stream original": 380.0,
    "tuned prepared": 1200.0,
    "stream prepared": 900.0,
}


def test_all_loaders_return_the_same_images(tmp_path):
    items = list(synthetic_images.synthetic_photos(6))
    files = synthetic_images.read_captions(
        synthetic_images.write_files(iter(items), tmp_path / "files")
    )
    prepared = make_set(
        tmp_path / "set", [row(n, data=data, texts=[text]) for n, (data, text) in enumerate(items)]
    )
    tokenizer = train_tokenizer([text for _, text in items], 60)
    plan = SamplePlan(6, 6, 1, seed=0, steps=1, shuffle=False)
    inputs = Inputs(image_side=224, fit="crop", interpolation="bilinear", max_tokens=160)
    block = RowReader(prepared, inputs, tokenizer, 10**7).read_block(plan, np.arange(6))
    tuned_rows = TunedDataset(prepared, tokenizer, 224, 160)
    tuned = TunedDataset.collate([tuned_rows[index] for index in range(6)])
    assert np.abs(tuned["image"].numpy().astype(int) - block["image"]).max() <= 2
    assert np.array_equal(tuned["input_ids"].numpy(), block["input_ids"])
    assert tuned["attention_mask"].sum(1).tolist() == block["num_tokens"].tolist()
    textbook = TextbookDataset(files, tokenizer, 224)[3]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (textbook["image"] * std[:, None, None] + mean[:, None, None]) * 255
    cut = 375 * 224 / 256  # crops after resizing to 256
    box = ((500 - cut) / 2, (375 - cut) / 2, (500 + cut) / 2, (375 + cut) / 2)
    image = Image.fromarray(decode(prepared.read(np.array([3]))[0].image))
    square = image.resize((224, 224), Image.Resampling.BILINEAR, box=box)
    # uncropped: 29
    assert np.abs(pixels.numpy() - np.asarray(square).transpose(2, 0, 1)).mean() < 6
    length = int(block["num_tokens"][3])
    assert textbook["input_ids"].shape == (512,) and textbook["attention_mask"].sum() == length
    assert textbook["input_ids"][:length].tolist() == block["input_ids"][3, :length].tolist()


@pytest.mark.parametrize("modality", ["audio", "video"])
def test_both_loaders_return_the_same_clips(modality, tmp_path):
    folder = clips.write_clips(modality, 3, tmp_path)
    rows = clips.read_rows(folder, modality)
    plain = clips.PlainClips(rows, modality, train_tokenizer([rows[0].text], 60))
    columns = ClipColumns(clips.clip_inputs(modality))
    for index, clip_row in enumerate(rows):
        media = Media(modality, Path(clip_row.file).read_bytes())
        span = [clip_row.start_s, clip_row.start_s + clips.CLIP_S[modality]]
        block = columns.empty(1)
        columns.set_row(block, 0, Row("k", [media], ["x"], spans=[span]), None)
        clip = plain[index][modality].numpy()
        assert clip.shape == block[modality][0].shape
        if modality == "audio":
            # The phases of the resamplers differ by up to a sample.
            assert np.corrcoef(clip, block["audio"][0])[0, 1] > 0.9
        else:
            mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
            pixels = (clip * std[:, None, None] + mean[:, None, None]) * 255
            assert np.abs(pixels - block["video"][0]).mean() < 2


def arrivals(every_s, rows=10, count=12, first_s=0.0):
    return [Arrival(first_s + number * every_s, rows) for number in range(count)]


def test_rate_excludes_warmup_arrivals():
    burst = [*arrivals(0.001, 1000, WARMUP_ARRIVALS), *arrivals(0.5, first_s=0.01)]
    assert rows_per_s([burst]) == pytest.approx(20)
    assert rows_per_s([arrivals(0.5), arrivals(0.25)]) == pytest.approx(20 + 40)
    # too few to exclude any
    assert rows_per_s([arrivals(0.5, count=2)]) == pytest.approx(20)
    assert rows_per_s([arrivals(0.5, count=1)]) == 0


def test_notes_name_the_decode_actors_a_device_needs():
    assert format_needs(RATES, 2000.0, 4) == [
        "original: a device of 2,000 images/s needs 22 decode actors",
        "prepared: a device of 2,000 images/s needs 9 decode actors",
    ]


def test_table_and_json_of_fixed_windows(tmp_path, monkeypatch):
    """Two consumers of 32 rows per arrival; loaders run in ABBA order."""
    order = []

    def window(name):
        order.append(name)
        return [arrivals(2 * 32 / RATES[name], 32, 20, first_s=1.5)] * 2

    monkeypatch.setattr(
        loader, "_build_loaders", lambda *_: {name: partial(window, name) for name in RATES}
    )
    monkeypatch.setattr(loader, "ray_session", lambda _: nullcontext())
    monkeypatch.setattr(loader, "time", SimpleNamespace(time=lambda: 0.0))
    out, file = io.StringIO(), tmp_path / "loader.json"
    words = ["loader", "--rounds", "2", "--workers", "4", "--gpu-rate", "2000", "--json", str(file)]
    assert (
        bench(words, ConsoleReporter(Console(file=out, width=120, highlight=False, soft_wrap=True)))
        == 0
    )
    assert order == [*RATES, *reversed(RATES)]
    text = " ".join(out.getvalue().replace("│", " ").split())
    assert "arm images/s lowest highest first batch s" in text
    assert "textbook original 190 190 190 1.5" in text
    assert "stream_prepared_vs_textbook 4.737 (median of 2 pairs" in text
    written = json.loads(file.read_text())
    assert list(written) == ["machine", "ratios", "spread", "rows", "notes"]
    assert written["machine"]["data_workers"] == 4 and list(written["ratios"]) == list(RATIOS)
    stream = written["rows"][1]
    assert (stream["arm"], stream["first_batch_s"]) == ("stream original", 1.5)
    for name in ("images_per_s", "lowest", "highest"):
        assert stream[name] == pytest.approx(380)
    assert all(note in text for note in written["notes"])


def test_window_of_one_block_and_negative_workers_are_refused(monkeypatch):
    loaders = {name: lambda: [arrivals(0.1, count=1)] for name in RATES}
    monkeypatch.setattr(loader, "_build_loaders", lambda *_: loaders)
    monkeypatch.setattr(loader, "ray_session", lambda _: nullcontext())
    with pytest.raises(UsageError, match=r"textbook original: too few blocks .* raise --window-s"):
        bench_loader(lambda _: None, gpu_rate=1000.0)
    with pytest.raises(UsageError, match="--workers -3: must be 0"):
        bench_loader(lambda _: None, workers=-3)


@pytest.mark.cluster
def test_bench_loader_end_to_end(local_ray, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = {
        "GLOBAL_BATCH_SIZE": 16,
        "SIDE": 96,
        "PREPARED_SIDE": 48,
        "MIN_STEPS": WARMUP_ARRIVALS + 4,
    }
    sizes |= {"BLOCK_MB": 0.25}
    for name, size in sizes.items():
        monkeypatch.setattr(loader, name, size)
    notes = []
    result = bench_loader(notes.append, images=20, rounds=1, window_s=0.1, gpu_rate=500.0)
    by_loader = {each["arm"]: each for each in result["rows"]}
    assert list(by_loader) == list(RATES) and list(result["ratios"]) == list(RATIOS)
    assert result["ratios"]["stream_vs_tuned"] == pytest.approx(
        by_loader["stream prepared"]["images_per_s"] / by_loader["tuned prepared"]["images_per_s"],
        rel=0.01,
    )
    assert len(result["notes"]) == 2 and len(notes) == 1 + len(by_loader)
    assert all(
        by_loader[f"stream {name}"]["first_batch_s"] > 0 for name in ("original", "prepared")
    )
    with pytest.raises(UsageError, match="--images 4: bench loader needs at least 16"):
        bench_loader(notes.append, images=4, rounds=1)
