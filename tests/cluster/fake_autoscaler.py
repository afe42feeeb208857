"""A Ray head on this machine whose autoscaler starts and stops nodes as local processes, from zero nodes.

ray.cluster_utils.AutoscalingCluster needs a file that the wheel lacks, and stops every Ray of the machine.
"""

import json
import os
import signal
import socket
import subprocess
import time

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

HEAD = "ray.head.default"  # the provider knows its head by this name
COMMANDS = ["initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"]
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


class FakeAutoscaler:
    """`with FakeAutoscaler({"cpu": {"resources": {"CPU": 2}, "labels": {}, "max_workers": 2}}, folder) as address:`"""

    def __init__(self, node_types, folder):
        self.folder, self.port, self.ip = folder, free_port(), ray.util.get_node_ip_address()
        types = {name: {"node_config": {}, "min_workers": 0, **kind} for name, kind in node_types.items()}
        types[HEAD] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        self.config = {
            "cluster_name": "fake",
            "max_workers": 8,
            "idle_timeout_minutes": 1,
            "upscaling_speed": 9999,
            "provider": {
                "type": "external",
                "module": PROVIDER,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "launch_multiple": True,
                "head_node_id": FAKE_HEAD_NODE_ID,
                "gcs_address": f"{self.ip}:{self.port}",
            },
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            "file_mounts_sync_continuously": False,
            "available_node_types": types,
            "head_node_type": HEAD,
            **{f"{name}_commands": [] for name in COMMANDS},
            **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        }

    def __enter__(self):
        config = self.folder / "autoscaling.json"
        config.write_text(json.dumps(self.config))
        own = {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }
        options = [f"--port={self.port}", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false"]
        command = ["ray", "start", "--head", "--block", *options, f"--autoscaling-config={config}"]
        with (self.folder / "head.log").open("w") as log:
            self.head = subprocess.Popen(
                [*command, "--object-store-memory=200000000"],
                env=os.environ | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + 60
        while time.monotonic() < until and self.head.poll() is None:
            try:
                socket.create_connection((self.ip, self.port), 0.5).close()
                time.sleep(4)  # the port answers before the autoscaler does
                return f"{self.ip}:{self.port}"
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"the head did not start: {(self.folder / 'head.log').read_text()[-800:]}")

    def __exit__(self, *error):
        self.head.send_signal(signal.SIGTERM)
        try:
            self.head.wait(35)
        except subprocess.TimeoutExpired:
            self.head.kill()
