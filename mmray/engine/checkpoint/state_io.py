"""State of a run to and from the files of a checkpoint, with torch.distributed.checkpoint (DCP) and
safetensors.

    shard-2-of-4.safetensors   tensors of the second of four ranks; replicated ones are in the first
    state.json                 all other values: progress, loss scale, optimizer groups

Every strategy writes this format: one file without sharding, one per rank under FSDP. The header of
a file names the slice of each tensor in it, so any number of ranks can read them, each only its own
bytes.

The storage classes extend those of torch for safetensors. torch's own were measured (100 tensors,
234 MiB, torch 2.14) and not used alone. FileSystemWriter keeps a pickle (`.metadata`).
HuggingFaceStorageWriter saves as fast as CheckpointWriter (150 and 180 MiB/s), but neither syncs
nor writes checksums. HuggingFaceStorageReader loads a local folder twice as fast (730 and 380
MiB/s), but it opens no object store, reads stray files of another world size too, and maps the
files: a read error of a network disk then ends the process instead of raising an OSError.

Importing DCP takes 0.7 s, so other modules import this one only when they save or load.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import orjson
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import _getdtype
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture

from mmray.engine.checkpoint import files
from mmray.engine.checkpoint.files import (
    META,
    STATE,
    SUMS,
    as_user_error,
    discard,
    fsync,
    read_json,
    sha256,
)
from mmray.engine.checkpoint.staging import HostStager
from mmray.engine.run_state import CheckpointState, DestinationFn, separate_tensors
from mmray.errors import MmrayError, StorageError, os_reason
from mmray.models.weights import save_weights
from mmray.storage.paths import AnyPath, RemotePath, open_for_upload, staged_upload
from mmray.storage.ranges import ByteRange, RangeReader, coalesce_ranges
from mmray.storage.requests import iter_parallel, parallel_map

# DCP without a group is intended here.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
# Tensors in this buffer are only copied.
warnings.filterwarnings("ignore", "The given buffer is not writable")
# The limit of safetensors.
MAX_HEADER_BYTES = 100 << 20


def stage_save(
    path: AnyPath,
    state: CheckpointState,
    meta: dict[str, Any],
    cpu_group: ProcessGroup | None = None,
    stager: HostStager | None = None,
    before_write: Callable[[], None] = lambda: None,
    on_complete: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Copy the state to the host, and return the function that writes the checkpoint.

    Args:
        path: Folder of the checkpoint; an existing one is replaced.
        state: Nested dicts of tensors and JSON values; a run gives `model`, `optimizer`, `scaler`,
            `progress` and maybe `average`.
        cpu_group: Gloo group of the ranks that save together, each its shards; None: this process
            saves alone.
        stager: Keeps its buffers from save to save, so the previous save must have ended; None:
            buffers of this save.
        before_write: Called without arguments on rank 0, before any rank writes and again before
            the checksums. Every rank raises what it raises.
        on_complete: Called without arguments on rank 0 when the checkpoint is complete. Every rank
            raises what it raises.

    Returns:
        A function without arguments that all ranks call, in any thread, and again after an error.
        It raises errors of any rank; call it inside `as_storage_error`, which turns those of the
        storage into StorageError.
    """
    values, tensors = separate_tensors(state)
    stager = stager or HostStager()
    writer = CheckpointWriter(
        path, values, meta, cpu_group, before_write, on_complete, stager.synchronize_staging
    )
    if writer.rank != 0:
        tensors = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, DTensor)}
    copies = stager.stage(tensors)

    def write() -> None:
        dcp.save(
            copies,
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=cpu_group,
            no_dist=cpu_group is None,
        )

    return write


def load(
    path: AnyPath,
    destination: DestinationFn | None = None,
    only: str = "",
    on_read: Callable[[], None] = lambda: None,
) -> CheckpointState:
    """Return the saved state, or a part of it. Needs no process group.

    Args:
        destination: Called with (key, tensor): the key of a saved tensor, such as
            `model/log_scale`, and a meta tensor with its shape and dtype. Returns the tensor into
            which it is read. None: full tensors on the CPU. Of a sharded tensor, only the bytes of
            this rank's shard are read.
        only: Key of the part to read, such as `model`; empty: everything.
        on_read: Called without arguments after each request, of at most MAX_REQUEST_BYTES (16 MiB)
            unless a tensor is larger.

    Returns:
        Nested dicts of tensors and JSON values, as they were saved: `model` (its state_dict),
        `optimizer` (as `optimizer_state` returns it), `scaler` (state_dict of the loss scaler),
        `progress` (fields of LoopProgress) and, with an EMA of the weights, `average` (its
        state_dict). With `only`, tensors of other parts are absent.

    Raises:
        TrainingError: A file is missing or damaged.
        StorageError: The storage cannot be read, and may recover.
    """
    destination = destination or (lambda _, saved: torch.empty_like(saved, device="cpu"))
    state: CheckpointState = read_json(path / STATE)
    with as_user_error(path):
        reader = CheckpointReader(path, on_read)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            tensors: dict[str, Any] = {
                key: destination(
                    key, torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
                )
                for key, saved in reader.read_metadata().state_dict_metadata.items()
                if isinstance(saved, TensorStorageMetadata)
                and key.startswith(f"{only}/" if only else "")
            }
            with _raise_first_cause():
                dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
        except (AssertionError, KeyError) as error:
            # DCP's errors for a damaged file.
            raise ValueError(f"{type(error).__name__}: {error}") from error
    for key, tensor in tensors.items():
        *parents, name = (unquote(part) for part in key.split("/"))
        reduce(getitem, parents, state)[name] = tensor
    return state


