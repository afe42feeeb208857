"""Growing clusters: a run that starts with no worker node, and the nodes that an elastic run requests."""

import re

import pytest
import ray

from mmray.cluster.placement import ROLE_LABEL
from mmray.config import Cluster
from mmray.train.driver import train
from tests.cluster.fake_autoscaler import fake_autoscaler
from tests.train.runs import Silent, config, expected_marks, marks

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(400)]  # three minutes
POOLS = {
    "train": {"resources": {"CPU": 1, "slot": 1}, "labels": {ROLE_LABEL: "train"}, "max_workers": 2},
    "data": {"resources": {"CPU": 2}, "labels": {ROLE_LABEL: "data"}, "max_workers": 1},
}


def test_elastic_run_scales_up_from_zero_nodes(data, tmp_path):
    if ray.is_initialized():
        ray.shutdown()
    made = config(data, tmp_path, "grown", ("tests.train.faults:Slowly",), steps=60)
    with fake_autoscaler(POOLS, tmp_path) as address:
        labels = {"train_label": f"{ROLE_LABEL}=train", "data_label": f"{ROLE_LABEL}=data"}
        section = Cluster(
            workers="1-2", resources_per_worker={"slot": 1.0}, address=address, wait_for_nodes=True, **labels
        )
        reporter = Silent()
        outcome = train(made.replace(cluster=section), reporter)
    starts = [text for kind, text in reporter.notes if kind == "status" and re.match(r"starting \d+ worker", text)]
    assert starts[-1] == "starting 2 workers" and outcome.result["status"] == "finished"
    assert outcome.result["wasted_steps"] == 0 and marks(outcome.path) == list(expected_marks(60))
