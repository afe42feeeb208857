"""What one training worker does: builds the model, rehearses, restores, then lets the loop run. Knows nothing of Ray.

trainer.py calls `work` on each Ray Train worker; under torchrun it can be called as well, with blocks from anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import torch
from torch import nn

from mmray import objectives, plug
from mmray.data.collate import steps_of
from mmray.data.manifest import QUARANTINE
from mmray.data.order import Start
from mmray.data.reader import Block, RowReader
from mmray.data.store import PreparedSet
from mmray.errors import DataError, TrainingError
from mmray.evaluate.score import Retrieval
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from mmray.train import checkpoint, lease, loop, precision
from mmray.train.group import Group
from mmray.train.parallel import buffers_kept
from mmray.train.telemetry import MetricsLog

if TYPE_CHECKING:
    from mmray.config import Config

Report = Callable[[dict[str, Any]], Any]
BEST = "evaluate/recall_at_1/mean"  # the checkpoint kept beside the newest


@dataclass(frozen=True)
class Job:
    """A run as its workers see it."""

    config: Config
    folder: Path
    fence: int
    reader: RowReader
    eval_set: PreparedSet | None
    tokenizer_json: str


def work(
    job: Job, start: Start, blocks: Iterable[Block], device: torch.device, report: Report, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Train from `start` to the end of its plan; returns what result.json says. `report` is called on rank 0."""
    config = job.config
    _settle_torch(config)
    group = Group.current(device)
    architecture = None if start.checkpoint is None else checkpoint.load_meta(Path(start.checkpoint))["architecture"]
    model = build(config.model, config.model.text.vocab_size, architecture).to(device)
    objective = objectives.build(config.objective)
    rehearse(model, objective, config, min(start.plan.micro, start.plan.share), device)
    state = None if start.checkpoint is None else checkpoint.load(Path(start.checkpoint))
    log = MetricsLog(job.folder, start.step) if group.rank == 0 else None
    if log is not None:
        report({"wasted_steps": log.wasted_steps})
    task = loop.Task(
        model=model,
        objective=objective,
        plan=start.plan,
        group=group,
        train=config.train,
        optimizer=config.optimizer,
        save=partial(_save, job, group, start, _architecture(model)),
        evaluate=_evaluator(job, group, model, objective, start),
        evaluate_every=config.evaluate.every,
        log=log,
        callbacks=(
            *(plug.load(name, "train.callbacks")() for name in config.train.callbacks),
            *((_Reporting(report),) if group.rank == 0 else ()),
        ),
        stop=stop,
    )
    try:
        outcome = loop.run(task, steps_of(_watched(blocks, job, start), start.plan), state)
    finally:
        if log is not None:
            log.close()
    return vars(outcome) | {"metrics": {key.removeprefix("evaluate/"): v for key, v in outcome.metrics.items()}}


def _settle_torch(config: Config) -> None:
    torch.set_num_threads(max(1, int(config.cluster.cpus_per_worker)))  # fixed: sums in another order are other sums
    torch.manual_seed(config.train.seed)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def rehearse(model: nn.Module, objective: Any, config: Config, rows: int, device: torch.device) -> None:
    """One synthetic micro-batch forward and backward, so that mistakes of shape and memory show before any data."""
    batch = synthetic_batch(config.model.inputs, config.model.text.vocab_size, rows, device)
    chosen = precision.choose(config.train.precision, device)
    try:
        with buffers_kept(model), chosen.autocast():
            loss, _, _ = objective.measure(model(batch), batch)
        loss.backward()
    except torch.OutOfMemoryError as error:
        raise TrainingError(f"a micro-batch of {rows} rows does not fit: lower --batch.micro ({error})") from error
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        raise TrainingError(f"one synthetic micro-batch of {rows} rows did not pass the model: {error}") from error
    finally:
        model.zero_grad(set_to_none=True)


class _Reporting:
    """Passes on what is logged; a callback like a user's own."""

    def __init__(self, report: Report):
        self.report = report

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        if metrics is not None:
            self.report(metrics)


def _architecture(model: nn.Module) -> dict[str, Any] | None:
    """What the weights need to be loaded again without the pretrained ones; a user's own model may not tell."""
    return model.architecture() if hasattr(model, "architecture") else None  # type: ignore[operator]


def _save(
    job: Job,
    group: Group,
    start: Start,
    architecture: dict[str, Any] | None,
    step: int,
    state: loop.State,
    metrics: dict[str, Any],
) -> None:
    """Rank 0 writes the checkpoint, unless another run has taken the folder over."""
    if group.rank != 0:
        return
    lease.check(job.folder, job.fence)
    meta = {
        "step": step,
        "rows_consumed": start.plan.rows_start(step),
        "world": group.world,
        "architecture": architecture,
        "config": job.config.model_dump(mode="json", by_alias=True),
        "metrics": metrics,
    }
    model_state = state.pop("model")
    checkpoint.save(job.folder / "checkpoints", step, model_state, state, meta)
    checkpoint.prune(job.folder / "checkpoints", job.config.train.keep_checkpoints, BEST)


def _evaluator(
    job: Job, group: Group, model: nn.Module, objective: Any, start: Start
) -> Callable[[int], dict[str, float]] | None:
    if job.eval_set is None:
        return None
    scorer = Retrieval(
        job.eval_set, job.config.model.inputs, job.tokenizer_json, job.config.evaluate, job.reader.max_pixels
    )
    chosen = precision.choose(job.config.train.precision, group.device)

    def evaluate(_: int) -> dict[str, float]:
        with chosen.autocast():
            return scorer.score(model, group, objective, start.plan.global_rows)

    return evaluate


def _watched(blocks: Iterable[Block], job: Job, start: Start) -> Iterator[Block]:
    """Blocks as they come; rows that could not be read are named in quarantine.jsonl, up to `data.max_bad_rows`."""
    bad = 0
    for block in blocks:
        for position in block["pos"][~block["valid"] & (block["pos"] >= 0)]:
            bad += 1
            told = _quarantine(job, start, int(position))
            if bad > job.config.data.max_bad_rows:
                budget = f"data.max_bad_rows {job.config.data.max_bad_rows}"
                raise DataError(
                    f"{bad} rows could not be read ({budget}), the last: {told}. "
                    f"All are named in {job.folder / 'quarantine.jsonl'}; prepare the set again from its source"
                )
        yield block


def _quarantine(job: Job, start: Start, position: int) -> str:
    """Write down one row that failed in training; returns its name and reason."""
    row = int(start.plan.rows_at(np.array([position]))[0])
    record, reason = job.reader.fault(row)
    entry = {
        "key": record.key if record else None,
        "source": record.source if record else None,
        "row": row,
        "stage": "train",
        "reason": reason,
    }
    with (job.folder / QUARANTINE).open("ab") as file:
        file.write(orjson.dumps(entry) + b"\n")
    return f"row {row} ({entry['key']}, {entry['source']}): {reason}"
