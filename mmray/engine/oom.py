"""OOM recovery: work that may run out of memory, the ranks' vote on it, and its messages.

README.md, section "OOM recovery", describes the protocol. The vote is a CPU collective: it does not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from mmray.data.stream.order import SamplePlan
from mmray.engine.batch import smaller_micro
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.errors import is_out_of_memory

T = TypeVar("T")


def error_text(error: BaseException) -> str:
    """Message of an error, or its type if it has none, like Python's MemoryError."""
    return str(error).strip() or type(error).__name__


class RecoverableOom(Exception):
    """Some rank ran out of memory, all ranks know it, and no weight has changed: the step can be retried.

    The text is this rank's error, empty if it was another rank's.
    """


class OomGuard:
    """Runs the work of one step. Without `can_recover_oom` errors propagate (e.g. a forward has collectives)."""

    def __init__(self, group: Group, can_recover_oom: bool, timers: PhaseTimers):
        self.group, self.can_recover_oom, self.timers = group, can_recover_oom, timers
        self._error: str | None = None

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
                self._error = error_text(error)  # not the error: its traceback would keep the tensors alive
        return cast("Any", None)

    def run_and_sync(self, work: Callable[[], T]) -> T:
        """Return the result of `work` after a vote; raise RecoverableOom on all ranks if any ran out of memory."""
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
MAX_NAMED = 4  # rows named in a message; the rest are counted
RowNames = Callable[[list[int]], list[str]]  # row numbers in the prepared set -> names for messages


def row_numbers(rows: list[int]) -> list[str]:
    """Name rows by their numbers in the set."""
    return [f"row {row}" for row in rows]


def describe_rank_error(plan: SamplePlan, step: int, rank: int, names: RowNames, error: str) -> str:
    """Format a rank's rows of step `step` (from 0), the first of them by name, and its error; empty without one."""
    if not error:
        return ""
    positions = plan.positions(step, rank)
    rows = [int(row) for row in plan.rows_at(positions[positions >= 0])]
    more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
    return f"rank {rank}, with {', '.join(names(rows[:MAX_NAMED]))}{more}: {error.splitlines()[0]}"


def step_oom_message(step: int, micro: int, errors: list[str]) -> str:
    """Format an OOM of step `step` (from 0), and the errors of the ranks that have one."""
    smaller = smaller_micro(micro)
    retry = f"; retrying the same rows with {smaller} at a time"
    if smaller == 0:
        retry = f": a single row does not fit: {OOM_ADVICE}"
    errors = [error for error in errors if error]
    return f"out of memory at step {step + 1} with micro-batches of {micro} rows ({'; '.join(errors)}){retry}"
