"""What one training worker does: builds the model, rehearses, restores, then lets the loop run. Knows nothing of Ray.

trainer.py calls `work` on each Ray Train worker; under torchrun it can be called as well, with blocks from anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import torch
from torch import nn

from mmray import objectives, plug
from mmray.data.collate import steps_of
from mmray.data.folders import write_whole
from mmray.data.order import Plan, Start
from mmray.data.reader import Block, RowReader
from mmray.data.remote import Folder, folder_at
from mmray.data.store import PreparedSet
from mmray.data.words import encoder_of
from mmray.errors import UsageError
from mmray.evaluate.choose import evaluator_of
from mmray.models.build import build
from mmray.models.regions import LabelTexts
from mmray.models.synthetic import synthetic_batch
from mmray.report.run import EXAMPLES
from mmray.train import checkpoint, loop, memory, optimizer, precision
from mmray.train.advice import Advising, advice
from mmray.train.group import Group
from mmray.train.keeper import Keeper
from mmray.train.learner import Learner
from mmray.train.pulse import Pulse
from mmray.train.shaping import shape
from mmray.train.task import State, Task
from mmray.train.telemetry import MetricsLog, Phases
from mmray.train.unreadable import watched
from mmray.train.writer import Writer

if TYPE_CHECKING:
    from mmray.config import Config

Report = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Job:
    """A run as its workers see it."""

    config: Config
    folder: Folder
    fence: int
    reader: RowReader
    eval_set: PreparedSet | None
    tokenizer_json: str
    data_workers: int = 1
    micro: int = 0  # rows of a micro-batch, fewer than configured, after an attempt had no room; 0: as configured


@dataclass(frozen=True)
class Line:
    """A worker's line to whoever started it: `report` is called on rank 0, the rest on every rank."""

    report: Report
    stop: Callable[[], bool]  # True ends the run after the next step, with a checkpoint
    bad_row: Callable[[int], int]  # counts a row that could not be read; answers how many by now, 0 where it was known
    beat: Callable[[dict[str, Any]], bool]  # takes a heartbeat; answers whether this rank's stacks are wanted
    about: dict[str, Any]  # rank, node and process, for the heartbeat


def work(job: Job, start: Start, blocks: Iterable[Block], device: torch.device, line: Line) -> dict[str, Any]:
    """Train from `start` to the end of its plan; returns what result.json says."""
    pulse = Pulse(line.beat, line.about, job.folder / "stacks" / f"step-{start.step}-rank-{line.about['rank']}.txt")
    with pulse.beating(start.step):
        return _work(job, start, blocks, device, line, pulse)


