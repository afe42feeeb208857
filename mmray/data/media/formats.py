"""Formats of audio and video that are read, by the first bytes of a file, and their file names."""

from __future__ import annotations

import re

# FFmpeg's demuxer by the first bytes. Only these demuxers are used, because others, such as those
# of playlists, open further files and URLs.
_DEMUXERS = {
    "wav": re.compile(rb"(RIFF|RF64|RIFX).{4}WAVE", re.S),
    "flac": re.compile(rb"fLaC"),
    "ogg": re.compile(rb"OggS"),
    "mov": re.compile(rb".{4}(ftyp|moov|mdat|wide|free|skip)", re.S),
    "matroska": re.compile(rb"\x1aE\xdf\xa3"),
    # An ID3 tag, or the sync bits of a frame of layer 1 to 3.
    "mp3": re.compile(rb"ID3|\xff[\xe2-\xe7\xea-\xef\xf2-\xf7\xfa-\xff]"),
}
AUDIO_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a")
VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov", ".m4v")
SUBTITLE_SUFFIXES = (".srt", ".vtt")
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*")  # en, pt-BR, zh-Hans
NAMES = "WAV, FLAC, MP3, Ogg, MP4 (also M4A and MOV) or Matroska (also WebM)"
_HEAD_BYTES = 64


def detect_demuxer(data: bytes) -> str | None:
    """Return the name of FFmpeg's demuxer for encoded audio or video by its first 64 bytes; None if
    it is not a format that is read.
    """
    head = data[:_HEAD_BYTES]
    return next((name for name, each in _DEMUXERS.items() if each.match(head)), None)


def media_kind(name: str) -> str | None:
    """Return `audio` or `video` by the suffix of a file name, in upper or lower case, or None."""
    name = name.lower()
    if name.endswith(AUDIO_SUFFIXES):
        return "audio"
    return "video" if name.endswith(VIDEO_SUFFIXES) else None
