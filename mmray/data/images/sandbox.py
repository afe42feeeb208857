"""Decodes images in a process of its own, for sources in which one has killed its worker.

A decoder that dies natively takes its process with it, and no `except` sees it. Here that is a child's process: the
image it was given last is the one to name. What is tried is all that a reader does in native code: decoding, and the
resizing of the part that it would take. Slower by a copy of the bytes, so it is used only after a death, and where
a death would cost a training worker: for held-out images that no prepare has decoded.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

import orjson

from mmray.data.images.augment import load_and_transform
from mmray.data.images.decode import BadImage, decode, read_pixels

if TYPE_CHECKING:
    import numpy as np

    from mmray.config import Augment, Inputs

TransformSpec = tuple["Inputs", "Augment | None", "np.ndarray | None"]  # how a model sees it: as `viewed` takes them
COMMAND = (sys.executable, "-m", "mmray.data.images.sandbox")
CRASH = "decoder-crash"  # reason of an image that killed its decoder


class SandboxedDecoder:
    """A child that decodes; begun with the first image, and anew after each death."""

    def __init__(self) -> None:
        self.deaths = 0
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, data: bytes, max_pixels: int, view: TransformSpec | None = None) -> tuple[int, int]:
        """(width, height) of an image that decodes to its end, and resizes as `view` says.

        Raises BadImage, with reason `crash` where it kills.
        """
        how = b"" if view is None else pickle.dumps(view)
        child = self._child or subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._child, line = child, b""
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):  # the answer that is missing tells it
            child.stdin.write(b"%d %d %d\n" % (len(how), len(data), max_pixels) + how + data)
            child.stdin.flush()
            line = child.stdout.readline()
        if not line:
            self._child, self.deaths = None, self.deaths + 1
            raise BadImage(CRASH, f"the decoder died of it (exit status {child.wait()})")
        answer = orjson.loads(line)
        if "reason" in answer:
            raise BadImage(answer["reason"], answer["detail"])
        return answer["width"], answer["height"]

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.communicate()
            self._child = None


class SandboxedDecoders:
    """Tries images once each, for several threads, each of which has a child of its own meanwhile."""

    def __init__(self) -> None:
        self._free: list[SandboxedDecoder] = []
        self._known: dict[str, BadImage | None] = {}

    def check(self, key: str, data: bytes, max_pixels: int) -> None:
        """Raises BadImage as `SandboxedDecoder.check` does; what it found for a key holds from then on."""
        if key not in self._known:
            try:
                sandbox = self._free.pop()
            except IndexError:
                sandbox = SandboxedDecoder()
            try:
                sandbox.check(data, max_pixels)
                self._known[key] = None
            except BadImage as bad:
                self._known[key] = bad
            finally:
                self._free.append(sandbox)
        if (found := self._known[key]) is not None:
            raise BadImage(found.reason, f"{key}: {found.detail}")

    def close(self) -> None:
        """End the children; what they found stays known."""
        while self._free:
            self._free.pop().close()


def serve(source: BinaryIO, out: BinaryIO) -> None:
    """The child: a line of lengths and the bytes of an image in, a line of JSON out, until the input ends."""
    while head := source.readline():
        how_long, length, max_pixels = map(int, head.split())
        how, data = source.read(how_long), source.read(length)
        try:
            image = decode(data, max_pixels)
            if how:
                load_and_transform(data, max_pixels, *pickle.loads(how))  # of the process that began this one
            else:
                read_pixels(data, 1, "squash", "bilinear", max_pixels)  # the stream's decoder, where it is another
            answer: dict[str, int | str] = {"width": image.width, "height": image.height}
        except BadImage as bad:
            answer = {"reason": bad.reason, "detail": bad.detail}
        except MemoryError:  # here, where nothing else takes any, it is the image's
            answer = {"reason": "memory", "detail": "no memory to decode it"}
        out.write(orjson.dumps(answer) + b"\n")
        out.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
