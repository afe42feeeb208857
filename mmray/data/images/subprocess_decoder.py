"""Test-decode images in a child process, so that a native decoder crash kills only the child and
names the image.

The child runs all native code of a reader: decoding and the resize of the model's transform. It
costs a copy of the bytes, so it is used only after a worker died or ran out of memory, for
thumbnails, to explain a bad row, and for held-out images that `mmray prepare` has not decoded.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import suppress
from typing import Any, BinaryIO

import orjson

from mmray.data.images.decode import MAX_PIXELS, BadImage, decode
from mmray.data.images.transform import resize_to_square, thumbnail, transform

COMMAND = (sys.executable, "-m", "mmray.data.images.subprocess_decoder")
CRASH = "decoder-crash"  # reason of an image that killed its decoder


class SubprocessDecoder:
    """Checks in a child process that an image does not crash its decoder; the caller then decodes
    it itself.
    """

    def __init__(self) -> None:
        self.num_crashes = 0
        self._child: subprocess.Popen[bytes] | None = None

    def check(
        self, data: bytes, max_pixels: int, transform_args: tuple[Any, ...] | None = None
    ) -> tuple[int, int]:
        """Return (width, height) of an image that decodes completely and survives `transform(rgb,
        *transform_args)`.

        Raises BadImage, with reason `decoder-crash` if the image kills the child.
        """
        args = b"" if transform_args is None else pickle.dumps(transform_args)
        child = self._child = self._child or subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        line = b""
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):  # detected by the missing reply
            child.stdin.write(b"%d %d %d\n" % (len(args), len(data), max_pixels) + args + data)
            child.stdin.flush()
            line = child.stdout.readline()
        if not line:
            self._child, self.num_crashes = None, self.num_crashes + 1
            raise BadImage(CRASH, f"the decoder process died (exit status {child.wait()})")
        reply = orjson.loads(line)
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
            self._child.communicate()
            self._child = None

    __del__ = close


def serve(source: BinaryIO, out: BinaryIO) -> None:
    """Main loop of the child: reads a line of lengths and the bytes of an image, writes a line of
    JSON, until EOF.
    """
    while head := source.readline():
        args_bytes, data_bytes, max_pixels = map(int, head.split())
        args, data = source.read(args_bytes), source.read(data_bytes)
        reply: dict[str, int | str]
        try:
            rgb = decode(data, max_pixels)
            if args:
                transform(rgb, *pickle.loads(args))  # from the parent process
            else:
                resize_to_square(rgb, 1, "squash", "bilinear")
            reply = {"width": rgb.shape[1], "height": rgb.shape[0]}
        except BadImage as bad:
            reply = {"reason": bad.reason, "detail": bad.detail}
        except MemoryError:  # nothing else allocates here, so the image caused it
            reply = {"reason": "memory", "detail": "no memory to decode it"}
        out.write(orjson.dumps(reply) + b"\n")
        out.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
