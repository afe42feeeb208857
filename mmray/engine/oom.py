"""OOM recovery: run work that may run out of memory, agree over all ranks whether it did, and format the error.

README.md, section "OOM recovery", describes the protocol. The agreement, a CPU collective, does not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from mmray.engine.batch import halve
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.errors import first_line, is_out_of_memory

T = TypeVar("T")


class RecoverableOom(Exception):
    """Some rank ran out of memory, all ranks left the step, and no weight has changed: the step can be retried.

    The text is this rank's error, empty if it was another rank's.
    """


class OomGuard:
    """Runs the work of one step. Without `can_recover_oom` errors propagate (e.g. a forward has collectives)."""

    def __init__(self, group: Group, can_recover_oom: bool, timers: PhaseTimers):
        self.group, self.can_recover_oom, self.timers = group, can_recover_oom, timers
        self._error: str | None = None

    def disable(self) -> None:
        """Let the errors of further work propagate, without an agreement."""
        self.can_recover_oom = False

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; None (despite the type) after this rank ran out of memory."""
        if not self.can_recover_oom:
            return work()
        if self._error is None:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._error = first_line(error)  # not the error: its traceback would keep the tensors alive
        return cast("Any", None)

    def run_and_sync(self, work: Callable[[], T]) -> T:
        """Return the result of `work` if it fitted on all ranks; otherwise raise RecoverableOom on all of them."""
        result = self.run(work)
        if self.can_recover_oom:
            with self.timers("sync"):
                all_fit = self.group.all_reduce_min(int(self._error is None)) == 1
            if not all_fit:
                raise RecoverableOom(self._error or "")
        return result


OOM_ADVICE = (
    "lower --model.inputs.image-side or --model.inputs.max-tokens, try --train.precision bf16 or --train.parallel "
    "fsdp, or use a smaller model or a larger GPU"
)


def format_oom(when: str, micro: int, errors: dict[int, str], retry: str) -> str:
    """Format an OOM with the errors of the ranks that have one; `retry` is what follows unless `micro` is 1."""
    action = f"{retry} with {halve(micro)} at a time" if micro > 1 else f"a single row does not fit: {OOM_ADVICE}"
    causes = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items() if error)
    return f"out of memory {when} with micro-batches of {micro} rows ({causes}); {action}"
