"""Audio and video that crash the process that decodes them, like FFmpeg with a bug.

Without files that are encoded at import, because worker processes import it.
"""

from __future__ import annotations

import signal
from typing import Any
from unittest.mock import patch

from mmray.data.images import subprocess_decoder
from mmray.data.media import decode
from mmray.data.prepare.pack import pack_task as _pack_task

MARK = b"this ends its decoder"
_open = decode._open
_serve = subprocess_decoder.serve


def open_or_die(data: bytes, max_pixels: int) -> Any:
    if data.endswith(MARK):
        signal.raise_signal(signal.SIGSEGV)
    return _open(data, max_pixels)


def serve(channel: Any) -> None:
    with patch.object(decode, "_open", open_or_die):
        _serve(channel)


def pack_task(item: Any, job: Any) -> dict[str, Any]:
    """The task of prepare on a worker whose FFmpeg crashes on marked files."""
    with (
        patch.object(decode, "_open", open_or_die),
        patch.object(subprocess_decoder, "serve", serve),
    ):
        return _pack_task(item, job)
