"""Audio and video of every source become rows with their headers and spans, or are quarantined."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.config import Prepare
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.media import decode
from mmray.data.media.subtitles import parse_subtitles
from mmray.data.prepare.pipeline import prepare
from mmray.data.rows import MORE_TEXTS, BadRow
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.errors import DataError
from tests.data.media.synthetic import AUDIO_CODECS, encode_audio, encode_video
from tests.data.prepare.test_pipeline import quarantine

pytestmark = pytest.mark.usefixtures("in_process")
LAX = Prepare(max_bad_fraction=1.0, rows_per_shard=3, vocab_size=0)
SOUND = encode_audio("flac", 2.0)
CLIP = encode_video(times_ms=range(0, 2000, 40), audio="aac")
TEXTS = [
    {"text": "first words", "t0_s": 0.25, "t1_s": 0.75},
    {"text": "last words", "t0_s": 1.0, "t1_s": 1.9},
]
SRT = """1
00:00:00,250 --> 00:00:00,750
<i>first</i>
words

2
00:00:01,000 --> 00:00:01,900
last words
"""
VTT = """WEBVTT

NOTE a comment

intro
00:00.250 --> 00:00.750 align:start
first words

00:00:01.000 --> 00:00:01.900
<v Ann>last words</v>
"""


def read_all(folder: Path) -> list[Row]:
    prepared = PreparedSet.open(str(folder))
    return prepared.read(np.arange(prepared.num_rows))


def jsonl(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.flac").write_bytes(SOUND)
    (folder / "b.mp4").write_bytes(CLIP)
    rows = [
        {"id": "a", "audio": "a.flac", "texts": TEXTS},
        {"id": "b", "video": "b.mp4", "texts": TEXTS},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def parquet(folder: Path) -> Path:
    folder.mkdir()
    medium = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    texts = pa.list_(
        pa.struct([("text", pa.string()), ("t0_s", pa.float64()), ("t1_s", pa.float64())])
    )
    columns = {
        "id": pa.array(["a", "b"]),
        "audio": pa.array([{"bytes": SOUND, "path": "a.flac"}, None], medium),
        "video": pa.array([None, {"bytes": CLIP, "path": "b.mp4"}], medium),
        "texts": pa.array([TEXTS, TEXTS], texts),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


def tar(folder: Path) -> Path:
    folder.mkdir()
    members = {
        "a.flac": SOUND,
        "a.json": json.dumps({"texts": TEXTS}).encode(),
        "b.mp4": CLIP,
        "b.vtt": VTT.encode(),
    }
    with tarfile.open(folder / "rows.tar", "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return folder / "rows.tar"


def clips_and_subtitles(folder: Path) -> Path:
    folder.mkdir()
    files = {"a.flac": SOUND, "a.srt": SRT.encode(), "b.mp4": CLIP, "b.vtt": VTT.encode()}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("index_only", [False, True])
@pytest.mark.parametrize("make", [jsonl, parquet, tar, clips_and_subtitles])
def test_audio_and_video_from_every_source(tmp_path: Path, make: Any, index_only: bool) -> None:
    if index_only and make is parquet:
        pytest.skip("its bytes are inside the rows")
    source = make(tmp_path / "raw")
    manifest = prepare(str(source), str(tmp_path / "out"), LAX.replace(index_only=index_only))
    assert quarantine(tmp_path / "out") == []
    assert manifest.media_kinds == {"": {"audio": 1, "video": 1}}
    sound, clip = read_all(tmp_path / "out")
    for row, data in ((sound, SOUND), (clip, CLIP)):
        assert row.texts == ["first words", "last words"]
        assert row.spans == [[0.25, 0.75], [1.0, 1.9]]
        assert [media.data for media in row.media] == [data]
        assert bool(row.media[0].ref) == index_only and row.checksum_ok
    [audio] = sound.media
    assert (audio.kind, audio.rate, audio.channels, audio.width) == ("audio", 24000, 1, 0)
    assert audio.duration == pytest.approx(2.0)
    [video] = clip.media
    assert (video.kind, video.rate, video.channels) == ("video", 25, 1)
    assert (video.width, video.height) == (64, 64)
    assert video.duration == pytest.approx(2.0, abs=0.03)


@pytest.mark.parametrize("suffix", AUDIO_CODECS)
def test_audio_rate_stores_what_is_read_from_the_original(tmp_path: Path, suffix: str) -> None:
    jsonl(tmp_path / "raw")
    data = encode_audio(suffix, 3.0, 48000, channels=2)
    (tmp_path / "raw" / f"s.{suffix}").write_bytes(data)
    rows = [{"audio": f"s.{suffix}", "texts": TEXTS, "video": "b.mp4"}]
    assert prepare_rows(tmp_path, rows, audio_rate=16000) == []
    [row] = read_all(tmp_path / "out")
    audio, video = row.media
    assert video.data == CLIP and row.spans == [[0.25, 0.75], [1.0, 1.9]]
    assert audio.data.startswith(b"fLaC") and audio.checksum_ok
    assert (audio.rate, audio.channels) == (16000, 1)
    assert audio.duration == pytest.approx(decode.verify_media(data, "audio").end_s)
    for start, end in ((0.0, 1.0), *row.spans, (2.5, 3.2)):
        # From a seek the phase of the resampler differs, by up to a sample of 16,000 Hz.
        stored = decode.read_audio(audio.data, start, end, 16000)
        original = decode.read_audio(data, 0.0, 4.0, 16000)[round(start * 16000) :]
        np.testing.assert_array_equal(stored, original[: len(stored)])
        read = decode.read_audio(data, start, end, 16000)
        assert np.corrcoef(stored, read)[0, 1] > 0.9


def prepare_rows(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    """Prepare rows of JSON lines with the files a.flac and b.mp4; return the quarantine."""
    if not (folder / "raw").exists():
        jsonl(folder / "raw")
    lines = [json.dumps({"id": str(number)} | row) for number, row in enumerate(rows)]
    (folder / "raw" / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    prepare(str(folder / "raw" / "rows.jsonl"), str(folder / "out"), LAX.replace(**settings))
    return quarantine(folder / "out")


def test_spans_outside_the_medium_are_quarantined_with_the_numbers(tmp_path: Path) -> None:
    rows = [
        {"audio": "a.flac", "text": "x", "t0_s": 0.5, "t1_s": 2.3},
        {"audio": "a.flac", "text": "x", "t0_s": 0.5, "t1_s": 2.7},
        {"audio": "a.flac", "texts": ["whole", {"text": "x", "t0_s": 4, "t1_s": 9}]},
        {"audio": "a.flac", "text": "x", "t0_s": 1, "t1_s": 1},
        {"audio": "a.flac", "text": "x", "t0_s": 1},
        {"audio": "a.flac", "texts": ["whole", {"text": "x", "start": 1, "end": 1.5}]},
    ]
    bad = {each["key"]: each["detail"] for each in prepare_rows(tmp_path, rows)}
    assert bad.keys() == {"1", "2", "3", "4"}
    assert bad["1"] == "text 1 is at 0.50 to 2.70 s, and a.flac has 0.00 to 2.00 s"
    assert bad["2"] == "text 2 is at 4.00 to 9.00 s, and a.flac has 0.00 to 2.00 s"
    assert "t0_s and t1_s must be seconds, the first before the second" in bad["3"]
    first, last = read_all(tmp_path / "out")
    assert first.spans == [[0.5, 2.0]]  # cut to the medium
    assert last.spans == [None, [1.0, 1.5]]


def test_spans_as_other_programs_write_them(tmp_path: Path) -> None:
    chunks = [{"text": "x", "timestamp": [0.25, 0.5]}, {"text": "y", "timestamp": [1.0, None]}]
    prepare_rows(tmp_path, [{"audio": "a.flac", "texts": chunks}])
    [row] = read_all(tmp_path / "out")
    assert row.spans == [[0.25, 0.5], [1.0, 2.0]]  # the last one of Whisper may have no end
    (tmp_path / "raw" / "rows.csv").write_text(
        "clip,from,to,text\na.flac,0.5,1.5,in CSV\na.flac,one,two,no times\n"
    )
    settings = LAX.replace(columns=("audio=clip", "t0_s=from", "t1_s=to"))
    prepare(str(tmp_path / "raw" / "rows.csv"), str(tmp_path / "csv"), settings)
    [row] = read_all(tmp_path / "csv")
    assert row.spans == [[0.5, 1.5]]
    [bad] = quarantine(tmp_path / "csv")
    assert "must be seconds, the first before the second (got one and two)" in bad["detail"]


def test_rows_of_one_recording_differ_by_their_spans(tmp_path: Path) -> None:
    rows = [
        {"audio": "a.flac", "text": "x", "t0_s": 0, "t1_s": 1},
        {"audio": "a.flac", "text": "y", "t0_s": 1, "t1_s": 2},
        {"audio": "a.flac", "text": "z", "t0_s": 1, "t1_s": 2},
    ]
    bad = prepare_rows(tmp_path, rows, holdout=0.5)
    assert [(each["key"], each["detail"]) for each in bad] == [("2", "duplicate of row 1")]
    # All parts of a recording are held out, or none.
    assert len({row.split for row in read_all(tmp_path / "out")}) == 1


def test_a_pair_of_audio_and_video_needs_no_text(tmp_path: Path) -> None:
    jsonl(tmp_path / "raw")
    (tmp_path / "raw" / "c.ogg").write_bytes(encode_audio("ogg", 0.5, 48000))
    pairs = [{"audio": name, "video": "b.mp4"} for name in ("a.flac", "c.ogg")]
    # No captions are not the same captions.
    [bad] = prepare_rows(tmp_path, [*pairs, {"video": "b.mp4"}], duplicates="row")
    assert (bad["key"], bad["reason"]) == ("2", "no-text")
    rows = read_all(tmp_path / "out")
    assert [[media.kind for media in row.media] for row in rows] == [["audio", "video"]] * 2
    assert [row.texts for row in rows] == [[], []]


def test_mislabelled_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "raw")
    files = {
        "page.mp4": b"<!DOCTYPE html><html></html>",
        "empty.wav": b"",
        "sound.mp4": encode_audio("m4a", 0.5),
        "really_ogg.wav": encode_audio("ogg", 0.5, 48000),
    }
    for name, data in files.items():
        (tmp_path / "raw" / name).write_bytes(data)
    rows = [
        {"video": "page.mp4", "text": "x"},
        {"audio": "empty.wav", "text": "x"},
        {"video": "sound.mp4", "text": "x"},
        {"audio": "really_ogg.wav", "text": "kept"},
        {"image": "a.flac", "text": "x"},
        {"audio": [1, 2, 3], "text": "x"},
        {"image": "a.flac", "text": "x", "t0_s": 0, "t1_s": 1},
        {"audio": "../a.flac", "text": "x"},
    ]
    bad = {each["key"]: each["reason"] for each in prepare_rows(tmp_path, rows)}
    assert bad == {
        "0": "format",
        "1": "empty",
        "2": "no-video",
        "4": "format",
        "5": "audio",
        "6": "span",
        "7": "path",
    }


def test_a_folder_of_clips_without_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.flac").write_bytes(SOUND)
    with pytest.raises(DataError, match=r"has .flac 1 .*need texts or subtitles \(0.txt or 0.srt"):
        prepare(str(tmp_path / "raw"), str(tmp_path / "out"), LAX)


def test_without_the_extra_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_is_available", lambda: False)
    source = jsonl(tmp_path / "raw")
    with pytest.raises(DataError, match=r"pip install 'mmray\[media\]'"):
        prepare(str(source), str(tmp_path / "out"), LAX.replace(max_bad_fraction=0.01))


@pytest.mark.parametrize("text", ["WEBVTT\n\nno times\n", "1\n00:00:02,000 --> 00:00:01,000\nx\n"])
def test_subtitles_without_valid_times_are_bad_rows(text: str) -> None:
    with pytest.raises(BadRow):
        parse_subtitles(text, "a.srt")


def test_subtitles_keep_hours_lines_and_entities() -> None:
    text = "1\r\n01:02:03,5 --> 01:02:04,25\r\n{\\an8}a &amp; b\r\n<b>c</b>\r\n\r\n"
    [entry] = parse_subtitles(text, "a.srt")
    assert entry == {"text": "a & b c", "t0_s": 3723.5, "t1_s": 3724.25}


def test_automatic_captions_keep_each_line_once() -> None:
    """As YouTube writes them: a line of words with times, alone, and above the next line."""
    head = "WEBVTT\nKind: captions\n\n00:00:00.160 --> 00:00:02.389 align:start position:0%\n \n"
    first = "hello<00:00:00.480><c> and</c><00:00:00.640><c> welcome</c>\n\n"
    again = "00:00:02.389 --> 00:00:02.399 align:start position:0%\nhello and welcome\n \n\n"
    second = "00:00:02.399 --> 00:00:04.000 align:start position:0%\nhello and welcome\nto<"
    texts = parse_subtitles(head + first + again + second + "00:00:02.600><c> us</c>", "a.vtt")
    assert [each["text"] for each in texts] == ["hello and welcome", "to us"]
    assert [each["t0_s"] for each in texts] == [0.16, 2.399]


def cues(*entries: tuple[float, float, str]) -> str:
    texts = [f"00:00:{start:06.3f} --> 00:00:{end:06.3f}\n{text}" for start, end, text in entries]
    return "\n\n".join(["WEBVTT", *texts]) + "\n"


ROLLING = [
    (0.0, 2.0, " \nla la"),
    (2.0, 2.01, "la la\n "),
    (2.01, 4.0, "la la\nla la"),
    (4.0, 4.01, "la la"),
    (4.01, 6.0, "la la\nthe end"),
    (6.0, 6.01, "the end"),
    (9.0, 9.9, "the end"),
]


def test_rolling_captions_without_times_of_words_are_merged() -> None:
    texts = parse_subtitles(cues(*ROLLING), "a.vtt")
    assert [(each["text"], each["t0_s"], each["t1_s"]) for each in texts] == [
        ("la la", 0.0, 2.0),
        ("la la", 2.01, 4.0),
        ("the end", 4.01, 6.0),
        ("the end", 9.0, 9.9),
    ]
    timed = [(*cue[:2], cue[2].replace("\nthe", "\nthe<00:00:04.500>")) for cue in ROLLING]
    assert parse_subtitles(cues(*timed), "a.vtt") == texts


def test_rolling_captions_of_three_lines_are_merged() -> None:
    rows = ["a", "a\nb", "a\nb\nc", "b\nc\nd"]
    texts = parse_subtitles(cues(*((n, n + 1, row) for n, row in enumerate(rows))), "a.vtt")
    assert [each["text"] for each in texts] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "rows",
    [
        ["la la", "la la", "la la", "hey"],
        ["la la\nhey", "hey\nla la", "one\ntwo", "three\nfour"],
        ["no", "no\nyes"],
    ],
)
def test_lines_that_are_sung_twice_are_kept(rows: list[str]) -> None:
    texts = parse_subtitles(cues(*((n, n + 1, row) for n, row in enumerate(rows))), "a.vtt")
    assert [each["text"] for each in texts] == [row.replace("\n", " ") for row in rows]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("first\n\nsecond", "first second"),
        ("if a < b and b > c", "if a < b and b > c"),
        ("I <3 you <i>->", "I <3 you ->"),
        ("it&#39;s &quot;AT&T&quot;&lrm;", 'it\'s "AT&T"'),
    ],
)
def test_text_of_subtitles_is_kept(lines: str, expected: str) -> None:
    text = f"1\n00:00:01 --> 00:00:2,5\n{lines}\n\n2\n00:00:03,000 --> 00:00:04,000\nend\n"
    assert parse_subtitles(text, "a.srt") == [
        {"text": expected, "t0_s": 1.0, "t1_s": 2.5},
        {"text": "end", "t0_s": 3.0, "t1_s": 4.0},
    ]


def test_one_of_several_texts_is_used_and_the_others_are_counted(tmp_path: Path) -> None:
    source = clips_and_subtitles(tmp_path / "raw")
    (source / "b.mp4").rename(source / "b.MP4")
    (source / "b.vtt").rename(source / "b.VTT")
    (source / "a.txt").write_text("other\n")
    manifest = prepare(str(source), str(tmp_path / "out"), LAX)
    assert manifest.notices[MORE_TEXTS]["num_rows"] == 1
    assert {row.key: row.texts[0] for row in read_all(tmp_path / "out")} == {
        "a.flac": "other",
        "b.MP4": "first words",
    }
    archive = tar(tmp_path / "tar")
    add_member(archive, "b.txt", b"other")
    manifest = prepare(str(archive), str(tmp_path / "of_tar"), LAX)
    assert manifest.notices[MORE_TEXTS] == {"num_rows": 1, "example": "rows.tar/b"}


def test_subtitles_of_a_language_belong_to_the_clip_of_their_name(tmp_path: Path) -> None:
    source = clips_and_subtitles(tmp_path / "raw")
    (source / "b.vtt").rename(source / "b.pt.vtt")
    (source / "a.srt").rename(source / "a.v2.srt")
    assert prepare(str(source), str(tmp_path / "out"), LAX).num_rows == 1
    [row] = read_all(tmp_path / "out")
    assert (row.key, row.texts[0]) == ("b.mp4", "first words")


def test_subtitles_that_do_not_end_after_their_start_are_left_out_and_counted(
    tmp_path: Path,
) -> None:
    source = clips_and_subtitles(tmp_path / "raw")
    for name in ("a.srt", "b.vtt"):
        text = (source / name).read_text()
        (source / name).write_text(f"{text}\n\n9\n00:00:01.500 --> 00:00:01.500\nlost\n")
    manifest = prepare(str(source), str(tmp_path / "out"), LAX)
    [notice] = manifest.notices
    assert (notice, manifest.notices[notice]["num_rows"]) == (
        "a subtitle that does not end after its start is left out",
        2,
    )
    assert all("lost" not in row.texts for row in read_all(tmp_path / "out"))


def add_member(archive: Path, name: str, data: bytes) -> None:
    with tarfile.open(archive, "a") as file:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        file.addfile(info, io.BytesIO(data))


def test_fields_of_texts_that_are_not_used_are_counted(tmp_path: Path) -> None:
    jsonl(tmp_path / "raw")
    segment = {"text": "a", "start": 0.1, "end": 1.0, "speaker": "Ann", "words": []}
    assert prepare_rows(tmp_path, [{"audio": "a.flac", "texts": [segment, "b"]}]) == []
    notices = PreparedSet.open(str(tmp_path / "out")).manifest.notices
    assert [*notices] == ["`speaker` of a text is not used", "`words` of a text is not used"]


def test_comments_of_webvtt_are_left_out() -> None:
    text = f"{VTT}\n\nNOTE\n\nNOTE\nlast comment\n"
    texts = [each["text"] for each in parse_subtitles(text, "a.vtt")]
    assert texts == ["first words", "last words"]


def test_unreadable_times_of_subtitles_are_named() -> None:
    text = "1\n00:00:01,000 --> 00:00:02,000\na\n\n2\n-00:00:03,000 --> 00:00:04,000\nb\n"
    with pytest.raises(BadRow, match=r"a.srt: the times of line 6 cannot be read: '-00:00:03"):
        parse_subtitles(text, "a.srt")


def test_subtitles_without_empty_lines_between_them() -> None:
    text = "1\n00:00:01,000 --> 00:00:02,000\nx\n2\n00:00:03,000 --> 00:00:04,000\ny\n42"
    assert [each["text"] for each in parse_subtitles(text, "a.srt")] == ["x", "y 42"]


def damaged_files(count: int) -> list[tuple[str, bytes]]:
    """Truncated, bit-flipped, mislabelled and empty files, and files with a wrong header."""
    draw = random.Random("damaged")
    originals = {
        suffix: encode_audio(suffix, 0.5, 48000 if suffix == "ogg" else 24000)
        for suffix in ("wav", "flac", "mp3", "ogg", "m4a")
    }
    times = range(0, 400, 40)
    originals["mp4"] = encode_video(times_ms=times, audio="aac")
    originals["mkv"] = encode_video("mkv", times_ms=times, audio="libopus")
    originals["webm"] = encode_video("webm", times_ms=times, audio="libopus")
    files = []
    for number in range(count):
        suffix = draw.choice(list(originals))
        data = bytearray(originals[suffix])
        fault = number % 5
        if fault == 0:
            data = data[: draw.randrange(1, len(data))]
        elif fault == 1:
            for _ in range(draw.choice((1, 20, 200))):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif fault == 2:
            suffix = draw.choice(list(originals))
        elif fault == 3:
            data = data[:0] if draw.random() < 0.2 else bytearray(draw.randbytes(500))
        else:  # sizes, rates and durations are in the first bytes, in MP4 in the last ones
            at = draw.randrange(4, 200)
            at = len(data) - at - 8 if suffix in ("mp4", "m4a") and draw.random() < 0.7 else at
            data[at : at + 4] = draw.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4)))
        files.append((f"{number}.{suffix}", bytes(data)))
    return files


def test_damaged_files_are_prepared_or_quarantined(tmp_path: Path) -> None:
    jsonl(tmp_path / "raw")
    files = damaged_files(500)
    for name, data in files:
        (tmp_path / "raw" / name).write_bytes(data)
    kinds = {"wav": "audio", "flac": "audio", "mp3": "audio", "ogg": "audio", "m4a": "audio"}
    rows = [{kinds.get(name.rpartition(".")[2], "video"): name, "text": "x"} for name, _ in files]
    bad = prepare_rows(tmp_path, rows, duplicates="keep")
    kept = {row.key for row in read_all(tmp_path / "out")}
    assert kept.isdisjoint(each["key"] for each in bad)
    assert len(kept) + len(bad) == len(files)
    reasons = Counter(each["reason"] for each in bad)
    assert set(reasons) <= {
        *("truncated", "corrupt", "format", "empty", "no-video", "no-audio"),
        *("too-long", "too-large", "rate", "channels"),
    }
    # Files with another suffix, and those with a flipped bit that no checksum covers.
    assert 100 < len(kept) < 260
    # What was kept can be used.
    for row in read_all(tmp_path / "out")[::10]:
        [media] = row.media
        if media.kind == "video":
            decode.read_frames(media.data, [0.1, 0.2])
        else:
            decode.read_audio(media.data, 0.0, 0.2, 16000)


def test_the_child_process_measures_as_the_worker() -> None:
    decoder = SubprocessDecoder()
    assert decoder.check_media(CLIP, "video", 10_000) == decode.verify_media(CLIP, "video")
    with pytest.raises(decode.BadImage, match="no-audio"):
        decoder.check_media(encode_video(times_ms=[0, 40]), "audio", 10_000)
    decoder.close()


@pytest.mark.parametrize("rate", [0, 8000])
def test_what_a_file_has_and_its_clips_do_not_is_counted(tmp_path: Path, rate: int) -> None:
    (tmp_path / "b.mp4").write_bytes(CLIP)
    rows = [{"audio": "b.mp4", "text": "sound"}, {"video": "b.mp4", "text": "both"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = LAX.model_copy(update={"audio_rate": rate, "duplicates": "keep"})
    manifest = prepare(str(tmp_path / "rows.jsonl"), str(tmp_path / "set"), settings)
    assert manifest.notices == {
        "the video of a file in the column `audio` is not used": {
            "num_rows": 1,
            "example": "rows.jsonl:1",
        }
    }
