"""Conversations with videos and audio: from JSON lines to what a model gets."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from mmray.config import Evaluate, Objective, Prepare
from mmray.data.media.decode import BadMedia, read_header
from mmray.data.message_fields import REJECTED
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Media
from mmray.data.stream.order import SamplePlan
from mmray.data.vlm.chat_template import RowError
from mmray.data.vlm.collate import rope_index_of
from mmray.data.vlm.encoder import ProcessorEncoder
from mmray.data.vlm.families import FAMILIES
from mmray.data.vlm.reader import (
    ADAPTERS_OFF,
    ConversationReader,
    ReferenceLogProbs,
    read_clip,
)
from mmray.data.vlm.token_counter import ProcessorCounter
from mmray.data.vlm.video import Clip
from mmray.engine.collectives import Group
from mmray.errors import UsageError
from mmray.evaluation.conversations import ConversationEvaluator
from mmray.models.export.vlm import Conversations
from mmray.models.vlm.model import Vlm
from tests.data.media.synthetic import (
    encode_audio,
    encode_video,
    read_clock,
    time_of_sweep,
)
from tests.made import png
from tests.models.vlm.folders import OMNI
from tests.models.vlm.rows import AUDIO, OMNI_ROWS, VIDEO, settings

pytestmark = pytest.mark.usefixtures("forked_data_processes")

FRAMES = 6


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, forked_children):
    """A conversation about a part of a video, one with two media, and captions with spans."""
    folder = tmp_path_factory.mktemp("videos")
    (folder / "a.mp4").write_bytes(encode_video())
    (folder / "b.png").write_bytes(png(3, 40))
    answer = {"role": "assistant", "content": "circle"}
    rows: list[dict[str, Any]] = [
        {
            "video": "a.mp4",
            "t0_s": 1.0,
            "t1_s": 2.2,
            "messages": [{"role": "user", "content": "<video>\nWhich shape?"}, answer],
        },
        {
            "image": "b.png",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "video", "path": "a.mp4"},
                        {"type": "image"},
                        {"type": "text", "text": "What color?"},
                    ],
                },
                answer,
            ],
        },
        {
            "video": "a.mp4",
            "texts": [
                {"text": "red", "t0_s": 0.2, "t1_s": 0.9},
                {"text": "blue", "t0_s": 2.0, "t1_s": 2.9},
            ],
        },
    ]
    lines = [json.dumps({"id": str(number)} | row) for number, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    prepare(str(folder / "rows.jsonl"), str(folder / "set"), Prepare(vocab_size=0))
    return PreparedSet.open(str(folder / "set"))


def model_settings(folder: Any, frames: int = FRAMES) -> Any:
    return settings(folder, frames=frames, frame_rate=4.0, frame_pixels=64 * 64, question="what")


@pytest.fixture(scope="module")
def reader(folder_of, prepared):
    return ConversationReader(prepared, model_settings(folder_of("qwen3_vl")), 10**7)


def shown_times(clip) -> list[float]:
    return [read_clock(frame) / 1000 for frame in clip.frames]


def test_frames_are_in_the_span_at_the_times_that_the_model_reads(prepared, reader):
    part, whole, captions = prepared.read(np.arange(3))
    [clip] = reader.media_of(part)
    # 1.2 s at 4 frames a second are 5 frames; a patch has two.
    assert len(clip.frames) == 4
    assert shown_times(clip) == pytest.approx([1 + time for time in clip.times_s], abs=0.04)
    assert clip.times_s == pytest.approx([0.15, 0.45, 0.75, 1.05])
    clip, image = reader.media_of(whole, phase=0.0)
    assert image.size == (40, 40)
    assert clip.times_s == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    [clip] = reader.media_of(captions, choice=1)
    assert min(shown_times(clip)) >= 2.0 and max(shown_times(clip)) <= 2.9


def test_block_is_a_function_of_seed_and_pass(prepared, reader):
    def records(seed: int, epoch: int) -> list[bytes]:
        plan = SamplePlan(3, 3, world_size=1, seed=seed, steps=9, shuffle=False)
        return list(reader.read_block(plan, plan.positions(epoch, 0))["record"])

    first = records(1, 0)
    assert first == records(1, 0)
    for seed, epoch in ((2, 0), (1, 1)):
        assert all(one != other for one, other in zip(first, records(seed, epoch), strict=True))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", *OMNI])
def test_tokens_are_counted_from_durations(family, folder_of, prepared):
    weights = str(folder_of(family))
    limits = {"frames": FRAMES, "frame_rate": 4.0, "frame_pixels": 64 * 64}
    count = ProcessorCounter(weights, limits, "what").build()
    reader = ConversationReader(prepared, model_settings(weights), 10**7)
    for row in prepared.read(np.arange(3)):
        choices = range(1 if row.messages else 2)
        lengths = [len(reader.encode_row(row, choice).input_ids) for choice in choices]
        assert count(row) == max(lengths)


def test_tokens_of_a_pair_are_counted_in_its_span(folder_of, prepared):
    weights = str(folder_of("qwen3_vl"))
    limits = {"frames": FRAMES, "frame_rate": 4.0, "frame_pixels": 64 * 64}
    [row] = prepared.read(np.arange(1))
    *prompt, answer = row.messages
    row = replace(row, messages=[*prompt, answer | {REJECTED: [answer]}])
    references = ReferenceLogProbs(ADAPTERS_OFF)
    spec = model_settings(weights)
    encoded = ConversationReader(prepared, spec, 10**7, references=references).encode_row(row)
    count = ProcessorCounter(weights, limits, pairs=True).build()
    assert count(row) == sum(len(each.input_ids) for each in encoded.conversations)


@pytest.mark.parametrize("family", OMNI)
def test_frames_have_the_default_size_of_the_processor(family, folder_of):
    """Its class has a size of videos that replaces the one in its files."""
    from transformers import AutoProcessor

    weights = str(folder_of(family))
    messages, [clip] = OMNI_ROWS[3]
    row = ProcessorEncoder(weights, 500, frames=4).encode(messages, [clip])
    processor = AutoProcessor.from_pretrained(weights)
    expected = processor(
        text=[processor.video_token],
        videos=[clip.frames],
        videos_kwargs={"do_sample_frames": False},
    )
    assert row.images["video_grid_thw"].tolist() == expected["video_grid_thw"].tolist()


@pytest.mark.parametrize("family", ["qwen2_5_vl", OMNI[0]])
def test_limits_of_earlier_versions_are_those_of_transformers(family, folder_of, tmp_path):
    from transformers import AutoProcessor

    for file in [*folder_of(family).glob("*.json"), *folder_of(family).glob("*.jinja")]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "processor_config.json"
    values = json.loads(file.read_text())
    values["video_processor"]["max_pixels"] = 28 * 28 * 2
    file.write_text(json.dumps(values))
    frames = np.zeros((2, 112, 112, 3), np.uint8)
    processor = AutoProcessor.from_pretrained(tmp_path)
    inputs = processor(text=[processor.video_token], videos=[frames])
    own = ProcessorEncoder(str(tmp_path), 500, frames=2).processor.video_processor
    assert [own.grid(*frames.shape[:3])] == [*map(tuple, inputs["video_grid_thw"].tolist())]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_smaller_than_a_token_have_the_size_of_transformers(family, folder_of):
    from transformers import AutoProcessor

    frames = np.zeros((2, 20, 100, 3), np.uint8)
    processor = AutoProcessor.from_pretrained(folder_of(family)).video_processor
    grid = processor(frames, do_sample_frames=False)["video_grid_thw"]
    own = ProcessorEncoder(str(folder_of(family)), 500, frames=2).processor.video_processor
    assert [own.grid(*frames.shape[:3])] == [*map(tuple, grid.tolist())]


@pytest.mark.parametrize("family", ["qwen2_audio", *OMNI])
def test_audio_is_cut_to_its_span_and_to_the_longest(family, folder_of, tmp_path, forked_children):
    """A sweep whose pitch is a function of time; the model takes at most 2 s."""
    (tmp_path / "a.flac").write_bytes(encode_audio("flac", 3.0))
    answer = {"role": "assistant", "content": "circle"}
    rows = [
        {"t0_s": 1.0, "t1_s": 1.5, "messages": [{"role": "user", "content": "<audio>?"}, answer]},
        {"texts": [{"text": each, "t0_s": 0.5, "t1_s": 2.7} for each in ("red", "blue")]},
        {"texts": [{"text": "red", "t0_s": 0.5, "t1_s": 0.9}, "blue"]},
    ]
    lines = [json.dumps({"id": str(n), "audio": "a.flac"} | row) for n, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    prepare(str(tmp_path / "rows.jsonl"), str(tmp_path / "set"), Prepare(vocab_size=0))
    prepared = PreparedSet.open(str(tmp_path / "set"))
    weights = str(folder_of(family))
    reader = ConversationReader(prepared, model_settings(weights, frames=0), 10**7)
    part, captions, too_long = prepared.read(np.arange(3))
    [samples] = reader.media_of(part)
    assert len(samples) == 16000 * max(0.5, FAMILIES[family].min_audio_s)
    assert time_of_sweep(samples[:1600], 16000) == pytest.approx(1.05, abs=0.02)
    [samples] = reader.media_of(captions, choice=1, phase=0.5)
    assert len(samples) == 2 * 16000
    assert time_of_sweep(samples[:1600], 16000) == pytest.approx(0.55, abs=0.02)
    count = ProcessorCounter(weights, question="what").build()
    for row, choices in ((part, 1), (captions, 2)):
        lengths = [len(reader.encode_row(row, choice).input_ids) for choice in range(choices)]
        assert count(row) == max(lengths)
    # The text of the whole file is about more than the model gets.
    for refused in (count, reader.encode_row):
        with pytest.raises(RowError, match=r"about 3.0 s of audio, and the model takes 2 s"):
            refused(too_long)


def test_span_without_frames_is_refused(folder_of, tmp_path):
    data = encode_video(times_ms=range(0, 1000, 40), audio="aac", audio_s=3.0)
    (tmp_path / "a.mp4").write_bytes(data)
    row = {"video": "a.mp4", "text": "red", "t0_s": 1.5, "t1_s": 2.5}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    prepare(str(tmp_path / "rows.jsonl"), str(tmp_path / "set"), Prepare(vocab_size=0))
    prepared = PreparedSet.open(str(tmp_path / "set"))
    reader = ConversationReader(prepared, model_settings(folder_of("qwen3_vl")), 10**7)
    with pytest.raises(BadMedia, match=r"no frame at 1.50 to 2.50 s; its frames are at 0.00 to 1"):
        reader.encode_row(prepared.read(np.arange(1))[0])


@pytest.mark.parametrize("span", [(0.2, 2.2), (1.6, 3.0), (1.2, 1.8)])
def test_span_beyond_the_frames_repeats_none(folder_of, reader, span):
    data = encode_video("mkv", times_ms=range(1000, 2000, 40), audio="flac", audio_s=3.0)
    clip = read_clip(Media("video", data, duration=1.0), reader.encoder, span)
    assert shown_times(clip) == pytest.approx([span[0] + time for time in clip.times_s], abs=0.041)
    assert len(clip.times_s) == len(reader.encoder.choose_times(span[1] - span[0], 0.5))


def test_frames_have_equal_steps_of_positions_at_any_phase(folder_of):
    weights = str(folder_of("qwen2_5_vl"))
    config = AutoConfig.from_pretrained(weights)
    encoder = ProcessorEncoder(weights, 500, frames=10)
    frames = np.zeros((10, 28, 28, 3), np.uint8)
    for number in range(20):
        shown = Clip(frames, encoder.choose_times(5.0, number / 20))
        row = encoder.encode_prompt([{"role": "user", "content": [VIDEO]}], [shown])
        ids = torch.from_numpy(row.input_ids).long()
        images = {name: torch.from_numpy(column) for name, column in row.images.items()}
        times = rope_index_of(config)(ids, images)[0][ids == config.video_token_id]
        # One second for two frames
        step = config.vision_config.tokens_per_second
        assert times.unique().diff().tolist() == [step] * 4


def test_recording_without_duration_is_read_to_its_end(folder_of):
    """As browsers write them: the header has no duration, and no check measured it."""
    times = range(0, 1600, 40)
    data = encode_video("mkv", times, audio="flac", muxer_options={"live": "1"})
    assert read_header(data, "video").duration_s == 0
    encoder = ProcessorEncoder(str(folder_of(OMNI[0])), 500, frames=4)
    clip = read_clip(Media("video", data), encoder)
    assert clip.times_s == pytest.approx([0.2, 0.6, 1.0, 1.4])
    assert shown_times(clip) == pytest.approx(clip.times_s, abs=0.041)
    assert len(read_clip(Media("audio", data), encoder)) == 1.6 * 16000


def test_evaluation_generates_answers_about_videos(folder_of, prepared):
    spec = model_settings(folder_of("qwen2_5_vl"))
    config: Any = SimpleNamespace(
        model=spec,
        evaluate=Evaluate(batch=3, num_generations=3),
        data=None,
        objective=Objective(),
    )
    shown: list[Any] = []
    evaluator = ConversationEvaluator(config, prepared, 10**7)
    scores = evaluator.score(Vlm(spec), Group(), None, 3, shown.append)
    assert (scores["rows"], scores["bad_rows"], scores["answered"]) == (3, 0, 3)
    # Not `blue`, which is the answer in another span.
    assert [each["references"] for each in shown[0]["answers"]] == [["circle"], ["circle"], ["red"]]
    parts = [part for each in shown[0]["answers"] for part in each["turns"][0]["parts"]]
    assert sum("image" in part for part in parts) == 4


def test_files_are_answered_as_the_stored_media(folder_of, prepared, reader, tmp_path):
    model = Vlm(model_settings(folder_of(OMNI[0])))
    paths = [tmp_path / "a.mp4", tmp_path / "a.flac"]
    paths[0].write_bytes(encode_video())
    paths[1].write_bytes(encode_audio("flac", 1.2))
    row = prepared.read(np.arange(2))[1]
    parts = [*row.messages[0]["content"][:1], AUDIO]
    messages = [row.messages[0] | {"content": parts}]
    sound = read_clip(Media("audio", paths[1].read_bytes()), model.encoder)
    media = [reader.media_of(row)[0], sound]
    expected = model.answer([messages], [media], 4)[0]
    assert Conversations(model).answer(messages, paths, 4) == expected


def test_videos_are_refused_by_name(folder_of, prepared):
    reader = ConversationReader(prepared, model_settings(folder_of("qwen3_vl"), 0), 10**7)
    with pytest.raises(RowError, match="the row has video, which the model does not take"):
        reader.encode_row(prepared.read(np.arange(1))[0])
    with pytest.raises(UsageError, match=r"takes no videos here.* qwen2_5_vl, qwen3_vl"):
        Vlm(model_settings(folder_of("internvl")))
