"""How the stream scales with the number of ranks.

    python -m tests.benchmarks.stream_scale 8

Decoding is replaced by a sleep, and ranks are threads of a few processes, so that one machine can
run many of them. Measured are the rate and the CPU time of each kind of process. The processes of
ranks and decode actors import this module, so it does not import torch.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from operator import sub
from typing import Any

import numpy as np
import psutil
import ray

from mmray.bench.results import describe_machine
from mmray.cli.bench import print_result
from mmray.cluster.connect import ray_session
from mmray.cluster.ray_internals import actors_of_job
from mmray.config import Cluster
from mmray.console.reporter import ConsoleReporter
from mmray.data.stream.actors import rank_blocks
from mmray.data.stream.blocks import Block
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.pool_size import DecoderLimits

BLOCK_ROWS = 128
SIDE = 32  # side of the images in pixels
MIN_DECODE_S = 0.25  # time of a block: 512 images/s for each process
# Of all ranks: with more, blocks take longer and their CPU time is not that of a machine without
# free cores.
MAX_BLOCKS_PER_S = 32
RANKS_PER_PROCESS = 8
ENDLESS = 10**6  # steps of a plan that no window finishes
START_TIMEOUT_S = 300.0
ROLES = {"DecodeActor": "decoder", "RankGroup": "rank", "gcs_server": "head", "raylet": "raylet"}


def bench_consumers(consumers: int, window_s: float) -> dict[str, Any]:
    """Measure how the stream scales with the number of ranks, with a sleep in place of decoding.

    Args:
        consumers: Number of ranks, each with one decode actor (a process that reads and decodes
            rows).
        window_s: Seconds of the measurement, after each rank has received two blocks (rows that are
            read together).

    Returns:
        `machine` (a dict: `cpu`, `cores`, `device`, `load_1min`, and versions `python` and
        `torch`), `rows` with one dict, and `notes` (texts). The row has `consumers`,
        `images_per_s`, `expected` (images/s that the sleep allows), `first_s` (seconds to the first
        blocks), CPU milliseconds per block in each kind of process (`decoder_ms`, `rank_ms`,
        `head_ms`, `raylet_ms`), and `head_cores` (CPU cores that the head uses).
    """
    plan = SamplePlan(
        num_rows=10**8,
        global_batch_size=BLOCK_ROWS * consumers,
        world_size=consumers,
        seed=0,
        steps=ENDLESS,
    )
    decode_s = max(MIN_DECODE_S, consumers / MAX_BLOCKS_PER_S)
    with ray_session(Cluster(workers=2)), ExitStack() as stack:
        group_class: Any = ray.remote(num_cpus=0)(RankGroup)
        groups = [
            group_class.remote(
                plan, range(first, min(consumers, first + RANKS_PER_PROCESS)), decode_s
            )
            for first in range(0, consumers, RANKS_PER_PROCESS)
        ]
        stack.callback(lambda: ray.get([group.stop.remote() for group in groups]))
        start_s = time.monotonic()
        _wait_for_first_blocks(groups, consumers)
        first_s = time.monotonic() - start_s
        blocks = sum(_counts(groups))
        cpu_s = _cpu_times()
        at_s = time.monotonic()
        time.sleep(window_s)
        blocks = sum(_counts(groups)) - blocks
        took_s = time.monotonic() - at_s
        used_s = {role: spent - cpu_s.get(role, 0.0) for role, spent in _cpu_times().items()}
    row: dict[str, Any] = {
        "consumers": consumers,
        "images_per_s": round(blocks * BLOCK_ROWS / took_s, 1),
        "expected": round(consumers * BLOCK_ROWS / decode_s, 1),
        "first_s": round(first_s, 1),
    }
    for role in ROLES.values():
        row[f"{role}_ms"] = round(1000 * used_s.get(role, 0.0) / blocks, 2)
    row["head_cores"] = round(used_s.get("head", 0.0) / took_s, 3)
    notes = [
        f"blocks of {BLOCK_ROWS} rows of {SIDE} pixels; decoding is a sleep of {decode_s} s",
        "ms: CPU time of a block, by process; head: gcs_server, the driver does nothing",
    ]
    return {"machine": describe_machine(), "rows": [row], "notes": notes}


def _counts(groups: list[Any]) -> list[int]:
    counts = ray.get([group.counts.remote() for group in groups])
    return [count for group in counts for count in group]


def _wait_for_first_blocks(groups: list[Any], num_actors: int) -> None:
    """Wait until all decode actors run and each rank has received two blocks of them."""
    end_s = time.monotonic() + START_TIMEOUT_S
    first: list[int] | None = None  # when all actors ran; before, ranks decode late blocks
    while first is None or min(map(sub, _counts(groups), first)) < 2:
        if time.monotonic() > end_s:
            raise TimeoutError(f"some ranks received no block within {START_TIMEOUT_S:g} s")
        states = [state for state, *_ in actors_of_job("DecodeActor")]
        if first is None and states.count("ALIVE") == num_actors:
            first = _counts(groups)
        time.sleep(0.5)


def _cpu_times() -> dict[str, float]:
    """Return the CPU seconds of the processes of each role so far."""
    spent_s: dict[str, float] = defaultdict(float)
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline()[:1])
            times = process.cpu_times()
        except psutil.Error:  # it ended meanwhile
            continue
        role = next((role for text, role in ROLES.items() if text in command), None)
        if role is not None:
            spent_s[role] += times.user + times.system
    return dict(spent_s)


class SleepingReader:
    """A reader of rows that decodes nothing, to measure the stream alone.

    Decode actors (processes that read and decode rows) call its `read_block`, as of any reader.

    Args:
        decode_s: Seconds to sleep for each block (rows that are read together).
    """

    pixel_shape = (3, SIDE, SIDE)
    row_bytes = 3 * SIDE**2
    subprocess_decoder = None

    def __init__(self, decode_s: float) -> None:
        self._decode_s = decode_s

    def read_block(
        self, plan: SamplePlan, positions: np.ndarray, pixels: np.ndarray | None = None
    ) -> Block:
        """Sleep for `decode_s` in place of decoding, and return undefined pixels.

        Args:
            plan: Unused.
            positions: Positions of the rows in the sample order, int64 [B].
            pixels: Memory for `image`; None: new memory.

        Returns:
            `image` uint8 [B, 3, 32, 32] and `pos`, the positions.
        """
        time.sleep(self._decode_s)
        if pixels is None:
            pixels = np.empty((len(positions), *self.pixel_shape), np.uint8)
        return {"image": pixels, "pos": positions}


class RankGroup:
    """Several ranks, one in each thread, which receive rows from the construction until `stop`;
    made a Ray actor with `ray.remote`.

    Args:
        plan: Order and number of the rows.
        ranks: The ranks of this process.
        decode_s: Seconds to sleep, in place of decoding, for each block (rows that are read
            together).
    """

    def __init__(self, plan: SamplePlan, ranks: range, decode_s: float) -> None:
        self._plan = plan
        self._decode_s = decode_s
        self._blocks = [0] * len(ranks)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._consume, args=(index, rank), daemon=True)
            for index, rank in enumerate(ranks)
        ]
        for thread in self._threads:
            thread.start()

    def _consume(self, index: int, rank: int) -> None:
        reader: Any = SleepingReader(self._decode_s)
        start = ResumePoint(self._plan, 0)
        limits = DecoderLimits(1, 1, 1)
        world = self._plan.world_size
        block_mb = BLOCK_ROWS * reader.row_bytes / 1e6
        with closing(rank_blocks(reader, start, rank, world, block_mb, limits, print)) as blocks:
            for step, block in enumerate(blocks):
                if not np.array_equal(block["pos"], self._plan.positions(step, rank)):
                    raise RuntimeError(
                        f"rank {rank} received rows that do not belong to step {step}"
                    )
                self._blocks[index] += 1
                if self._stop.is_set():
                    return

    def counts(self) -> list[int]:
        """Return how many blocks (rows that are read together) each rank of this process has
        received.
        """
        return list(self._blocks)

    def stop(self) -> None:
        """Stop the ranks after their next block, and wait for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("consumers", type=int, help="ranks, each with a decode actor")
    parser.add_argument("--window-s", type=float, default=3.0)
    options = parser.parse_args()
    print_result(bench_consumers(options.consumers, options.window_s), ConsoleReporter())


if __name__ == "__main__":
    # Processes of Ray import the classes of this module by its name.
    from tests.benchmarks.stream_scale import main as main_of_module

    main_of_module()