def load_weights(path: AnyPath, key: str = "model") -> dict[str, Tensor]:
    """Return the full state_dict of a checkpoint's model on the CPU."""
    return load(path, only=key)[key]


class CheckpointWriter(HuggingFaceStorageWriter):
    """Storage of torch.distributed.checkpoint (DCP): a safetensors file per rank; rank 0 adds
    state.json, meta.json and the checksums.

    DCP calls `prepare_local_plan`, `prepare_global_plan`, `write_data` and `finish`, in this order.

    Args:
        values: The state without its tensors, for state.json.
        meta: Contents of meta.json, JSON values by name (see `load_meta`), without `versions`,
            which are added.
        cpu_group: Gloo group of the ranks that save together; None: this process saves alone.
        before_write: Called without arguments on rank 0, before any rank writes and again before
            the checksums.
        on_complete: Called without arguments on rank 0, when the checkpoint is complete.
        wait_copied: Called without arguments; waits until this rank's tensors are on the host.
    """

    def __init__(
        self,
        path: AnyPath,
        values: CheckpointState,
        meta: dict[str, Any],
        cpu_group: ProcessGroup | None,
        before_write: Callable[[], None],
        on_complete: Callable[[], None],
        wait_copied: Callable[[], None],
    ):
        super().__init__(str(path), save_distributed=True)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        self._folder = path
        self._values = values
        self._meta = meta | {"versions": versions}
        self._before_write = before_write
        self._on_complete = on_complete
        self._wait_copied = wait_copied
        self.rank = dist.get_rank(cpu_group) if cpu_group else 0
        num_files = dist.get_world_size(cpu_group) if cpu_group else 1
        self._name = files.tensor_file_names(num_files)[self.rank]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        # The base class would create the folder, which rank 0 must clear first.
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, delete an earlier checkpoint of this step and create its folder."""
        self._before_write()
        discard(self._folder)
        # The folder of the run is not created: an empty one is below a mount that is lost.
        self._folder.parent.mkdir(exist_ok=True)
        self._folder.mkdir()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's tensors to its safetensors file, with the slice of each in the header.

        Args:
            plan: Tensors that this rank writes.
            planner: DCP's planner, whose `resolve_data` returns the tensor of each item of the
                plan.

        Returns:
            A completed future with one result: name of the file, its size in bytes, and its SHA-256
            in hexadecimal.

        Raises:
            OSError: The file cannot be written.
        """
        self._wait_copied()
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, Any] = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert item.tensor_data is not None and isinstance(tensor, Tensor)
            tensors[item.index.fqn] = tensor
            offsets[item.index.fqn] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        with open_for_upload(self._folder / self._name) as file:
            save_weights(tensors, file, {CUSTOM_METADATA_KEY: json.dumps(offsets)})
            fsync(file)
            digest = sha256(file)
            num_bytes = file.stat().st_size
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result([WriteResult(MetadataIndex(self._name), num_bytes, digest)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, write state.json, meta.json and SHA256SUMS, which complete the checkpoint.

        Args:
            metadata: Description of the tensors by torch.distributed.checkpoint (DCP); unused,
                because the headers of the files have it.
            results: What `write_data` returned on each rank: name, size and SHA-256 of its file.

        Raises:
            OSError: A rank's file is missing or has another size in this folder, or a file cannot
                be written.
        """
        shards = [result for written in results for result in written]
        for shard in shards:
            file = self._folder / shard.index.fqn
            size = file.stat().st_size if file.exists() else 0
            if size != shard.size_in_bytes:
                raise OSError(
                    f"{file} has {size:,} bytes, but its rank wrote {shard.size_in_bytes:,}: "
                    "is this folder shared by all nodes?"
                )
        self._before_write()
        with staged_upload(self._folder, (STATE, META, SUMS)) as local:
            (local / STATE).write_text(json.dumps(self._values))
            # orjson writes NaN as null.
            options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
            (local / META).write_bytes(orjson.dumps(self._meta, option=options))
            files.write_checksums(
                local, (STATE, META), {shard.index.fqn: shard.storage_data for shard in shards}
            )
        self._on_complete()


class _SavedChunk(NamedTuple):
    """A part of a tensor in a file, from byte `start`."""

    file: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckpointReader(HuggingFaceStorageReader):
    """Storage of torch.distributed.checkpoint (DCP): reads byte ranges of the safetensors files, of
    a local folder or an object store.

    torch's class opens local files only, and maps them into memory. DCP calls `read_metadata` and
    `read_data`.

    Args:
        on_read: Called without arguments after each request.
    """

    def __init__(self, path: AnyPath, on_read: Callable[[], None]):
        super().__init__(str(path))
        self._on_read = on_read
        self._names = files.tensor_file_names(files.num_tensor_files(path))
        self._is_remote = isinstance(path, RemotePath)
        self._read = RangeReader(path).read

    @cached_property
    def _metadata(self) -> Metadata:
        tensors: dict[str, Any] = {}
        chunks: dict[MetadataIndex, _SavedChunk] = {}
        headers = iter_parallel(self._header, self._names)
        for name, (header_bytes, header) in zip(self._names, headers, strict=True):
            offsets = json.loads(header.pop("__metadata__")[CUSTOM_METADATA_KEY])
            for key, entry in header.items():
                dtype = _getdtype(entry["dtype"])
                shape = entry["shape"]
                offset = offsets[key][SAVED_OFFSETS_KEY]
                known = tensors.setdefault(
                    key, TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
                )
                known.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
                ends = (first + size for first, size in zip(offset, shape, strict=True))
                known.size = torch.Size(map(max, known.size, ends))
                start = 8 + header_bytes + entry["data_offsets"][0]
                chunks[MetadataIndex(key, offset)] = _SavedChunk(name, start, dtype, tuple(shape))
        return Metadata(
            tensors, storage_data=chunks, storage_meta=StorageMeta(load_id=self.load_id)
        )

    def _header(self, name: str) -> tuple[int, dict[str, Any]]:
        """Return the number of bytes of a file's header, and the header."""
        (header_bytes,) = struct.unpack("<Q", self._read(name, 0, 8))
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"{name} is not a safetensors file")
        return header_bytes, json.loads(self._read(name, 8, 8 + header_bytes))

    def read_metadata(self) -> Metadata:
        """Return shapes, dtypes and slices of all saved tensors, from the headers of the files,
        read once.
        """
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Read slices of saved tensors into the tensors of the planner, adjacent ones in one
        request.

        Args:
            plan: Slices to read. A slice is requested as a range of the first dimension, with all
                of the other dimensions.
            planner: Has the tensors to read into.

        Returns:
            A completed future.
        """
        items: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[self.storage_data[item.storage_index].file].append(item)
        spans = {name: [self._span(item) for item in of_file] for name, of_file in items.items()}

        def read(request: tuple[str, ByteRange]) -> None:
            name, span = request
            data = memoryview(self._read(name, span.start, span.stop))
            self._on_read()
            for index in span.span_indices:
                first, last = spans[name][index]
                if first < last:
                    part = data[first - span.start : last - span.start]
                    self._copy(items[name][index], part, planner)

        requests = [
            (name, each) for name, of_file in spans.items() for each in coalesce_ranges(of_file)
        ]
        # Parallel requests hide the latency of a store; each request in flight takes memory.
        if self._is_remote:
            parallel_map(read, requests)
        else:
            for request in requests:
                read(request)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def _span(self, item: ReadItem) -> tuple[int, int]:
        """First and last byte of the rows of an item in its file."""
        chunk = self.storage_data[item.storage_index]
        row_bytes = chunk.dtype.itemsize * math.prod(chunk.shape[1:])
        start = chunk.start + (item.storage_offsets[0] if chunk.shape else 0) * row_bytes
        return start, start + (item.lengths[0] if chunk.shape else 1) * row_bytes

    def _copy(self, item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
        chunk = self.storage_data[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        rows = torch.frombuffer(data, dtype=chunk.dtype).view(-1, *chunk.shape[1:])
        for dim in range(1, rows.dim()):
            rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target.copy_(rows.view_as(target))
        planner.commit_tensor(item, target)


@contextmanager
def as_storage_error(path: AnyPath, discards: bool = True) -> Iterator[None]:
    """Context manager that turns an error of the storage while saving, on any rank, into
    StorageError.

    Args:
        discards: Whether to delete what was written of the checkpoint.

    Raises:
        StorageError: An OSError or SafetensorError occurred inside.
    """
    try:
        with _raise_first_cause():
            yield
    except (OSError, SafetensorError) as error:
        if discards:
            with suppress(OSError):
                discard(path)
        text = os_reason(error).splitlines()[0]
        free = ""
        if isinstance(path, Path) and path.parent.exists():
            free = f" ({shutil.disk_usage(path.parent).free / 2**30:.2f} GiB free)"
        raise StorageError(
            f"cannot write the checkpoint {path}: {text}{free}. Older checkpoints are intact. Free "
            "space or fix the permissions and rerun the same command, or choose another "
            "--run.storage"
        ) from error


@contextmanager
def _raise_first_cause() -> Iterator[None]:
    """Raise the error of the failed rank instead of DCP's list of tracebacks."""
    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        user_errors = {
            rank: cause for rank, cause in causes.items() if isinstance(cause, MmrayError)
        }
        rank, cause = next(iter((user_errors or causes).items()))
        if isinstance(cause, OSError | SafetensorError) and rank > 0:
            raise OSError(f"{os_reason(cause)} (on rank {rank})") from cause
        raise cause from None
