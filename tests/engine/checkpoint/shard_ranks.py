"""Scenarios of sharded checkpoints on up to four gloo ranks; test_shards.py checks the results."""

from __future__ import annotations

import copy
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mmray.config import Batch, CaptionDecoder, Clip, Config, Objective, Train
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import SamplePlan
from mmray.engine import memory_probe
from mmray.engine.batch import BatchShape
from mmray.engine.build import build_model
from mmray.engine.checkpoint import state_io
from mmray.engine.checkpoint.manager import CheckpointManager
from mmray.engine.collectives import Group, to_local
from mmray.engine.parallel.sharding import shard
from mmray.engine.run_state import EMA_KEY
from mmray.errors import MmrayError, OutOfMemoryError, StorageError, UsageError
from mmray.models.protocol import PRETRAINED, is_sharded
from mmray.objectives.contrastive import Contrastive
from mmray.storage import outage, requests
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, to_path
from tests.engine import toy
from tests.engine.ranks import join_group
from tests.engine.single_worker import run_config
from tests.training import runs

WORLD, OTHERS = 4, 2
# Strategies by number of ranks that resume a checkpoint of two sharded ranks.
RESUMED = {1: ("ddp", "fsdp"), 2: ("fsdp",), 3: ("ddp", "fsdp"), 4: ("fsdp", "hsdp")}
PROBED = {"probed": 6, "probed with little memory": 3}  # rows; of the latter, four fit on rank 1


def main(rank: int, folder: str, address: str) -> None:
    """Entry point of a rank: two ranks train and save, one to four resume, then one of two ranks
    fails.
    """
    requests.ATTEMPTS = 1
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two nodes of two ranks, for hsdp
    here, results = Path(folder), {}
    if rank >= WORLD:
        oom_in_probe(join_group(here, "oom", rank - WORLD, 2), here / f"oom-{rank - WORLD}.json")
        os._exit(0)
    if rank < 2:
        group = join_group(here, "saving", rank, 2)
        train_and_save(group, here / "run")
        train_and_save(group, to_path(address) / "run", steps=4)
        results["full disk"] = save_on_full_disk(group, here / "full")
        results["worker"] = run_worker(group, here, "worker", "fsdp")
        results["worker, ddp from the start"] = run_worker(group, here, "replicated", "ddp")
        results["missing weights"] = build_without_files(group, here)
        for kind in ("ddp", "fsdp"):
            results[f"worker, {kind}"] = run_worker(
                group, here, kind, kind, here / "worker/checkpoints/step-3"
            )
        for name, free in zip(PROBED, (1000, (1000, 4)[rank]), strict=True):
            results[name] = probe_and_train(group, free=free)
        results["reused"] = probe_and_train(group, micro=3)
        dist.destroy_process_group()
    for world, kinds in RESUMED.items():
        if rank < world:
            group = join_group(here, f"at-{world}", rank, world)
            load = partial(state_io.load, here / "run" / "checkpoints" / "step-4")
            for kind in kinds:
                results[f"{kind} at {world}"] = train(group, kind, load, first=4)
            if world == WORLD:
                train_and_save(group, here / "hybrid", parallel="hsdp")
                load = partial(state_io.load, here / "hybrid" / "checkpoints" / "step-4")
                results["fsdp after hsdp"] = train(group, "fsdp", load, first=4)
                results["hsdp after hsdp"] = train(group, "hsdp", load, first=4)
            dist.destroy_process_group()
    torch.save(results, here / f"rank-{rank}.pt")
    if rank < 2:
        die_while_saving(join_group(here, "dying", rank, 2), here / "dying")
    os._exit(0)  # see ranks.main_two


def manager_of(group: Group, run: AnyPath) -> tuple[CheckpointManager, Lease | None]:
    """The checkpoint manager of this rank and the lease of rank 0, created as in worker.py."""
    if group.rank == 0:
        run.mkdir(parents=True)
    lease = Lease(run) if group.rank == 0 else None
    manager = CheckpointManager(
        run,
        lease.acquire() if lease else None,
        {"world": group.world_size},
        lambda *_: None,
        keep=3,
        metric="evaluate/recall_at_1/mean",
        cpu_group=group.new_cpu_group(60),
    )
    return manager, lease


