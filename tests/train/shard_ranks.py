"""Scenes of sharded checkpoints, played by up to four gloo ranks; test_shards.py judges what they leave."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mmray.config import Config, Run, Train
from mmray.data import remote
from mmray.data.order import Blocks, Plan, Start
from mmray.data.reader import RowReader
from mmray.data.remote import Folder, folder_at
from mmray.data.store import PreparedSet
from mmray.data.text import TextEncoder
from mmray.data.words import fitted
from mmray.errors import StorageError
from mmray.objectives.contrastive import Contrastive
from mmray.train import checkpoint, loop, nest, rundir, shards
from mmray.train.group import Group
from mmray.train.job import Job, Line
from mmray.train.keeper import Helper, Keeper
from mmray.train.lease import Lease
from mmray.train.worker import work
from tests.train import runs, toy

MOST = 4
WORLDS = (1, 2, 3, 4)
KINDS = ("ddp", "fsdp")
TIMEOUT = timedelta(seconds=120)


def play(rank: int, folder: str, address: str) -> None:
    """Entry of a rank: two of them train and save, then one to four go on, then one of two dies."""
    torch.set_num_threads(1)
    remote.ATTEMPTS = 1
    here, results = Path(folder), {}
    if rank < 2:
        group = joined(rank, 2, here, "saving")
        results["saved"] = saved(group, here / "run")
        results["uploaded"] = saved(group, folder_at(address) / "run", steps=4)
        results["full"] = full(group, here / "full")
        results["worked"] = worked(group, here, "worked", "fsdp")
        for kind in KINDS:
            results[f"worked on, {kind}"] = worked(group, here, kind, kind, str(here / "worked/checkpoints/step-3"))
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


def of(group: Group, run: Folder, ranks: Any, told: list[str]) -> tuple[Keeper | Helper, Lease | None]:
    """What writes on this rank, as worker.py has it."""
    if group.rank:
        return Helper(run, ranks), None
    run.mkdir(parents=True)
    held = Lease(run)
    train = Train(parallel="fsdp", keep_checkpoints=3, steps=8)
    config = Config(recipe="sample", run=Run(storage=str(run.parent), name=run.name), train=train)
    about = {"world": group.world, "architecture": None}
    return Keeper(run, held.acquire(), config, about, lambda label, text: told.append(text), ranks), held


def train(group: Group, save: Any, state: Any, kind: str, first: int, steps: int = 8) -> toy.Branched:
    plan = Plan(num_rows=30, global_rows=12, world=group.world, micro=3, seed=1, steps=8)
    settings = SimpleNamespace(**vars(toy.TRAIN) | {"checkpoint_every": 2, "parallel": kind})
    model = toy.Branched().double()
    asked = iter(range(first + 1, 9))
    options = {"objective": Contrastive(), "train": settings, "save": save}
    task = toy.task(model, plan, group, **options, stop=lambda: next(asked) == steps)
    loop.run(task, toy.steps_of(plan, group.rank, first), state)
    return model


WHOLE = DTensor.full_tensor


def only_numbers(tensor: DTensor, **options: Any) -> torch.Tensor:
    """A norm may be summed up over the ranks; nothing that is cut may come together."""
    assert tensor.ndim == 0, f"a rank asked for a whole tensor, {tuple(tensor.shape)}"
    return WHOLE(tensor, **options)


def saved(group: Group, run: Folder, steps: int = 8) -> dict[str, Any]:
    """A run whose ranks save beside it; no rank may put a tensor together, and each says how much it held."""
    told: list[str] = []
    held: list[int] = []
    DTensor.full_tensor = only_numbers
    writes, lease = of(group, run, group.apart(60), told)

    def save(step: int, state: dict[str, Any], metrics: dict[str, Any]) -> float | None:
        held.append(elements(state))
        return writes.save(step, 12 * step, state, metrics)

    try:
        model = train(group, save, None, "fsdp", 0, steps)
        writes.close()
    finally:
        DTensor.full_tensor = WHOLE
    if lease is not None:
        lease.release()
    return {"weights": toy.flat(model), "elements": max(held), "told": told}


def elements(state: Any) -> int:
    """Numbers that a state takes on this rank."""
    counts: list[int] = []
    nest.mapped(state, lambda _, tensor: counts.append(getattr(tensor, "_local_tensor", tensor).numel()))
    return sum(counts)


def goes_on(group: Group, found: Path, kind: str) -> dict[str, Any]:
    """The rest of the run from its fourth step; how many numbers of its state this rank read."""
    read: list[int] = []

    def stored(cut: Any) -> dict[str, Any]:
        state = checkpoint.load(found, cut)
        read.append(elements(state))
        return state

    sharded = kind == "fsdp" and group.world > 1
    model = train(group, None, stored if sharded else checkpoint.load(found), kind, 4)
    return {"weights": toy.flat(model), "elements": max(read, default=0)}


def full(group: Group, run: Path) -> str:
    """Rank 1's disk takes no part of the first checkpoint; the next one is written, and all ranks are told."""
    told: list[str] = []
    writes, lease = of(group, run, group.apart(60), told)
    state = {"model": {"w": torch.ones(3)}, "progress": {"step": 1}}
    real = shards.sha256

    def refuse(file: Path) -> str:
        raise OSError(28, "No space left on device")

    shards.sha256 = refuse if group.rank else real
    writes.save(1, 12, copy.deepcopy(state) | cut(group), {})
    try:
        writes.close()
    except StorageError as error:
        return str(error)
    finally:
        shards.sha256 = real
        if lease is not None:
            lease.release()
    return "it was written"


