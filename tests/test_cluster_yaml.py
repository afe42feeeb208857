"""cluster.yaml passes the schema of Ray's launcher, and its comments are true."""

import re
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool, missing_capacity
from mmray.cluster.placement import ROLE_LABEL, data_label_selector, train_label_selector

FILE = Path(__file__).parents[1] / "cluster.yaml"
TEXT = FILE.read_text()


@pytest.fixture(scope="module")
def cluster():
    """cluster.yaml as Ray parses it, with Ray's defaults."""
    config = prepare_config(yaml.safe_load(TEXT))
    validate_config(config)
    return config


def test_schema_refuses_misspelled_key():
    config = prepare_config(yaml.safe_load(TEXT) | {"idle_timeout_minuets": 5})
    with pytest.raises(Exception, match="idle_timeout_minuets"):
        validate_config(config)


def test_head_has_no_resources_and_is_not_spot(cluster):
    head = cluster["available_node_types"][cluster["head_node_type"]]
    assert (head["resources"]["CPU"], head["resources"]["GPU"]) == (0, 0)
    assert "InstanceMarketOptions" not in head["node_config"]


@pytest.mark.parametrize(("pool", "role"), [("cpu", "data"), ("gpu", "train")])
def test_pools_start_at_zero_spot_nodes_with_role_labels(cluster, pool, role):
    node_type = cluster["available_node_types"][pool]
    assert node_type["min_workers"] == 0 < node_type["max_workers"] <= cluster["max_workers"]
    assert node_type["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert node_type["labels"] == {ROLE_LABEL: role}
    assert bool(node_type["resources"].get("GPU")) is (role == "train")
    assert any("--shm-size" in option for option in node_type["docker"]["worker_run_options"])


def test_idle_nodes_are_terminated_and_versions_match_the_package(cluster):
    assert 0 < cluster["idle_timeout_minutes"] <= 30
    assert cluster["provider"]["cache_stopped_nodes"] is False
    wanted = re.search(
        r"ray\[[^]]*\]~=(\d+\.\d+)", (FILE.parent / "pyproject.toml").read_text()
    ).group(1)
    lock = (FILE.parent / "jobs" / "deploy" / "requirements.lock").read_text()
    assert f"\nray=={wanted}." in lock  # of the image
    commands = str([cluster[name] for name in cluster if name.endswith("_commands")])
    assert "pip install" not in commands and "chmod 777" not in commands
    assert f'"ray[default]=={wanted}.' in TEXT


def test_every_node_uses_the_auth_token(cluster):
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    starts = [
        line
        for key in ("head", "worker")
        for line in cluster[f"{key}_start_ray_commands"]
        if "ray start" in line
    ]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in line for line in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_empty_pools_accept_feasible_and_refuse_infeasible_run(cluster):
    """With both pools empty, mmray sees the labels of the head and the resources of the pools."""
    types = cluster["available_node_types"]
    head = Node({"CPU": 0.0}, {**types["head"]["labels"], NODE_GROUP: "head"})
    pools = [
        Pool(
            name,
            {key: float(amount) for key, amount in types[name]["resources"].items()},
            types[name]["max_workers"],
        )
        for name in ("cpu", "gpu")
    ]
    train, data = train_label_selector("auto", [head]), data_label_selector("auto", [head])
    assert (train, data) == ({ROLE_LABEL: "train"}, {ROLE_LABEL: "data"})
    gpus = int(types["gpu"]["max_workers"] * types["gpu"]["resources"]["GPU"])
    assert missing_capacity(Demand(gpus, {"CPU": 1.0, "GPU": 1.0}, train), [head], pools) is None
    assert missing_capacity(Demand(1, {"CPU": 1.0}, data, "data"), [head], pools) is None
    message = missing_capacity(Demand(99, {"CPU": 1.0, "GPU": 1.0}, train), [head], pools)
    assert message is not None and f"--cluster.workers {gpus} would fit" in message


def test_submit_lines_name_existing_jobs():
    scripts = re.findall(r"python (jobs/\w+\.py)", TEXT)
    assert scripts and all((FILE.parent / script).exists() for script in scripts)
