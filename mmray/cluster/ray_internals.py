"""All uses of Ray's private API, with a version check. Ray 2.60 has no public API for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from mmray.cluster.capacity import NODE_ID
from mmray.errors import ResourceError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient
    from ray.runtime_env import RuntimeEnv

TESTED_VERSION = "2.60"
HEAD_RESOURCE = "node:__internal_head__"  # resource of the head node only
PRELOAD_VARIABLE = "RAY_preload_python_modules"  # modules that idle worker processes import ahead
# Runs are shown on the page Train of the dashboard, by an actor on the head. A Ray of this machine
# has no dashboard.
STATE_TRACKING_VARIABLE = "RAY_TRAIN_ENABLE_STATE_TRACKING"
GITIGNORE_VARIABLE = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"
REQUEST_TIMEOUT_S = 60.0  # of jobs; Ray has none, so a broken connection would hang
# A connection that gets no answer for this long is closed (Ray's default: 20 s). The other side is
# not told while the link is down: a call that waits for its reply would fail five minutes later,
# when Ray's client next tests the connection. Longer than Ray needs to give up a node.
KEEPALIVE_VARIABLE = "RAY_grpc_keepalive_timeout_ms"
KEEPALIVE_MS = 120_000
ENVIRONMENT = {
    KEEPALIVE_VARIABLE: str(KEEPALIVE_MS),
    # Ray's 2 s delay each report and the detection of each failure
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # it adds a process per worker group; the driver polls instead
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_task_oom_retries": "5",  # the default is to retry out-of-memory tasks forever
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray Train's controller waits for its workers in `ray.get`
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}


def version_warning(installed: str = ray.__version__) -> str | None:
    """Return a warning if a version of Ray is untested, otherwise None.

    Args:
        installed: Version such as `2.60.1`; major and minor number are compared.
    """
    if installed.split(".")[:2] == TESTED_VERSION.split("."):
        return None
    return (
        f"Ray {installed} is untested: mmray uses private APIs of Ray {TESTED_VERSION}, so "
        "autoscaling and preemption may fail. Install it with: pip install "
        f"'ray~={TESTED_VERSION}.0'"
    )


def job_client(address: str | None) -> JobSubmissionClient:
    """Return Ray's client of jobs, whose requests fail if the head does not answer for 60 s."""
    from ray.job_submission import JobSubmissionClient  # importing it takes a second

    class JobClient(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=REQUEST_TIMEOUT_S, **options)

    return JobClient(address)


@contextmanager
def _checked(what: str) -> Iterator[None]:
    """Turn errors caused by a changed private API into a ResourceError."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        fix = version_warning() or "This is a bug of mmray"
        raise ResourceError(
            f"cannot read {what} from Ray {ray.__version__}: {error}. {fix}"
        ) from error


@contextmanager
def essential_processes() -> Iterator[None]:
    """Return a context manager in which `ray.init` starts only the processes that a Ray of this
    machine needs.

    The API server, the autoscaler, the monitor of log files and the HTTP server of the agent take
    8 s of CPU time, and `ray.init` waits for the first one.
    """
    with _checked("the processes of a node"):
        from ray._private import node, utils

        class EssentialNode(node.Node):
            def start_api_server(self, **options: object) -> None:
                pass

            def start_monitor(self) -> None:
                pass

            def start_log_monitor(self) -> None:
                pass

    replaced: list[tuple[Any, str, Any]] = [
        (node, "Node", EssentialNode),
        # The agent serves no HTTP if the packages of the dashboard are missing.
        (utils, "get_dashboard_dependency_error", lambda: ImportError("not needed")),
    ]
    originals = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(replaced, originals, strict=True):
            setattr(module, name, value)


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each node by its ID, such as {"ab12...": {"CPU": 3.0, "memory":
    1e10}}.
    """
    with _checked("the free resources per node"):
        from ray._private import state

        free = state.available_resources_per_node()
    return {node_id: dict(resources) for node_id, resources in free.items()}


def draining_nodes() -> dict[str, float]:
    """Return the nodes that are draining, because they will be preempted.

    Returns:
        Deadline by node ID, in seconds since the epoch; 0: no deadline.
    """
    with _checked("the draining nodes"):
        from ray._private.state import state

        deadlines_ms = state.get_draining_nodes()
    return {node_id: deadline_ms / 1000 for node_id, deadline_ms in deadlines_ms.items()}


def actors_of_job(class_name: str) -> list[tuple[str, str, int]]:
    """Return the actors of this job that are not dead.

    Args:
        class_name: Part of the class name of the actors, such as `DecodeActor`.

    Returns:
        State (such as `ALIVE`), node ID and process ID of each.
    """
    with _checked("the actors"):
        from ray._private.state import actors

        job = ray.get_runtime_context().get_job_id()
        return [
            (actor["State"], actor["Address"]["NodeID"], actor["Pid"])
            for actor in actors(job_id=ray.JobID.from_hex(job)).values()
            if class_name in actor["ActorClassName"] and actor["State"] != "DEAD"
        ]


def running_jobs() -> list[str]:
    """Return the other jobs that run on the cluster, as text with their job ID, driver address and
    process ID.
    """
    with _checked("the jobs"):
        from ray._private.state import jobs

        own = ray.get_runtime_context().get_job_id()
        return [
            f"{job['JobID']} of {job['DriverIPAddress']} (process {job['DriverPid']})"
            for job in jobs()
            if not job["IsDead"] and job["JobID"] != own
        ]


