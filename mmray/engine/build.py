"""Build the model of a rank: its weights, transforms, and what a reference model demands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmray.builtin import KINDS
from mmray.data.stream.order import SamplePlan
from mmray.data.vlm.reader import ConversationReader, ReferenceLogProbs
from mmray.engine import precision
from mmray.engine.checkpoint import files
from mmray.engine.collectives import Group
from mmray.engine.metrics.meters import model_flops_of_row, peak_flops
from mmray.engine.parallel.device_defaults import (
    capability_of,
    compile_pays,
    configure_torch,
    device_defaults,
    resolve_auto,
)
from mmray.engine.parallel.strategy import strategy_class
from mmray.engine.parallel.support import unsupported_reasons
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.worker_context import DriverHandle, WorkerContext
from mmray.errors import UsageError
from mmray.evaluation.build import check_evaluable
from mmray.models import lora
from mmray.models.build import build, build_on
from mmray.models.lora import FrozenBase
from mmray.models.protocol import PRETRAINED, Model, WeightSource, saved_layers
from mmray.models.synthetic import synthetic_rows
from mmray.models.weights import copy_to_meta
from mmray.storage.paths import AnyPath

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.models.vlm.model import Vlm


def build_for_device(
    config: Config,
    plan: SamplePlan,
    checkpoint: AnyPath | None,
    group: Group,
    driver: DriverHandle,
) -> tuple[Config, Model, FrozenBase | None]:
    """Build the model; return it with the config in which no setting of `train` is `auto`, and the
    frozen weights that checkpoints leave out.
    """
    meta = {} if checkpoint is None else files.load_meta(checkpoint)
    saved_base = meta.get("base")
    reads_weights = checkpoint is None or saved_base is not None
    source = PRETRAINED if reads_weights else saved_layers(meta["architecture"])
    model = build_model(config, group, source)

    def frozen_base() -> FrozenBase:
        base = lora.frozen_base(model, config.model.initial_weights)
        if saved_base is not None:
            base.check(saved_base)
        return base

    base = None
    if reads_weights and lora.leaves_out_base(config.model):
        base = group.call_on_rank0(frozen_base)
    for note in model.build_notes:
        driver.notify("model", note)
    if config.train.compile == "auto" and config.model.lora.load_in_4bit:
        config = config.replace(train=config.train.replace(compile="none"))
    if config.train.compile == "auto":
        earns = _earns_compile(config, model, group.device, plan.rank_rows, plan.steps)
        if group.all_reduce_min(int(earns)) == 0:
            driver.notify("device", "compile none: the run is too short to earn it")
            config = config.replace(train=config.train.replace(compile="none"))
    # after this, so that a short run does not spend seconds to try the compiler
    config = config.replace(train=resolve_auto(config.train, group, driver.notify))
    if reasons := unsupported_reasons(config):
        raise UsageError("\n".join(reasons))
    if text := configure_torch(config.train, group.device):
        driver.notify("device", text)
    return config, model, base


def _set_reference(
    model: nn.Module, references: ReferenceLogProbs, is_start: bool, group: Group
) -> None:
    """Set that a model trains on pairs of answers, and check that it starts as the reference model
    that wrote their log-probabilities. A collective call.

    Raises UsageError on every rank.
    """
    from mmray.models.vlm.model import Vlm

    assert isinstance(model, Vlm)
    model.pairs = True
    model.has_reference = references.is_stored
    if model.has_reference and is_start:
        digest = group.call_on_rank0(lambda: lora.hash_weights(model))
        if digest != references.digest:
            raise UsageError(
                f"objective.reference: `{references.column}` of the set is of "
                f"{references.weights}, whose weights are not those of model.weights. Run `mmray "
                "score` with the weights of the run, with another --name and --objective.reference"
            )


def check_packing(precision_name: str, model: Vlm, group: Group, driver: DriverHandle) -> None:
    """Pad the rows of a model whose loss or gradients depend on the other rows of a sequence; a
    collective call of all ranks.
    """
    model.eval()  # dropout and scales of float8 depend on the other rows
    if not model.packed:
        driver.notify("packing", "rows are padded: those of this model cannot be packed")
        return
    with precision.select_precision(precision_name, group.device).autocast():
        differs = model.differs_if_packed()
    if group.all_reduce_min(int(not differs)) == 0:
        model.packed = False
        driver.notify(
            "packing", "rows are padded: a packed row has another loss or gradient than alone"
        )


def _earns_compile(
    config: Config, model: nn.Module, device: torch.device, rank_rows: int, steps: int
) -> bool:
    """Return True if the run is long enough for torch.compile, by the FLOPs of the model.

    True if the blocks would not be compiled on the device, with `train.float8`, which needs it, for
    a model that will be sharded, which is large, and for a user's model whose FLOPs cannot be
    counted without running it.
    """
    default = device_defaults(capability_of(device)).compile
    must_compile = config.train.float8 != "none" or strategy_class(config.train).shards_weights
    if default == "none" or must_compile:
        return True
    without_autocast = precision.Precision("fp32", None, "meta")
    row = synthetic_rows(model, config.model, 1, "meta")
    try:
        flops = model_flops_of_row(copy_to_meta(model), row, without_autocast)
    except Exception:  # noqa: BLE001 - code of a user may fail in any way on the meta device
        return True
    mixed = precision.select_precision(config.train.precision, device)
    return compile_pays(flops, rank_rows, steps, peak_flops(device, mixed))


def prepare_model(
    context: WorkerContext, group: Group, model: Model, is_start: bool, driver: DriverHandle
) -> nn.Module:
    """Apply the settings of `train` to a model; shard it if it will be, otherwise it is not wrapped
    yet. `is_start`: no checkpoint will be loaded.
    """
    reader = context.reader
    references = reader.references if isinstance(reader, ConversationReader) else None
    if references is not None:
        _set_reference(model, references, is_start, group)
    config = context.config
    train = context.config.train
    transformed = apply_transforms(model, train, config.optimizer, group, driver.notify)
    if references is not None and not references.is_stored:
        lora.check_only_adapters(transformed)
    if context.eval_sets:
        check_evaluable(config, transformed)
    strategy = strategy_class(train)(group, precision.DTYPES[train.precision])
    return strategy.wrap(transformed) if strategy.is_sharded else transformed


def build_model(config: Config, group: Group, source: WeightSource) -> Model:
    """Build the model on this rank.

    A model that will be sharded has weights on rank 0 only, or on no rank if a checkpoint will be
    loaded; on the other ranks its parameters are on the meta device.

    Args:
        group: All ranks; each calls this function.
        source: Where weights come from; random ones will be loaded from a checkpoint.

    Returns:
        The model, not sharded yet.

    Raises:
        UsageError: The settings are not supported, or the weights cannot be read; on every rank.
    """
    spec = config.model
    sharded = strategy_class(config.train).shards_weights
    if not sharded or group.world_size == 1:
        may_read_weights = source.pretrained and spec.initial_weights != "none"
        # A user's class may compute on the CPU with its weights.
        on_cpu = sharded or may_read_weights or spec.kind not in KINDS
        return build_on("cpu" if on_cpu else group.device, spec, spec.vocab_size, source)
    on_rank0: list[Model] = []

    def build_on_rank0() -> dict[str, Any]:
        on_rank0.append(build(spec, spec.vocab_size))
        return on_rank0[0].architecture()

    if source.pretrained:
        source = saved_layers(group.call_on_rank0(build_on_rank0))
    if on_rank0:
        return on_rank0[0]
    return build_on("meta", spec, spec.vocab_size, source)
