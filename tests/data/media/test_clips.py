"""A clip has the frames and samples inside the span of its text, as a function of seed, pass and
key.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmray.config import ClipInputs
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.media.clips import (
    ClipColumns,
    Window,
    choose_window,
    clip_batch,
    frame_times,
    full_span,
)
from mmray.data.media.decode import verify_media
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Media, Row
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.engine.metrics.meters import padding_fractions
from mmray.engine.prefetch import make_local_batch
from tests.data.media.synthetic import encode_audio, encode_video, read_clock, time_of_sweep
from tests.made import make_set, png

RATE = 8000
INPUTS = ClipInputs(
    image_side=64,
    fit="squash",
    interpolation="bilinear",
    max_tokens=8,
    clip_s=0.8,
    frames=4,
    audio_rate=RATE,
)
SPANS = [[0.2, 0.9], [1.0, 2.9]]
CLIP = encode_video(audio="aac", b_frames=2)


def media_of(data: bytes, kind: str) -> Media:
    info = verify_media(data, kind)
    return Media(
        kind,
        data,
        sha256=hashlib.sha256(data).hexdigest(),
        width=info.width,
        height=info.height,
        duration=info.stream_s,
        rate=info.rate,
        channels=info.channels,
    )


def make_rows() -> list[Row]:
    """A video with sound, a silent one, audio, an image, a damaged video, and two texts with
    spans.
    """
    video = media_of(CLIP, "video")
    silent = media_of(encode_video(), "video")
    audio = media_of(encode_audio("flac", 3.0), "audio")
    image = Media("image", png(3), sha256=hashlib.sha256(png(3)).hexdigest())
    broken = Media("video", CLIP[:99], sha256=hashlib.sha256(CLIP[:99]).hexdigest())
    texts = ["first", "last"]
    rows = [Row("sound", [video], texts), Row("silent", [silent], texts)]
    rows += [Row("audio", [audio], texts), Row("image", [image], texts)]
    rows += [Row("broken", [broken], texts), Row("two", [video, video], texts)]
    rows += [Row("pair", [audio, silent], []), Row("whole", [video], texts)]
    for row in rows[:3]:
        row.spans = [list(span) for span in SPANS]
    return rows


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: Any) -> PreparedSet:
    return make_set(tmp_path_factory.mktemp("clips") / "set", make_rows())


def plan_of(seed: int = 5) -> SamplePlan:
    return SamplePlan(num_rows=8, global_batch_size=8, world_size=1, seed=seed, steps=999)


def read(
    prepared: PreparedSet, rows: Any, epoch: int = 0, seed: int = 5, **inputs: Any
) -> dict[str, Any]:
    """The block of these rows in an epoch, in this order."""
    reader = RowReader(prepared, INPUTS.replace(**inputs), prepared.tokenizer_json or "", 10**6)
    plan = plan_of(seed)
    positions = np.arange(8) + 8 * epoch
    by_row = positions[np.argsort(plan.row_ids_at(positions))]
    return reader.read_block(plan, by_row[np.asarray(rows)])


def clock_times(block: dict[str, Any], row: int) -> list[float]:
    frames = block["video"][row, : block["num_frames"][row]]
    return [read_clock(frame.transpose(1, 2, 0)) / 1000 for frame in frames]


def test_frames_and_samples_are_inside_the_span_and_aligned(prepared: PreparedSet) -> None:
    seen = set()
    for epoch in range(6):
        block = read(prepared, range(8), epoch)
        times = clock_times(block, 0)
        # A frame at the start of a span may have been shown up to 40 ms earlier.
        [span] = [
            span for span in SPANS if all(span[0] - 0.04 <= time <= span[1] for time in times)
        ]
        seen.add(span[0])
        length = min(0.8, span[1] - span[0])
        assert np.diff(times) == pytest.approx(length / 4, abs=0.04)
        samples = block["audio"][0, : block["num_samples"][0]]
        assert len(samples) == round(length * RATE)
        # Sound and frames are of the same window.
        start = time_of_sweep(samples[:800], RATE) - 0.05
        assert span[0] - 0.01 <= start and start + length <= span[1] + 0.01
        assert start - 0.04 <= times[0] <= start + length / 4
        assert clock_times(block, 1) and block["num_samples"][1] == 0
    assert seen == {0.2, 1.0}


def test_a_block_is_a_function_of_seed_pass_and_key(prepared: PreparedSet) -> None:
    first = read(prepared, range(8))
    again = read(prepared, [3, 1, 0])
    for name in ("video", "audio", "num_samples", "num_frames"):
        np.testing.assert_array_equal(again[name], first[name][[3, 1, 0]])
    for mine, theirs in zip(again["input_ids"], first["input_ids"][[3, 1, 0]], strict=True):
        np.testing.assert_array_equal(mine, theirs[: len(mine)])
    other = read(prepared, range(8), seed=6)
    later = read(prepared, range(8), epoch=1)
    for block in (other, later):
        assert any(
            not np.array_equal(block["audio"][row], first["audio"][row]) for row in (0, 2, 7)
        )


def test_rows_may_lack_a_modality(prepared: PreparedSet) -> None:
    block = read(prepared, range(8))
    assert block["valid"].tolist() == [True, True, True, True, False, False, True, True]
    assert (block["num_samples"] > 0).tolist() == [1, 0, 1, 0, 0, 0, 1, 1]
    assert block["num_frames"].tolist() == [4, 4, 0, 1, 0, 0, 4, 4]
    assert block["has_text"].tolist() == [1, 1, 1, 1, 0, 0, 0, 1]
    reader = RowReader(prepared, INPUTS, prepared.tokenizer_json or "", 10**6)
    decoder = SubprocessDecoder()
    assert reader.explain_bad_row(5, decoder)[1] == "video-count"
    assert reader.explain_bad_row(4, decoder)[1] in ("truncated", "corrupt")
    assert reader.explain_bad_row(0, decoder)[1] == "temporary"


def test_a_model_without_video_or_audio_has_no_such_columns(prepared: PreparedSet) -> None:
    assert "video" not in read(prepared, [0], frames=0)
    assert "audio" not in read(prepared, [0], audio_rate=0)
    assert "image" not in read(prepared, [0])


def test_clips_are_checked_in_a_child_process_after_a_crash(prepared: PreparedSet) -> None:
    reader = RowReader(prepared, INPUTS, prepared.tokenizer_json or "", 10**6)
    reader.subprocess_decoder = SubprocessDecoder()
    block = reader.read_block(plan_of(), np.arange(8))
    assert block["valid"].sum() == 6
    reader.subprocess_decoder.close()


def test_frames_by_rate() -> None:
    assert frame_times(Window(1, 2), 4, 0, 0.5) == pytest.approx([1.125, 1.375, 1.625, 1.875])
    assert frame_times(Window(1, 2), 8, 5, 0.5) == pytest.approx([1.1, 1.3, 1.5, 1.7, 1.9])
    assert frame_times(Window(1, 2), 3, 5, 0.0) == pytest.approx([1.0, 1.2, 1.4])
    assert frame_times(Window(1, 1.1), 8, 1, 0.9) == pytest.approx([1.09])


def test_a_long_span_is_cut_at_random_and_a_short_one_is_kept() -> None:
    assert choose_window((3, 5), 10, 0.9) == (3, 5)
    assert choose_window((3, 33), 10, 0.0) == (3, 13)
    assert choose_window((3, 33), 10, 0.5) == (13, 23)


def test_memory_is_flat_over_many_clips(prepared: PreparedSet, tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()
    reader = RowReader(prepared, INPUTS, prepared.tokenizer_json or "", 10**6)
    plan = plan_of()
    used = []
    for step in range(80):  # 560 media are decoded
        reader.read_block(plan, np.arange(8) + 8 * step)
        used.append(process.memory_info().rss)
    assert max(used[40:]) < max(used[10:40]) + 8 * 2**20


def test_grouping_by_length_pads_clips_less(prepared: PreparedSet) -> None:
    """Clips of 0.7 s, 0.8 s and none in micro-batches of two rows."""
    reader = RowReader(prepared, INPUTS, prepared.tokenizer_json, 10**7)
    shares = []
    rows = []
    for is_grouped in (False, True):
        blocks = [reader.read_block(plan_of(), np.arange(8))]
        [micro_batches] = iter_micro_batches(blocks, 8, 2, is_grouped)
        batch = make_local_batch(micro_batches)
        fractions = padding_fractions(list(batch.token_counts))
        shares.append([fractions["batch/padding_audio"], fractions["batch/padding_video"]])
        rows.append(sorted(batch.keys.tolist()))
    assert rows[0] == rows[1]
    assert shares[1][0] < 0.6 * shares[0][0] and 0 < shares[0][1] < 1


SHORT_VIDEO = range(0, 1000, 40)
LATE_VIDEO = range(2000, 3000, 40)


@pytest.mark.parametrize("suffix", ["mp4", "webm"])
@pytest.mark.parametrize(
    ("times_ms", "audio_s", "span", "frames", "seconds"),
    [
        (SHORT_VIDEO, 3.0, (1.5, 2.3), 0, 0.8),
        (SHORT_VIDEO, 3.0, (0.6, 1.4), 2, 0.8),
        (SHORT_VIDEO, 3.0, (0.1, 0.9), 4, 0.8),
        (range(0, 3000, 40), 1.0, (1.5, 2.3), 4, 0.0),
        (range(0, 3000, 40), 1.0, (0.6, 1.4), 4, 0.4),
        (LATE_VIDEO, 3.0, (0.1, 0.9), 0, 0.8),
        (LATE_VIDEO, 3.0, (1.5, 2.3), 2, 0.8),
    ],
)
def test_clip_has_no_frames_or_sound_where_a_stream_has_none(
    suffix: str,
    times_ms: range,
    audio_s: float,
    span: tuple[float, float],
    frames: int,
    seconds: float,
) -> None:
    audio = "libopus" if suffix == "webm" else "aac"
    data = encode_video(suffix, times_ms, audio=audio, audio_s=audio_s)
    video = media_of(data, "video")
    row = Row("a", [video], ["text"], spans=[list(span)])
    columns = ClipColumns(INPUTS)
    block = columns.empty(1)
    columns.set_row(block, 0, row, None)
    assert block["num_frames"].tolist() == [frames]
    # AAC and Opus have an encoder delay.
    assert block["num_samples"][0] / RATE == pytest.approx(seconds, abs=0.05)
    batch = clip_batch(block)
    assert (batch["has_video"][0], batch["has_audio"][0]) == (frames > 0, seconds > 0)
    start, end = full_span(video)
    assert start == pytest.approx(times_ms[0] / 1000, abs=0.01)
    assert end == pytest.approx(times_ms[-1] / 1000 + 0.04, abs=0.01)
    assert full_span(video, with_sound=True)[1] >= max(end, audio_s - 0.02)
