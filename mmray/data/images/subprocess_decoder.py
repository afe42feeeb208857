"""Test-decode images in a child process, so that a native decoder crash kills only the child and
names the image.

The child runs all native code of a reader: decoding and the resize of the model's transform. It
costs a copy of the bytes, so it is used only after a worker died or ran out of memory, for
thumbnails, to explain a bad row, and for held-out images that `mmray prepare` has not decoded.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson

from mmray.data.images.decode import MAX_PIXELS, BadImage, decode
from mmray.data.images.transform import resize_to_square, thumbnail, transform
from mmray.processes import Channel, ChildProcess

CRASH = "decoder-crash"  # reason of an image that killed its decoder


class SubprocessDecoder:
    """Checks in a child process that an image does not crash its decoder; the caller then decodes
    it itself.
    """

    def __init__(self) -> None:
        self.num_crashes = 0
        self._child: ChildProcess | None = None

    def check(
        self, data: bytes, max_pixels: int, transform_args: tuple[Any, ...] | None = None
    ) -> tuple[int, int]:
        """Return (width, height) of an image that decodes completely and survives `transform(rgb,
        *transform_args)`.

        Raises BadImage, with reason `decoder-crash` if the image kills the child.
        """
        if self._child is None:
            self._child = ChildProcess("decoder", serve)
        connection = self._child.connection
        try:
            connection.send((data, max_pixels, transform_args))
            # Not a pickled object: the image may have taken over the child.
            reply = orjson.loads(connection.recv_bytes())
        except (EOFError, OSError):
            died = self._child.death()
            self._child = None
            self.num_crashes += 1
            raise BadImage(CRASH, str(died)) from None
        if "reason" in reply:
            raise BadImage(reply["reason"], reply["detail"])
        return reply["width"], reply["height"]

    def thumbnail(self, data: bytes) -> str | None:
        """Return a thumbnail of untrusted encoded bytes; None if they cannot be decoded."""
        try:
            self.check(data, MAX_PIXELS)
            return thumbnail(decode(data))
        except (BadImage, MemoryError):
            return None

    def close(self) -> None:
        """Stop the child; the next image starts another one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def __del__(self) -> None:
        if self._child is not None:
            with suppress(OSError):
                self._child.connection.close()  # the child ends then


def serve(channel: Channel) -> None:
    """Main loop of the child: receives images, and sends replies in JSON."""
    while True:
        data, max_pixels, transform_args = channel.connection.recv()
        channel.connection.send_bytes(orjson.dumps(_check(data, max_pixels, transform_args)))


def _check(
    data: bytes, max_pixels: int, transform_args: tuple[Any, ...] | None
) -> dict[str, int | str]:
    try:
        rgb = decode(data, max_pixels)
        if transform_args is None:
            resize_to_square(rgb, 1, "squash", "bilinear")
        else:
            transform(rgb, *transform_args)
        return {"width": rgb.shape[1], "height": rgb.shape[0]}
    except BadImage as bad:
        return {"reason": bad.reason, "detail": bad.detail}
    except MemoryError:  # nothing else allocates here, so the image caused it
        return {"reason": "memory", "detail": "no memory to decode it"}
