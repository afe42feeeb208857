"""An iterator whose first item is on its way before anyone asks for it: what makes it starts beside other work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain, islice
from typing import TypeVar

Item = TypeVar("Item")


def begun(made: Callable[[], Iterable[Item]]) -> Iterator[Item]:
    """The items of what `made` gives. It is called, and its first item awaited, in a thread from now on.

    The rest is taken by who asks for it, who also meets what was raised in the thread.
    """
    first: Future[Iterator[Item]] = Future()

    def begin() -> None:
        try:
            items = iter(made())
            first.set_result(chain(list(islice(items, 1)), items))
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that asks for the items
            first.set_exception(error)

    # A daemon, and not of a pool: nobody waits at the process's end for an item that does not come.
    threading.Thread(target=begin, name="mmray-first-item", daemon=True).start()
    return _taken(first)


def _taken(first: Future[Iterator[Item]]) -> Iterator[Item]:
    yield from first.result()
