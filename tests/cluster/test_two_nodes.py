"""Runs on several Ray nodes of this machine: a head without CPUs and two worker nodes, joined by address."""

import json

import numpy as np
import pytest
import torch

from mmray.data.store.prepared_set import key_id
from mmray.data.stream.order import PADDING, SamplePlan
from mmray.engine.metrics.meters import rows_sha
from mmray.train.driver import train
from tests.made import make_set, row
from tests.nodes import several_nodes
from tests.train.runs import STEPS, Silent, config, marks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def nodes():
    with several_nodes({"num_cpus": 3}, {"num_cpus": 3}) as cluster:
        yield cluster


def expected_marks():
    """The rows of each step according to the order, computed without the stream."""
    plan = SamplePlan(50, 16, 1, 16, 0, STEPS)
    for step in range(STEPS):
        positions = plan.positions(step, 0)
        keys = [key_id(f"row-{number}") for number in plan.rows_at(positions[positions != PADDING])]
        yield step + 1, plan.rows_start(step), rows_sha(torch.tensor(np.array(keys, np.int64)))


def test_run_over_two_nodes_takes_rows_of_the_order(nodes, tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(50)], [row(number) for number in range(100, 120)])
    outcome = train(config(tmp_path / "set", tmp_path, "run", address=nodes.address), Silent())
    assert outcome.result["status"] == "finished"
    assert marks(outcome.path) == list(expected_marks())
    assert json.loads((outcome.path / "result.json").read_text())["restarts"] == 0
