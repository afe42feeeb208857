"""Test-decode images, audio and video in a child process, so that a native decoder crash kills
only the child and names the file.

The child runs all native code of a reader: decoding and the resize of the model's transform. It
costs a copy of the bytes, so it is used only after a worker died or ran out of memory, for
thumbnails, to explain a bad row, and for held-out images that `mmray prepare` has not decoded.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson

from mmray.data.images.decode import MAX_PIXELS, BadImage, decode
from mmray.data.images.pages import split_pages
from mmray.data.images.transform import resize_to_square, thumbnail, transform
from mmray.data.media.decode import MediaInfo, read_header, verify_media
from mmray.processes import Channel, ChildProcess

# Memory of the child process; a decoder takes below 1 GiB for the largest accepted images.
MAX_CHILD_BYTES = 4 << 30
CRASH = "decoder-crash"  # reason of an image that killed its decoder


class SubprocessDecoder:
    """Checks in a child process that an image does not crash its decoder; the caller then decodes
    it itself.

    The first call starts the child process, as does the first one after a crash, and `close` ends
    it.

    Attributes:
        num_crashes: How often the child process has died, since this object was constructed.
    """

    def __init__(self) -> None:
        self.num_crashes = 0
        self._child: ChildProcess | None = None

    def check(
        self, data: bytes, max_pixels: int, transform_args: tuple[Any, ...] | None = None
    ) -> tuple[int, int]:
        """Decode an image in the child process, and return the size of the upright image.

        Args:
            transform_args: Further arguments of `transform`, which the child then calls, too.

        Raises:
            BadImage: Also with reason `decoder-crash` (of the child) or `memory`.
        """
        reply = self.request(_check, data, max_pixels, transform_args)
        return reply["width"], reply["height"]

    def check_pages(self, data: bytes, max_pixels: int) -> None:
        """Decode all pages of a TIFF in the child process. Raises BadImage as `check` does."""
        self.request(_check_pages, data, max_pixels)

    def check_media(
        self, data: bytes, kind: str, max_pixels: int, header_only: bool = False
    ) -> MediaInfo:
        """Decode audio or video in the child process, or only its header. Raises BadImage as
        `check` does.
        """
        return MediaInfo(**self.request(_check_media, data, kind, max_pixels, header_only))

    def request(self, function: Callable[..., dict[str, Any]], *args: object) -> dict[str, Any]:
        """Call a function in the child process.

        Args:
            function: A function of a module, which is pickled by name; it returns a dict of JSON
                values without the key `reason`, or raises BadImage.

        Raises:
            BadImage: The function raised it. The reason is `decoder-crash` if the call killed the
                child, and `memory` if the child had no memory for it.
        """
        if self._child is None:
            self._child = ChildProcess("decoder", serve)
        connection = self._child.connection
        try:
            connection.send((function, args))
            # Not a pickled object: the image may have taken over the child.
            reply: dict[str, Any] = orjson.loads(connection.recv_bytes())
        except (EOFError, OSError):
            died = self._child.death()
            self._child = None
            self.num_crashes += 1
            raise BadImage(CRASH, str(died)) from None
        if "reason" in reply:
            raise BadImage(reply["reason"], reply["detail"])
        return reply

    def thumbnail(self, data: bytes) -> str | None:
        """Return a thumbnail of an image from an untrusted source as a data URI; None if it cannot
        be decoded.
        """
        try:
            self.check(data, MAX_PIXELS)
            return thumbnail(decode(data))
        except (BadImage, MemoryError):
            return None

    def close(self) -> None:
        """Stop the child process; the next check starts another one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def __del__(self) -> None:
        if self._child is not None:
            with suppress(OSError):
                self._child.connection.close()  # the child ends then


def serve(channel: Channel) -> None:
    """Decode images until the parent closes the channel: the main loop of the child process.

    Each message is a pickled tuple (function, arguments). The reply is JSON: the dict that the
    function returned, or {"reason", "detail"} of the BadImage that it raised.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # So a file that needs more fails by itself, before the kernel ends another process for it.
    if hard == resource.RLIM_INFINITY or hard > MAX_CHILD_BYTES:
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_CHILD_BYTES, hard))
    while True:
        function, args = channel.connection.recv()
        try:
            reply = function(*args)
        except BadImage as bad:
            reply = {"reason": bad.reason, "detail": bad.detail}
        except MemoryError:  # nothing else allocates here, so the image caused it
            reply = {"reason": "memory", "detail": "no memory to decode it"}
        channel.connection.send_bytes(orjson.dumps(reply))


def _check(data: bytes, max_pixels: int, transform_args: tuple[Any, ...] | None) -> dict[str, Any]:
    rgb = decode(data, max_pixels)
    if transform_args is None:
        resize_to_square(rgb, 1, "squash", "bilinear")
    else:
        transform(rgb, *transform_args)
    return {"width": rgb.shape[1], "height": rgb.shape[0]}


def _check_pages(data: bytes, max_pixels: int) -> dict[str, Any]:
    return {"pages": len(split_pages(data, max_pixels)[0])}


def _check_media(data: bytes, kind: str, max_pixels: int, header_only: bool) -> dict[str, Any]:
    read = read_header if header_only else verify_media
    return read(data, kind, max_pixels)._asdict()
