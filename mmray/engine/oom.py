"""OOM recovery: run work that may run out of memory, agree over all ranks whether it did, and
format the error.

README.md, section "OOM recovery", describes the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from mmray.engine.batch import halve
from mmray.engine.collectives import Group
from mmray.errors import first_line, is_out_of_memory

T = TypeVar("T")


class RecoverableOom(Exception):
    """Some rank ran out of memory, all ranks left the step, and no weight has changed: the step can
    be retried.

    The text is this rank's error, empty if it was another rank's.
    """


class OomGuard:
    """Runs the work of a step before its last backward; after an OOM this rank skips the rest of
    that work.

    It still takes part in the collectives of the step, because other ranks wait in them. Not
    `enabled`: errors propagate, because there is one rank, or a forward has collectives.
    """

    def __init__(self, group: Group, enabled: bool = False):
        self.group, self.enabled = group, enabled
        self.error: str | None = None  # of this rank

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`;

        None (despite the type) after this rank ran out of memory.
        """
        if not self.enabled:
            return work()
        if self.error is None:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # not the error: its traceback would keep the tensors alive
                self.error = first_line(error)
        return cast("Any", None)

    def any_rank_failed(self) -> bool:
        """Return whether some rank ran out of memory; a collective if enabled, called by all ranks
        or none.
        """
        return self.enabled and self.group.all_reduce_min(int(self.error is None)) == 0


OOM_ADVICE = (
    "lower --model.inputs.image-side or --model.inputs.max-tokens, try --train.precision bf16 or "
    "--train.parallel "
    "fsdp, or use a smaller model or a larger GPU"
)


def format_oom(when: str, micro: int, errors: dict[int, str], retry: str) -> str:
    """Format an OOM with the errors of the ranks that have one;

    `retry` is what follows unless `micro` is 1.
    """
    action = (
        f"{retry} with {halve(micro)} at a time"
        if micro > 1
        else (f"a single row does not fit: {OOM_ADVICE}")
    )
    causes = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items() if error)
    return f"out of memory {when} with micro-batches of {micro} rows ({causes}); {action}"
