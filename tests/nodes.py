"""Several Ray nodes on this machine, for tests marked `cluster`."""

from contextlib import contextmanager


@contextmanager
def several_nodes(*nodes, head=None):
    """A cluster with a head without CPUs and a node per mapping; a running Ray is shut down first."""
    import ray
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **(head or {})})
    try:
        for node in nodes:
            cluster.add_node(**node)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
