"""Scenarios of sharded checkpoints on up to four gloo ranks; test_shards.py checks the results."""

from __future__ import annotations

import copy
import faulthandler
import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mmray.config import Config, Run, Train
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import Blocks, ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.chat import extend_tokenizer
from mmray.data.text.tokenizer import TextEncoder
from mmray.engine import loop, memory_probe
from mmray.engine.checkpoint import state_io
from mmray.engine.checkpoint.manager import CheckpointManager
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import dry_run_job
from mmray.engine.worker import work
from mmray.engine.worker_context import DriverHandle, WorkerContext
from mmray.errors import MmrayError, OutOfMemoryError, StorageError
from mmray.objectives.contrastive import Contrastive
from mmray.storage import storage
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, to_path
from mmray.train import run_dir
from tests.engine import toy
from tests.train import runs

MOST, APART = 4, 2
WORLDS = (1, 2, 3, 4)
KINDS = ("ddp", "fsdp")
TIMEOUT = timedelta(seconds=120)


def play(rank: int, folder: str, address: str) -> None:
    """Entry point of a rank: two ranks train and save, one to four resume, then one of two ranks fails."""
    faulthandler.enable()  # prints a traceback on a native crash
    torch.set_num_threads(1)
    storage.ATTEMPTS = 1
    here, results = Path(folder), {}
    if rank >= MOST:
        cramped(joined(rank - MOST, 2, here, "cramped"), here / f"cramped-{rank - MOST}.json")
        os._exit(0)
    if rank < 2:
        group = joined(rank, 2, here, "saving")
        results["saved"] = saved(group, here / "run")
        results["uploaded"] = saved(group, to_path(address) / "run", steps=4)
        results["full"] = full(group, here / "full")
        results["worked"] = worked(group, here, "worked", "fsdp")
        for kind in KINDS:
            results[f"worked on, {kind}"] = worked(group, here, kind, kind, str(here / "worked/checkpoints/step-3"))
        results["tried"] = tried(group)
        results["tried with little"] = tried(group, free=(1000, 4)[rank])
        results["again"] = tried(group, micro=3)
        dist.destroy_process_group()
    for world in WORLDS:
        if rank < world:
            group = joined(rank, world, here, f"at-{world}")
            for kind in KINDS:
                results[f"{kind} at {world}"] = goes_on(group, here / "run" / "checkpoints" / "step-4", kind)
            dist.destroy_process_group()
    torch.save(results, here / f"rank-{rank}.pt")
    if rank < 2:
        dying(joined(rank, 2, here, "dying"), here / "dying")
    os._exit(0)  # see two_ranks.play


def joined(rank: int, world: int, folder: Path, scene: str) -> Group:
    store = f"file://{folder}/store-{scene}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=TIMEOUT)
    return Group.current()


def manager_of(group: Group, run: AnyPath, told: list[str]) -> tuple[CheckpointManager, Lease | None]:
    """The checkpoint manager of this rank and the lease of rank 0, created as in worker.py."""
    held = None
    if group.rank == 0:
        run.mkdir(parents=True)
        held = Lease(run)
    train = Train(parallel="fsdp", keep_checkpoints=3, steps=8)
    config = Config(recipe="sample", run=Run(storage=str(run.parent), name=run.name), train=train)
    about = {"world": group.world, "architecture": None}
    fence = held.acquire() if held else None
    log, cpu_group = lambda label, text: told.append(text), group.new_cpu_group(60)
    return CheckpointManager(run, fence, config, about, log, cpu_group, sharded=True), held


def plan_of(group: Group, micro: int = 3) -> SamplePlan:
    return SamplePlan(num_rows=30, global_rows=12, world=group.world, micro=micro, seed=1, steps=8)


def settings(kind: str) -> SimpleNamespace:
    return SimpleNamespace(**vars(toy.TRAIN) | {"checkpoint_every": 2, "parallel": kind, "compile": "none"})


