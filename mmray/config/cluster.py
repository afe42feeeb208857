"""Settings of where a run happens: what it asks of Ray, its name and its files."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from mmray.config.base import Section
from mmray.storage.address import CREDENTIALS_REFUSED, has_credentials

LABEL = r"^(auto|none|[A-Za-z0-9._/-]+=\S+)$"


class Cluster(Section):
    """What a run asks of Ray."""

    path: ClassVar[str] = "cluster"
    address: str | None = Field(None, description="Ray address; none: RAY_ADDRESS where it is set, else this machine.")
    workers: int | str = Field(
        1,
        description="Training workers (one GPU each, or CPU only); 1-4: as many as there is room for.",
    )
    accelerator: Literal["auto", "gpu", "cpu"] = Field("auto", description="auto: GPUs where the cluster has them.")
    cpus_per_worker: float = Field(1.0, gt=0, description="CPUs of a training worker.")
    resources_per_worker: dict[str, float] = Field(
        {}, description="Further resources of a training worker, by the names that the nodes give them."
    )
    data_label: str = Field(
        "auto",
        pattern=LABEL,
        description="Label (key=value) of the nodes for data; auto: mmray/role=data where nodes have roles, "
        "else off the GPU nodes where others have CPUs; or none.",
    )
    train_label: str = Field(
        "auto",
        pattern=LABEL,
        description="Label (key=value) of the nodes for training; auto: mmray/role=train where nodes have roles.",
    )
    grows: bool = Field(
        False, description="An autoscaler that does not say what it can add: wait for whatever is asked for."
    )
    max_failures: int = Field(3, ge=0, description="Failures without a new checkpoint in between: more end the run.")
    start_timeout_s: float = Field(600.0, gt=0, description="Wait this long for nodes that scale up.")
    collective_timeout_s: float = Field(300.0, gt=0, description="A collective that takes longer is an error.")
    hang_timeout_s: float = Field(
        180.0, gt=0, description="A rank without a step for so long is named, and the workers start again."
    )

    @field_validator("workers")
    @classmethod
    def _are_a_range(cls, workers: int | str) -> int | str:
        least, most = _range(workers)
        if not 1 <= least <= most:
            raise ValueError(f"must be a number, or two as in 1-4, at least 1 (got {workers!r})")
        return workers

    @property
    def least_workers(self) -> int:
        return _range(self.workers)[0]

    @property
    def most_workers(self) -> int:
        """The number that batch arithmetic and start-up checks count with."""
        return _range(self.workers)[1]

    @property
    def elastic(self) -> bool:
        return self.least_workers != self.most_workers


def _range(workers: int | str) -> tuple[int, int]:
    """(least, most) of `4` or `1-4`; (0, 0) of anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(workers))
    return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


class Run(Section):
    """Name and place of a run's files."""

    path: ClassVar[str] = "run"
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Its folder; none: the recipe.")
    storage: str = Field("runs", description="Folder that every node sees, or s3://bucket/prefix.")
    resume: Literal["auto", "never", "must"] = Field("auto", description="Go on from the newest checkpoint, or not.")
    trackers: tuple[str, ...] = Field(
        (),
        description="`mlflow`, `wandb`, your own `package.module:Class`: told what `mmray train` logs.",
    )
    project: str = Field("mmray", min_length=1, description="Project (experiment) of the run there.")

    @field_validator("storage")
    @classmethod
    def _keeps_no_secret(cls, storage: str) -> str:
        if has_credentials(storage):
            raise ValueError(CREDENTIALS_REFUSED)
        return storage
