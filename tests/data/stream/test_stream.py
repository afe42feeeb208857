"""The stream: rows in sample order for any number of workers, from any step."""

import copy
import itertools
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import ray
import torch

from mmray.config import Augment, Inputs
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.store.stored_row import hash_key
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.decoder import BlockDecoder, Decoded
from mmray.data.stream.order import PADDING, BlockPlan, SamplePlan
from mmray.data.stream.pool_size import DecoderLimits
from mmray.data.stream.reader import RowReader
from mmray.data.stream.slots import SlotPool
from mmray.data.stream.stream import RankBlocks
from mmray.data.text.tokenizer import train_tokenizer
from mmray.storage.requests import TransientStorageError
from mmray.training.workers.ray_backend import root_cause
from tests.data.stream.consumers import compare, consume, taken
from tests.made import CAPTIONS, make_set, png, row
from tests.polling import wait_until
from tests.training.readers import FailingReader

INPUTS = Inputs(image_side=8, fit="squash", max_tokens=12)
TINY = png(7, side=1)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """{number of rows: reader}."""
    made = {
        117: [row(number) for number in range(117)],
        5000: [row(number, TINY) for number in range(5000)],
    }
    tokenizer = train_tokenizer(CAPTIONS, 60)
    return {
        count: RowReader(make_set(tmp_path_factory.mktemp("set"), rows), INPUTS, tokenizer, 10**6)
        for count, rows in made.items()
    }


@pytest.fixture(scope="module")
def reader(readers):
    return readers[117]


class HerePool:
    """A pool with one worker, which decodes in threads, so in any order."""

    max_in_flight = 5

    def __init__(self, decoder):
        self._here = decoder
        self.workers, self.node = [self], "here"
        self._threads = ThreadPoolExecutor(2)

    def submit(self, item, careful):
        return self._threads.submit(self._here, item, careful)

    def node_limit(self, node):
        return 5

    def is_lost_worker(self, error):
        return False

    def update(self, waited_s):
        pass

    def close(self):
        self._threads.shutdown()


