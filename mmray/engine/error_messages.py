"""What people are told when a step cannot be taken: which step, which rows by name, and what to do. For loop.py."""

from __future__ import annotations

from collections.abc import Callable

from mmray.data.stream.order import SamplePlan
from mmray.engine.memory_probe import ADVICE

NAMED = 4  # rows named in a message; the rest are counted
Names = Callable[[list[int]], list[str]]  # numbers of rows of the set -> how people know them


def by_number(rows: list[int]) -> list[str]:
    """Rows by their numbers in the set, where nothing better is known."""
    return [f"row {row}" for row in rows]


def rows_and_error(plan: SamplePlan, step: int, rank: int, names: Names, error: str) -> str:
    """A rank's rows of step `step` (from 0), the first of them by name, and the error that it met."""
    positions = plan.positions(step, rank)
    rows = [int(row) for row in plan.rows_at(positions[positions >= 0])]
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"rank {rank}, with {', '.join(names(rows[:NAMED]))}{more}: {error.splitlines()[0]}"


def no_room(step: int, micro: int, errors: list[str], less: int) -> str:
    """Memory ran out in step `step` (from 0); `less`: rows of the micro-batches to come, 0: none."""
    before = f"no room for step {step + 1} in micro-batches of {micro} rows"
    where = "; ".join(error for error in errors if error)
    if less == 0:
        return f"{before} ({where}): a single row is too many: {ADVICE}"
    return f"{before} ({where}). Now the same rows again, {less} at a time"


def no_room_to_score(step: int, error: str) -> str:
    """Memory ran out in the evaluation after `step` steps, whose batches do not hang on those of training."""
    return (
        f"no room to score held-out rows after step {step} ({error.splitlines()[0]}): give fewer at a time with "
        "--evaluate.batch, and the same command goes on"
    )


def no_room_between(steps: int, micro: int, rank: int, error: str, less: int) -> str:
    """Memory ran out beside the steps, `steps` of them being taken; `less` as above."""
    before = f"no room after step {steps}, beside micro-batches of {micro} rows (rank {rank}: {error.splitlines()[0]})"
    return f"{before}: {ADVICE}" if less == 0 else f"{before}. Now {less} at a time"


def not_finite(plan: SamplePlan, step: int, in_row: int, most: int, named: list[str]) -> str:
    """Gradients stayed non-finite up to step `step` (from 0); `named`: rows on which the model itself fails."""
    rows = f"rows {plan.rows_start(step):,} to {plan.rows_stop(step) - 1:,} of the run's order"
    which = f"outputs not finite for {', '.join(named)}" if named else f"all outputs finite, and the rows are {rows}"
    return (
        f"the gradient was not finite in {in_row} steps in a row, the last being step {step + 1} "
        f"(train.max_nonfinite {most}; {which}). Lower --optimizer.lr, or try --train.precision fp32 to see whether "
        "the number format is the cause"
    )
