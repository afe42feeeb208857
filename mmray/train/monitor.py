"""Watches over an attempt from the driver: ranks that stand still, nodes that are taken away, room for more workers.

`look` is called a few times a second by attempts.py; each concern has its own pace. What it decides reaches the ranks
through the board, and rides on the vote of the next step: no rank waits for anybody in the hot path.
`ray.train.get_preemption_info` would do for the second, but it is a barrier over all ranks; the driver reads what Ray's
watcher, which is off, would read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray.exceptions

from mmray.cluster.autoscaling import AutoscalerRequest
from mmray.cluster.placement import draining_nodes, kill_processes, live_nodes
from mmray.config import Config
from mmray.train.coordinator import RunMonitor
from mmray.train.hang_detector import Hang, HangDetector
from mmray.train.resources import num_additional_workers, request_nodes

HANG_LOOK_S, DRAIN_LOOK_S, ROOM_LOOK_S = 1.0, 1.0, 5.0
ROOM_LOOKS = 2  # in a row with room before a group is given up for a larger one; four times as many after each in vain
STACKS_S = 3.0  # until stacks are written: a beat comes each second
NOTICE_S = 3.0  # from the driver's wish to the ranks' vote, in time that is not a step


def checkpoint_deadline_s(deadline_s: float, checkpoint_s: float, step_s: float) -> float:
    """Time of day at which to ask for the last checkpoint before a node goes; 0, at once, where too little is known.

    Twice the measured write, and two steps: the one under way, and the one that carries the wish.
    """
    if not deadline_s or not checkpoint_s:
        return 0.0
    return deadline_s - 2 * checkpoint_s - 2 * step_s - NOTICE_S


@dataclass
class AttemptMonitor:
    """What the driver does about one attempt of `world` workers while it runs."""

    config: Config  # as the user asked
    world: int
    run_monitor: RunMonitor
    first_step: int
    failed_resizes: int = 0  # how often such a group made way for a larger one, and was back
    autoscaler: AutoscalerRequest = field(
        default_factory=lambda: AutoscalerRequest("mmray")
    )  # the wish for nodes that a larger group needs
    hang: Hang | None = None
    leaving: bool = False  # a node of the group is being taken away
    _due_s: dict[str, float] = field(default_factory=dict)
    _room_seen: int = 0
    _watchdog: HangDetector = field(init=False)

    def __post_init__(self) -> None:
        cluster = self.config.cluster
        self._watchdog = HangDetector(cluster.hang_timeout_s, cluster.start_timeout_s, self.first_step)

    def look(self) -> None:
        """Look at what is due."""
        self._at(HANG_LOOK_S, self._stop_hang)
        self._at(DRAIN_LOOK_S, self._leave_nodes)
        if self.world < self.config.cluster.max_workers:
            self._at(ROOM_LOOK_S, self._grow)

    def _at(self, every_s: float, act: Callable[[], None]) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s.get(act.__name__, 0.0):
            self._due_s[act.__name__] = now_s + every_s
            try:
                act()
            except (ray.exceptions.RayError, RuntimeError, OSError) as error:  # Ray does not answer: the group goes on
                self.run_monitor.reporter.log(f"Ray did not answer, looking again: {error}", "cluster")

    def _stop_hang(self) -> None:
        """End the processes of a group that hangs, when all who can have written down where they stand."""
        hang = self._watchdog.look(self.run_monitor.beats, time.monotonic())
        if hang is None or self.hang is not None:
            return
        self.hang = hang
        self.run_monitor.reporter.log(f"{hang.told}; stacks in the run's folder, stacks/", "hang")
        self.run_monitor.coordinator.ask_for_stacks.remote()
        beats = self.run_monitor.beats
        time.sleep(STACKS_S)
        kill_processes((beat.node, beat.pid) for beat in beats)

    def _leave_nodes(self) -> None:
        """Ask for a checkpoint in time where a node of the group is being taken away."""
        going = draining_nodes()
        deadlines = [going[beat.node] for beat in self.run_monitor.beats if beat.node in going]
        if not deadlines:
            return
        self.leaving = True
        leave_s = min(
            checkpoint_deadline_s(deadline, self.run_monitor.checkpoint_s, self.run_monitor.step_s)
            for deadline in deadlines
        )
        if time.time() >= leave_s:
            left = f"in {min(deadlines) - time.time():.0f} s" if min(deadlines) else "soon"
            self.run_monitor.ask("preempted", f"a node is taken away {left}: a checkpoint, then elsewhere")

    def _grow(self) -> None:
        """Ask for a checkpoint and a larger group where more workers have a place, at several looks in a row."""
        request_nodes(self.config, self.autoscaler, self.world)
        more = num_additional_workers(self.config, live_nodes().nodes, self.world) if self.run_monitor.beats else 0
        self._room_seen = self._room_seen + 1 if more else 0
        if self._room_seen >= ROOM_LOOKS * 4**self.failed_resizes:
            self.run_monitor.ask(
                "resize", f"there is room for {self.world + more} workers: a checkpoint, then all of them"
            )