def train(
    group: Group, save: Any, state: Any, kind: str, first: int, steps: int = 8, planned: int = 3, **given: Any
) -> toy.Branched:
    plan, model = plan_of(group, planned), toy.Branched().double()
    asked = iter(range(first + 1, 9))
    options = {"objective": Contrastive(), "train": settings(kind), "save": save} | given
    task = toy.task(model, plan, group, **options, stop=lambda: next(asked) == steps)
    loop.run(task, toy.steps_of(plan, group.rank, first), state)
    return model


WHOLE = DTensor.full_tensor


def only_numbers(tensor: DTensor, **options: Any) -> torch.Tensor:
    """Allow all-reduce of norms, but no gathering of sharded tensors."""
    assert tensor.ndim == 0, f"a rank asked for a whole tensor, {tuple(tensor.shape)}"
    return WHOLE(tensor, **options)


def saved(group: Group, run: AnyPath, steps: int = 8) -> dict[str, Any]:
    """Train with background saves; no rank may gather a tensor, and each returns how many elements it holds."""
    told: list[str] = []
    held: list[int] = []
    DTensor.full_tensor = only_numbers
    writes, lease = manager_of(group, run, told)

    def save(step: int, state: dict[str, Any], metrics: dict[str, Any], last: bool) -> float | None:
        held.append(elements(state))
        return writes.save(step, 12 * step, state, metrics, last)

    try:
        model = train(group, save, None, "fsdp", 0, steps)
        writes.close()
    finally:
        DTensor.full_tensor = WHOLE
    if lease is not None:
        lease.release()
    return {"weights": toy.flat(model), "elements": max(held), "told": told}


def elements(state: Any) -> int:
    """Number of elements of a state on this rank."""
    counts: list[int] = []
    for tensor in pytree.tree_leaves(state):
        if isinstance(tensor, torch.Tensor):
            counts.append(getattr(tensor, "_local_tensor", tensor).numel())
    return sum(counts)


def goes_on(group: Group, found: Path, kind: str) -> dict[str, Any]:
    """Resume at the fourth step; return how many elements of the state this rank read."""
    read: list[int] = []

    def stored(target: Any) -> dict[str, Any]:
        state = state_io.load(found, target)
        read.append(elements(state))
        return state

    model = train(group, None, stored, kind, 4)
    return {"weights": toy.flat(model), "elements": max(read, default=0)}


class Narrow(toy.Branched):
    """A model that runs out of memory above a number of rows."""

    def __init__(self, most_rows: int):
        super().__init__()
        self.most_rows = most_rows

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        toy.Fault("nowhere", most_rows=self.most_rows).at("forward", len(batch["valid"]))
        return super().forward(batch)


def rehearsed(group: Group, model: toy.Branched, kind: str, micro: int) -> memory_probe.ProbeResult:
    """Probe memory as a worker does with `batch.micro: auto`, or use the result of an earlier attempt."""
    config = SimpleNamespace(train=settings(kind), batch=SimpleNamespace(micro="auto"), optimizer=toy.OPTIMIZER)
    config.model = SimpleNamespace(inputs=SimpleNamespace(image_side=4, max_tokens=6, max_boxes=0), vocab_size=20)
    alone = Group(group.rank, 1, group.device)
    state = replace(toy.train_state(model, alone), group=group)
    return dry_run_job(SimpleNamespace(config=config, micro=micro), state, plan_of(group, micro or 6))


def tried(group: Group, micro: int = 0, free: int = 1000) -> dict[str, Any]:
    """The result of the memory probe and of the run with it; `free`: rows that fit the host memory of this rank."""
    model, log = toy.Branched().double(), toy.Lines()
    before = copy.deepcopy(model.state_dict())
    one_row = rehearsed(Group(group.rank, 1), model, "ddp", 1).table["memory/activations_gib"] * memory_probe.GIB
    room = SimpleNamespace(available=(free + 0.5) * one_row * group.world / memory_probe.HOST_SHARE)
    with patch.object(psutil, "virtual_memory", lambda: room):
        found = rehearsed(group, model, "fsdp", micro)
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trained = train(group, None, None, "fsdp", 0, planned=6, micro=found.micro, static_metrics=found.table, log=log)
    return {
        "micro": found.micro,
        "table": found.table,
        "whole activations": rehearsed(group, model, "ddp", found.micro).table["memory/activations_gib"],
        "model is as it was": same,
        "weights": toy.flat(trained),
        "line": log.lines[-1],
    }


