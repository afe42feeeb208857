"""A Ray head on this machine whose autoscaler starts and stops nodes as local processes, from zero
nodes.

ray.cluster_utils.AutoscalingCluster needs a file that the wheel lacks, and stops every Ray of the
machine.
"""

import json
import os
import socket
import time
from contextlib import contextmanager

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from tests.nodes import free_ports, ray_head

HEAD = "ray.head.default"  # the provider knows its head by this name
COMMANDS = [
    "initialization",
    "setup",
    "head_setup",
    "worker_setup",
    "head_start_ray",
    "worker_start_ray",
]
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


@contextmanager
def fake_autoscaler(node_types, folder, dashboard=(), idle_minutes=1, env=os.environ):
    """`with fake_autoscaler({"cpu": {"resources": {"CPU": 2}, "labels": {}, "max_workers": 2}},
    folder) as address:`

    dashboard: its port and that of its agent, for jobs; without one by default.
    """
    (port,), ip = free_ports(1), ray.util.get_node_ip_address()
    types = {
        name: {"node_config": {}, "min_workers": 0, **kind} for name, kind in node_types.items()
    }
    types[HEAD] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    config = {
        "cluster_name": "fake",
        "max_workers": 8,
        "idle_timeout_minutes": idle_minutes,
        "upscaling_speed": 9999,
        "provider": {
            "type": "external",
            "module": PROVIDER,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": f"{ip}:{port}",
        },
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        "file_mounts_sync_continuously": False,
        "available_node_types": types,
        "head_node_type": HEAD,
        **{f"{name}_commands": [] for name in COMMANDS},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    }
    (folder / "autoscaling.json").write_text(json.dumps(config))
    own = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }
    options = ["--num-cpus=0", f"--autoscaling-config={folder / 'autoscaling.json'}"]
    names = ("--dashboard-port", "--dashboard-agent-listen-port")
    given = [f"{name}={number}" for name, number in zip(names, dashboard, strict=False)]
    options += (
        ["--dashboard-host=127.0.0.1", *given] if dashboard else ["--include-dashboard=false"]
    )

    def is_ready():
        try:
            socket.create_connection((ip, port), 0.5).close()
            for dashboard_port in dashboard[:1]:
                socket.create_connection(("127.0.0.1", dashboard_port), 0.5).close()
        except OSError:
            return False
        time.sleep(4)  # the port answers before the autoscaler does
        return True

    with ray_head(folder, port, options, env | own, is_ready):
        yield f"{ip}:{port}"
