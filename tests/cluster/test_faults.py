"""Faults on several Ray nodes of this machine: after any of them the same rows give the same model.

Faults come from callbacks (tests/training/faults.py), or from a reporter that is called at each
logged step.
"""

import re
import socket
import time
from functools import partial

import pytest
import torch
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2

from mmray.cluster.capacity import NODE_ID
from mmray.cluster.placement import alive_nodes, free_nodes
from mmray.config import Cluster
from mmray.data.store.prepared_set import PreparedSet
from mmray.training import monitor
from mmray.training.driver import train
from mmray.training.workers import backend
from tests.engine.single_worker import run_config
from tests.training.readers import StoppingReader
from tests.training.runs import Silent, config, expected_marks, in_double, lines, marks, weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
AWAY_S = 60.0  # from the loss of a node to the first step on another
SLOT = {"slot": 1.0}  # one per worker, so that tests control where workers run


def settings(data, storage, name, nodes, steps=12, callbacks=(), cluster=None, **given):
    """A run without dropout, so any number of workers gives the same model."""
    names = [f"tests.training.faults:{each}" for each in callbacks]
    made = config(data, storage, name, names, steps=steps, **given)
    model = made.model.replace(text=made.model.text.replace(dropout=0.0))
    section = {"workers": 2, "resources_per_worker": SLOT, "address": nodes.address} | (
        cluster or {}
    )
    return made.replace(model=model, cluster=Cluster(**section))


def losses_of_one_worker(wanted, folder):
    """The same run by one worker in this process, without Ray and faults."""
    calm = wanted.replace(train=wanted.train.replace(callbacks=()))
    run_config(calm, PreparedSet.open(wanted.data.train, "train"), folder)
    return [entry["train/loss"] for entry in lines(folder)]


def assert_same_model(folder, calm):
    """The final weights of two runs in double precision are equal."""
    torch.testing.assert_close(weights(folder), weights(calm), rtol=1e-9, atol=1e-12)


class Acting(Silent):
    """Runs actions at certain steps, once each: {(step, workers): action};

    `away_s`: downtime of each.
    """

    def __init__(self, acts):
        super().__init__()
        self.acts, self.workers, self.groups = dict(acts), 0, []
        self.waiting, self.acted_s = False, None
        self.away_s = []  # seconds from each action to the first step of the next group

    def status(self, title):
        super().status(title)
        if started := re.fullmatch(r"starting (\d+) workers?", title):
            self.workers, self.waiting = int(started[1]), self.acted_s is not None
            self.groups.append(self.workers)

    def step(self, metrics, total_steps):
        super().step(metrics, total_steps)
        if self.waiting:
            self.away_s.append(time.monotonic() - self.acted_s)
            self.acted_s, self.waiting = None, False
        for step, workers in list(self.acts):
            if metrics["step"] >= step and self.workers == workers:
                self.acts.pop((step, workers))()
                self.acted_s = time.monotonic()


def notes(reporter, label):
    return [text for kind, text in reporter.notes if kind == label]


@pytest.mark.slow  # two minutes; run by hand
def test_elastic_run_over_lost_and_added_nodes_takes_same_rows(nodes, data, tmp_path, monkeypatch):
    """A node is lost, a larger one is added, the first one is lost: same row order and same losses
    as one worker.
    """
    monkeypatch.setattr(monitor, "CAPACITY_INTERVAL_S", 1.0)
    nodes.reset([(4, 1), (2, 1)])
    first, second = nodes.workers
    acts = {
        (4, 2): partial(nodes.remove, second),
        (8, 1): partial(nodes.add, 4, 2),
        (16, 3): partial(nodes.remove, first),
    }
    reporter = Acting(acts)
    wanted = in_double(
        settings(
            data, tmp_path, "elastic", nodes, 30, callbacks=["Slowly"], cluster={"workers": "1-3"}
        )
    )
    outcome = train(wanted, reporter)
    assert reporter.groups == [2, 1, 3, 2]
    assert outcome.result["resizes"] == 1 and outcome.result["status"] == "finished"
    # one checkpoint interval for each node; growing wastes none
    assert outcome.result["wasted_steps"] <= 2 * 3
    assert max(reporter.away_s[0], reporter.away_s[2]) < AWAY_S
    assert marks(outcome.path) == list(expected_marks(30))
    calm = losses_of_one_worker(wanted, tmp_path / "calm")
    assert [entry["train/loss"] for entry in lines(outcome.path)] == pytest.approx(calm, rel=1e-9)


