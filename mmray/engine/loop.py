"""The training loop: micro-batches of rows in; weights, metrics and checkpoints out. Runs without
Ray.

prefetch.py yields a batch, step.py takes the step, metrics/ measures it. The loop runs in one
process, under torchrun, or in a Ray Train worker. Every rank makes the same calls; only rank 0
writes the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from mmray.engine import run_state
from mmray.engine.batch import out_of_memory_error
from mmray.engine.checkpoint.manager import CheckpointSchedule, steps_between_checkpoints
from mmray.engine.memory_probe import OOM_ADVICE
from mmray.engine.metrics.meters import (
    Meter,
    model_flops_of_row,
    padding_fractions,
    reduce_over_ranks,
    rows_sha,
    source_metrics,
)
from mmray.engine.metrics.table import EVALUATE
from mmray.engine.metrics.timers import Throughput
from mmray.engine.metrics.writers import Metrics, profile_steps
from mmray.engine.optimizer import ExponentialMovingAverage, lr_at, set_lr
from mmray.engine.precision import micro_seed
from mmray.engine.prefetch import LocalBatch, Prefetcher
from mmray.engine.run_state import (
    EMA_KEY,
    HasMetrics,
    LoadCheckpointFn,
    LoopProgress,
    LoopResult,
    TrainSpec,
    TrainState,
)
from mmray.engine.step import StepResult, accumulate_gradients, apply_update, zero_gradients
from mmray.errors import (
    OutOfMemoryError,
    TrainingError,
    UsageError,
    first_line,
    is_out_of_memory,
)
from mmray.objectives.protocol import Batch
from mmray.plugins import merge_metrics

COMPUTE_METRICS = "train.callbacks: compute_metrics"  # for errors
MAX_NONFINITE_STEPS = 10  # steps in a row


def train_loop(
    spec: TrainSpec, steps: Iterable[list[Batch]], load_checkpoint: LoadCheckpointFn | None = None
) -> LoopResult:
    """Train until the last step of the run, or until a stop is requested.

    Args:
        steps: Yields this rank's micro-batches on the CPU for each remaining step.
        load_checkpoint: Loads the checkpoint to resume from, with a function that maps (key, meta
            tensor) to the tensor to read into. None: start at step 0.

    Raises:
        OutOfMemoryError: With the BatchShape of a restart as `retry_shape`, if there is one.
        TrainingError: Wrong rows in a step, or 10 gradients in a row that are not finite.
    """
    return Trainer(spec, load_checkpoint).train(steps)


class Trainer:
    """A run on one rank: the state that steps change, its progress, and what is measured.

    The state is restored from the checkpoint if there is one; each rank reads only its own shards.
    """

    def __init__(self, spec: TrainSpec, load_checkpoint: LoadCheckpointFn | None) -> None:
        train = spec.train
        module = spec.model.train()
        self.spec = spec
        self.state = TrainState.build(
            train, spec.optimizer, module, spec.objective, spec.group, spec.heartbeat
        )
        self.ema = ExponentialMovingAverage(module, train.ema) if train.ema else None
        self.progress = LoopProgress()
        if load_checkpoint is not None:
            self._load(load_checkpoint)
        self.meter = Meter(
            Throughput(),
            self.state.memory,
            spec.group,
            self.state.precision,
            devices=self.state.strategy.num_devices,
            compiles=train.compile != "none",
        )
        self.schedule = CheckpointSchedule(train.checkpoint_every, self.progress.step)
        self.saved_step = self.progress.step

    def train(self, steps: Iterable[list[Batch]]) -> LoopResult:
        """Take the remaining steps; see `train_loop`."""
        spec = self.spec
        plan = self.spec.plan
        progress = self.progress
        rates = self.meter.rates
        batches = Prefetcher(
            steps,
            plan,
            first=progress.step,
            rank=spec.group.rank,
            device=spec.group.device,
            group_by_length=spec.group_by_length,
            interrupt_stream=spec.interrupt_stream,
        )
        metrics: Metrics = {}
        stop = False
        spec.heartbeat.set_state("first_step")
        with (
            closing(batches),
            profile_steps(spec.train.profile, spec.profile_path, spec.group.device) as profile_step,
            self._restart_if_out_of_memory(),
        ):
            while progress.step < plan.steps and not stop:
                batch = self._next_batch(batches)
                if batch is None:
                    self._save_if_new()
                    break
                set_lr(self.state.optimizer, lr_at(progress.step, spec.optimizer, plan.steps))
                result = self._take_step(batch)
                progress.step += 1
                if self.ema is not None and result.is_finite:
                    self.ema.update()
                self._check_finite(result)
                rates.add(batch.wait_s, plan.global_batch_size, batch.token_counts.real)
                self.meter.token_counts += torch.tensor(batch.token_counts)
                keys = batch.keys
                del batch  # a GPU holds two batches: this one and the next
                metrics = self._finish_step(keys, result) or metrics
                stop = result.stop
                profile_step()
                rates.lap("callbacks")
        return LoopResult(
            status="finished" if progress.step >= plan.steps else "stopped",
            steps=progress.step,
            rows_consumed=plan.rows_start(progress.step),
            skipped_steps=progress.skipped,
            metrics=metrics,
        )

    def _next_batch(self, batches: Iterator[LocalBatch]) -> LocalBatch | None:
        """Return the next batch, None if a stop was requested while the only rank waited for it."""
        with self.spec.heartbeat.state("waiting_for_data"):
            batch = next(batches, None)
        if batch is None and self.spec.group.world_size == 1 and self.spec.stop():
            return None
        if batch is None:
            raise TrainingError(
                f"the data stream ended after step {self.progress.step} of {self.spec.plan.steps}. "
                "The prepared set may have changed: rerun its `mmray prepare` command, or compare "
                "its fingerprint with the run's data.json"
            )
        return batch

    def _take_step(self, batch: LocalBatch) -> StepResult:
        """Take one optimizer step."""
        spec = self.spec
        state = self.state
        seed_of = partial(micro_seed, spec.train.seed, self.progress.step, spec.group.rank)
        # The request is reduced over ranks in the step: all ranks must leave the loop together.
        cache = accumulate_gradients(state, batch, seed_of, spec.stop())
        result = apply_update(state, cache)
        if self.meter.flops_of_row is None:
            self.meter.flops_of_row = model_flops_of_row(
                state.module, cache.micro_batches[0], state.precision
            )
            zero_gradients(state)
        return result

    def _check_finite(self, result: StepResult) -> None:
        """Count skipped steps; raise TrainingError after too many in a row."""
        progress = self.progress
        plan = self.spec.plan
        progress.skipped += not result.is_finite
        progress.skipped_in_a_row = 0 if result.is_finite else progress.skipped_in_a_row + 1
        if progress.skipped_in_a_row >= MAX_NONFINITE_STEPS:
            first_row = plan.rows_start(progress.step - 1)
            last_row = plan.rows_start(progress.step) - 1
            raise TrainingError(
                f"the gradient was not finite in {progress.skipped_in_a_row} steps in a row, up to "
                f"step {progress.step} (rows {first_row:,} to {last_row:,} of the sample order). "
                "Lower --optimizer.lr, or try --train.precision fp32 to see whether the precision "
                "is the cause"
            )

    def _finish_step(self, keys: Tensor, result: StepResult) -> Metrics | None:
        """Measure, evaluate, log, save, and call the callbacks; all ranks decide alike.

        Returns:
            The logged line, None if the step was not logged.
        """
        spec = self.spec
        step = self.progress.step
        rates = self.meter.rates
        last = step == spec.plan.steps or result.stop
        evaluating = spec.evaluate is not None and (
            step == spec.plan.steps or _is_due(step, spec.evaluate_every)
        )
        # With `auto`, save every evaluated step, so that the best one has a checkpoint.
        scored = evaluating and self.schedule.every == "auto"
        saving = spec.save is not None and (last or scored or self.schedule.is_due(step))
        metrics = None
        if last or evaluating or saving or _is_due(step, spec.train.log_every):
            scores = self._evaluate() if evaluating else {}
            metrics = self._measure(keys, result) | scores
            if spec.log is not None:
                spec.log.write(metrics)
            rates.lap("log")
        if saving:
            with spec.heartbeat.state("saving"):
                self._save(metrics or {}, last)
        for callback in spec.callbacks:
            callback.on_step(step, metrics)
        return metrics

    def _measure(self, keys: Tensor, result: StepResult) -> Metrics:
        """Return the metrics of the step just taken.

        Takes three small collectives, so only for steps that are logged.
        """
        spec = self.spec
        meter = self.meter
        step = self.progress.step - 1
        local_sums = [*result.means.values(), meter.token_counts, result.by_source]
        local = meter.compute()
        own: dict[str, float] = {}
        for callback in spec.callbacks:
            if isinstance(callback, HasMetrics):
                own = merge_metrics(own, callback.compute_metrics(step + 1), COMPUTE_METRICS)
        if scores := [name for name in own if name.startswith(EVALUATE)]:
            raise UsageError(
                f"{COMPUTE_METRICS} returned {scores[0]}, which is the name of a score of an "
                "evaluation: rename it"
            )
        sums, reduced = reduce_over_ranks(spec.group, local_sums, local | own)
        *means, token_counts, by_source = sums
        meter.token_counts.zero_()
        metrics: Metrics = {
            "step": step + 1,
            "epoch": spec.plan.rows_start(step) // spec.plan.num_rows,
            "rows_start": spec.plan.rows_start(step),
            "rows_stop": spec.plan.rows_start(step + 1),
            "rows_sha": rows_sha(spec.group.all_gather_variable(keys)),
        }
        metrics |= {f"train/{name}": mean for name, [mean] in zip(result.means, means, strict=True)}
        metrics |= {f"train/{name}": float(value) for name, value in result.scalars.items()}
        metrics["train/lr"] = lr_at(step, spec.optimizer, spec.plan.steps)
        metrics["train/grad_norm"] = result.grad_norm
        metrics["train/skipped_steps"] = self.progress.skipped
        shape = spec.batch_shape
        if shape.micro_tokens is None:
            metrics["batch/micro"] = shape.micro_batch_size
        else:
            metrics["batch/tokens"] = shape.micro_tokens
        metrics |= padding_fractions(token_counts)
        metrics |= source_metrics(spec.sources, by_source) | spec.static_metrics
        merge_metrics(metrics | local, own, COMPUTE_METRICS)
        return metrics | reduced

    def _evaluate(self) -> Metrics:
        spec = self.spec
        step = self.progress.step
        assert spec.evaluate is not None
        averaged = nullcontext() if self.ema is None else self.ema.swapped()
        with spec.heartbeat.state("evaluating"), averaged:
            try:
                scores = spec.evaluate(step, spec.model)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemoryError(
                    f"out of memory in the evaluation after step {step} ({first_line(error)}): "
                    "lower --evaluate.batch and rerun the same command to resume"
                ) from error
            finally:
                self.state.strategy.free(spec.model)
        spec.model.train()
        metrics = {f"{EVALUATE}{name}": score for name, score in scores.items()}
        return metrics | {"time/evaluate_s": self.meter.rates.lap("evaluate")}

    def _save_if_new(self) -> None:
        """Save the last checkpoint of a run that stops between two steps."""
        if self.spec.save is not None and self.progress.step > self.saved_step:
            with self.spec.heartbeat.state("saving"):
                self._save({}, last=True)

    def _save(self, metrics: Metrics, last: bool) -> None:
        """Save a checkpoint. With `auto`, the interval is derived from the stall of training
        measured on rank 0.

        The state refers to live weights (of sharded ones, this rank's shard), which `spec.save`
        must write or copy before the next update, and to copies of the running statistics, which
        the next forward changes.
        """
        spec = self.spec
        step = self.progress.step
        schedule = self.schedule
        rates = self.meter.rates
        assert spec.save is not None
        self.saved_step = step
        model_state = dict(spec.model.state_dict())
        buffers = spec.model.named_buffers(remove_duplicate=False)
        model_state |= {name: buffer.clone() for name, buffer in buffers if name in model_state}
        state = {} if self.ema is None else {EMA_KEY: self.ema.state_dict(model_state)}
        state |= {
            "model": model_state,
            "optimizer": run_state.optimizer_state(spec.model, self.state.optimizer),
            "scaler": self.state.scaler.state_dict(),
            "progress": asdict(self.progress),
        }
        save_duration_s = spec.save(step, state, metrics, last)
        stall_s = rates.lap("checkpoint")
        if schedule.every == "auto" and not last:
            taken = step - schedule.first
            steps = steps_between_checkpoints(
                metrics.get("time/step_s"), stall_s, save_duration_s, taken
            )
            schedule.saved(step, spec.group.broadcast_object(steps))
            rates.lap("checkpoint")

    def _load(self, load_checkpoint: LoadCheckpointFn) -> None:
        """Restore model, optimizer, scaler, EMA and progress from the checkpoint."""
        module = self.spec.model
        saved = load_checkpoint(run_state.load_destinations(module))
        module.load_state_dict(saved["model"])
        run_state.load_optimizer_state(module, self.state.optimizer, saved["optimizer"])
        if saved["scaler"]:  # empty if saved in a precision that needs no scaler
            self.state.scaler.load_state_dict(saved["scaler"])
        if self.ema is not None:
            self.ema.load_state_dict(saved[EMA_KEY])
        self.progress = LoopProgress(**saved["progress"])

    @contextmanager
    def _restart_if_out_of_memory(self) -> Iterator[None]:
        """Turn an out-of-memory error of this rank into one with which the driver restarts the
        workers from the latest checkpoint, with half the micro-batch size.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory_error(
                f"out of memory at step {self.progress.step + 1}",
                f"rank {self.spec.group.rank}: {first_line(error)}",
                self.spec.batch_shape,
                f"a single row does not fit: {OOM_ADVICE}",
            ) from error


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