def stream(reader, plan, first_step, steps, block_mb):
    """Keys and positions of each step, rank after rank; after `steps` the group stops."""
    blocks = BlockPlan.sized(plan, first_step, reader.row_bytes, block_mb)
    ranks = []
    for rank in range(plan.world_size):
        pool = HerePool(BlockDecoder(copy.copy(reader), blocks))
        with closing(RankBlocks(blocks, rank, pool, late_s=None)) as made:
            ranks.append(list(taken(made, plan, steps)))
    return [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


def expected(plan):
    """Expected keys and positions of each step, rank after rank."""
    out = []
    for step in range(plan.steps):
        positions = np.concatenate([plan.positions(step, rank) for rank in range(plan.world_size)])
        positions = positions[positions != PADDING]
        out.append(
            [
                (hash_key(f"row-{r}"), int(p))
                for r, p in zip(plan.row_ids_at(positions), positions, strict=True)
            ]
        )
    return out


@pytest.mark.parametrize(
    # stops: {number of workers: last step}
    ("num_rows", "global_batch_size", "first_step", "stops", "block_mb"),
    [
        pytest.param(117, 1, 0, {3: 125}, 0.01, id="one row a step"),
        pytest.param(
            117, 4, 0, {1: 11, 3: 37, 2: 70}, 0.01, id="four rows, which do not divide the set"
        ),
        pytest.param(5000, 250, 7, {3: 24}, 0.04, id="5000 rows, blocks of a part of a step"),
        # The 11 rows of a rank have no divisor, so they are one block, above the limit.
        pytest.param(117, 22, 0, {2: 6}, 0.0015, id="blocks that cannot be cut"),
    ],
)
def test_changing_worker_groups_take_same_rows(
    readers, num_rows, global_batch_size, first_step, stops, block_mb
):
    """Groups of one to three workers stop in mid-epoch; the next starts at the step where the last
    one stopped. The last group runs to the end of the run, which is not the end of an epoch.
    """
    last_step = max(stops.values())
    plans = [
        SamplePlan(num_rows, global_batch_size, world, seed=3, steps=last_step) for world in stops
    ]
    found = expected(plans[0])[:first_step]
    for plan, stop in zip(plans, stops.values(), strict=True):
        steps = stop - first_step if stop < plan.steps else None
        found += stream(readers[num_rows], plan, first_step, steps, block_mb)
        first_step = stop
    assert all(expected(plan) == found for plan in plans)
    everyone = sorted(hash_key(f"row-{number}") for number in range(num_rows))
    assert {len(step) for step in found} == {global_batch_size}
    keys = [key for step in found for key, _ in step]
    for epoch in range(len(keys) // num_rows):
        assert sorted(keys[epoch * num_rows : (epoch + 1) * num_rows]) == everyone


def test_actors_of_two_ranks_that_are_killed_cost_no_row(local_ray, reader):
    """One rank is slow; the actors of the other are killed twice."""
    plan = SamplePlan(117, 8, 2, seed=3, steps=40)
    limits = DecoderLimits(1, 2, 2)
    ranks = [
        consume.remote(reader, plan, 0, limits, 0.001, pause_s=0.05),
        consume.remote(reader, plan, 1, limits, 0.001, kills=True, pause_s=0.02),
    ]
    (first, notes), (second, more_notes) = ray.get(ranks)
    assert [one + two for one, two in zip(first, second, strict=True)] == expected(plan)
    # An actor may be killed before it has started; one without a block is never missed.
    texts = ("died and was restarted", "did not start")
    assert all(any(text in note for text in texts) for note in notes + more_notes)


@pytest.mark.skipif(sys.platform != "linux", reason="opens memory of another process in /proc")
def test_actors_of_the_node_write_pixels_into_memory_that_no_block_uses(local_ray, reader):
    """If the rank uses all of that memory, they return blocks as objects of Ray."""
    plan = SamplePlan(117, 4, 1, seed=3, steps=100)
    few, many = ray.get([compare.remote(reader, plan, kept) for kept in (2, 12)])
    assert len(few) == len(many) == 100
    assert sum(few) >= 90 and 5 <= sum(many) < 90


@pytest.mark.skipif(sys.platform != "linux", reason="opens memory in /proc")
def test_slot_is_lent_again_when_no_part_of_its_pixels_is_used():
    slots = SlotPool(2, 4, (3, 8, 8))
    lent, _ = slots.lend(), slots.lend()
    lent.open()[:3] = 7
    pixels = slots.receive(lent, 3)
    assert pixels.shape == (3, 3, 8, 8) and (pixels == 7).all()
    with pytest.raises(FileNotFoundError, match="file of another process"):
        lent._replace(inode=0).open()
    part = torch.from_numpy(pixels[1:])[0]
    del pixels
    assert slots.lend() is None
    del part
    assert slots.lend() == lent


def test_error_of_a_decode_actor_keeps_its_type(local_ray, reader):
    """The driver retries a storage, and not a bug."""
    failing = FailingReader(reader.prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    plan = SamplePlan(117, 4, 1, seed=3, steps=1)
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        ray.get(consume.remote(failing, plan, 0, DecoderLimits(1, 1, 1), 0.01))
    cause = root_cause(raised.value)
    assert isinstance(cause, TransientStorageError) and "read_block" in str(cause.__notes__)


@pytest.mark.parametrize(
    ("global_batch_size", "world", "shape"), [(16, 3, (7, 1)), (36, 2, (1, 3)), (16, 3, (1, 1))]
)
def test_blocks_of_all_ranks_have_equal_size_and_cover_the_steps_in_order(
    global_batch_size, world, shape
):
    plan = SamplePlan(117, global_batch_size, world, 0, steps=29)
    blocks = BlockPlan(plan, 4, *shape)
    by_rank = [
        [blocks.positions(block) for block in range(rank, blocks.count, world)]
        for rank in range(world)
    ]
    assert all(
        len({len(positions) for positions in group}) == 1 for group in zip(*by_rank, strict=True)
    )
    for rank, positions in enumerate(by_rank):
        steps = np.concatenate([plan.positions(step, rank) for step in range(4, plan.steps)])
        assert np.concatenate(positions).tolist() == steps.tolist()


@pytest.mark.parametrize(
    ("block_mb", "rows", "requested"),
    [(4 * 16e-6, [16, 32, 64, 64, 16], 1), (4e-6, [4] * 48, 4)],
    ids=["of several steps", "of parts of a step"],
)
def test_only_the_first_step_is_decoded_before_it_is_requested(block_mb, rows, requested):
    """The start of training has few cores to itself: later blocks are larger, and read ahead."""
    plan = SamplePlan(117, 16, 1, 0, steps=12)
    blocks = BlockPlan.sized(plan, 0, 1, block_mb)
    submitted = []

    class RecordingPool(HerePool):
        def submit(self, item, careful):
            submitted.append(item)
            return super().submit(item, careful)

    pool = RecordingPool(lambda block, _: Decoded({"pos": blocks.positions(block)}, False))
    with closing(RankBlocks(blocks, 0, pool, late_s=None)) as stream:
        assert submitted == list(range(requested))
        assert [len(block["pos"]) for block in stream] == rows


def test_block_holds_pixels_tokens_and_padding(reader):
    plan = SamplePlan(117, 5, 2, seed=0, steps=4, shuffle=False)
    block = reader.read_block(plan, plan.positions(0, 1))
    assert block["pos"].tolist() == [3, 4, PADDING]
    assert block["valid"].tolist() == [True, True, False]
    assert block["key"].tolist() == [hash_key("row-3"), hash_key("row-4"), 0]
    assert (block["image"][0] == 3).all() and (block["image"][2] == 0).all()
    (micro,) = next(iter_micro_batches([block], plan.rank_rows, plan.rank_rows))
    assert micro["attention_mask"].sum(1).tolist() == block["num_tokens"].tolist()
    assert micro["input_ids"].shape[1] == block["num_tokens"].max()


def test_data_worker_does_not_import_pydantic(tmp_path):
    inputs, augment = (
        Inputs(image_side=8, max_tokens=40),
        Augment(flip=1.0, crop_scale=(0.5, 1.0)),
    )
    prepared = make_set(tmp_path, [row(0, texts=CAPTIONS)])
    reader = RowReader(prepared, inputs, train_tokenizer(CAPTIONS, 60), 10**6, augment)
    heavy = ("pydantic", "tyro", "mmray.config", "torch", "ray")
    code = f"""
import pickle, sys
from mmray.data.stream.order import SamplePlan
plan = SamplePlan(1, 1, 1, seed=0, steps=1)
block = pickle.load(sys.stdin.buffer).read_block(plan, plan.positions(0, 0))
print(block["image"].shape, block["valid"], [name for name in {heavy} if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(reader), capture_output=True, check=True
    )
    assert run.stdout.decode().strip() == "(1, 3, 8, 8) [ True] []"


def test_unreadable_row_and_damaged_record_invalidate_only_themselves(tmp_path):
    rows = [row(number, b"broken" if number == 2 else None) for number in range(40)]
    prepared = make_set(tmp_path, rows)
    reader = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    shard = tmp_path / "shards" / "0.arrow"
    data = bytearray(shard.read_bytes())
    data[data.index(prepared.read(np.array([11]))[0].image) + 40] ^= 1
    shard.write_bytes(data)
    block = reader.read_block(SamplePlan(40, 40, 1, seed=0, steps=1, shuffle=False), np.arange(40))
    assert np.flatnonzero(~block["valid"]).tolist() == [2, 11] and block["pos"].tolist() == list(
        range(40)
    )
    record, reason, detail = reader.explain_bad_row(2, SubprocessDecoder())
    assert (record.key, reason) == ("row-2", "format") and detail
    assert reader.explain_bad_row(11, SubprocessDecoder())[1:] == (
        "checksum",
        "the bytes differ from those that were prepared",
    )


def test_rows_of_a_vanished_storage_are_waited_for(tmp_path, monkeypatch, caplog):
    """They are not unreadable: the run would otherwise take other steps."""
    monkeypatch.setattr("mmray.storage.outage.RETRY_EVERY_S", 0.01)
    (tmp_path / "mount").mkdir()
    prepared = make_set(tmp_path / "mount" / "set", [row(number) for number in range(8)])
    reader = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    (tmp_path / "mount").rename(tmp_path / "away")
    (tmp_path / "mount").mkdir()
    plan = SamplePlan(8, 8, 1, seed=0, steps=1)
    with ThreadPoolExecutor(1) as thread:
        block = thread.submit(reader.read_block, plan, np.arange(8))
        wait_until(lambda: "cannot be used on" in caplog.text)
        (tmp_path / "mount").rmdir()
        (tmp_path / "away").rename(tmp_path / "mount")
        assert block.result()["valid"].all()


def test_caption_choice_differs_by_epoch_and_is_reproducible(tmp_path):
    reader = RowReader(
        make_set(tmp_path, [row(0, texts=CAPTIONS)]), INPUTS, train_tokenizer(CAPTIONS, 60), 10**6
    )
    plan = SamplePlan(1, 1, 1, seed=0, steps=40)
    lengths = reader.read_block(plan, np.arange(40))["num_tokens"]
    assert len(set(lengths.tolist())) == 3
    assert np.array_equal(lengths[7:9], reader.read_block(plan, np.arange(7, 9))["num_tokens"])
