"""Rows of a chunk in their order, with the images that lie at addresses: asked for before their row's turn comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from mmray.data.formats.rows import BadRow, RawRow, row_of
from mmray.data.formats.source import Item

WINDOW = 32  # images on their way, and rows that wait for them
Fetch = Callable[[str], Future[bytes]]
_Waiting = tuple[Item, RawRow | BadRow, list[Future[bytes] | None]]


def rows_ahead(
    items: Iterable[Item], hosts: tuple[str, ...], fetch: Fetch | None
) -> Iterator[tuple[Item, RawRow | BadRow]]:
    """Each item with its row, or what is wrong with it; without `fetch` an address stays one.

    Memory holds WINDOW fetched images: a row has one at most.
    """
    waiting: deque[_Waiting] = deque()
    for item in items:
        raw = _parsed(item, hosts)
        wanted = raw.images if fetch and isinstance(raw, RawRow) else ()
        waiting.append((item, raw, [fetch(one.url) if fetch and one.url else None for one in wanted]))
        while waiting and (len(waiting) > WINDOW or not any(waiting[0][2])):
            yield _fetched(*waiting.popleft())
    while waiting:
        yield _fetched(*waiting.popleft())


def _parsed(item: Item, hosts: tuple[str, ...]) -> RawRow | BadRow:
    if isinstance(item.values, BadRow):
        return item.values
    try:
        return row_of(item.values, item.origin, hosts)
    except BadRow as bad:
        return bad


def _fetched(item: Item, raw: RawRow | BadRow, images: list[Future[bytes] | None]) -> tuple[Item, RawRow | BadRow]:
    """The row with the bytes of its images in it, once they are all there."""
    if isinstance(raw, BadRow) or not any(images):
        return item, raw
    try:
        found = [
            one if coming is None else replace(one, data=coming.result())
            for one, coming in zip(raw.images, images, strict=True)
        ]
    except BadRow as bad:
        return item, BadRow(bad.stage, bad.reason, bad.detail, raw.key)
    return item, replace(raw, images=tuple(found))
