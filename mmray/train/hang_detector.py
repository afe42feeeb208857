"""Which rank has stopped, told from heartbeats: pure functions and the driver's memory of what each rank last did.

pulse.py sends the heartbeats from every training worker, board.py carries them, attempts.py acts on what is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SILENT_S = 5.0  # a beat comes each second; a process that is stopped, or holds its interpreter, sends none


@dataclass(frozen=True)
class HeartbeatRecord:
    """What a rank said of itself, and how long ago (`age_s`, by the clock of the board)."""

    rank: int
    node: str
    pid: int
    step: int
    mark: int  # grows with each step, and while something long moves on (starting, evaluating, saving)
    where: str  # file:line in function, the innermost of ours
    waits: bool  # inside a collective, or a backward that holds some: waiting for the others
    age_s: float = 0.0


@dataclass(frozen=True)
class Hang:
    """Ranks that hold the others up, in words for people."""

    stuck_ranks: tuple[int, ...]
    told: str


@dataclass
class HangDetector:
    """Remembers when each rank last moved; `limit_s` of standing still is a hang."""

    limit_s: float
    start_limit_s: float  # until the first step: models load, data workers start
    first_step: int = 0
    _moved: dict[int, tuple[int, float]] = field(default_factory=dict)

    def look(self, beats: Sequence[HeartbeatRecord], now_s: float) -> Hang | None:
        """The hang that these beats show at this time, or None."""
        stood_s = [self._still_s(beat, now_s) for beat in beats]
        over = [
            beat
            for beat, still_s in zip(beats, stood_s, strict=True)
            if still_s > (self.limit_s if beat.step > self.first_step else max(self.limit_s, self.start_limit_s))
        ]
        waiting = all(beat.waits and beat.age_s <= SILENT_S for beat in over)
        if not over or (waiting and min(stood_s) < self.limit_s):  # for a rank that writes or evaluates, and moves
            return None
        return _describe_hang(beats, max(stood_s))

    def _still_s(self, beat: HeartbeatRecord, now_s: float) -> float:
        mark, since_s = self._moved.get(beat.rank, (-1, now_s))
        if mark != beat.mark:
            since_s = now_s
        self._moved[beat.rank] = (beat.mark, since_s)
        return now_s - since_s


def stuck_ranks(beats: Sequence[HeartbeatRecord]) -> list[HeartbeatRecord]:
    """Those the others wait for: processes that do not answer, else ranks outside any collective, else all."""
    silent = [beat for beat in beats if beat.age_s > SILENT_S]
    outside = [beat for beat in beats if not beat.waits]
    return silent or outside or list(beats)


def _describe_hang(beats: Sequence[HeartbeatRecord], still_s: float) -> Hang:
    found = stuck_ranks(beats)
    who = "; ".join(
        f"rank {beat.rank} (process {beat.pid}, node {beat.node[:8]}) {_describe_rank(beat)}" for beat in found
    )
    return Hang(tuple(beat.rank for beat in found), f"no step for {still_s:.0f} s: {who}")


def _describe_rank(beat: HeartbeatRecord) -> str:
    if beat.age_s > SILENT_S:
        return f"does not answer since {beat.age_s:.0f} s, last seen at {beat.where}"
    return f"waits in a collective at {beat.where}" if beat.waits else f"stands at {beat.where}"
