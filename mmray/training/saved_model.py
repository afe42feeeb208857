"""Open and load a checkpoint of a run, or pretrained weights: to evaluate, export or score."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import nn

from mmray.config import Config, Lora, Vlm, from_yaml, recipes
from mmray.config.model import AnyModel
from mmray.data.text.tokenizer import TextEncoder, declared_pad_id
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.engine.checkpoint import files
from mmray.engine.run_state import EMA_KEY
from mmray.errors import Log, UsageError
from mmray.evaluation.build import best_metric
from mmray.models import lora
from mmray.models.build import build
from mmray.models.pretrained import pretrained_settings
from mmray.models.protocol import PRETRAINED, saved_layers
from mmray.storage.paths import AnyPath, to_path
from mmray.training.run_dir import RunDir, check_processor, describe_unstored_processor

# A step, the checkpoint with the best metric (`best_metric`), or (None) the newest valid one.
Step = int | Literal["best"] | None


def load_run_config(folder: AnyPath) -> Config:
    """Return the config of a run; raise UsageError if the folder is not a run."""
    file = to_path(folder) / "config.yaml"
    if not file.exists():
        problem = (
            "is not a run: it has no config.yaml" if file.parent.exists() else ("does not exist")
        )
        raise UsageError(f"{file.parent} {problem}; `mmray runs` lists the runs of a folder")
    try:
        return from_yaml(file.read_text(), str(file))
    except UsageError as error:
        raise UsageError(
            f"{error}\nIf another version of mmray trained this run, use that version, for example "
            "to export the model."
        ) from None


class SavedModel(NamedTuple):
    """A checkpoint of a run, or pretrained weights.

    Attributes:
        config: Settings of the model and its run.
        tokenizer_json: Content of tokenizer.json; "" for a vision-language model.
        checkpoint: Folder of the checkpoint; None: the weights of `model.weights`.
    """

    config: Config
    tokenizer_json: str
    checkpoint: AnyPath | None

    def load(self, share: float = 1.0) -> nn.Module:
        """Return the model on the CPU, with LoRA adapters if the run trains them; with a share of
        the trained weights below 1 interpolated, without adapters.
        """
        model = load_model(self.config, self.checkpoint)
        if share != 1:
            model = lora.merge_adapters(model)
            interpolate_from_start(model, self.config.model, share)
        return model


def open_run(folder: AnyPath, step: Step) -> SavedModel:
    """Return a checkpoint of a run, which may still be training; its files were verified.

    Raises:
        UsageError: The folder is not a run, or has no such valid checkpoint.
    """
    run = RunDir(to_path(folder))
    config = load_run_config(folder)
    faults = list[str]()
    if step is None:
        checkpoint = files.latest_valid_checkpoint(run.checkpoints, faults.append, rename=False)
    elif step == "best":
        metric = best_metric(config)
        checkpoint = files.best_checkpoint(run.checkpoints, metric)
        if checkpoint is None:
            faults.append(
                f"none has {metric}: the run holds out no rows, or was never evaluated at a "
                "checkpoint"
            )
    else:
        path = run.checkpoints / f"step-{step}"
        checkpoint = path if path.exists() else None
    fault = None if step is None or checkpoint is None else files.verify(checkpoint)
    if fault is not None:
        faults.append(f"checkpoint {checkpoint} is not valid: {fault}")
        checkpoint = None
    if checkpoint is None:
        existing = ", ".join(files.list_checkpoint_names(run.checkpoints)) or "none"
        which = "valid checkpoint" if step is None else f"valid checkpoint for --step {step}"
        raise UsageError(
            "\n".join([f"{run.path} has no {which}; checkpoints: {existing}", *faults])
        )
    return SavedModel(config, (run.path / "tokenizer.json").read_text(), checkpoint)


def pretrained_config(weights: str) -> Config:
    """Return the config with which pretrained weights are evaluated or exported: the recipe of
    their model kind, with the settings that the weights define, such as image size and tokenizer.

    Raises:
        UsageError: The weights are unknown or cannot be read.
    """
    settings = pretrained_settings(weights)
    kind = settings.pop("kind")
    all_recipes = [make() for make in recipes.RECIPES.values()]
    recipe = next(recipe for recipe in all_recipes if recipe.model.kind == kind)
    inputs = recipe.model.inputs.replace(**settings.pop("inputs"))
    return recipe.replace(model=recipe.model.replace(**settings, inputs=inputs))


def open_model(source: AnyPath | Config, step: Step, log: Log) -> SavedModel:
    """Return a checkpoint of a run, or pretrained weights.

    Args:
        source: Folder or URI of a run; or a config of `pretrained_config`, without a checkpoint.
        log: Called with (warning, label).

    Raises:
        UsageError: The folder is not a run or has no such valid checkpoint, the tokenizer cannot be
            loaded, or the processor of the run has changed.
    """
    if isinstance(source, Config):
        return SavedModel(*with_tokenizer(source, log), None)
    saved = open_run(source, step)
    check_processor(to_path(source), saved.config.model)
    if line := describe_unstored_processor(to_path(source), saved.config.model):
        log(line, "warning")
    return saved


def with_tokenizer(config: Config, log: Log) -> tuple[Config, str]:
    """Load the tokenizer of pretrained weights.

    Args:
        config: A config of `pretrained_config`.
        log: Called with (warning, label) if the weights have more tokens.

    Returns:
        The config with the vocabulary size and the padding token of the tokenizer, and the content
        of tokenizer.json. Of a vision-language model the config unchanged, and "".

    Raises:
        UsageError: The tokenizer cannot be loaded, or only a set defines it.
    """
    if isinstance(config.model, Vlm):  # its processor is in its weights
        return config, ""
    inputs = config.model.inputs
    if inputs.tokenizer == "trained":
        raise UsageError(
            "model.inputs.tokenizer: `trained` is the tokenizer of a prepared set; name the file, "
            "folder or hub name of the tokenizer that the weights were trained with"
        )
    tokenizer_json = load_tokenizer(inputs.tokenizer, None)
    num_tokens = TextEncoder(tokenizer_json, inputs.max_tokens).vocab_size
    rows = config.model.vocab_size
    if num_tokens < rows:
        log(
            f"{inputs.tokenizer} has {num_tokens:,} tokens, the weights {rows:,}: is it their "
            "tokenizer?",
            "warning",
        )
    return config.replace(
        model=config.model.with_vocab(num_tokens, declared_pad_id(tokenizer_json))
    ), tokenizer_json


def load_model(config: Config, checkpoint: AnyPath | None) -> nn.Module:
    """Build the model of a run on the CPU, with the weights of a checkpoint.

    Args:
        config: Config of the run. With `train.ema`, the averaged weights are loaded.
        checkpoint: Folder of the checkpoint; None: the weights of `model.weights`.

    Returns:
        The model, with LoRA adapters if the run trains them.
    """
    if checkpoint is None:
        return build(config.model, config.model.vocab_size)
    meta = files.load_meta(checkpoint)
    saved_base = meta.get("base")
    source = PRETRAINED if saved_base is not None else saved_layers(meta.get("architecture", {}))
    model = build(config.model, config.model.vocab_size, source)
    from mmray.engine.checkpoint import state_io  # late: DCP takes seconds to import

    if config.train.ema:
        ema_weights = state_io.load_weights(checkpoint, EMA_KEY).items()
        weights = {
            name.removeprefix("module."): each
            for name, each in ema_weights
            if name.startswith("module.")
        }
    else:
        weights = state_io.load_weights(checkpoint)
    if saved_base is not None:
        base = lora.frozen_base(model, config.model.initial_weights)
        base.check(saved_base)
        base.add_to({"model": weights}, model)
    model.load_state_dict(weights)
    return model


def interpolate_from_start(model: nn.Module, settings: AnyModel, share: float) -> None:
    """Interpolate between the initial and the trained weights, in place.

    Source: WiSE-FT (Wortsman et al. 2022, arXiv:2109.01903).

    Args:
        share: Factor of the trained weights, 0 to 1; that of the initial ones is 1 - share.
    """
    check_interpolation(settings, share)
    start = build(settings.replace(lora=Lora()), settings.vocab_size).state_dict()
    # A tied weight has several names.
    weights = {trained.data_ptr(): (name, trained) for name, trained in model.state_dict().items()}
    for name, trained in weights.values():
        if trained.is_floating_point():
            trained.copy_(torch.lerp(start[name].to(trained), trained, share))


def check_interpolation(settings: AnyModel, share: float) -> None:
    """Raise UsageError if a run has no weights that its trained ones can be interpolated with."""
    if not 0 <= share <= 1:
        raise UsageError(f"--interpolate {share:g}: must be between 0 (the start) and 1 (the end)")
    check_start("--interpolate", settings)


def check_start(option: str, settings: AnyModel) -> None:
    """Raise UsageError if `model.weights` lacks weights that a run started with."""
    if not lora.starts_from_files(settings):
        raise UsageError(
            f"{option} needs a run whose initial weights are all in files of `model.weights`; this "
            f"run has random ones (model.weights: {settings.initial_weights}); leave {option} out"
        )


# The model of this process by its digest: loading one takes seconds.
_MODELS: dict[str, nn.Module] = {}


def cached_model(saved: SavedModel, digest: str) -> tuple[nn.Module, torch.device]:
    """Return a model with merged adapters, on the GPU of this process if it has one, and the
    device. The process keeps the model until it loads another one.

    Args:
        digest: Hash of the model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if digest not in _MODELS:
        _MODELS.clear()
        _MODELS[digest] = lora.merge_adapters(saved.load()).to(device)
    return _MODELS[digest], device
