"""A synthetic step before the first, for a run: mistakes of shape and memory show in the first seconds.

memory.py measures; here its objections become words about the settings.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from mmray.data.order import Plan
from mmray.errors import UsageError
from mmray.models.synthetic import synthetic_batch
from mmray.train import memory, optimizer, parallel
from mmray.train.job import Job
from mmray.train.learner import Learner
from mmray.train.shaping import compiled

if TYPE_CHECKING:
    from mmray.config import Config


def rehearse_job(job: Job, learner: Learner, plan: Plan) -> memory.Rehearsed:
    """A synthetic step, so that mistakes of shape and memory show before the first; the rows that fit."""
    micro = min(plan.micro, plan.share, job.micro or plan.share)
    auto = job.config.batch.micro == "auto" and not job.micro
    batch_of = synthetic_of(job, learner.group.device)
    cut = job.config.train.parallel == "fsdp"
    if cut:
        learner = _cut(job.config, learner)
    # The averaged weights will lie beside the others.
    average = [weight.detach().clone() for weight in learner.model.parameters()] if job.config.train.ema else []
    try:
        return rehearse(job.config, learner, batch_of, plan.share, None if auto else micro)
    finally:
        average.clear()
        if cut:
            del learner
            gc.collect()  # what cuts a module refers to it, and is referred to: it would stay for a while
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


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
    module = compiled(whole, config.train)
    layout = parallel.Layout.of(config.train, learner.precision.dtype, (), "")
    model = parallel.wrap(module, learner.group, layout)
    return replace(learner, model=model, optimizer=optimizer.build(module, config.optimizer))


def rehearse(
    config: Config,
    learner: Learner,
    batch_of: Callable[[int], dict[str, torch.Tensor]],
    share: int,
    micro: int | None,
) -> memory.Rehearsed:
    """`memory.rehearse`, with its objections to what model and objective have to do with each other in words."""
    try:
        return memory.rehearse(learner, batch_of, share, micro, partial(_check_all_learn, learner.model, config))
    except KeyError as error:
        raise UsageError(
            f"objective.kind: `{config.objective.kind}` reads `{error.args[0]}`, which a model of model.kind "
            f"`{config.model.kind}` with these settings does not give; choose another objective or model"
        ) from error


def synthetic_of(job: Job, device: torch.device) -> Callable[[int], dict[str, torch.Tensor]]:
    spec = job.config.model
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
