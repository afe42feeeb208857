"""What to do when training workers fail: a pure function, so that a test needs no cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmray.errors import MmrayError, TrainingError


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended: `lost` (a worker, node or connection went away) or `raised` (code raised an error)."""

    kind: Literal["lost", "raised"]
    error: BaseException
    step: int  # the last step that was logged; 0: none

    def same_as(self, other: Failure | None) -> bool:
        """The same error at the same step: doing it again would not help."""
        return (
            other is not None
            and self.kind == other.kind == "raised"
            and (type(self.error), str(self.error), self.step) == (type(other.error), str(other.error), other.step)
        )


@dataclass(frozen=True)
class Retry:
    """Begin again from the newest good checkpoint."""

    reason: str


@dataclass(frozen=True)
class Raise:
    """Give up with this error."""

    error: MmrayError


def decide(failure: Failure, before: Failure | None, attempt: int, max_failures: int) -> Retry | Raise:
    """Retry a lost worker up to `max_failures` times; raise what retrying cannot mend. `attempt` counts from 1."""
    error = failure.error
    if isinstance(error, MmrayError):
        return Raise(error)
    told = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    if failure.same_as(before):
        return Raise(_final(f"the same error came back after step {failure.step}: {told}", error))
    if failure.kind == "raised" and failure.step == 0:
        return Raise(_final(f"before any step was logged: {told}", error))
    if attempt > max_failures:
        return Raise(
            _final(f"{attempt} attempts failed (cluster.max_failures {max_failures}); the last: {told}", error)
        )
    return Retry(f"after step {failure.step}: {told.splitlines()[0]}")


def _final(message: str, cause: BaseException) -> TrainingError:
    error = TrainingError(message)
    error.__cause__ = cause
    return error
