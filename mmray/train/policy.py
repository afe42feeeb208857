"""What to do when an attempt to train has ended too early: pure functions, so that a test needs no cluster.

attempts.py turns what Ray Train raised into a `Failure`, asks `decide`, and does what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmray.errors import MmrayError, OutOfMemoryError, ResourceError, TrainingError

FailureKind = Literal["lost", "hung", "preempted", "raised"]


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended.

    `lost`: a worker, node or connection went away; `hung`: a rank stopped stepping and the watchdog ended the group;
    `preempted`: its node was taken away with notice; `raised`: code raised an error.
    """

    kind: FailureKind
    error: BaseException
    step: int  # the last that the attempt logged; the one it began from where it logged none
    logged: bool = True  # this attempt, or one before it, logged a step

    def same_as(self, other: Failure | None) -> bool:
        """The same error at the same step: doing it again would not help."""
        return (
            other is not None
            and self.kind == other.kind == "raised"
            and (type(self.error), str(self.error), self.step) == (type(other.error), str(other.error), other.step)
        )


@dataclass(frozen=True)
class Restart:
    """Begin again from the newest good checkpoint, with as many workers as there is room for."""

    reason: str


@dataclass(frozen=True)
class ReduceMicroBatch:
    """Begin again from the newest good checkpoint, with micro-batches of `micro` rows."""

    micro: int
    reason: str


@dataclass(frozen=True)
class Fail:
    """Give up with this error."""

    error: MmrayError


def count_failures(failures: int, kind: str, progressed: bool) -> int:
    """Failures in a row, this one included, where `failures` were before it; a newer checkpoint begins a new row.

    Nodes that are taken away with notice are no failures. Each new row is some steps nearer to the end, so the count
    ends a run that only fails, and never one that is unlucky now and then for weeks.
    """
    if kind == "preempted":
        return 0 if progressed else failures
    return 1 if progressed else failures + 1


def decide_recovery(
    failure: Failure, before: Failure | None, failures: int, max_failures: int
) -> Restart | ReduceMicroBatch | Fail:
    """Begin again after what was lost, up to `max_failures` in a row; raise what that cannot mend.

    `failures` is what `spent` says, `before` the failure of the attempt before.
    """
    error = failure.error
    if isinstance(error, OutOfMemoryError) and error.micro:
        return ReduceMicroBatch(error.micro, str(error))
    if isinstance(error, MmrayError) and failure.kind == "raised":
        return Fail(error)
    told = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    if failure.same_as(before):
        return Fail(_final(f"{_traceback(error)}the same error came back after step {failure.step}: {told}", error))
    if failure.kind == "raised" and not failure.logged:
        return Fail(_final(f"{_traceback(error)}before any step was logged: {told}", error))
    if failures > max_failures and isinstance(error, ResourceError):
        return Fail(error)  # no place was found: it says what to do, and its exit code is its own
    if failures > max_failures:
        row = f"{failures} failures without a new checkpoint between them (cluster.max_failures {max_failures})"
        return Fail(_final(f"{_traceback(error)}{row}; the last: {told}", error))
    return Restart(f"{failure.kind} after step {failure.step}: {told.splitlines()[0]}")


def _traceback(error: BaseException) -> str:
    """Where the user's own code raised it, as the worker noted it down: a traceback does not travel by itself."""
    return "".join(f"{note.rstrip()}\n" for note in getattr(error, "__notes__", ()))


def _final(message: str, cause: BaseException) -> TrainingError:
    error = TrainingError(message)
    error.__cause__ = cause
    return error
