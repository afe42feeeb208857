"""Settings that the strategy, the model or the device does not support."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmray.engine.parallel.strategy import strategy_class

if TYPE_CHECKING:
    from mmray.config import Config


def unsupported_reasons(config: Config) -> list[str]:
    """Return why a model cannot be trained with its strategy and transforms, as sentences with a
    fix; [] if it can.

    Imports no torch. Called before a run starts, and on each worker, where no setting is `auto`.
    """
    return (
        strategy_class(config.train).unsupported_reasons(config)
        + _batch_norm_reasons(config)
        + _transform_reasons(config)
        + _float8_reasons(config)
    )


def _batch_norm_reasons(config: Config) -> list[str]:
    synced = config.model.synced_batch_norm
    if not synced:
        return []
    reasons = []
    if config.batch.is_searched:
        reasons.append(
            "batch.micro auto does not support model.batch_norm synced; set --batch.micro"
        )
    if config.cluster.accelerator == "cpu" and synced.startswith("resnet"):
        reasons.append(
            "model.batch_norm: `synced` needs GPUs; set `local` or `frozen` with "
            "--cluster.accelerator cpu"
        )
    return reasons


def _transform_reasons(config: Config) -> list[str]:
    train = config.train
    model = config.model
    reasons = []
    unknown = [name for name in train.activation_checkpointing if name not in model.branches]
    if model.branches and unknown:
        problem = f"the model has no branch `{unknown[0]}`; it has {', '.join(model.branches)}"
        reasons.append(f"train.activation_checkpointing: {problem}")
    return reasons


def _float8_reasons(config: Config) -> list[str]:
    train = config.train
    if train.float8 == "none":
        return []
    reasons = []
    if config.cluster.accelerator == "cpu":
        reasons.append(
            "train.float8 needs GPUs; set --train.float8 none, or --cluster.accelerator gpu"
        )
    if train.precision not in ("auto", "bf16"):
        reasons.append(
            f"train.float8 needs bf16, not {train.precision}; set --train.precision bf16"
        )
    if train.compile == "none":
        # The casts of a product are several kernels then.
        reasons.append(
            "train.float8 is slower than bf16 without torch.compile; set --train.compile inductor "
            "or --train.float8 none"
        )
    return reasons