def _work(
    job: Job, start: Start, blocks: Iterable[Block], device: torch.device, line: Line, pulse: Pulse
) -> dict[str, Any]:
    config = job.config
    _settle_torch(config)
    group = Group.current(device, config.cluster.collective_timeout_s)
    found = None if start.checkpoint is None else folder_at(start.checkpoint)
    architecture = None if found is None else checkpoint.load_meta(found)["architecture"]
    model = build(config.model, config.model.vocab_size, architecture)
    _tell_labels(model, job)
    model = shape(model, config.train, config.optimizer, device)
    objective = objectives.build(config.objective)
    chosen = precision.choose(config.train.precision, device)
    rehearsal = Learner(
        model, objective, group, chosen, optimizer.build(model, config.optimizer), chosen.scaler(), {}, Phases(device)
    )
    rehearsed = _rehearse(job, rehearsal, start.plan)
    apart = config.train.parallel == "branches"
    del rehearsal
    state = None if found is None else checkpoint.load(found)
    keeper = _keeper(job, group, model, line.report)
    log = None if keeper is None else MetricsLog(keeper.growing.here, start.step)
    if log is not None:
        line.report({"wasted_steps": log.wasted_steps})
    advising = Advising(partial(_advise, job, line.report, device))
    task = Task(
        model=model,
        objective=objective,
        plan=start.plan,
        group=group,
        train=config.train,
        optimizer=config.optimizer,
        save=partial(_save, keeper, start),
        evaluate=_evaluator(job, group, objective, start, line.report),
        evaluate_every=config.evaluate.every,
        log=log,
        callbacks=(
            *(plug.load(name, "train.callbacks")() for name in config.train.callbacks),
            pulse,
            *(() if keeper is None else (_Reporting(line.report, keeper.writer), advising)),
        ),
        stop=line.stop,
        by_length=config.batch.by_length,
        profile_to=None if keeper is None else keeper.growing.here / "profile" / "rank-0.json",
        micro=rehearsed.micro,
        devices=_two_of(device) if apart else (device,),
        slower=memory.slower_branch(model, _synthetic_of(job, device)(rehearsed.micro)) if apart else "image",
        constants=rehearsed.table,
        names=partial(_names, job.reader),
        note=lambda text, label: _tell(line.report, label, text),
    )
    if config.batch.micro == "auto":
        task.note(f"micro-batches of {rehearsed.micro} rows fit", "memory")
    try:
        rows = watched(blocks, config, job.folder, job.reader, start.plan, line.bad_row)
        outcome = loop.run(task, steps_of(rows, start.plan, config.batch.by_length), state)
    finally:
        if log is not None:
            log.close()
        if keeper is not None:
            keeper.close()  # the last checkpoint is there, or its error raised, before this rank says that it is done
    return vars(outcome) | {"metrics": {key.removeprefix("evaluate/"): v for key, v in outcome.metrics.items()}}


def _tell_labels(model: nn.Module, job: Job) -> None:
    """A model that reads the names of labels gets their tokens; one from a checkpoint has them."""
    labels = getattr(model, "labels", None)
    if isinstance(labels, LabelTexts) and not labels.known:
        labels.read(encoder_of(job.tokenizer_json, job.config.model.inputs))


def _settle_torch(config: Config) -> None:
    torch.set_num_threads(max(1, int(config.cluster.cpus_per_worker)))  # fixed: sums in another order are other sums
    torch.manual_seed(config.train.seed)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _rehearse(job: Job, learner: Learner, plan: Plan) -> memory.Rehearsed:
    """A synthetic step, so that mistakes of shape and memory show before any data; the rows that fit."""
    micro = min(plan.micro, plan.share, job.micro or plan.share)
    auto = job.config.batch.micro == "auto" and not job.micro
    batch_of = _synthetic_of(job, learner.group.device)
    if job.config.train.parallel == "fsdp":  # here one device holds it all, which later none has to
        rehearse(job.config, learner, batch_of, plan.share, 1, with_optimizer=False)
        return memory.Rehearsed(micro, {})
    return rehearse(job.config, learner, batch_of, plan.share, None if auto else micro)


def rehearse(
    config: Config,
    learner: Learner,
    batch_of: Callable[[int], dict[str, torch.Tensor]],
    share: int,
    micro: int | None,
    with_optimizer: bool = True,
) -> memory.Rehearsed:
    """`memory.rehearse`, with its objections to what model and objective have to do with each other in words."""
    try:
        return memory.rehearse(
            learner, batch_of, share, micro, with_optimizer, partial(_check_all_learn, learner.model, config)
        )
    except KeyError as error:
        raise UsageError(
            f"objective.kind: `{config.objective.kind}` reads `{error.args[0]}`, which a model of model.kind "
            f"`{config.model.kind}` with these settings does not give; choose another objective or model"
        ) from error


def _synthetic_of(job: Job, device: torch.device) -> Callable[[int], dict[str, torch.Tensor]]:
    spec = job.config.model
    return lambda rows: synthetic_batch(spec.inputs, spec.vocab_size, rows, device)


def _two_of(device: torch.device) -> tuple[torch.device, torch.device]:
    """The worker's devices: its GPU and the other one it was given; on a CPU, two threads of it."""
    if device.type != "cuda":
        return device, device
    if torch.cuda.device_count() < 2:
        raise UsageError("train.parallel branches needs two GPUs in one worker, and this one sees one; take `ddp`")
    return device, torch.device("cuda", 1 - (device.index or 0))


