"""A cluster of several Ray nodes on this machine, started once for all tests of this folder."""

import os

import pytest

from tests.made import make_set, row
from tests.nodes import several_nodes


class Nodes:
    """A head without CPUs, and nodes that tests add and remove."""

    def __init__(self, cluster):
        self.cluster, self.address, self.workers = cluster, cluster.address, []

    def add(self, num_cpus, slots):
        """Add a node with this many CPUs and slots for training workers."""
        self.workers.append(self.cluster.add_node(num_cpus=num_cpus, resources={"slot": slots}))
        return self.workers[-1]

    def remove(self, node):
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def reset(self, sizes):
        """Replace all nodes by new ones of (CPUs, slots), so that no process of an earlier test
        remains.
        """
        for node in list(self.workers):
            self.remove(node)
        for size in sizes:
            self.add(*size)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared set of 50 rows."""
    folder = tmp_path_factory.mktemp("set")
    make_set(folder, [row(number) for number in range(50)])
    return folder


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    os.environ["MMRAY_TEST_FAULTS"] = str(tmp_path_factory.mktemp("faults"))
    with several_nodes() as cluster:
        yield Nodes(cluster)