def plan_of(group: Group) -> SamplePlan:
    return SamplePlan(
        num_rows=30, global_batch_size=12, world_size=group.world_size, seed=1, steps=8
    )


def train(
    group: Group,
    kind: str,
    load: Any = None,
    first: int = 0,
    steps: int = 8,
    model: torch.nn.Module | None = None,
    **options: Any,
) -> torch.Tensor:
    plan = plan_of(group)
    model = model or toy.Branched().double()
    polls = iter(range(first + 1, 9))
    options |= {
        "train": toy.train_settings(checkpoint_every=2, parallel=kind),
        "stop": lambda: next(polls) == steps,
    }
    with patch.object(DTensor, "full_tensor", full_scalar):
        toy.run(model, plan, group, load, first, **options)
    return toy.flat(model)


FULL_TENSOR = DTensor.full_tensor


def full_scalar(tensor: DTensor, **options: Any) -> torch.Tensor:
    """Allow all-reduce of norms, but no gathering of sharded tensors."""
    assert tensor.ndim == 0, f"a rank requested a full tensor, {tuple(tensor.shape)}"
    return FULL_TENSOR(tensor, **options)


def train_and_save(group: Group, run: AnyPath, steps: int = 8, parallel: str = "fsdp") -> None:
    """Train with background saves."""
    manager, lease = manager_of(group, run)

    def save(step: int, state: dict[str, Any], metrics: dict[str, Any], last: bool) -> float | None:
        return manager.save(step, 12 * step, state, metrics, last)

    train(group, parallel, steps=steps, save=save)
    manager.close()
    if lease is not None:
        lease.release()


def probe(
    group: Group, model: torch.nn.Module, micro: int | None
) -> tuple[BatchShape, dict[str, float]]:
    """Probe memory as a worker does with this micro-batch size;

    None: `batch.micro: auto`.
    """
    inputs = SimpleNamespace(image_side=4, max_tokens=6)
    parallel = "fsdp" if is_sharded(model) else "ddp"
    config = SimpleNamespace(train=toy.train_settings(parallel=parallel), optimizer=toy.OPTIMIZER)
    config.model = SimpleNamespace(inputs=inputs, vocab_size=20)
    shape = BatchShape(12, micro or 6, group.world_size, auto=micro is None)
    return memory_probe.dry_run(config, model, Contrastive(), group, shape, steps=8)


def probe_and_train(group: Group, micro: int | None = None, free: int = 1000) -> dict[str, Any]:
    """The result of the memory probe and of the run with it;

    `free`: rows that fit the host memory of this rank.
    """
    full, log = toy.Branched().double(), toy.Lines()
    model = shard(copy.deepcopy(full), group, None)
    before = [to_local(weight).clone() for weight in model.state_dict().values()]
    one_row = probe(Group(group.rank, 1), full, 1)[1]["memory/activations_gib"] * memory_probe.GIB
    row = one_row * memory_probe.PEAK_PER_SAVED
    memory = SimpleNamespace(
        available=(free + 0.5) * row * group.world_size / memory_probe.HOST_FRACTION
    )
    with patch.object(psutil, "virtual_memory", lambda: memory):
        shape, table = probe(group, model, micro)
    unchanged = all(map(torch.equal, map(to_local, model.state_dict().values()), before))
    micro = shape.micro_batch_size
    options = {"micro": micro, "static_metrics": table, "log": log}
    with patch.object(memory_probe, "FEW_ROWS", micro):  # a whole step, without a prediction
        whole = probe(group, full, micro)[1]
    return {
        "micro": micro,
        "table": table,
        "full activations": whole["memory/activations_gib"],
        "unchanged": unchanged,
        "weights": train(group, "fsdp", model=model, **options),
        "line": log[-1],
    }


