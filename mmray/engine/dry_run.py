"""A synthetic step before the first, for a run: mistakes of shape and memory show in the first seconds.

memory_probe.py measures; here its errors become messages about the settings.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmray.data.stream.order import SamplePlan
from mmray.engine import memory_probe, optimizer, precision
from mmray.engine.collectives import Group
from mmray.engine.metrics.writers import Phases
from mmray.engine.parallel import wrap as parallel
from mmray.engine.parallel.transforms import compile_branches
from mmray.engine.train_state import Learner
from mmray.engine.worker_context import Job
from mmray.errors import UsageError
from mmray.models.synthetic import synthetic_batch

if TYPE_CHECKING:
    from mmray.config import Config, Train


def learner_of(config: Config, model: nn.Module, objective: Any, group: Group) -> Learner:
    """What takes the synthetic step: with an optimizer of its own, which goes with it."""
    chosen, phases = precision.choose(config.train.precision, group.device), Phases(group.device)
    apart = optimizer.build(model, config.optimizer)
    return Learner(model, objective, group, chosen, apart, chosen.scaler(), {}, phases)


def rehearse_job(job: Job, learner: Learner, plan: SamplePlan) -> memory_probe.Rehearsed:
    """A synthetic step, so that mistakes of shape and memory show before the first; the rows that fit."""
    micro = min(plan.micro, plan.rank_rows, job.micro or plan.rank_rows)
    auto = job.config.batch.micro == "auto" and not job.micro
    batch_of = synthetic_of(job.config, learner.group.device)
    cut = job.config.train.parallel == "fsdp"
    if cut:
        learner = _cut(job.config, learner)
    # The averaged weights will lie beside the others, and so will the buckets where gradients do not live in them.
    copies = bool(job.config.train.ema) + _has_buckets_beside(job.config.train, learner.group)
    beside = [weight.detach().clone() for _ in range(copies) for weight in learner.model.parameters()]
    try:
        return rehearse(job.config, learner, batch_of, plan.rank_rows, None if auto else micro)
    finally:
        beside.clear()
        if cut:
            del learner
            gc.collect()  # what cuts a module refers to it, and is referred to: it would stay for a while
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def _has_buckets_beside(train: Train, group: Group) -> bool:
    return train.parallel == "ddp" and group.world > 1 and not train.gradient_views


def _cut(config: Config, learner: Learner) -> Learner:
    """What takes the step with a copy of the model that is cut over the ranks, as it will be; it goes with the step.

    A copy, since state that is whole can only be loaded into weights that are. Raises UsageError for a model of the
    user's own that cannot be copied.
    """
    try:
        whole = copy.deepcopy(learner.model)
    except (TypeError, RuntimeError) as error:  # it holds a lock or a file, or weights that are computed
        raise UsageError(
            "train.parallel fsdp tries a copy of the model before the first step, and model.kind "
            f"`{config.model.kind}` cannot be copied ({error}): give it a __deepcopy__, or take another strategy"
        ) from error
    module = compile_branches(whole, config.train)
    layout = parallel.ParallelConfig.of(config.train, learner.precision.dtype, (), "")
    model = parallel.wrap(module, learner.group, layout)
    return replace(learner, model=model, optimizer=optimizer.build(module, config.optimizer))


def rehearse(
    config: Config,
    learner: Learner,
    batch_of: Callable[[int], dict[str, torch.Tensor]],
    share: int,
    micro: int | None,
) -> memory_probe.Rehearsed:
    """`memory.rehearse`, with its objections to what model and objective have to do with each other in words."""
    try:
        return memory_probe.rehearse(learner, batch_of, share, micro, partial(_check_all_learn, learner.model, config))
    except KeyError as error:
        raise UsageError(
            f"objective.kind: `{config.objective.kind}` reads `{error.args[0]}`, which a model of model.kind "
            f"`{config.model.kind}` with these settings does not give; choose another objective or model"
        ) from error


def synthetic_of(config: Config, device: torch.device) -> Callable[[int], dict[str, torch.Tensor]]:
    spec = config.model
    return lambda rows: synthetic_batch(spec.inputs, spec.vocab_size, rows, device)


def _check_all_learn(model: nn.Module, config: Config) -> None:
    """Raise UsageError where a weight gets no gradient: DDP would wait for it for ever, and it is hardly meant so."""
    silent = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    if silent:
        raise UsageError(
            f"objective.kind `{config.objective.kind}` gives {len(silent)} weights of the model no gradient, the first "
            f"is {silent[0]}: choose another objective, or leave them as they are with "
            f"--optimizer.freeze {' '.join(silent[:3])}"
        )
