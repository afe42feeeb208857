"""One worker without Ray, on a set of generated rows."""

from __future__ import annotations

import torch

from mmray.config import Batch
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import Blocks, ResumePoint, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.chat import extend_tokenizer
from mmray.data.text.tokenizer import TextEncoder
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.checkpoint import files, state_io
from mmray.engine.worker import work
from mmray.engine.worker_context import DriverHandle, WorkerContext
from mmray.storage.lease import Lease
from mmray.train import run_dir
from tests.made import make_set, row
from tests.train import runs

STEPS = 4
CPU = torch.device("cpu")


def rows_of(place):
    """A prepared set of 22 rows at `place`."""
    make_set(place, [row(number) for number in range(22)])
    return PreparedSet.open(str(place))


def ran(
    prepared,
    folder,
    micro,
    dropout=0.0,
    group_by_length=False,
    device=CPU,
    model=None,
    scored=True,
    found=None,
    **settings,
):
    """Run a worker with 8 rows per step; return its checkpoint, logged lines and messages.

    `model` replaces the model section of runs.py, to which `dropout` applies. `scored`: hold out rows for evaluation.
    `found`: the checkpoint to resume from.
    """
    config = runs.config("made", folder.parent, folder.name, **{"steps": STEPS, "precision": "fp32"} | settings)
    tokenizer = extend_tokenizer(prepared.tokenizer_json, config.model.inputs)
    text = config.model.text.model_copy(update={"dropout": dropout})
    model = model or config.model.model_copy(update={"text": text})
    model = model.with_tokens(TextEncoder(tokenizer, 8).vocab_size, None)
    config = config.model_copy(
        update={"model": model, "batch": Batch(micro=micro, global_=8, group_by_length=group_by_length)}
    )
    plan = SamplePlan(
        num_rows=22,
        global_rows=8,
        world=1,
        micro=resolve_batch_shape(config.batch, 1).micro,
        seed=0,
        steps=config.train.steps,
    )
    run_dir.create_run_dir(folder, config, {"train": "made"}, tokenizer)
    lease, told = Lease(folder), []
    first = 0 if found is None else files.step_of(found)
    reader, blocks = RowReader(prepared, config.model.inputs, tokenizer, 10**6), Blocks(plan, first, 2)
    job = WorkerContext(config, folder, lease.acquire(), reader, prepared if scored else None, tokenizer)
    read = (reader.block(plan, blocks.positions(number)) for number in range(blocks.count))
    line = DriverHandle(told.append, lambda: False, lambda _: 0, lambda _: False, {"rank": 0, "node": "", "pid": 0})
    try:
        work(job, ResumePoint(plan, first, None if found is None else str(found)), read, device, line)
    finally:
        lease.release()
    state = state_io.load(folder / "checkpoints" / f"step-{config.train.steps}")
    return state, runs.lines(folder), [message["note"] for message in told if "note" in message]
