"""Runs that share a cluster, and the stream over nodes that are lost and added."""

import os
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster import waiting
from mmray.cluster.ray_internals import actors_of_job
from mmray.config import Cluster, Inputs
from mmray.data.store.stored_row import hash_key
from mmray.data.stream import pool_size
from mmray.data.stream.actors import rank_blocks
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.pool_size import DecoderLimits
from mmray.data.text.tokenizer import train_tokenizer
from mmray.training.driver import train
from tests.made import CAPTIONS, make_set, png, row
from tests.polling import wait_until
from tests.training.readers import SlowReader
from tests.training.runs import Silent, config, expected_marks, marks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SIDE, STORE_BYTES, ROWS = 160, 80 * 10**6, 3200


def test_waiting_run_starts_when_the_other_has_ended(nodes, data, tmp_path, monkeypatch):
    """Each needs the two CPUs: a worker and its decode actor."""
    nodes.reset([(2, 1)])
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 1.0)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    reporters = [Silent(), Silent()]
    outcomes = {}

    def run(number):
        faults = ("tests.training.faults:AwaitDriver",)
        wanted = config(data, tmp_path, f"run-{number}", faults, steps=3, checkpoint_every=0)
        cluster = Cluster(workers=1, address=nodes.address)
        outcomes[number] = train(wanted.replace(cluster=cluster), reporters[number])

    def waits():
        return [n for n, each in enumerate(reporters) if "waiting" in dict(each.notes)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        wait_until(waits, 120, pause_s=0.2)
        (late,) = waits()
        (Path(os.environ["MMRAY_TEST_FAULTS"]) / "acted").touch()
        for thread in threads:
            thread.join()
    finally:
        ray.shutdown()
    assert list(outcomes) == [1 - late, late]  # in the order of their ends
    for number in outcomes:
        assert outcomes[number].result["status"] == "finished"
        assert outcomes[number].result["restarts"] == 0
        assert marks(outcomes[number].path) == list(expected_marks(3))
    lines = [text for label, text in reporters[late].notes if label == "waiting"]
    assert lines and "s for 1 training worker of 2 CPU" in lines[0]
    assert "CPU on 1 node" in lines[0] and "gives up after 3600 s" in lines[0]


@ray.remote(num_cpus=0, max_concurrency=2)
class Consumer:
    """A rank that is slower than its stream at first, until it is stopped."""

    def __init__(self):
        self.stopped = threading.Event()

    def run(self, reader, plan, limits, num_slow=10):
        """Return the time, positions and keys of each block; take 0.3 s for the first ones."""
        taken = []
        start = ResumePoint(plan, 0)
        with closing(rank_blocks(reader, start, 0, 1, 24.0, limits, print)) as blocks:
            for number, block in enumerate(blocks):
                taken.append((time.time(), block["pos"].copy(), block["key"].copy()))
                time.sleep(0.3 if number < num_slow else 0.0)
                if self.stopped.is_set():
                    return taken
        return taken

    def stop(self):
        self.stopped.set()


def nodes_of_actors():
    return [node for state, node, _ in actors_of_job("DecodeActor") if state == "ALIVE"]


def slow_reader(folder):
    grays = [png(gray, SIDE) for gray in range(8)]
    prepared = make_set(folder, [row(number, grays[number % 8]) for number in range(ROWS)])
    inputs = Inputs(image_side=SIDE, fit="squash", max_tokens=12)
    return SlowReader(0.1, prepared, inputs, train_tokenizer(CAPTIONS, 60), 10**6)


def test_rank_that_evaluates_gives_cpus_to_a_reservation_that_waits(nodes, tmp_path, monkeypatch):
    """Two decode actors have all CPUs, which are reserved while the rank requests no blocks."""
    nodes.reset([(2, 1)])
    monkeypatch.setattr(pool_size, "GROW_WINDOW_S", 0.5)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    notes = []
    try:
        plan = SamplePlan(ROWS, 64, 1, seed=3, steps=10**5)
        start, limits = ResumePoint(plan, 0), DecoderLimits(1, 1, 3)
        must_yield = waiting.Contention().must_yield
        blocks = rank_blocks(
            slow_reader(tmp_path), start, 0, 1, 24.0, limits, notes.append, must_yield
        )
        with closing(blocks):
            positions = []
            taken = iter(blocks)
            end_s = time.monotonic() + 120
            while len(nodes_of_actors()) < 3:
                assert time.monotonic() < end_s, notes
                positions.append(next(taken)["pos"])
            pending_s = time.monotonic()
            reserved = ray.util.placement_group([{"CPU": 2.0}]).ready()
            while not ray.wait([reserved], timeout=0.5)[0] and time.monotonic() < pending_s + 60:
                blocks.update_pool()
            waited_s = time.monotonic() - pending_s
            positions += [next(taken)["pos"] for _ in range(10)]
    finally:
        ray.shutdown()
    print(f"reserved after {waited_s:.1f} s; {notes}")
    assert waited_s < 30
    assert "decode actors of rank 0: 1, was 3, because others wait for CPUs" in notes
    rows = np.concatenate(positions)
    assert rows.tolist() == list(range(len(rows)))


@pytest.mark.slow  # a minute; run by hand
def test_lost_data_node_costs_no_row_and_an_added_one_decodes(nodes, tmp_path):
    """Four actors fill two data nodes; each object store is smaller than what passes it."""
    nodes.reset([])
    add = nodes.cluster.add_node
    own = add(num_cpus=0, object_store_memory=STORE_BYTES)
    lost, kept = (add(num_cpus=2, object_store_memory=STORE_BYTES) for _ in range(2))
    nodes.workers += [own, lost, kept]
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        reader = slow_reader(tmp_path)
        plan = SamplePlan(ROWS, 64, 1, seed=3, steps=10**5)
        here = NodeAffinitySchedulingStrategy(own.node_id, soft=False)
        selector = {"ray.io/node-id": f"!in({own.node_id})"}
        limits = DecoderLimits(1, 5, 5, selector)
        consumer = Consumer.options(scheduling_strategy=here).remote()
        stream = consumer.run.remote(reader, plan, limits)
        wait_until(lambda: {lost.node_id, kept.node_id} <= set(nodes_of_actors()), pause_s=0.2)
        nodes.remove(lost)
        added_s = time.time()
        added = add(num_cpus=2, object_store_memory=STORE_BYTES)
        nodes.workers.append(added)
        wait_until(lambda: added.node_id in nodes_of_actors(), pause_s=0.2)
        used_s = time.time() - added_s
        time.sleep(2)
        consumer.stop.remote()
        taken = ray.get(stream)
        spilled = spilled_bytes(nodes.address)
    finally:
        ray.shutdown()
    positions = np.concatenate([positions for _, positions, _ in taken])
    assert positions.tolist() == list(range(len(taken) * 64))
    expected = [hash_key(f"row-{number}") for number in plan.row_ids_at(positions)]
    assert np.concatenate([keys for *_, keys in taken]).tolist() == expected
    gap_s = np.diff([at_s for at_s, *_ in taken]).max()
    print(f"longest gap {gap_s:.1f} s, added node used after {used_s:.1f} s, spilled {spilled}")
    assert gap_s < 10 and used_s < 30 and spilled == 0


def spilled_bytes(address):
    """Bytes that the object stores of all nodes have written to disk."""
    state = get_state_from_address(address)
    return get_memory_info_reply(state).store_stats.spilled_bytes_total


def test_slow_rank_and_unequal_object_stores_spill_nothing(nodes, tmp_path):
    """Most actors are on a node whose object store has memory for 8 of 13 blocks of 7.4 MB that the
    rank's own store allows.
    """
    nodes.reset([])
    add = nodes.cluster.add_node
    own = add(num_cpus=0, object_store_memory=4 * STORE_BYTES)
    small = add(num_cpus=5, object_store_memory=STORE_BYTES)
    large = add(num_cpus=1, object_store_memory=6 * STORE_BYTES)
    nodes.workers += [own, small, large]
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        plan = SamplePlan(ROWS, 96, 1, seed=3, steps=50)
        here = NodeAffinitySchedulingStrategy(own.node_id, soft=False)
        selector = {"ray.io/node-id": f"!in({own.node_id})"}
        consumer = Consumer.options(scheduling_strategy=here).remote()
        limits = DecoderLimits(1, 7, 7, selector)
        stream = consumer.run.remote(slow_reader(tmp_path), plan, limits, num_slow=35)
        wait_until(lambda: nodes_of_actors().count(small.node_id) == 5, pause_s=0.2)
        taken = ray.get(stream)
        spilled = spilled_bytes(nodes.address)
    finally:
        ray.shutdown()
    assert np.concatenate([each for _, each, _ in taken]).tolist() == list(range(50 * 96))
    assert spilled < 10**6  # no block; once it was an object of Ray's own of 4 KB