def autoscaler_groups() -> list[tuple[str, dict[str, float], int]] | None:
    """Return the node pools of Ray's autoscaler.

    Returns:
        Name, resources of a node and maximum number of nodes (negative: no limit) of each pool.
        None if the cluster has no such configuration.
    """
    with _checked("the autoscaler's pools"):
        from ray._private.state import state

        config = state.get_cluster_config()
        if config is None:
            return None
        return [
            (
                group.name,
                {name: float(amount) for name, amount in group.resources.items()},
                group.max_count,
            )
            for group in config.node_group_configs
        ]


def request_nodes(
    requester: str,
    bundles: list[dict[str, float]],
    selector: dict[str, str],
    expire_s: float,
    timeout_s: float,
) -> None:
    """Request nodes for bundles of resources from the autoscaler.

    Args:
        requester: Name of the request; a later one of the same name replaces it.
        bundles: Resources of each bundle, such as {"CPU": 4, "GPU": 1}; an empty list cancels the
            request.
        selector: Labels of the nodes, for all bundles; {}: any node.
        expire_s: Seconds after which the request ends if it is not repeated.
        timeout_s: Seconds to wait for an answer.

    Raises:
        RayError: The autoscaling coordinator failed.
        TimeoutError: It did not answer in time.
    """
    with _checked("the autoscaling coordinator"):
        from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as module

        # It adds up all requests of Ray Data and Ray Train, and would overwrite those of
        # `ray.autoscaler.sdk`.
        coordinator: Any = module.get_or_create_autoscaling_coordinator()
        if bundles:
            answer = coordinator.request_resources.remote(
                requester_id=requester,
                resources=bundles,
                label_selectors=[dict(selector)] * len(bundles) if selector else None,
                expire_after_s=expire_s,
                priority=module.ResourceRequestPriority.HIGH,
            )
        else:
            answer = coordinator.cancel_request.remote(requester_id=requester)
    ray.get(answer, timeout=timeout_s)


def run_train_controller(group: PlacementGroup, callbacks: list[Any], **arguments: Any) -> Any:
    """Run Ray Train's controller on this node, with workers in a placement group that exists.

    Ray's callback for datasets is not used. The one that removes the placement group if the
    controller dies is used only in an actor (the driver of a trial); another caller removes the
    group itself.

    Args:
        group: The placement group, with a bundle for each worker.
        callbacks: Ray Train's callbacks, as its trainer creates them.
        arguments: Further keyword arguments of Ray Train's `TrainController`, as its
            `DataParallelTrainer.fit` passes them.

    Returns:
        The ray.train.Result of the run, with `metrics`, `checkpoint` and `error`.
    """
    with _checked("the controller of Ray Train"):
        from ray.train.v2._internal.callbacks import DatasetsCallback
        from ray.train.v2._internal.callbacks.placement_group_callback import (
            PlacementGroupCleanerCallback,
        )
        from ray.train.v2._internal.constants import get_env_vars_to_propagate
        from ray.train.v2._internal.execution import controller, worker_group
        from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
            DefaultPlacementGroupHandle,
        )

        class WorkerGroup(worker_group.WorkerGroup):
            def _create_placement_group(self, *_: object) -> DefaultPlacementGroupHandle:
                return DefaultPlacementGroupHandle(group)

            @staticmethod
            def _get_worker_runtime_env(custom_runtime_env: dict[str, Any] | RuntimeEnv) -> Any:
                if is_local:
                    return custom_runtime_env
                return worker_group.WorkerGroup._get_worker_runtime_env(custom_runtime_env)

        class TrainController(controller.TrainController):
            worker_group_cls = WorkerGroup

    context = ray.get_runtime_context()
    # Processes of a Ray of this machine have the environment of the driver. Those that Ray starts
    # ahead can only be used without another one.
    is_local = not context.runtime_env
    if is_local:
        arguments["scaling_policy"] = _reserved_policy(arguments["scaling_policy"].scaling_config)
    unused: list[type] = [DatasetsCallback]
    if context.get_actor_id() is None:
        unused.append(PlacementGroupCleanerCallback)
    used = [each for each in callbacks if not isinstance(each, tuple(unused))]
    runtime_env = None if is_local else {"env_vars": get_env_vars_to_propagate()}
    options: dict[str, Any] = {
        "num_cpus": 0,
        "label_selector": {NODE_ID: context.get_node_id()},
        "runtime_env": runtime_env,
    }
    actor: Any = ray.remote(TrainController).options(**options).remote(callbacks=used, **arguments)
    ray.get(actor.run.remote())
    return ray.get(actor.get_result.remote())


def _reserved_policy(scaling_config: Any) -> Any:
    """Return Ray Train's scaling policy of a fixed number of workers, which requests no nodes for
    them, so that Ray starts no actor for requests.
    """
    with _checked("the scaling policy of Ray Train"):
        from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

        class ReservedPolicy(FixedScalingPolicy):
            def after_controller_start(self, *_: object) -> None:
                pass

            def _maybe_send_resource_request(self) -> None:
                pass

    return ReservedPolicy(scaling_config)
