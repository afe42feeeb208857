"""Sizes that the header of an MP4 states, read before FFmpeg allocates memory for them."""

from __future__ import annotations

from collections.abc import Iterator

# Boxes that have boxes, on the way to those with numbers of samples.
_CONTAINERS = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"})
# Where the number of samples is in a box.
_COUNT_AT = {b"stsz": 8, b"stz2": 8, b"trun": 4}


def header_problem(data: bytes) -> str:
    """Return why an MP4 must not be given to FFmpeg, according to its header; empty if it may.

    It states more samples, in all tracks and fragments, than the file has bytes: FFmpeg allocates
    some 40 bytes for each. Or it is compressed, as QuickTime could write it.
    """
    total = 0
    for name, start, end in _boxes(data, 0, len(data)):
        if name == b"cmov":
            return "its header is compressed, which is not supported"
        at = _COUNT_AT.get(name)
        if at is not None and start + at + 4 <= end:
            total += int.from_bytes(data[start + at : start + at + 4])
    if total > len(data):
        return f"its header states {total:,} samples in {len(data):,} bytes"
    return ""


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, the start and the end of the content of each box between two offsets, and of
    the boxes inside it.
    """
    while start + 8 <= end:
        size = int.from_bytes(data[start : start + 4])
        name = data[start + 4 : start + 8]
        content = start + 8
        if size == 1:  # the size is in the next 8 bytes
            size = int.from_bytes(data[content : content + 8])
            content += 8
        elif size == 0:  # to the end
            size = end - start
        if size < content - start:
            return
        stop = min(start + size, end)
        yield name, content, stop
        if name in _CONTAINERS:
            yield from _boxes(data, content, stop)
        start += size
