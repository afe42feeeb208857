"""The stream on Ray: every row where the order puts it, for any number of workers, from any step."""

import itertools
import pickle
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import ray
import torch

from mmray.config import Augment, ChatInputs, Inputs
from mmray.data.collate import steps_of
from mmray.data.order import PADDING, Blocks, Plan, Start
from mmray.data.reader import RowReader
from mmray.data.store import key_id
from mmray.data.stream import Stream, block_shape, most_block_mb, plan_dataset
from mmray.data.text import train_tokenizer
from tests.made import CAPTIONS, make_set, png, row

INPUTS = Inputs(image_side=8, fit="squash", max_tokens=12)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    prepared = make_set(tmp_path_factory.mktemp("set"), [row(number) for number in range(117)])
    return RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)


@ray.remote(num_cpus=0)
def consume(iterator, plan, pause_s=0.0, steps=None):
    """Keys of each step of one rank, as a training worker gets them, which takes `pause_s` over each step."""
    taken = []
    for step in itertools.islice(steps_of(iterator.iter_batches(batch_size=None, batch_format="numpy"), plan), steps):
        columns = (torch.cat([micro[name] for micro in step]) for name in ("key", "pos", "valid"))
        taken.append([(k, p) for k, p, v in zip(*(column.tolist() for column in columns), strict=True) if v])
        time.sleep(pause_s)
    return taken