def oom_in_probe(group: Group, file: Path) -> None:
    """Rank 1 runs out of memory in the probe above three rows; rank 0 waits in a collective until
    it ends.
    """
    model = toy.MemoryLimitedToy(toy.MemoryFault(max_rows=3 if group.rank else 99)).double()
    try:
        probe(group, shard(model, group, None), None)
    except OutOfMemoryError as error:
        file.write_text(
            json.dumps({"error": str(error), "micro": error.retry_shape.micro_batch_size})
        )
    except MmrayError as error:
        file.write_text(json.dumps({"error": str(error), "micro": -1}))


def save_on_full_disk(group: Group, run: Path) -> str:
    """Rank 1's disk is full at the last checkpoint, which both ranks repeat and then report."""
    manager, lease = manager_of(group, run)
    failures = []

    def fail(file: Path) -> str:
        failures.append(file)
        raise OSError(28, "No space left on device")

    with (
        patch.object(state_io, "sha256", fail if group.rank else state_io.sha256),
        patch.multiple(outage, RETRY_EVERY_S=0.01, LIMIT_S=0.02),
    ):
        manager.save(1, 12, {"model": sharded_state(group), "progress": {"step": 1}}, {}, last=True)
        try:
            manager.close()
        except StorageError as error:
            assert len(failures) == (3 if group.rank else 0)
            return str(error)
        finally:
            if lease is not None:
                lease.release()
    return "no error"


def sharded_state(group: Group) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (group.world_size,))
    return {"w": torch.ones(3), "sharded": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])}


def run_worker(
    group: Group, folder: Path, name: str, kind: str, checkpoint: Path | None = None
) -> dict[str, Any]:
    """Final weights of a six-step run through the worker code, their average, and its loss and
    caption perplexity on held-out rows.

    Rank 0 has more of these, with more captions. Nothing gathers the whole model.
    """
    options = {"steps": 6, "parallel": kind, "precision": "fp32", "ema": 0.5}
    config = runs.config(folder / "set", folder, name, **options)
    config = config.model_copy(update={"batch": Batch(micro=2, global_=8)})
    decoder = CaptionDecoder(width=16, depth=1, heads=2)
    config = config.replace(
        evaluate=config.evaluate.replace(batch=1),
        model=config.model.replace(decoder=decoder),
        objective=Objective(kind="contrastive + captioning"),
    )
    train_set = PreparedSet.open(str(folder / "set"), "train")
    held_out = PreparedSet.open(str(folder / "held-out"))
    with patch.object(FSDPModule, "unshard", side_effect=AssertionError):
        result, _ = run_config(
            config, train_set, folder / name, held_out, checkpoint=checkpoint, group=group
        )
    saved = folder / name / "checkpoints" / "step-6"
    weights = state_io.load_weights(saved) | state_io.load_weights(saved, EMA_KEY)
    scores = [result["scores"][name] for name in ("loss", "caption_perplexity")]
    return weights | {"held-out loss": torch.tensor(scores)}


def build_without_files(group: Group, folder: Path) -> str:
    """The error of a sharded model whose pretrained weights do not exist; only rank 0 looks for
    them.
    """
    model = Clip(weights=str(folder / "missing.pt"), vocab_size=9)
    try:
        build_model(Config(model=model, train=Train(parallel="fsdp")), group, PRETRAINED)
    except UsageError as error:
        return str(error)
    return "no error"


def die_while_saving(group: Group, run: Path) -> None:
    """Rank 1 exits while writing its shard; rank 0 keeps the error of its own writer."""
    manager, _ = manager_of(group, run)
    if group.rank:
        state_io.sha256 = lambda file: os._exit(0)
    manager.save(1, 12, {"model": sharded_state(group), "progress": {"step": 1}}, {}, last=True)
    try:
        manager.close()
    except RuntimeError as error:
        (run / "error").write_text(str(error))