def _check_all_learn(model: nn.Module, config: Config) -> None:
    """Raise UsageError where a weight gets no gradient: DDP would wait for it for ever, and it is hardly meant so."""
    silent = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    if silent:
        raise UsageError(
            f"objective.kind `{config.objective.kind}` gives {len(silent)} weights of the model no gradient, the first "
            f"is {silent[0]}: choose another objective, or leave them as they are with "
            f"--optimizer.freeze {' '.join(silent[:3])}"
        )


class _Reporting:
    """Passes on what is logged, and what a checkpoint cost; a callback like a user's own."""

    def __init__(self, report: Report, writer: Writer):
        self.report, self.writer = report, writer
        self._told_s: float | None = None

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        self.writer.check()
        if self.writer.cost_s != self._told_s:
            self._told_s = self.writer.cost_s
            self.report({"checkpoint_s": self._told_s})
        if metrics is not None:
            self.report(metrics)


def _advise(job: Job, report: Report, device: torch.device, wait_share: float) -> None:
    """A line for people when training waits for rows."""
    config, kind = job.config, "GPU" if device.type == "cuda" else "CPU"
    line = advice(wait_share, job.data_workers, config.prepare.image_side, config.model.inputs.image_side, kind)
    if line is not None:
        _tell(report, "pace", line)


def _architecture(model: nn.Module) -> dict[str, Any] | None:
    """What the weights need to be loaded again without the pretrained ones; a user's own model may not tell."""
    return model.architecture() if hasattr(model, "architecture") else None  # type: ignore[operator]


def _keeper(job: Job, group: Group, model: nn.Module, report: Report) -> Keeper | None:
    """Rank 0's keeper of checkpoints and logs; None on the others."""
    if group.rank != 0:
        return None
    about = {"world": group.world, "architecture": _architecture(model)}
    return Keeper(job.folder, job.fence, job.config, about, lambda label, text: _tell(report, label, text))


def _save(keeper: Keeper | None, start: Start, step: int, state: State, metrics: dict[str, Any]) -> float | None:
    """Rank 0 has the checkpoint written beside the training; answers what the one before cost, in seconds."""
    return None if keeper is None else keeper.save(step, start.plan.rows_start(step), state, metrics)


def _evaluator(
    job: Job, group: Group, objective: Any, start: Start, report: Report
) -> Callable[[int, nn.Module], dict[str, float]] | None:
    if job.eval_set is None:
        return None
    scorer = evaluator_of(job.config, job.eval_set, job.tokenizer_json)
    chosen = precision.choose(job.config.train.precision, group.device)

    def evaluate(step: int, model: nn.Module) -> dict[str, float]:
        show = partial(_keep_examples, job.folder, report, step) if group.rank == 0 else None
        with chosen.autocast():
            return scorer.score(model, group, objective, start.plan.global_rows, show)

    return evaluate


def _keep_examples(folder: Folder, tell: Report, step: int, examples: dict[str, Any]) -> None:
    """Write what the report shows of the newest evaluation; that the storage does not take it is told."""
    try:
        write_whole(folder / EXAMPLES, orjson.dumps({"step": step, **examples}).decode())
    except OSError as error:
        _tell(tell, "storage", f"the examples of step {step} are not kept: {error}")


def _tell(report: Report, label: str, text: str) -> None:
    """A line for people."""
    report({"note": text, "label": label})


def _names(reader: RowReader, rows: list[int]) -> list[str]:
    """Keys of rows of the set, for messages; a row that cannot be read goes by its number."""
    try:
        return [
            f"{record.key} (row {row})" for row, record in zip(rows, reader.prepared.read(np.array(rows)), strict=True)
        ]
    except (OSError, ValueError):
        return [f"row {row}" for row in rows]
