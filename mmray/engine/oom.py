"""Work that may run out of memory, and the vote of the ranks on whether it did.

step.py runs each stretch between two collectives through a MemoryVote. A rank that ran out of memory does nothing more
until the next vote, so that all ranks leave the step at one point, together; the loop then takes the same rows again in
smaller micro-batches. The vote goes from host to host and waits for no device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from mmray.data.stream.order import SamplePlan
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.errors import is_out_of_memory

T = TypeVar("T")


def error_text(error: BaseException) -> str:
    """What an error says; its kind where it has no words, as Python's own MemoryError."""
    return str(error).strip() or type(error).__name__


class RecoverableOom(Exception):
    """Some rank ran out of memory, all ranks know it, and no weight has changed: the step may be taken again.

    Running statistics of a BatchNorm that is `local` have moved: a copy of them for each step would cost more.
    The text is this rank's own error, empty where it was another's.
    """


class OomGuard:
    """One step's stretches of work; without `may_vote` an error ends it, as where a forward holds collectives."""

    def __init__(self, group: Group, can_recover_oom: bool, timers: PhaseTimers):
        self.group, self.can_recover_oom, self.timers = group, can_recover_oom, timers
        self._error: str | None = None

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns; None (whatever the type says) once this rank has met the end of its memory."""
        if not self.can_recover_oom:
            return work()
        if self._error is None:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._error = error_text(error)  # not the error itself: its traceback would keep the tensors alive
        return cast("Any", None)

    def run_and_sync(self, work: Callable[[], T]) -> T:
        """What `work` returns, after a vote that all ranks have had room so far; raises NoRoom on all of them."""
        result = self.run(work)
        if self.can_recover_oom and not self._vote():
            raise RecoverableOom(self._error or "")
        return result

    def _vote(self) -> bool:
        with self.timers("sync"):
            return self.group.all_reduce_and(self._error is None)


ADVICE = (
    "lower --model.inputs.image-side or --model.inputs.max-tokens, try --train.precision bf16 or --train.parallel "
    "fsdp, or take a smaller model or a larger GPU"
)

MAX_NAMED = 4  # rows named in a message; the rest are counted


RowNames = Callable[[list[int]], list[str]]  # numbers of rows of the set -> how people know them


def row_numbers(rows: list[int]) -> list[str]:
    """Rows by their numbers in the set, where nothing better is known."""
    return [f"row {row}" for row in rows]


def describe_rank_error(plan: SamplePlan, step: int, rank: int, names: RowNames, error: str) -> str:
    """A rank's rows of step `step` (from 0), the first of them by name, and the error that it met."""
    positions = plan.positions(step, rank)
    rows = [int(row) for row in plan.rows_at(positions[positions >= 0])]
    more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
    return f"rank {rank}, with {', '.join(names(rows[:MAX_NAMED]))}{more}: {error.splitlines()[0]}"


def step_oom_message(step: int, micro: int, errors: list[str], less: int) -> str:
    """Memory ran out in step `step` (from 0); `less`: rows of the micro-batches to come, 0: none."""
    before = f"no room for step {step + 1} in micro-batches of {micro} rows"
    where = "; ".join(error for error in errors if error)
    if less == 0:
        return f"{before} ({where}): a single row is too many: {ADVICE}"
    return f"{before} ({where}). Now the same rows again, {less} at a time"


def evaluation_oom_message(step: int, error: str) -> str:
    """Memory ran out in the evaluation after `step` steps, whose batches do not hang on those of training."""
    return (
        f"no room to score held-out rows after step {step} ({error.splitlines()[0]}): give fewer at a time with "
        "--evaluate.batch, and the same command goes on"
    )


def prefetch_oom_message(steps: int, micro: int, rank: int, error: str, less: int) -> str:
    """Memory ran out beside the steps, `steps` of them being taken; `less` as above."""
    before = f"no room after step {steps}, beside micro-batches of {micro} rows (rank {rank}: {error.splitlines()[0]})"
    return f"{before}: {ADVICE}" if less == 0 else f"{before}. Now {less} at a time"


def nonfinite_message(plan: SamplePlan, step: int, in_row: int, most: int, named: list[str]) -> str:
    """Gradients stayed non-finite up to step `step` (from 0); `named`: rows on which the model itself fails."""
    rows = f"rows {plan.rows_start(step):,} to {plan.rows_stop(step) - 1:,} of the run's order"
    which = f"outputs not finite for {', '.join(named)}" if named else f"all outputs finite, and the rows are {rows}"
    return (
        f"the gradient was not finite in {in_row} steps in a row, the last being step {step + 1} "
        f"(train.max_nonfinite_steps {most}; {which}). Lower --optimizer.lr, or try --train.precision fp32 to see "
        "whether the number format is the cause"
    )
