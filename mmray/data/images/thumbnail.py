"""A picture small enough to live inside a page: what examples of retrieval and the report show of an image."""

from __future__ import annotations

import base64
import io

from PIL import Image

from mmray.data.images.decode import MAX_PIXELS, BadImage, decode
from mmray.data.images.sandbox import SandboxedDecoder

SIDE = 128


def thumbnail(picture: Image.Image, side: int = SIDE) -> str:
    """A data URI of the picture as WebP, its longer side `side` pixels at most (about 3 KB at 128)."""
    small = picture.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "WEBP", quality=80, method=2)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def encoded_thumbnail(data: bytes, sandbox: SandboxedDecoder) -> str | None:
    """The thumbnail of encoded bytes of which nobody knows whether they can be decoded; None where they cannot.

    They are tried in the child of `sandbox` first: this process is one that must not die of them.
    """
    try:
        sandbox.check(data, MAX_PIXELS)
        return thumbnail(decode(data))
    except (BadImage, MemoryError):
        return None