def stream(reader, plan, first_step, pauses_s=(), steps=None, block_mb=0.01):
    """Keys and positions of each step over all ranks; `steps`: so many, and then the group goes."""
    made = Stream(Start(plan, first_step), reader, workers=2, block_mb=block_mb)
    iterators = [shard["train"] for shard in made.configure({"train": None}, plan.world)]
    pairs = itertools.zip_longest(iterators, pauses_s, fillvalue=0.0)
    ranks = ray.get([consume.remote(iterator, plan, pause_s, steps) for iterator, pause_s in pairs])
    return [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


def expected(plan, first_step, steps=None):
    out = []
    for step in range(first_step, plan.steps)[:steps]:
        positions = np.concatenate([plan.positions(step, rank) for rank in range(plan.world)])
        positions = positions[positions != PADDING]
        out.append(
            sorted((key_id(f"row-{r}"), int(p)) for r, p in zip(plan.rows_at(positions), positions, strict=True))
        )
    return out


@pytest.mark.parametrize(
    ("world", "global_rows", "micro", "first_step", "steps"),
    [(1, 1, 1, 0, 125), (3, 4, 1, 7, 60)],
)
def test_every_row_where_the_order_puts_it(local_ray, reader, world, global_rows, micro, first_step, steps):
    """117 rows, which steps of 4 do not divide, nor 3 ranks a step: into the next epoch, from any step."""
    plan = Plan(117, global_rows, world, micro, seed=3, steps=steps)
    assert stream(reader, plan, first_step) == expected(plan, first_step)


def test_blocks_of_a_part_of_a_step_and_too_many_to_list_come_in_the_same_order(local_ray, reader, monkeypatch):
    monkeypatch.setattr("mmray.data.stream.LISTED_BLOCKS", 3)
    plan = Plan(117, 96, 2, 32, seed=3, steps=12)
    assert stream(reader, plan, 1) == expected(plan, 1)
    assert not ray.data.DataContext.get_current().execution_options.preserve_order  # of these streams alone


def test_a_slow_consumer_gets_its_own_rows_and_holds_the_order_for_the_fast_one(local_ray, tmp_path):
    """5,000 rows, an epoch and a part of the next; one of two ranks stands still for a while at each step."""
    encoded = png(7, side=1)
    prepared = make_set(tmp_path, [row(number, encoded) for number in range(5000)])
    plan = Plan(5000, 250, 2, 125, seed=5, steps=24)
    reader = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    found = stream(reader, plan, 0, pauses_s=(0.1, 0.0), block_mb=0.1)
    assert found == expected(plan, 0)
    assert sorted(key for step in found[:20] for key, _ in step) == sorted(key_id(f"row-{n}") for n in range(5000))


def test_consumers_come_and_go_and_the_rows_of_each_step_stay(local_ray, reader):
    """One worker, then three, then two: each group begins where the last one's rows end."""
    rows_consumed, found, plans = 0, [], []
    for world, steps in ((1, 5), (3, 9), (2, 16)):
        plan = Plan(117, 16, world, 4, seed=3, steps=30)
        first_step = plan.step_at(rows_consumed)
        taken = stream(reader, plan, first_step, steps=steps)
        assert taken == expected(plan, first_step, steps)
        rows_consumed, found = plan.rows_start(first_step + steps), found + taken
        plans.append(plan)
    assert [expected(plan, 0) for plan in plans] == [found] * 3


def test_blocks_of_a_group_are_equal_and_cover_all_steps():
    plan = Plan(117, 16, 3, 4, 0, steps=29)
    blocks = Blocks(plan, 4, 7)
    sizes = [len(blocks.positions(block)) for block in range(blocks.count)]
    assert all(len(set(sizes[group : group + 3])) == 1 for group in range(0, blocks.count, 3))
    seen = np.concatenate([blocks.positions(block) for block in range(blocks.count)])
    assert sorted(seen[seen != PADDING]) == list(range(plan.rows_start(4), plan.rows_stop(28)))


def test_parts_of_a_step_are_equal_and_in_order():
    plan = Plan(117, 36, 2, 5, 0, steps=9)
    blocks = Blocks(plan, 3, 1, parts=3)
    of_ranks = [[blocks.positions(block) for block in range(rank, blocks.count, 2)] for rank in (0, 1)]
    assert {len(positions) for positions in of_ranks[0] + of_ranks[1]} == {6}
    for rank, positions in enumerate(of_ranks):
        whole = np.concatenate([plan.positions(step, rank) for step in range(3, 9)])
        assert np.concatenate(positions).tolist() == whole.tolist()


def test_block_size_follows_the_row():
    plan = Plan(10**6, 256, 2, 64, 0, steps=10**6)
    assert block_shape(plan, row_bytes=3 * 224 * 224, block_mb=24) == (1, 1)
    assert block_shape(plan, row_bytes=3 * 64 * 64, block_mb=24) == (15, 1)
    assert block_shape(plan, row_bytes=3 * 224 * 224, block_mb=6) == (1, 4)
    large = Plan(10**6, 4096, 1, 256, 0, steps=100)
    assert block_shape(large, row_bytes=3 * 224 * 224, block_mb=24) == (1, 32)  # 617 MB in one otherwise
    assert block_shape(Plan(10**6, 1021, 1, 64, 0, 100), 3 * 224 * 224, 24) == (1, 1)  # a prime number of rows
    assert most_block_mb(80e6, world=2) == pytest.approx(6) and most_block_mb(60e9, world=8) > 512  # any size asked for


def test_a_block_holds_pixels_tokens_and_padding(reader):
    plan = Plan(117, 5, 2, 3, seed=0, steps=4, shuffle=False)
    block = reader.block(plan, plan.positions(0, 1))
    assert block["pos"].tolist() == [3, 4, PADDING]
    assert block["valid"].tolist() == [True, True, False]
    assert block["key"].tolist() == [key_id("row-3"), key_id("row-4"), 0]
    assert (block["image"][0] == 3).all() and (block["image"][2] == 0).all()
    (micro,) = next(steps_of([block], plan))
    assert micro["attention_mask"].sum(1).tolist() == block["num_tokens"].tolist()
    assert micro["input_ids"].shape[1] == block["num_tokens"].max()


def test_a_data_worker_reads_without_the_types_of_settings(tmp_path):
    """They would cost each of its starts a third of a second, and the stream's first batch two of these."""
    inputs, augment = ChatInputs(image_side=8, max_tokens=40), Augment(flip=1.0, crop_scale=(0.5, 1.0))
    reader = RowReader(
        make_set(tmp_path, [row(0, texts=CAPTIONS)]), inputs, train_tokenizer(CAPTIONS, 60), 10**6, augment
    )
    heavy = ("pydantic", "tyro", "mmray.config", "torch", "ray")
    code = f"""
import pickle, sys
from mmray.data.order import Plan
plan = Plan(1, 1, 1, 1, seed=0, steps=1)
block = pickle.load(sys.stdin.buffer).block(plan, plan.positions(0, 0))
print(block["image"].shape, block["valid"], [name for name in {heavy} if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(reader), capture_output=True, check=True)
    assert run.stdout.decode().strip() == "(1, 3, 8, 8) [ True] []"


def test_a_row_that_cannot_be_read_keeps_its_place(tmp_path):
    reader = RowReader(
        make_set(tmp_path, [row(number, b"broken" if number == 2 else None) for number in range(6)]),
        INPUTS,
        train_tokenizer(CAPTIONS, 60),
        10**6,
    )
    block = reader.block(Plan(6, 6, 1, 6, 0, 1, shuffle=False), np.arange(6))
    assert block["valid"].tolist() == [True, True, False, True, True, True]
    assert block["pos"].tolist() == list(range(6))
    record, reason = reader.fault(2)
    assert record.key == "row-2" and "format" in reason


def test_a_damaged_record_costs_itself_only(tmp_path):
    prepared = make_set(tmp_path, [row(number) for number in range(40)])
    reader = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    shard = tmp_path / "0.arrow"
    data = bytearray(shard.read_bytes())
    at = data.index(prepared.read(np.array([11]))[0].images[0])
    data[at + 40] ^= 1
    shard.write_bytes(data)
    block = reader.block(Plan(40, 40, 1, 40, 0, 1, shuffle=False), np.arange(40))
    assert np.flatnonzero(~block["valid"]).tolist() == [11]
    assert "checksum" in reader.fault(11)[1]


def test_a_store_that_does_not_answer_is_no_fault_of_the_rows(reader, monkeypatch):
    """They keep their place in the epoch: whoever reads them fails, and is begun again."""

    def refuse(*_):
        raise OSError("503 slow down")

    monkeypatch.setattr(type(reader.prepared), "read", refuse)
    with pytest.raises(OSError, match="503"):
        reader.block(Plan(40, 40, 1, 40, 0, 1, shuffle=False), np.arange(40))


def test_a_caption_is_chosen_anew_each_epoch_and_the_same_again(tmp_path):
    reader = RowReader(make_set(tmp_path, [row(0, texts=CAPTIONS)]), INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    plan = Plan(1, 1, 1, 1, seed=0, steps=40)
    lengths = reader.block(plan, np.arange(40))["num_tokens"]
    assert len(set(lengths.tolist())) == 3
    assert np.array_equal(lengths[7:9], reader.block(plan, np.arange(7, 9))["num_tokens"])


def test_a_plan_of_a_million_blocks_costs_nothing_to_make(local_ray):
    """Made and begun in seconds: block numbers come from coarse tasks, never a list of a million.

    Nor in memory: a task for each block takes some 4 KB, which were 4 GB. Measured: 25 to 29 MiB.
    """
    driver = psutil.Process()
    before = driver.memory_info().rss
    began_s = time.monotonic()
    numbers = plan_dataset(1_000_000)
    assert time.monotonic() - began_s < 2
    first = [int(batch["id"][0]) for batch in itertools.islice(numbers.iter_batches(batch_size=None), 100)]
    assert first == list(range(100))
    assert (driver.memory_info().rss - before) / 2**20 < 100
