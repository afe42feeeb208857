"""Ranks that take blocks from decode actors, as tasks of Ray; without torch, which takes seconds to
import.
"""

import itertools
import os
import signal
import time
from collections import deque
from contextlib import closing

import ray

from mmray.cluster.ray_internals import actors_of_job
from mmray.data.stream.actors import rank_blocks
from mmray.data.stream.order import ResumePoint
from mmray.data.stream.pool_size import DecoderLimits


def taken(blocks, plan, steps):
    """Keys and positions of the first steps of one rank; None: all steps."""
    columns = ("key", "pos", "valid")
    rows = (
        row
        for block in blocks
        for row in zip(*(block[name].tolist() for name in columns), strict=True)
    )
    for _ in itertools.count() if steps is None else range(steps):
        step = list(itertools.islice(rows, plan.rank_rows))
        if not step:
            return
        yield [(key, position) for key, position, valid in step if valid]


@ray.remote(num_cpus=0)
def consume(reader, plan, rank, limits, block_mb, kills=False, pause_s=0.0):
    """Take all steps of a rank from decode actors, and kill an actor of any rank at two of them,
    at the first from step 4 and from step 12 on when one has started; return the steps and the
    notes of the stream.
    """
    notes, killed, steps = [], [], []
    start = ResumePoint(plan, 0)
    blocks = rank_blocks(reader, start, rank, plan.world_size, block_mb, limits, notes.append)
    with closing(blocks):
        for number, step in enumerate(taken(blocks, plan, None)):
            time.sleep(pause_s)
            steps.append(step)
            if kills and len(killed) < 2 and number >= (4, 12)[len(killed)]:
                alive = [pid for state, _, pid in actors_of_job("DecodeActor") if state == "ALIVE"]
                # On a busy machine all may still start; the rank decodes its rows itself then.
                for pid in [each for each in alive if each not in killed][:1]:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)
    return steps, notes


@ray.remote(num_cpus=0)
def compare(reader, plan, num_kept):
    """Keep the last blocks, and compare the oldest of them with its rows; return for each block
    whether it is in memory of the rank.
    """
    limits, kept, in_slots = DecoderLimits(2, 2, 2), deque(), []
    with closing(rank_blocks(reader, ResumePoint(plan, 0), 0, 1, 1e-3, limits, print)) as blocks:
        for block in blocks:
            kept.append(block)
            in_slots.append(block["image"].flags.writeable)  # objects of Ray are not
            if len(kept) == num_kept:
                oldest = kept.popleft()
                rows = plan.row_ids_at(oldest["pos"])
                assert (oldest["image"] == rows[:, None, None, None]).all()
    return in_slots
