"""The stream of one worker without Ray: child processes write pixels into shared memory."""

import os
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

from mmray import processes
from mmray.config import Inputs
from mmray.data.stream import local
from mmray.data.stream.local import LocalBlocks
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import ResourceError
from mmray.processes import SPAWN
from tests.made import CAPTIONS, make_set, noisy, png, row

pytestmark = pytest.mark.usefixtures("forked_children")
NUM_ROWS = 60
INPUTS = Inputs(image_side=8, fit="squash", max_tokens=12)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A set with an unreadable row."""
    rows = [row(number, noisy(number) if number != 7 else b"broken") for number in range(NUM_ROWS)]
    prepared = make_set(tmp_path_factory.mktemp("set"), rows)
    return RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)


def streamed(reader, plan, first_step, rows_per_block, num_processes, warn=print, act=None):
    """The columns of each step, copied before the next block is requested."""
    block_mb = rows_per_block * reader.row_bytes / 1e6
    start = ResumePoint(plan, first_step)
    with closing(LocalBlocks(reader, start, block_mb, num_processes, warn)) as blocks:
        for number, block in enumerate(blocks):
            if act is not None:
                act(number, blocks)
            copied = {name: column.copy() for name, column in block.items()}
            size = len(block["pos"]) // plan.rank_rows
            yield from (
                {
                    name: column[step * plan.rank_rows :][: plan.rank_rows]
                    for name, column in copied.items()
                }
                for step in range(size)
            )


def check(reader, plan, first_step, steps):
    assert len(steps) == plan.steps - first_step
    for number, columns in enumerate(steps, start=first_step):
        expected = reader.read_block(plan, plan.positions(number, 0))
        assert columns.keys() == expected.keys()
        for name, column in columns.items():
            width = expected[name].shape[1] if name == "input_ids" else None
            assert np.array_equal(column[:, :width] if width else column, expected[name]), name


@pytest.mark.parametrize(
    ("global_batch_size", "rows_per_block"),
    [
        pytest.param(12, 3, id="parts of a step"),
        pytest.param(12, 12, id="one step"),
        pytest.param(5, 16, id="three steps, of which the last block has fewer"),
        pytest.param(13, 3, id="a step that cannot be divided"),
    ],
)
def test_pixels_of_each_step_are_those_of_its_rows(reader, global_batch_size, rows_per_block):
    """Three processes go around the ring of slots several times; the consumer is slow."""
    plan = SamplePlan(NUM_ROWS, global_batch_size, 1, seed=3, steps=25)

    def wait(number, blocks):
        time.sleep(0.02)

    steps = list(streamed(reader, plan, 4, rows_per_block, 3, act=wait))
    check(reader, plan, 4, steps)
    assert any(not columns["valid"].all() for columns in steps)


def test_few_slots_are_enough_if_memory_is_limited(reader, monkeypatch):
    monkeypatch.setattr(local, "MAX_SLOTS_MB", 0.0)
    plan = SamplePlan(NUM_ROWS, 12, 1, seed=3, steps=12)
    check(reader, plan, 0, list(streamed(reader, plan, 0, 3, 3)))


def spawned():
    return {
        each for each in psutil.Process().children() if "spawn_main" in " ".join(each.cmdline())
    }


def test_killed_process_is_replaced_and_its_rows_are_written_again(reader, monkeypatch):
    """Of spawned processes, as in use."""
    monkeypatch.setattr(processes, "SPAWN", SPAWN)
    plan, notes = SamplePlan(NUM_ROWS, 12, 1, seed=3, steps=20), []
    others = spawned()  # of earlier tests

    def kill(number, blocks):
        if number == 4:
            next(iter(spawned() - others)).kill()

    check(reader, plan, 0, list(streamed(reader, plan, 0, 3, 2, warn=notes.append, act=kill)))
    assert ["data process died" in note for note in notes] == [True]
    assert not spawned() - others


class DyingReader(RowReader):
    def read_block(self, plan, positions, pixels=None):
        os._exit(1)


def test_processes_that_keep_dying_end_the_run(reader):
    dying = DyingReader(reader.prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    plan = SamplePlan(NUM_ROWS, 12, 1, seed=3, steps=2)
    with pytest.raises(ResourceError, match="data processes died 6 times"):
        list(streamed(dying, plan, 0, 12, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_shared_memory_has_no_name(reader):
    """So nothing is left in a file system, even if all processes are killed."""
    plan = SamplePlan(NUM_ROWS, 12, 1, seed=3, steps=2)

    def inspect(number, blocks):
        address = blocks.pixels.ctypes.data
        (line,) = (
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.startswith(f"{address:x}-")
        )
        assert line.endswith("(deleted)")

    assert len(list(streamed(reader, plan, 0, 3, 1, act=inspect))) == 2


def test_png_of_one_gray_level_fills_its_place(tmp_path):
    prepared = make_set(tmp_path, [row(number, png(number)) for number in range(NUM_ROWS)])
    reader = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    plan = SamplePlan(NUM_ROWS, 12, 1, seed=3, steps=5)
    for number, columns in enumerate(streamed(reader, plan, 0, 3, 2)):
        rows = plan.row_ids_at(plan.positions(number, 0))
        assert (columns["image"] == rows[:, None, None, None]).all()
