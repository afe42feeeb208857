"""A training worker without Ray."""

from __future__ import annotations

import torch

from mmray.config import Batch
from mmray.data.stream.order import BlockPlan, ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import TextEncoder
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.checkpoint import files, state_io
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import Heartbeat
from mmray.engine.worker import train_worker
from mmray.engine.worker_context import DriverHandle, WorkerContext
from mmray.storage.lease import Lease
from mmray.training import run_dir
from tests.made import make_set, row
from tests.training import runs

STEPS = 4
CPU = torch.device("cpu")


def make_prepared(folder):
    return make_set(folder, [row(number) for number in range(22)])


def run_config(config, train_set, folder, eval_set=None, checkpoint=None, device=CPU, group=None):
    """Run one worker of a config, from the start or from a checkpoint; return its result and its
    messages.
    """
    group, messages = group or Group(), []
    tokenizer = train_set.tokenizer_json
    config = config.model_copy(
        update={"model": config.model.with_vocab(TextEncoder(tokenizer, 8).vocab_size, None)}
    )
    shape, steps = resolve_batch_shape(config.batch, group.world_size), config.train.steps
    plan = SamplePlan(
        train_set.num_rows, shape.global_batch_size, group.world_size, seed=0, steps=steps
    )
    first = 0 if checkpoint is None else files.step_of(checkpoint)
    if group.rank == 0:
        run_dir.write_run_files(folder, config, {"train": "made"}, tokenizer)
    group.all_gather_objects(None)
    lease = Lease(folder) if group.rank == 0 else None
    reader = RowReader(train_set, config.model.inputs, tokenizer, 10**6)
    fencing_token = lease.acquire() if lease else 0
    context = WorkerContext(
        config, folder, fencing_token, reader, {"": eval_set} if eval_set else {}, tokenizer, shape
    )
    blocks = BlockPlan(plan, first, 2)
    rows = (
        reader.read_block(plan, blocks.positions(each))
        for each in range(group.rank, blocks.count, group.world_size)
    )
    heartbeat = Heartbeat(lambda _: False, {"rank": group.rank, "node": "", "pid": 0}, folder)
    driver = DriverHandle(messages.append, lambda: False, lambda _: 0, heartbeat)
    try:
        result = train_worker(
            context, ResumePoint(plan, first, checkpoint and str(checkpoint)), rows, device, driver
        )
        group.all_gather_objects(None)
    finally:
        if lease:
            lease.release()
    return result, messages


def run_worker(
    prepared,
    folder,
    micro,
    dropout=0.0,
    group_by_length=False,
    model=None,
    evaluate=True,
    options=None,
    **settings,
):
    """Run a worker with the model of runs.py, or `model`; return its checkpoint, logged lines and
    notes.

    `options` are those of `run_config`, `settings` of section `train`.
    """
    config = runs.config(
        "made", folder.parent, folder.name, **{"steps": STEPS, "precision": "fp32"} | settings
    )
    text = config.model.text.model_copy(update={"dropout": dropout})
    model = model or config.model.model_copy(update={"text": text})
    batch = Batch(micro=micro, global_=8, group_by_length=group_by_length)
    config = config.model_copy(update={"model": model, "batch": batch}).with_cluster(workers=1)
    _, messages = run_config(
        config, prepared, folder, prepared if evaluate else None, **options or {}
    )
    state = state_io.load(folder / "checkpoints" / f"step-{config.train.steps}")
    return state, runs.lines(folder), [message["note"] for message in messages if "note" in message]
