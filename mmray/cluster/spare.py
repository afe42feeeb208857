"""Processes begun ahead of the actors that will live in them.

A stream's data actors are asked for by its coordinator, which needs two seconds to be there; then each needs two more,
nearly all of them imports of Ray and Ray Data. Begun together with the coordinator, their processes have some of that
behind them by then, and where Ray preloads Ray Data (join.py) all of it. Ray takes any process of the job that nothing
has used yet; one that nobody takes ends by itself.
"""

from __future__ import annotations

import logging
import math

import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

from mmray.cluster.capacity import Labels, Node

KEEP_S, ANSWER_S = 20, 5.0
_LOG = logging.getLogger(__name__)


def begin_processes(count: int, labels: Labels | None = None) -> None:
    """Ask the nodes with these labels for `count` processes between them, and wait for none.

    A node begins no more at once than it has cores. Where one does not answer, or another Ray knows no such request,
    actors start as they would have, two seconds later: the log has it, nobody else.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    bearing = [node for node in nodes if Node({}, dict(node["Labels"])).bears(labels or {})]
    for node in bearing:
        _ask(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", math.ceil(count / len(bearing)))


def _ask(address: str, count: int) -> None:
    # Internal to Ray 2.60: its C++ clients make this request, and Python has no other word for it.
    context = ray.get_runtime_context()
    request = node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]
        language=common_pb2.Language.PYTHON,  # type: ignore[attr-defined]
        job_id=bytes.fromhex(context.get_job_id()),
        num_workers=count,
        keep_alive_duration_secs=KEEP_S,
    )
    request.runtime_env_info.serialized_runtime_env = context.get_runtime_env_string()
    channel = init_grpc_channel(address)
    answer = node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers.future(request, timeout=ANSWER_S)

    def told(done: object) -> None:
        if answer.exception() is not None:
            _LOG.warning("no processes begun ahead on %s: %s", address, answer.exception())
        channel.close()

    answer.add_done_callback(told)
