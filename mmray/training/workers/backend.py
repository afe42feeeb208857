"""Where the workers of a run start: on a Ray cluster (ray_backend.py) or in a process of this
machine (local.py).
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from mmray.config import Config, Vlm
from mmray.data.store.mixture import PreparedMixture
from mmray.data.stream.order import BlockShuffle, ResumePoint, SamplePlan
from mmray.data.stream.reader import IMAGE_CACHE_MB, RowReader
from mmray.data.stream.shuffle import WORKERS_PER_NODE
from mmray.data.stream.token_batches import TokenPlan
from mmray.data.vlm.reader import ConversationReader
from mmray.engine.checkpoint import files
from mmray.engine.worker_context import WorkerContext
from mmray.errors import DeviceError, MmrayError, OutOfMemoryError, is_out_of_memory
from mmray.processes import ChildDied
from mmray.storage.paths import AnyPath
from mmray.training.resolve import ResolvedRun

if TYPE_CHECKING:
    from mmray.training import RunReporter
    from mmray.training.monitor import AttemptMonitor, Workers


T = TypeVar("T")
JOIN_INTERVAL_S = 0.25
# Errors of collectives that broke or timed out: gloo's, NCCL's, and those of the store through
# which ranks connect.
COLLECTIVE_ERRORS = re.compile(
    "Connection (closed|reset) by peer|Broken pipe|Connection timed out|No route to "
    "host|NCCL|Socket Timeout"
    "|(recv|send) operation to complete|wait timeout after|Connection was likely closed|timeout "
    "caused pair closure"
)


class WorkerFailed(Exception):
    """A worker failed, or did not start.

    Args:
        kind: `lost` (a worker, node or connection), `device` (a GPU or its link), `preempted` (its
            node was drained) or `raised` (code raised an error).
    """

    def __init__(self, kind: str, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.kind = kind
        self.cause = cause


def is_lost(error: BaseException) -> bool:
    """Return whether an error means that a worker, or the connection to another one, was lost.

    A process that exited by itself is not lost: an import failed, or user code called exit.
    """
    if isinstance(error, ChildDied):
        return error.exit_code is None or error.exit_code < 0
    # An error of mmray may quote NCCL.
    return not isinstance(error, MmrayError) and _is_of_collective(error)


def is_process_lost(error: BaseException) -> bool:
    """Return whether a process was lost: `is_lost` for a single worker, which has no connections to
    others.
    """
    return isinstance(error, ChildDied) and is_lost(error)


def _is_of_collective(error: BaseException) -> bool:
    return COLLECTIVE_ERRORS.search(str(error)) is not None


def select_cause(
    errors: Iterable[BaseException], is_lost: Callable[[BaseException], bool] = is_lost
) -> WorkerFailed:
    """Return why a group of workers failed.

    A failed device or a lack of memory of one rank causes errors of other ranks, and any error
    causes broken connections. So errors of devices and memory are the first choice, broken
    connections the last.

    Args:
        errors: What the workers raised, at least one.
        is_lost: Returns whether an error means that a worker was lost, not that its code failed.
    """

    def order(error: BaseException) -> tuple[bool, ...]:
        is_of_device = isinstance(error, (DeviceError, OutOfMemoryError))
        return (
            not is_of_device,
            not isinstance(error, MmrayError),
            is_lost(error),
            not is_out_of_memory(error),
            _is_of_collective(error),
        )

    cause = min(errors, key=order)
    if isinstance(cause, DeviceError):
        return WorkerFailed("device", cause)
    return WorkerFailed("lost" if is_lost(cause) else "raised", cause)


@dataclass(frozen=True)
class Attempt:
    """One start of the workers of a run, and what they start from.

    Args:
        resolved: The run, with the batch shape for the number of workers of the attempt.
        checkpoint: Folder of the checkpoint to resume from; None: step 0.
        bad_rows: Indices in the training set of the rows that earlier attempts could not read.
    """

    resolved: ResolvedRun
    folder: AnyPath
    fencing_token: int
    checkpoint: AnyPath | None
    bad_rows: set[int]

    def worker_context(self) -> WorkerContext:
        """Return what each worker of the attempt needs; it is pickled to them."""
        resolved = self.resolved
        config = self.resolved.config
        max_pixels = max(config.prepare.max_pixels, resolved.train_set.max_pixels)
        reader: RowReader | ConversationReader
        if isinstance(config.model, Vlm):
            reader = ConversationReader(
                resolved.train_set, config.model, max_pixels, config.data, resolved.references
            )
        else:
            reader = RowReader(
                resolved.train_set,
                config.model.inputs,
                resolved.tokenizer_json,
                max_pixels,
                config.augment,
                config.data.augment,
                resolved.teacher,
                IMAGE_CACHE_MB,
            )
        return WorkerContext(
            config=config,
            folder=self.folder,
            fencing_token=self.fencing_token,
            reader=reader,
            eval_sets=resolved.eval_sets,
            tokenizer_json=resolved.tokenizer_json,
            batch_shape=resolved.batch_shape,
        )


def resume_point(resolved: ResolvedRun, checkpoint: AnyPath | None) -> ResumePoint:
    """Return from which step and checkpoint the workers start, the same for every rank."""
    config = resolved.config
    shuffle = config.data.block_shuffle
    shape = resolved.batch_shape
    plan = SamplePlan(
        num_rows=resolved.data_identity["num_rows"],
        global_batch_size=shape.global_batch_size,
        world_size=shape.world_size,
        seed=config.train.seed,
        steps=resolved.steps,
        shuffle=config.data.shuffle,
        components=resolved.train_set.components
        if isinstance(resolved.train_set, PreparedMixture)
        else (),
        block_shuffle=None if shuffle is None else BlockShuffle(*shuffle),
    )
    # A node caches the blocks of its own ranks, so only these exchange rows. A full shuffle gives
    # no node blocks of its own.
    ranks_per_group = None if shuffle is None else math.gcd(shape.world_size, WORKERS_PER_NODE)
    if resolved.token_lengths is not None and shape.micro_tokens is not None:
        plan = TokenPlan(
            **vars(plan),
            num_tokens=resolved.token_lengths,
            max_row_tokens=config.max_row_tokens,
            max_tokens=shape.micro_tokens,
            padded=not resolved.is_packed,
            ranks_per_group=ranks_per_group,
        )
    return (
        ResumePoint(plan, 0)
        if checkpoint is None
        else ResumePoint(plan, files.step_of(checkpoint), str(checkpoint))
    )


def format_counts(names: Iterable[str]) -> str:
    """Format how often each name occurs, such as `1 stopped, 3 sleeping`; `none` without names."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items()) or "none"


