"""Runs of a vision-language model with batches by tokens, on one or several ranks without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmray.config import Batch, Config, Data, Evaluate, Objective, Optimizer, Run, Train, VlmInputs
from mmray.config import Vlm as VlmConfig
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import BlockPlan, ResumePoint, SamplePlan
from mmray.data.stream.token_batches import TokenPlan
from mmray.data.vlm.encoder import encoder_arguments
from mmray.data.vlm.reader import ConversationReader
from mmray.data.vlm.token_counter import ProcessorCounter
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.checkpoint import files
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import Heartbeat
from mmray.engine.worker import train_worker
from mmray.engine.worker_context import DriverHandle, WorkerContext
from mmray.storage.lease import Lease
from mmray.training import run_dir
from tests.made import make_set
from tests.models.vlm.rows import stored_rows

STEPS = 6
NUM_ROWS = 14  # a step takes the last rows of an epoch and the first of the next


def make_prepared(folder: Path) -> PreparedSet:
    return make_set(folder, stored_rows(NUM_ROWS), stored_rows(3))


def config_of(weights: Any, prepared: str, folder: Path, **train: Any) -> Config:
    """Six rows a step in micro-batches of at most 300 tokens; rows have 26 to 166."""
    settings = {"steps": STEPS, "log_every": 1, "checkpoint_every": 3} | train
    return Config(
        model=VlmConfig(weights=str(weights), inputs=VlmInputs(max_tokens=200)),
        objective=Objective(kind="language_modelling"),
        data=Data(train=prepared, workers=1),
        batch=Batch(global_=6, tokens=300),
        optimizer=Optimizer(lr=1e-3, warmup_steps=2),
        train=Train(**settings),
        evaluate=Evaluate(num_generations=3),
        run=Run(name=folder.name, storage=str(folder.parent)),
    ).with_cluster(workers=1, cpus_per_worker=1)


def run(
    config: Config, group: Group, checkpoint: Path | None = None, **train: Any
) -> dict[str, Any]:
    """Train a rank from the start or from a checkpoint; return the fields of result.json."""
    folder = Path(config.run.storage) / config.run.name
    train_set = PreparedSet.open(config.data.train, "train")
    config = config.replace(train=config.train.replace(**train))
    spec: Any = config.model
    reader = ConversationReader(train_set, spec, 10**7)
    limits = encoder_arguments(spec.inputs)
    count = ProcessorCounter(spec.weights, limits, spec.inputs.question).build()
    counts = [count(row) for row in train_set.read(np.arange(train_set.num_rows))]
    shape = resolve_batch_shape(config.batch, group.world_size, spec.inputs.max_tokens)
    plan = TokenPlan(
        **vars(SamplePlan(train_set.num_rows, 6, group.world_size, seed=0, steps=STEPS)),
        num_tokens=np.array(counts, np.uint32),
        max_row_tokens=spec.inputs.max_tokens,
        max_tokens=config.batch.tokens,
    )
    first = 0 if checkpoint is None else files.step_of(checkpoint)
    lease = Lease(folder) if group.rank == 0 else None
    if group.rank == 0:
        run_dir.write_run_files(folder, config, {"train": "made"}, "")
    group.all_gather_objects(None)
    context = WorkerContext(
        config, folder, lease.acquire() if lease else 0, reader, None, "", shape
    )
    blocks = BlockPlan(plan, first, 1)
    rows = (
        reader.read_block(plan, blocks.positions(number))
        for number in range(group.rank, blocks.count, group.world_size)
    )
    heartbeat = Heartbeat(
        lambda _: False, {"rank": group.rank, "node": "", "pid": group.rank}, folder
    )
    driver = DriverHandle(lambda _: None, lambda: False, lambda _: 0, heartbeat)
    start = ResumePoint(plan, first, checkpoint and str(checkpoint))
    try:
        return train_worker(context, start, rows, torch.device("cpu"), driver)
    finally:
        group.all_gather_objects(None)
        if lease:
            lease.release()
