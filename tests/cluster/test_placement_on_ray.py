"""Where data and training run on nodes of this machine, according to Ray."""

import time

import pytest
import ray
from ray._private.state import actors

from mmray.cluster import shared_storage
from mmray.cluster.placement import ROLE_LABEL, alive_nodes
from mmray.cluster.run_resources import num_free_workers
from mmray.cluster.shared_storage import LocalInput, check_inputs, find_missing
from mmray.config import Batch
from mmray.errors import ResourceError
from mmray.training.driver import train
from tests.made import make_set, row
from tests.nodes import several_nodes
from tests.training.runs import Silent, config, expected_marks, marks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
STEPS = 3


@pytest.fixture(scope="module")
def roles():
    """A head without CPUs, two training nodes and one data node, labeled as in cluster.yaml."""
    three = [{"num_cpus": 3, "labels": {ROLE_LABEL: role}} for role in ("train", "train", "data")]
    with several_nodes(*three, head={"labels": {ROLE_LABEL: "head"}}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def joined_roles(roles):
    ray.init(address=roles.address, log_to_driver=False, logging_level="ERROR")
    yield {node["NodeID"]: node["Labels"][ROLE_LABEL] for node in ray.nodes()}
    ray.shutdown()


def actors_by_role(roles_of):
    """{class of actor: roles of the nodes it ran on}, of all actors ever started.

    `list_actors` is not used: it asks the dashboard, which on a busy machine may not have started
    yet.
    """
    found: dict[str, set[str]] = {}
    for actor in actors().values():
        if (node := actor["Address"]["NodeID"]) in roles_of:
            found.setdefault(actor["ActorClassName"], set()).add(roles_of[node])
    return found


@pytest.fixture(scope="module")
def placed(joined_roles, tmp_path_factory):
    """A run of three workers with four rows per step, from a set of five rows."""
    folder = tmp_path_factory.mktemp("placed")
    make_set(folder / "set", [row(number) for number in range(5)])
    wanted = config(folder / "set", folder, "run", steps=STEPS, checkpoint_every=0).with_cluster(
        workers=3
    )
    return train(wanted.replace(batch=wanted.batch.replace(global_=4)), Silent())


def test_rank_without_rows_takes_the_steps_of_the_others(placed):
    """Four rows on three ranks: the last has only padding.

    Steps run through the ends of epochs of five rows.
    """
    assert (placed.result["status"], placed.result["rows_consumed"]) == ("finished", 12)
    assert marks(placed.path) == list(expected_marks(STEPS, 5, 4))


def test_decoding_starts_on_the_nodes_of_workers_and_nothing_on_the_head(placed, joined_roles):
    found = actors_by_role(joined_roles)
    decoders = [roles for name, roles in found.items() if "DecodeActor" in name]
    trainers = [roles for name, roles in found.items() if "RayTrainWorker" in name]
    assert decoders and all(roles == {"train"} for roles in decoders), found
    assert trainers and all(roles == {"train"} for roles in trainers), found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 99, "accelerator": "gpu"}, "no node has any GPU"),
        ({"train_label": "role=gup"}, "no node for training is labeled role=gup"),
    ],
)
def test_impossible_run_is_refused_without_a_wait(joined_roles, tmp_path, settings, message):
    wanted = config(tmp_path / "none", tmp_path, "never")
    wanted = wanted.replace(
        cluster=wanted.cluster.replace(**settings), batch=Batch(micro=4, global_=128)
    )
    began_s = time.monotonic()
    with pytest.raises(ResourceError, match=message):
        train(wanted, Silent())
    assert time.monotonic() - began_s < 60
    assert not (tmp_path / "never").exists()


def test_end_of_the_wait_for_resources_is_a_resource_error(joined_roles, tmp_path):
    """The nodes are large enough, but their resources are taken."""
    make_set(tmp_path / "set", [row(number) for number in range(50)])
    blocker = ray.util.placement_group(
        [{"CPU": 3}] * 2, bundle_label_selector=[{ROLE_LABEL: "train"}] * 2
    )
    ray.get(blocker.ready(), timeout=120)
    wanted = config(tmp_path / "set", tmp_path, "late", steps=STEPS).with_cluster(queue_timeout_s=5)
    try:
        with pytest.raises(ResourceError, match=r"5 s \(cluster.queue_timeout_s"):
            train(wanted, Silent())
        assert num_free_workers(wanted) == 2  # they would wait, too
    finally:
        ray.util.remove_placement_group(blocker)


@pytest.fixture
def take_files_from(joined_roles, monkeypatch):
    """take_files_from(role): nodes of this role have no files, although they share this machine.

    Messages name the roles of nodes.
    """

    def take(role):
        def find(paths):
            is_taken = joined_roles[ray.get_runtime_context().get_node_id()] == role
            return list(paths) if is_taken else find_missing(paths)

        monkeypatch.setattr(shared_storage, "find_missing", find)

    monkeypatch.setattr(shared_storage, "node_name", joined_roles.get)
    return take


def test_run_is_refused_before_it_starts_if_a_data_node_lacks_its_set(take_files_from, tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(16)])
    take_files_from("data")
    wanted = config(tmp_path / "set", tmp_path / "runs", "run", steps=STEPS)
    wanted = wanted.replace(data=wanted.data.replace(workers="2-8"))  # some on the data node
    with pytest.raises(ResourceError) as refused:
        train(wanted, Silent())
    lines = str(refused.value).splitlines()
    assert lines[1:2] == [
        f"  data.train: {tmp_path / 'set'} is missing, unreadable or empty on data"
    ]
    assert len(lines) == 3 and "Mount one file system" in lines[2]
    assert list((tmp_path / "runs").iterdir()) == []


def test_inputs_are_checked_on_the_nodes_that_read_them(take_files_from, roles, tmp_path):
    by_role = {
        role: [node for node in alive_nodes() if node.labels[ROLE_LABEL] == role]
        for role in ("train", "data")
    }
    (tmp_path / "set").mkdir()
    empty = LocalInput("data.train", tmp_path / "set", on_data_nodes=True)
    weights = LocalInput("model.weights", tmp_path / "weights", on_data_nodes=False)
    with pytest.raises(ResourceError) as refused:
        check_inputs([empty, weights], by_role["train"], by_role["data"])
    _, data, model, _ = str(refused.value).splitlines()
    assert sorted(data.partition(" on ")[2].split(", ")) == ["data", "train"]
    assert model.endswith("weights is missing, unreadable or empty on train")
    for path in (empty.path / "manifest.json", weights.path):
        path.write_text("{}")
    check_inputs([empty, weights], by_role["train"], by_role["data"])
