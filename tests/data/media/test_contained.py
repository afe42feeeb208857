"""Media that crash FFmpeg, or whose headers make it allocate memory, cost only their own rows."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from mmray.config import Prepare
from mmray.data.images.decode import MAX_PIXELS, BadImage
from mmray.data.images.subprocess_decoder import MAX_CHILD_BYTES, SubprocessDecoder
from mmray.data.prepare import pipeline
from mmray.data.store.prepared_set import PreparedSet
from tests.data.media import crashing_media
from tests.data.media.synthetic import encode_audio, encode_video
from tests.data.prepare.test_pipeline import quarantine

WAV = encode_audio("wav", 0.5)
FLAC = encode_audio("flac", 0.5)
TIMES = range(0, 400, 40)
MP4 = encode_video(times_ms=TIMES, audio="aac")
MKV = encode_video("mkv", times_ms=TIMES, audio="libopus")


def changed(data: bytes, name: bytes, offset: int, value: bytes) -> bytes:
    """The file with other bytes at an offset from the first occurrence of a name."""
    at = data.index(name) + offset
    return data[:at] + value + data[at + len(value) :]


def many_tracks(count: int) -> bytes:
    """An MP4 with this many copies of its first track."""
    at = MP4.index(b"moov") - 4
    size = int.from_bytes(MP4[at : at + 4])
    track = MP4.index(b"trak") - 4
    copies = MP4[track : track + int.from_bytes(MP4[track : track + 4])] * count
    header = MP4[at + 8 : at + size] + copies
    return MP4[:at] + struct.pack(">I", len(header) + 8) + b"moov" + header + MP4[at + size :]


# Bytes, kind, most pixels of a frame, and the message.
WRONG_HEADERS: dict[str, tuple[bytes, str, int, str]] = {
    "frames": (
        encode_video("webm", TIMES[:2]),
        "video",
        4000,
        "its frames have no size, or over 4,000 pixels",
    ),
    "tracks": (many_tracks(1200), "video", MAX_PIXELS, "such as over 1,000 streams"),
    "rate": (
        changed(WAV, b"fmt ", 12, struct.pack("<I", 400_000_000)),
        "audio",
        MAX_PIXELS,
        "400,000,000 samples a second",
    ),
    "channels": (changed(WAV, b"fmt ", 10, b"\xff\xff"), "audio", MAX_PIXELS, "no channels"),
    "years": (
        changed(MKV, b"\x44\x89", 3, struct.pack(">d", 3e10)),
        "video",
        MAX_PIXELS,
        "30,000,000.0 s; the limit is 14,400 s",
    ),
}


def peak_bytes() -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()
    return {"bytes": int(status.split("VmHWM:")[1].split()[0]) * 1024}


def allocate() -> dict[str, Any]:
    return {"size": len(bytearray(MAX_CHILD_BYTES))}


def test_wrong_headers_take_no_memory_and_end_no_process() -> None:
    decoder = SubprocessDecoder()
    decoder.check_media(MP4, "video", MAX_PIXELS)
    before = decoder.request(peak_bytes)["bytes"]
    for data, kind, max_pixels, message in WRONG_HEADERS.values():
        for header_only in (True, False):
            with pytest.raises(BadImage, match=message):
                decoder.check_media(data, kind, max_pixels, header_only)
    assert decoder.request(peak_bytes)["bytes"] - before < 64 * 2**20
    # What is not known to be wrong is bounded too.
    with pytest.raises(BadImage, match="memory"):
        decoder.request(allocate)
    assert decoder.num_crashes == 0
    decoder.close()


def test_a_crash_at_a_header_costs_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_ray: None
) -> None:
    rows = []
    for number in range(6):
        data = FLAC + crashing_media.MARK if number == 3 else FLAC
        (tmp_path / f"{number}.flac").write_bytes(data)
        rows.append({"id": str(number), "audio": f"{number}.flac", "text": f"text {number}"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(pipeline, "pack_task", crashing_media.pack_task)
    settings = Prepare(check="header", max_bad_fraction=0.5, vocab_size=0, duplicates="keep")
    manifest = pipeline.prepare(str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), settings)
    assert (manifest.num_rows, manifest.reasons) == (5, {"decoder-crash": 1})
    [bad] = quarantine(tmp_path / "out")
    assert bad["key"] == "3" and "the decoder process was ended by SIGSEGV" in bad["detail"]
    kept = PreparedSet.open(str(tmp_path / "out")).keys()
    assert kept == ["0", "1", "2", "4", "5"]
