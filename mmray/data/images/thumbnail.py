"""Thumbnails small enough to embed in a page: retrieval examples and the report."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from mmray.data.images.decode import MAX_PIXELS, BadImage, decode
from mmray.data.images.sandbox import SandboxedDecoder

SIDE = 128


def thumbnail(rgb: np.ndarray, side: int = SIDE) -> str:
    """Return a data URI of RGB uint8 [H, W, 3] as WebP, the longer side at most `side` pixels (about 3 KB at 128)."""
    small = Image.fromarray(rgb)
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "WEBP", quality=80, method=2)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def encoded_thumbnail(data: bytes, sandbox: SandboxedDecoder) -> str | None:
    """Return a thumbnail of untrusted encoded bytes, decoded in the sandbox first; None if they cannot be decoded."""
    try:
        sandbox.check(data, MAX_PIXELS)
        return thumbnail(decode(data))
    except (BadImage, MemoryError):
        return None