def run_in_thread(call: Callable[[], T], poll: Callable[[], None]) -> T:
    """Call a function in a daemon thread, and poll until it ends and once after its end.

    Args:
        call: Called without arguments, in the thread.
        poll: Called without arguments several times per second in the calling thread. Its errors
            are raised at once.

    Returns:
        The result of `call`; its error is raised.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            done.set_exception(error)

    thread = threading.Thread(target=run, name="mmray-trainer", daemon=True)
    thread.start()
    running = True
    while running:
        thread.join(JOIN_INTERVAL_S)
        running = thread.is_alive()  # before the poll, so that the last poll comes after the end
        poll()  # an exception leaves at once; the daemon thread then ends with the process
    return done.result()


class Backend(Protocol):
    """Starts the workers of each attempt: RayBackend on a cluster, LocalBackend on this machine.

    Attributes:
        errors: Types of errors of a cluster or a worker, after which the workers may be restarted;
            other errors are bugs.
    """

    errors: tuple[type[Exception], ...]

    def check(self, config: Config, reporter: RunReporter) -> None:
        """Check that the run can start here, and log warnings.

        Raises:
            ResourceError: The cluster or machine can never provide what the run needs.
            UsageError: `run.storage` cannot be used here.
        """

    def resolve(self, config: Config) -> Config:
        """Return the settings with values in place of `auto` in `cluster.accelerator` and
        `cluster.cpus_per_worker`, which are kept when workers are restarted.
        """

    def check_inputs(self, resolved: ResolvedRun) -> None:
        """Check that all machines of the run have the local files that its workers read.

        Raises:
            ResourceError: One lacks a file or folder.
        """

    def num_local(self, device: str) -> int | None:
        """Return the number of cores (`cpu`) or GPUs (`gpu`) of this machine; None if workers may
        run on others.
        """

    def choose_world_size(self, config: Config) -> int:
        """Return the number of workers for the next attempt: of a range `cluster.workers` as many
        as fit now, and at least its minimum.
        """

    def start(self, attempt: Attempt) -> Workers:
        """Start the workers of an attempt, without waiting for them."""

    def exclude_node(self, config: Config, node: str) -> bool:
        """Start no more workers of this run on a node, because a device failed there.

        Returns:
            False if the run would not fit without the node, which is then still used.
        """

    def find_cause(self, error: BaseException, monitor: AttemptMonitor) -> WorkerFailed:
        """Find out why the workers failed.

        Args:
            monitor: The monitor of these workers, which has their last heartbeats.
        """
