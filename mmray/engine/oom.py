"""Work that may run out of memory, and the vote of the ranks on whether it did.

step.py runs each stretch between two collectives through a MemoryVote. A rank that ran out of memory does nothing more
until the next vote, so that all ranks leave the step at one point, together; the loop then takes the same rows again in
smaller micro-batches. The vote goes from host to host and waits for no device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from mmray.engine.collectives import Group
from mmray.engine.metrics.writers import Phases
from mmray.errors import is_out_of_memory

T = TypeVar("T")


def said(error: BaseException) -> str:
    """What an error says; its kind where it has no words, as Python's own MemoryError."""
    return str(error).strip() or type(error).__name__


class NoRoom(Exception):
    """Some rank ran out of memory, all ranks know it, and no weight has changed: the step may be taken again.

    Running statistics of a BatchNorm that is `local` have moved: a copy of them for each step would cost more.
    The text is this rank's own error, empty where it was another's.
    """


class MemoryVote:
    """One step's stretches of work; without `may_vote` an error ends it, as where a forward holds collectives."""

    def __init__(self, group: Group, may_vote: bool, phases: Phases):
        self.group, self.may_vote, self.phases = group, may_vote, phases
        self._error: str | None = None

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns; None (whatever the type says) once this rank has met the end of its memory."""
        if not self.may_vote:
            return work()
        if self._error is None:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._error = said(error)  # not the error itself: its traceback would keep the tensors alive
        return cast("Any", None)

    def run_and_agree(self, work: Callable[[], T]) -> T:
        """What `work` returns, after a vote that all ranks have had room so far; raises NoRoom on all of them."""
        result = self.run(work)
        if self.may_vote and not self._vote():
            raise NoRoom(self._error or "")
        return result

    def _vote(self) -> bool:
        with self.phases("sync"):
            return self.group.all_agree(self._error is None)