def cut(group: Group) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (group.world,))
    return {"more": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])}


def worked(group: Group, folder: Path, name: str, kind: str, found: str | None = None) -> dict[str, torch.Tensor]:
    """The weights that a run of six steps ends with, as the workers of a real run have it; `found`: from the third."""
    config = runs.config(folder / "set", folder, name, steps=6, parallel=kind, precision="fp32")
    train_set = PreparedSet.open(str(folder / "set"), "train")
    tokenizer = fitted(train_set.tokenizer_json, config.model.inputs)
    model = config.model.model_copy(update={"vocab_size": TextEncoder(tokenizer, 8).vocab_size})
    config = config.model_copy(update={"model": model})
    plan = Plan(num_rows=22, global_rows=8, world=group.world, micro=2, seed=0, steps=6)
    start = Start(plan, 3 if found else 0, found)
    if group.rank == 0:
        rundir.create(folder / name, config, {"train": "made"}, tokenizer)
    group.barrier()
    lease = Lease(folder / name) if group.rank == 0 else None
    fence = lease.acquire() if lease else 0
    reader, blocks = RowReader(train_set, config.model.inputs, tokenizer, 10**6), Blocks(plan, start.step, 2)
    job = Job(config, folder / name, fence, reader, None, tokenizer)
    mine = range(group.rank, blocks.count, group.world)
    read = (reader.block(plan, blocks.positions(number)) for number in mine)
    about = {"rank": group.rank, "node": "", "pid": 0}
    line = Line(lambda _: None, lambda: False, lambda _: 0, lambda _: False, about)
    work(job, start, read, torch.device("cpu"), line)
    group.barrier()
    if lease:
        lease.release()
    return checkpoint.load_weights(folder / name / "checkpoints" / "step-6")


def dying(group: Group, run: Path) -> None:
    """Rank 1 ends while it writes its part; rank 0 notes what its own writer says of it."""
    told: list[str] = []
    writes, _ = of(group, run, group.apart(60), told)
    if group.rank:
        shards.sha256 = lambda file: os._exit(0)
    writes.save(1, 12, {"model": cut(group), "progress": {"step": 1}}, {})
    try:
        writes.close()
    except RuntimeError as error:
        (run / "said").write_text(str(error))
