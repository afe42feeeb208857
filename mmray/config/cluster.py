"""Settings of the Ray resources, name, files and trackers of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from mmray.config.base import Section, parse_range
from mmray.storage.address import CREDENTIALS_REFUSED, has_credentials

DATA_TIMEOUT_S = 3600.0  # longest wait for rows: data nodes may be preempted and replaced meanwhile
# longest wait for a checkpoint, in multiples of hang_timeout_s: a dead mount never answers
SAVE_TIMEOUT_FACTOR = 10
Label = Annotated[str, Field(pattern=r"^(auto|none|[A-Za-z0-9._/-]+=\S+)$")]


class Cluster(Section, settings_prefix="cluster"):
    """Resources that a run requests from Ray."""

    address: str | None = Field(
        None, description="Ray address; None: RAY_ADDRESS if set, otherwise this machine."
    )
    workers: int | str = Field(
        1, description="Training workers, one GPU each or CPUs only; 1-4: as many as fit."
    )
    accelerator: Literal["auto", "gpu", "cpu"] = Field(
        "auto", description="auto: GPUs if the cluster has any."
    )
    cpus_per_worker: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="CPUs (threads) per training worker; auto: its share of this machine's, 1 with "
        "a GPU.",
    )
    resources_per_worker: dict[str, float] = Field(
        {}, description="Custom Ray resources per training worker."
    )
    data_label: Label = Field(
        "auto",
        description="Label (key=value) of nodes for data; auto: mmray/role=data, or "
        "CPU-only nodes; none: any.",
    )
    train_label: Label = Field(
        "auto",
        description="Label (key=value) of nodes for training; auto: mmray/role=train if "
        "nodes have roles.",
    )
    wait_for_nodes: bool = Field(
        False, description="Skip the capacity check and wait for nodes to be added."
    )
    max_failures: int = Field(
        3, ge=0, description="Maximum number of consecutive failures without a new checkpoint."
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Limit for the start of workers, the first step, and a compilation.",
    )
    queue_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="Limit for the resources of the workers: used by others, or of nodes that "
        "start. Elastic runs start with fewer after start_timeout_s.",
    )
    hang_timeout_s: float = Field(
        180.0, gt=0, description="Restart the workers after this long without progress."
    )

    @field_validator("workers")
    @classmethod
    def _check_range(cls, workers: int | str) -> int | str:
        parse_range(workers)
        return workers

    @property
    def min_workers(self) -> int:
        """Smallest number of training workers: 1 if `workers` is the range `1-4`, 4 if it is 4."""
        return parse_range(self.workers)[0]

    @property
    def max_workers(self) -> int:
        """Largest number of training workers: 4 if `workers` is the range `1-4` or the number 4."""
        return parse_range(self.workers)[1]

    def resolve_cpus(self, num_cores: int) -> float:
        """Return the number of CPUs of each training worker; with `auto` its share of `num_cores`,
        at least 1.
        """
        return float(
            max(1, num_cores // self.max_workers)
            if self.cpus_per_worker == "auto"
            else self.cpus_per_worker
        )

    @property
    def num_cpus(self) -> float:
        """CPUs of each training worker; 1 if `cpus_per_worker` is still `auto`."""
        return self.resolve_cpus(num_cores=1)

    @property
    def num_threads(self) -> int:
        """CPU threads of each training worker: its CPUs without a fraction, at least 1."""
        return max(1, int(self.num_cpus))

    @property
    def state_limits_s(self) -> dict[str, float]:
        """Longest time in seconds that a rank may make no progress, by the state that it reports.

        A training worker reports its state each second. A longer time counts as a hang, and the
        workers are restarted. `training` and `evaluating`: `hang_timeout_s`; `saving`: 10 times as
        long; `starting`, `first_step` and `compiling`: the longer of `hang_timeout_s` and
        `start_timeout_s`; `waiting_for_data`: that, but at least 3600.
        """
        start_s = max(self.hang_timeout_s, self.start_timeout_s)
        return {
            "training": self.hang_timeout_s,
            "starting": start_s,
            "first_step": start_s,
            "evaluating": self.hang_timeout_s,
            "compiling": start_s,  # a recompilation takes as long as the first compilation
            "saving": SAVE_TIMEOUT_FACTOR * self.hang_timeout_s,
            "waiting_for_data": max(DATA_TIMEOUT_S, start_s),
        }

    @property
    def group_timeout_s(self) -> float:
        """Timeout in seconds to form the process group, and of its collectives until training
        starts: 1.5 x `hang_timeout_s`, at least 300.
        """
        return max(300.0, 1.5 * self.hang_timeout_s)

    @property
    def first_heartbeat_s(self) -> float:
        """Longest time in seconds to the first heartbeat of a worker: its node starts, and it
        imports torch and joins the process group.
        """
        return self.start_timeout_s + self.state_limits_s["starting"] + self.group_timeout_s

    @property
    def collective_timeout_s(self) -> float:
        """Timeout in seconds of a collective in training.

        It is longer than all limits of `state_limits_s`, so that a rank that hangs is detected and
        named before the collective of the other ranks fails.
        """
        return max(self.state_limits_s.values()) + self.group_timeout_s

    @property
    def elastic(self) -> bool:
        """Whether the number of training workers may change, as for `workers` 1-4."""
        return self.min_workers != self.max_workers


class Run(Section, settings_prefix="run"):
    """Name, files and trackers of a run."""

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run's folder; None: the recipe's name.",
    )
    storage: str = Field(
        "runs", description="Parent folder, visible to all nodes, or s3://bucket/prefix."
    )
    resume: Literal["auto", "never", "must"] = Field(
        "auto",
        description="auto: resume the run if it exists; never: start a new one; must: fail "
        "if there is none.",
    )
    trackers: tuple[str, ...] = Field(
        (), description="Trackers: `mlflow`, `wandb`, your own `package.module:Class`."
    )

    @field_validator("storage")
    @classmethod
    def _check_no_credentials(cls, storage: str) -> str:
        if has_credentials(storage):
            raise ValueError(CREDENTIALS_REFUSED)
        return storage
