"""The decode actors of one rank on a Ray cluster.

The first run on the node of the rank, on CPUs that the rank's own reservation includes, so a rank
that trains has them. Further actors have a CPU each: on the same node if one is free, otherwise on
data nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster.capacity import NODE_ID, exclude_nodes
from mmray.cluster.placement import node_name
from mmray.data.stream.decode_actor import DecodeActor
from mmray.data.stream.decoder import BlockDecoder, Decoded
from mmray.data.stream.order import BlockPlan, ResumePoint
from mmray.data.stream.pool_size import DecoderLimits, PoolSize
from mmray.data.stream.reader import CRASH_NOTE, RowReader
from mmray.data.stream.slots import LentSlot, SlotPool
from mmray.data.stream.stream import RankBlocks
from mmray.errors import first_line

if TYPE_CHECKING:
    from mmray.data.vlm.reader import ConversationReader

LATE_S = 5.0
# Blocks in flight use at most this share of an object store: two runs may share a node, and Ray
# spills above 80 %.
STORE_FRACTION = 0.3
# Blocks are smaller than the setting if fewer than this would fit into that share.
MIN_BLOCKS = 4
UPDATE_S = 0.5  # time between two checks of the actors
# A further actor without a CPU for this long is requested without a preference for the rank's node,
# because an autoscaler cannot add that node again.
PREFERENCE_S = 10.0
# Wait before lost actors are replaced; each loss in a row doubles it, up to the maximum.
RETRY_S = 1.0
MAX_RETRY_S = 60.0
ACTOR_BYTES = 2**29  # memory of an actor without its blocks
BLOCKS_PER_ACTOR = 2  # blocks in the memory of an actor at a time


def rank_blocks(
    reader: RowReader | ConversationReader,
    start: ResumePoint,
    rank: int,
    ranks_on_node: int,
    block_mb: float,
    limits: DecoderLimits,
    notify: Callable[[str], None],
    must_yield: Callable[[], bool] = lambda: False,
) -> RankBlocks:
    """Start the decode actors of this process's rank, and return its blocks.

    Args:
        block_mb: Maximum size of a block in MB; blocks are smaller if the object store is small.
        notify: Called with one line of text for the log.
        must_yield: Returns whether another job waits for resources of the cluster. While it does,
            the rank keeps only its minimum number of actors.
    """
    stores = object_stores()
    own_node = str(ray.get_runtime_context().get_node_id())
    share_bytes = STORE_FRACTION * stores[own_node] / ranks_on_node
    size_mb = min(block_mb, share_bytes / MIN_BLOCKS / 1e6)
    blocks = BlockPlan.sized(start.plan, start.step, reader.row_bytes, size_mb)
    decoder = BlockDecoder(reader, blocks)
    pool = ActorPool(decoder, limits, own_node, share_bytes, notify, must_yield, rank)
    return RankBlocks(blocks, rank, pool, LATE_S)


def object_stores() -> dict[str, float]:
    """Return the size of the object store of each alive node: bytes by node ID."""
    return {
        node["NodeID"]: float(node["Resources"].get("object_store_memory", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    }


@dataclass(eq=False)
class _Actor:
    handle: Any
    has_cpu: bool  # a CPU of its own; False: one of those reserved with the rank
    prefers_own_node: bool
    started: Future[str]
    created_s: float
    node: str = ""  # its ID, once the actor has started
    slots: SlotPool | None = None  # if it is on the rank's node
    # Numbers of its blocks. Not their futures, which would keep blocks in the object store.
    blocks: set[int] = field(default_factory=set)

    def submit(self, item: int, careful: bool) -> Future[Decoded]:
        self.blocks.add(item)
        slot = None if self.slots is None else self.slots.lend()
        receive = partial(self._receive, slot)
        future = _future_of(self.handle.decode.remote(item, careful, slot), receive)
        future.add_done_callback(lambda _: self.blocks.discard(item))
        return future

    def _receive(self, slot: LentSlot | None, decoded: Decoded) -> Decoded:
        """Return what the actor returned, with the pixels of the slot that it was lent."""
        if slot is not None and self.slots is not None:
            if "image" in decoded.block:
                self.slots.release(slot)
            else:
                num_rows = len(decoded.block["pos"])
                decoded.block["image"] = self.slots.receive(slot, num_rows)
        return decoded


def _future_of(
    reference: ray.ObjectRef[Any], receive: Callable[[Any], Any] = lambda result: result
) -> Future[Any]:
    """Return a future of an object, which raises what the actor itself raised; `receive` converts
    the object.
    """
    future: Future[Any] = Future()

    def copy(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(receive(done.result()))
            return
        if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
            cause = error.cause
            cause.add_note(str(error))  # the traceback in the actor
            error = cause
        future.set_exception(error)

    reference.future().add_done_callback(copy)
    return future


class ActorPool:
    """The decode actors of a rank, as a pool of processes for OrderedMap; Ray ends them with the
    rank.

    Args:
        decoder: Decodes a block by its number; pickled once for all actors.
        limits: Number of actors, and the nodes that may have them.
        own_node: ID of the rank's node.
        share_bytes: Bytes of the node's object store for blocks of this rank.
        notify: Called with one line of text for the log.
        must_yield: As for `rank_blocks`.
    """

    def __init__(
        self,
        decoder: BlockDecoder,
        limits: DecoderLimits,
        own_node: str,
        share_bytes: float,
        notify: Callable[[str], None],
        must_yield: Callable[[], bool],
        rank: int,
    ) -> None:
        self._here = decoder
        self._rank = rank
        self._decoder = ray.put(decoder)
        self._limits = limits
        self._own_node = own_node
        self._notify = notify
        self._must_yield = must_yield
        self._blocks = decoder.blocks
        self._block_bytes = decoder.reader.row_bytes * decoder.blocks.max_rows
        self._max_blocks = max(2, int(share_bytes / self._block_bytes))
        self._node_limits = {own_node: self._max_blocks}
        self._slots = None
        if decoder.reader.pixel_shape is not None:
            # Blocks in flight, and the blocks of the trained and the prefetched step.
            num_slots = self._blocks_to_request(limits.maximum) + 2 * self._blocks.blocks_per_step
            num_slots = min(self._max_blocks, num_slots)
            shape = decoder.reader.pixel_shape
            self._slots = SlotPool(num_slots, self._blocks.max_rows, shape)
        self._too_small = set[str]()  # nodes whose object store cannot have a block of each rank
        self._actors: list[_Actor] = []
        self._retiring: list[_Actor] = []  # they finish their blocks and get no more
        self._losses = 0  # lost actors in a row
        now_s = time.monotonic()
        self._retry_s = self._next_update_s = now_s
        self._size = PoolSize(limits.minimum, limits.maximum, now_s)
        self.update(0.0)

    @property
    def workers(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.node]

    @property
    def max_in_flight(self) -> int:
        return min(self._max_blocks, self._blocks_to_request(len(self.workers)))

    def _blocks_to_request(self, num_actors: int) -> int:
        return max(2 * num_actors, self._blocks.blocks_per_step) + 1

    def node_limit(self, node: str) -> int:
        return self._node_limits[node]

    def is_lost_worker(self, error: BaseException) -> bool:
        # Errors of the decoder itself are no RayErrors: `_future_of` unwraps them.
        return isinstance(error, ray.exceptions.RayError)

    def replace(self, worker: Any) -> None:
        """Kill a lost actor. Another one is started after a delay, unless there are enough."""
        ray.kill(worker.handle)  # it may be alive and unreachable
        if worker in self._retiring:
            self._retiring.remove(worker)
            return
        self._actors.remove(worker)
        self._delay_replacement()
        self._notify(CRASH_NOTE.format(process=f"a decode actor on node {node_name(worker.node)}"))

    def compute_here(self, item: int) -> Decoded:
        return self._here(item, True)

    def update(self, waited_s: float) -> None:
        """Start and end actors, so that the rank waits little for decoded rows; at most every
        UPDATE_S (0.5) seconds.
        """
        now_s = time.monotonic()
        if now_s < self._next_update_s:
            return
        self._next_update_s = now_s + UPDATE_S
        self._check_started(now_s)
        before = self._size.target
        must_yield = self._must_yield()
        num_running = len(self.workers)
        self._size.update(now_s, waited_s, num_running, must_yield)
        if self._size.target != before and self._rank == 0:
            reason = ", because others wait for CPUs" * must_yield
            self._notify(f"decode actors of rank 0: {self._size.target}, was {before}{reason}")
        self._retire_surplus()
        if now_s >= self._retry_s:
            for _ in range(self._size.target - len(self._actors)):
                self._actors.append(self._start(now_s))

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        """Kill all actors at once, and start no further ones."""
        self._retry_s = float("inf")
        for actor in [*self._actors, *self._retiring]:
            ray.kill(actor.handle)

    def _start(self, now_s: float, prefers_own_node: bool = True) -> _Actor:
        """Start an actor: one of the reserved, until they are complete, then with its own CPU."""
        options: dict[str, Any]
        num_reserved = sum(not actor.has_cpu for actor in self._actors)
        has_cpu = num_reserved >= self._limits.reserved
        if has_cpu:
            selector = self._limits.label_selector
            if self._too_small:
                selector = exclude_nodes(self._too_small, selector)
            memory = ACTOR_BYTES + BLOCKS_PER_ACTOR * self._block_bytes
            options = {"num_cpus": 1, "memory": memory, "label_selector": selector}
            if prefers_own_node:
                options["label_selector"] = {NODE_ID: self._own_node}
                options["fallback_strategy"] = [{"label_selector": selector}]
        else:
            here = NodeAffinitySchedulingStrategy(self._own_node, soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": here}
        # Otherwise Ray sends events of each block to the head.
        options["enable_task_events"] = False
        handle: Any = ray.remote(DecodeActor).options(**options).remote(self._decoder)
        started = _future_of(handle.node.remote())
        return _Actor(handle, has_cpu, prefers_own_node, started, now_s)

    def _check_started(self, now_s: float) -> None:
        for actor in [each for each in self._actors if not each.node]:
            if not actor.started.done():
                if actor.prefers_own_node and now_s - actor.created_s > PREFERENCE_S:
                    self._request_anywhere(actor, now_s)
                continue
            error = actor.started.exception()
            if error is not None:
                if not self._losses:
                    self._notify(f"a decode actor did not start: {first_line(error)}")
                self._actors.remove(actor)
                self._delay_replacement()
                continue
            node = actor.started.result()
            if self._limit_of(node) == 0:
                self._reject(actor, node)
                continue
            actor.node = node
            actor.slots = self._slots if node == self._own_node else None
            self._losses = 0

    def _request_anywhere(self, actor: _Actor, now_s: float) -> None:
        """Replace a further actor that has no CPU by one without a preferred node."""
        actor.prefers_own_node = False
        if actor.has_cpu:
            ray.kill(actor.handle)
            self._actors.remove(actor)
            self._actors.append(self._start(now_s, prefers_own_node=False))

    def _limit_of(self, node: str) -> int:
        """Return the most blocks of this rank in the object store of a node."""
        if node not in self._node_limits:
            store_bytes = object_stores().get(node, 0.0)
            all_ranks = self._blocks.plan.world_size * self._block_bytes
            self._node_limits[node] = int(STORE_FRACTION * store_bytes / all_ranks)
        return self._node_limits[node]

    def _reject(self, actor: _Actor, node: str) -> None:
        ray.kill(actor.handle)
        self._actors.remove(actor)
        self._too_small.add(node)
        self._notify(
            f"node {node_name(node)} decodes nothing: its object store is too small for a block of "
            f"{self._block_bytes / 1e6:.0f} MB of each rank; lower --data.block-mb"
        )

    def _retire_surplus(self) -> None:
        """End actors above the target, those that have not started first."""
        surplus = [actor for actor in self._actors if actor.has_cpu]
        surplus.sort(key=lambda actor: (bool(actor.node), actor.node == self._own_node))
        for actor in surplus[: max(0, len(self._actors) - self._size.target)]:
            self._actors.remove(actor)
            self._retiring.append(actor)
        for actor in list(self._retiring):
            if not actor.blocks:
                ray.kill(actor.handle)
                self._retiring.remove(actor)

    def _delay_replacement(self) -> None:
        delay_s = min(MAX_RETRY_S, RETRY_S * 2**self._losses)
        self._losses += 1
        self._retry_s = time.monotonic() + delay_s
