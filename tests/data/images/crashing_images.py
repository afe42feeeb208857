"""Images that crash the process that decodes them, like a native decoder with a bug.

Tests patch `open_image` in workers, and run `serve` in the child process of SubprocessDecoder.
"""

import os
import signal
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from mmray.data.images import decode as image
from mmray.data.images import subprocess_decoder

MARK = b"this kills its decoder, which is written down in "
_open = image.open_image
_serve = subprocess_decoder.serve
NEED = b"this needs more memory than there is"


def deadly(data, log):
    """Append a mark that crashes the decoder; each crashed process adds a line to the file
    `log`.
    """
    return data + MARK + str(log).encode()


def open_image(data, max_pixels):
    _, mark, log = data.partition(MARK)
    if mark:
        with Path(log.decode()).open("a") as file:
            file.write(f"{os.getpid()}\n")
        signal.raise_signal(signal.SIGSEGV)
    return _open(data, max_pixels)


def open_needy(data, max_pixels):
    if NEED in data:
        raise MemoryError
    return _open(data, max_pixels)


@contextmanager
def decoder_finds_no_memory():
    """Raise MemoryError for marked images, in this process only."""
    with patch.object(image, "open_image", open_needy):
        yield


@contextmanager
def decoder_dies():
    """Crash on marked images, in this process and its children."""
    with (
        patch.object(image, "open_image", open_image),
        patch.object(subprocess_decoder, "serve", serve),
    ):
        yield


def serve(channel):
    with patch.object(image, "open_image", open_image):
        _serve(channel)