def test_hung_stopped_and_oom_ranks_are_named_and_replaced(nodes, data, tmp_path):
    """One rank sleeps forever, then is out of memory outside a step, then its process is stopped.

    The OOM is between two steps, where ranks cannot agree on smaller micro-batches: the group
    restarts with them.
    """
    nodes.reset([(4, 2)])
    reporter = Silent()
    # slowly, so that the last heartbeat of a stopped rank is one of its steps
    faults = ["Slowly", "HangOnce", "OomOnRankOneOnce", "StopOnce"]
    wanted = in_double(
        settings(data, tmp_path, "hung", nodes, callbacks=faults, cluster={"hang_timeout_s": 8.0})
    )
    outcome = train(wanted, reporter)
    hung, stopped = notes(reporter, "hang")
    assert "rank 1 (" in hung and "is at" in hung and "faults.py" in hung and "rank 0" not in hung
    assert "rank 1 (" in stopped and "has not responded for" in stopped and "rank 0" not in stopped
    stacks = {file.name: file.read_text() for file in (outcome.path / "stacks").glob("*.txt")}
    assert any(name.endswith("rank-1.txt") and "on_step" in text for name, text in stacks.items())
    assert any(name.endswith("rank-0.txt") and "step.py" in text for name, text in stacks.items())
    assert any(
        "out of memory in the optimizer at step 6" in text for text in notes(reporter, "failure")
    )
    micro_batches = [line["batch/micro"] for line in lines(outcome.path)]
    assert micro_batches == [4] * 3 + [2] * 9  # restarted from the checkpoint of step 3
    assert outcome.result["restarts"] == 3
    assert marks(outcome.path) == list(expected_marks(12))
    losses_of_one_worker(wanted, tmp_path / "calm")
    assert_same_model(outcome.path, tmp_path / "calm")


def test_stopped_data_actor_is_named_and_the_rank_decodes_itself(
    nodes, data, tmp_path, monkeypatch
):
    """The only decode actor is stopped for good; max_failures is 0."""
    nodes.reset([(4, 2)])
    monkeypatch.setattr(backend, "RowReader", StoppingReader)
    monkeypatch.setattr(monitor, "DATA_WAIT_LOG_S", 0.5)
    reporter, cluster = Silent(), {"workers": 1, "max_failures": 0}
    # slowly, so that a heartbeat comes after the wait
    wanted = settings(data, tmp_path, "stopped", nodes, 14, ["Slowly"], cluster)
    outcome = train(wanted, reporter)
    assert (outcome.result["status"], outcome.result["restarts"]) == ("finished", 0)
    assert marks(outcome.path) == list(expected_marks(14))
    assert notes(reporter, "hang") == notes(reporter, "failure") == []
    waits = notes(reporter, "data")
    assert any(
        "for rows" in text and "decode actors: 1 stopped on node" in text for text in waits
    ), waits
    assert waits[-1] == "rows arrive again"


def test_run_leaves_a_node_with_a_bad_device(nodes, data, tmp_path):
    """A rank raises an ECC error, each time on the same node; the run ends on the other one."""
    nodes.reset([(4, 1), (4, 1)])
    reporter, cluster = Silent(), {"workers": 1, "max_failures": 1}
    faults = ["BadNode"]
    outcome = train(
        settings(data, tmp_path, "bad", nodes, steps=8, callbacks=faults, cluster=cluster), reporter
    )
    assert (outcome.result["status"], outcome.result["restarts"]) == ("finished", 1)
    assert marks(outcome.path) == list(expected_marks(8))
    ((failed,), (excluded,)) = notes(reporter, "failure"), notes(reporter, "device")
    assert failed.startswith(
        "device failed after step 4: CUDA error: uncorrectable ECC error encountered"
    )
    assert excluded.startswith("the node of the device gets no more workers")
    assert f"rank 0, GPU none, node {socket.gethostname()} at " in excluded


def test_preemption_with_notice_wastes_no_step(nodes, data, tmp_path):
    """A node is drained with a deadline: a checkpoint is saved in time, then other nodes are used;
    max_failures is 0.

    The next periodic checkpoint is far away: without an extra one the drain would waste all steps.
    """
    nodes.reset([(4, 1), (2, 1), (2, 1)])

    def drain():
        """Drain a node of the group, but not the first one."""
        slots = {node.labels[NODE_ID] for node in alive_nodes() if node.resources.get("slot")}
        taken = {node.labels[NODE_ID] for node in free_nodes() if not node.resources.get("slot")}
        node = min((slots & taken) - {nodes.workers[0].node_id})
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        GcsClient(address=nodes.address).drain_node(
            node, reason, "spot", int((time.time() + 30) * 1000)
        )

    reporter, cluster = Acting({(6, 2): drain}), {"max_failures": 0}
    wanted = settings(
        *(data, tmp_path, "spot", nodes, 10),
        callbacks=["AwaitStop"],
        cluster=cluster,
        checkpoint_every=100,
    )
    outcome = train(wanted, reporter)
    assert (outcome.result["preemptions"], outcome.result["restarts"]) == (1, 1)
    assert outcome.result["wasted_steps"] == 0
    (asked,), (from_own,) = notes(reporter, "stop"), notes(reporter, "resume")
    assert asked.startswith("node will be preempted in ") and "checkpointing and moving" in asked
    assert from_own.endswith("step-8") and marks(outcome.path) == list(expected_marks(10))
