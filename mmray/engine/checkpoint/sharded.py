"""A sharded checkpoint's tensors: each rank writes its own cut, and whoever reads them cuts them anew.

For checkpoint.py, over torch.distributed.checkpoint with its safetensors storage: the header of each file says which
part of which tensor lies in it. (torch's usual storage says so in a pickle, and no pickle is opened here.)

    shard-2-of-4.safetensors  what the second of four ranks holds; what all ranks hold alike is in the first one's file

Imported by those who write or read such files only: torch's part for it costs seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from mmray.engine.checkpoint.checksums import sha256
from mmray.engine.checkpoint.tree import At, Part, key_of, mapped, names
from mmray.errors import MmrayError
from mmray.storage.paths import AnyPath, RemotePath, temp_dir


def write(
    path: AnyPath, state: Any, ranks: Any, opened: Callable[[], None], closed: Callable[[dict[str, Part]], None]
) -> None:
    """Write this rank's cut of `state`; all ranks of the process group `ranks` (on hosts) call it together.

    On rank 0 `opened` is called before any rank writes, and `closed` when the files of all are at `path`; what either
    raises, every rank raises. Raises OSError for what the storage of any rank did not take.
    """
    mine: dict[str, Tensor] = {}
    first = dist.get_rank(ranks) == 0

    def take(at: At, tensor: Tensor) -> None:
        if first or isinstance(tensor, DTensor):
            mine[key_of(at)] = tensor.contiguous()

    mapped(state, take)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _made_here(path) as here, _causes():
        dcp.save(mine, storage_writer=_Writer(here, path, ranks, opened, closed), planner=planner, process_group=ranks)


def read(path: AnyPath, wanted: dict[At, Tensor], world: int) -> None:
    """Fill the tensors, each cut as it is, from the files of `world` ranks; talks to no other rank.

    Raises OSError, SafetensorError, RuntimeError, ValueError.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    by_key: dict[str, Any] = {key_of(at): tensor for at, tensor in wanted.items()}
    with _brought_here(path, world) as here, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is meant
        try:
            with _causes():
                dcp.load(by_key, storage_reader=HuggingFaceStorageReader(str(here)), planner=planner, no_dist=True)
        except (AssertionError, KeyError) as error:  # torch's words for a file that is not what it should be
            raise ValueError(f"{type(error).__name__}: {error}") from error


class _Writer(HuggingFaceStorageWriter):
    """One file for each rank, under the name that says how many there are."""

    def __init__(self, here: Path, path: AnyPath, ranks: Any, opened: Callable[[], None], closed: Callable[..., None]):
        super().__init__(str(here), save_distributed=True)
        # What comes is on the host already; the loader that copies ahead would make itself at home on the first GPU.
        self.per_thread_copy_ahead = 0
        self._here, self._there, self._opened, self._closed = here, path, opened, closed
        self._name = names(dist.get_world_size(ranks))[dist.get_rank(ranks)]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # not the base's: the folder is rank 0's to clear first

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._opened()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._here.mkdir(parents=True, exist_ok=True)  # a network disk may not show yet what rank 0 made
        written = super().write_data(plan, planner).wait()
        file = self._here / self._name
        (self._here / written[0].storage_data.relative_path).rename(file)
        if isinstance(self._there, RemotePath):
            (self._there / self._name).upload(file)
        part = Part(sha256(file), file.stat().st_size)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(self._name), part.num_bytes, part)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = {result.index.fqn: result.storage_data for written in results for result in written}
        for name, part in parts.items():
            file = self._there / name
            there = file.stat().st_size if file.exists() else 0
            if there != part.num_bytes:
                raise OSError(f"{file} has {there:,} bytes, and its rank wrote {part.num_bytes:,}: do all see it?")
        self._closed(parts)


@contextmanager
def _made_here(path: AnyPath) -> Iterator[Path]:
    if not isinstance(path, RemotePath):
        yield path
        return
    with temp_dir() as here:
        yield here


@contextmanager
def _brought_here(path: AnyPath, world: int) -> Iterator[Path]:
    """A folder of this machine with these files and no other that could be taken for one."""
    if not isinstance(path, RemotePath):
        there = {file.name for file in path.glob("*.safetensors")}
        if there != set(names(world)):
            raise OSError(f"of the files of {world} ranks there are {', '.join(sorted(there)) or 'none'}")
        yield path
        return
    with temp_dir() as here:
        for name in names(world):
            (path / name).download(here / name)
        yield here


@contextmanager
def _causes() -> Iterator[None]:
    """What went wrong on some rank, instead of torch's list of tracebacks.

    A connection that broke is no such thing: it is raised as it came, for it tells that a rank is gone.
    """
    try:
        yield
    except CheckpointException as error:
        rank, cause = next(
            ((rank, cause) for rank, (cause, _) in error.failures.items() if isinstance(cause, MmrayError)),
            next((rank, cause) for rank, (cause, _) in error.failures.items()),
        )
        if isinstance(cause, (OSError, SafetensorError)):
            text = getattr(cause, "strerror", None) or str(cause)
            raise OSError(f"{text} (on rank {rank})") from cause
        raise cause from None