def cramped(group: Group, found: Path) -> None:
    """Rank 1 runs out of memory in the probe above three rows; rank 0 waits in a collective until it ends."""
    model = Narrow(3 if group.rank else 99).double()
    try:
        rehearsed(group, model, "fsdp", 0)
    except OutOfMemoryError as error:
        found.write_text(json.dumps({"error": str(error), "micro": error.micro}))
    except MmrayError as error:
        found.write_text(json.dumps({"error": str(error), "micro": -1}))


def full(group: Group, run: Path) -> str:
    """Rank 1's disk is full at the first checkpoint; the next one is written, and each rank logs it."""
    told: list[str] = []
    writes, lease = manager_of(group, run, told)
    state = {"model": {"w": torch.ones(3)}, "progress": {"step": 1}}
    real = state_io.sha256

    def refuse(file: Path) -> str:
        raise OSError(28, "No space left on device")

    state_io.sha256 = refuse if group.rank else real
    writes.save(1, 12, copy.deepcopy(state) | cut(group), {}, last=True)
    try:
        writes.close()
    except StorageError as error:
        return str(error)
    finally:
        state_io.sha256 = real
        if lease is not None:
            lease.release()
    return "it was written"


def cut(group: Group) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (group.world,))
    return {"more": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])}


def worked(group: Group, folder: Path, name: str, kind: str, found: str | None = None) -> dict[str, torch.Tensor]:
    """Final weights of a six-step run through the worker code; `found`: resumed from the third step."""
    config = runs.config(folder / "set", folder, name, steps=6, parallel=kind, precision="fp32")
    train_set = PreparedSet.open(str(folder / "set"), "train")
    tokenizer = extend_tokenizer(train_set.tokenizer_json, config.model.inputs)
    model = config.model.model_copy(update={"vocab_size": TextEncoder(tokenizer, 8).vocab_size})
    config = config.model_copy(update={"model": model})
    plan = SamplePlan(num_rows=22, global_rows=8, world=group.world, micro=2, seed=0, steps=6)
    start = ResumePoint(plan, 3 if found else 0, found)
    if group.rank == 0:
        run_dir.create_run_dir(folder / name, config, {"train": "made"}, tokenizer)
    group.barrier()
    lease = Lease(folder / name) if group.rank == 0 else None
    fence = lease.acquire() if lease else 0
    reader, blocks = RowReader(train_set, config.model.inputs, tokenizer, 10**6), Blocks(plan, start.step, 2)
    job = WorkerContext(config, folder / name, fence, reader, None, tokenizer)
    mine = range(group.rank, blocks.count, group.world)
    read = (reader.block(plan, blocks.positions(number)) for number in mine)
    about = {"rank": group.rank, "node": "", "pid": 0}
    line = DriverHandle(lambda _: None, lambda: False, lambda _: 0, lambda _: False, about)
    work(job, start, read, torch.device("cpu"), line)
    group.barrier()
    if lease:
        lease.release()
    return state_io.load_weights(folder / name / "checkpoints" / "step-6")


def dying(group: Group, run: Path) -> None:
    """Rank 1 exits while writing its shard; rank 0 keeps the error of its own writer."""
    told: list[str] = []
    writes, _ = manager_of(group, run, told)
    if group.rank:
        state_io.sha256 = lambda file: os._exit(0)
    writes.save(1, 12, {"model": cut(group), "progress": {"step": 1}}, {}, last=True)
    try:
        writes.close()
    except RuntimeError as error:
        (run / "said").write_text(str(error))
