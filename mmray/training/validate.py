"""Checks of settings that contradict each other, before anything starts. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmray.builtin import (
    HF_AUDIO_TYPES,
    HF_IMAGE_TYPES,
    HF_TEXT_TYPES,
    KEEP_ALL,
    KINDS,
)
from mmray.config.model import Model, Objective, model_section
from mmray.config.model_kinds import PAIRS, Towers, Vlm
from mmray.config.sets import Mixture, parse_captions
from mmray.data.store.manifest import Manifest, read_manifest, text_columns
from mmray.data.store.row_columns import column_types
from mmray.data.store.selection import check_where
from mmray.data.vlm.families import find_family, has_weights, read_config
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.parallel import support
from mmray.errors import UsageError, suggest
from mmray.storage.paths import to_path

if TYPE_CHECKING:
    from mmray.config import Config

# objective: head of the model, and the flags with which the model has it, and has not
HEADS = {
    "matching": ("matching", "--model.matching True", "--model.matching False"),
    "clip_matching": ("matching", "--model.matching True", "--model.matching False"),
    "classification": ("classes", "--model.classes N", "--model.classes 0"),
    "captioning": ("has_decoder", "--model.decoder.depth N", "--model.decoder.depth 0"),
}


# `model_type` of transformers that a part can have
PART_TYPES = {
    "image": HF_IMAGE_TYPES,
    "text": HF_TEXT_TYPES,
    "audio": HF_AUDIO_TYPES,
}


def validate_settings(config: Config) -> None:
    """Check that the settings of a run do not contradict each other.

    Uses neither Ray nor weights, and of the data only manifests.

    Raises:
        UsageError: They contradict each other, or a path or URI is invalid.
        DataError: The manifest of a set with `data.where` is damaged.
    """
    resolve_batch_shape(config.batch, config.cluster.max_workers, config.max_row_tokens)
    reasons = unsupported_reasons(config)
    if reasons:
        raise UsageError("\n".join(reasons))
    sources = [*Mixture.parse(config.data.train).addresses]
    if sources[1:] and Path(config.data.train).exists():
        raise UsageError(
            "data.train is a path with `, ` or ` + `, which separate the sets of a mixture: rename "
            "it"
        )
    sources += [each.address for each in config.data.eval_sets]
    for address in filter(None, [*sources, config.data.cache, config.run.storage]):
        to_path(address)  # raises UsageError for an address that cannot be opened
    check_selections(config)


def check_selections(config: Config) -> None:
    """Check expressions and captions of a run against the columns of its sets, before Ray starts;
    of a raw source these are `prepare.keep` and `prepare.columns`. Raises UsageError.
    """
    _check_selection("", Mixture.parse(config.data.train).addresses, config)
    check_eval_selections(config)


def check_eval_selections(config: Config) -> None:
    """Do the same for `data.eval_where` and `data.eval_captions`."""
    trained_on = Mixture.parse(config.data.train).addresses
    evaluated_on = [each.address for each in config.data.eval_sets if each.address]
    _check_selection("eval_", evaluated_on or trained_on[:1], config)


def _check_selection(prefix: str, addresses: Sequence[str], config: Config) -> None:
    """Check `data.where` and `data.captions`, or those with a prefix, of the sets at addresses."""
    settings = dict(config.data)
    where = settings[f"{prefix}where"]
    captions = settings[f"{prefix}captions"]
    if where is None and captions is None:
        return
    manifests: dict[str, Manifest | None] = {}  # None: a raw source
    for address in addresses:
        path = to_path(address)
        manifest = read_manifest(path)
        # Opening one that does not exist raises an error, or finds where it was moved.
        if manifest is not None or path.exists():
            manifests[address] = manifest
    prepare = config.prepare
    if where is not None:
        types: Mapping[str, str | None] | None
        for address, manifest in manifests.items():
            if manifest is not None:
                types = column_types(manifest.columns)
            elif prepare.compute is not None or prepare.keep == (KEEP_ALL,):
                types = None  # columns with any names
            else:
                types = dict.fromkeys(prepare.keep)
            check_where(where, types, address, f"data.{prefix}where")
    if captions is None or manifests.keys() != set(addresses):
        return
    known: list[str] = []
    for manifest in manifests.values():
        known += text_columns(prepare.columns) if manifest is None else manifest.text_columns
    for name in parse_captions(captions):
        if name not in known:
            hint = "`mmray prepare --columns text=NAME,NAME` stores several columns of captions"
            raise UsageError(
                f"data.{prefix}captions: {', '.join(manifests)} has no column of captions "
                f"`{name}`; {suggest(name, known) if known else hint}"
            )


def unsupported_reasons(config: Config) -> list[str]:
    """Return why the settings of a run are not supported.

    Imports no torch, so it can run before Ray.

    Returns:
        One sentence per problem, with its fix; empty if the settings are supported.
    """
    return (
        config.model.unsupported_reasons()
        + weights_reasons(config.model)
        + evaluation_reasons(config)
        + objective_reasons(config)
        + support.unsupported_reasons(config)
        + kind_reasons(config)
        + four_bit_reasons(config)
    )


def four_bit_reasons(config: Config) -> list[str]:
    """Return which settings do not suit frozen weights in 4 bits (`model.lora.load_in_4bit`)."""
    model = config.model
    if not model.lora.load_in_4bit:
        return []
    train = config.train
    dpo = config.objective
    checks = {
        f"is for model.kind `vlm`, not `{model.kind}`; leave it out": isinstance(model, Vlm),
        "needs adapters: set --model.lora.rank": model.lora.rank > 0,
        "needs trained weights: set --model.weights": isinstance(model, Vlm)
        and not model.is_written_by_run
        and has_weights(model.weights),
        "needs --train.parallel ddp": train.parallel in ("ddp", "single"),
        "needs --train.ema 0": train.ema == 0,
        "needs --train.float8 none": train.float8 == "none",
        "needs --train.compile none": train.compile in ("auto", "none"),
        "needs --objective.reference adapters_off, because `mmray score` computes with unquantized "
        "weights": not dpo.is_dpo or dpo.reference == "adapters_off",
    }
    return [f"model.lora.load_in_4bit {text}" for text, holds in checks.items() if not holds]


def kind_reasons(config: Config) -> list[str]:
    """Return which settings of data and batches the kind of the model does not have."""
    data = config.data
    kind = config.model.kind
    reasons = list[str]()
    if isinstance(config.model, Vlm):
        if config.augment.is_active or data.augment is not None:
            reasons.append(
                "augment and data.augment: model.kind `vlm` reads the images as they are; leave "
                "them out"
            )
        return reasons
    if config.batch.tokens is not None:
        reasons.append(
            f"batch.tokens: the rows of model.kind {kind} are of equal size; set --batch.micro"
        )
    if (data.targets, data.reasoning) != ("all", "trained"):
        reasons.append(
            f"data.targets and data.reasoning: only model.kind `vlm` has them (got `{kind}`)"
        )
    return reasons


def weights_reasons(model: Model) -> list[str]:
    """Return why pretrained weights in a folder are not weights of the model, as sentences with a
    fix; [] if they are.

    Reads config.json only. Weights on the hub of other models than `vlm` are not checked.
    """
    if isinstance(model, Vlm):
        if model.weights == "none" or model.is_written_by_run:
            return []
        try:
            family = find_family(read_config(model.weights), model.weights)
            family.media_kinds(model.inputs.frames, model.weights)
        except UsageError as error:
            return [str(error)]
        return []
    hf_type = KINDS[model.kind].hf_type if model.kind in KINDS else ""
    if hf_type:
        return _hf_weights_reasons("model.weights", model.initial_weights, (hf_type,), model)
    reasons = list[str]()
    for part, weights in model.part_weights().items():
        reasons += _hf_weights_reasons(f"model.{part}.weights", weights, PART_TYPES[part], model)
    return reasons


def _hf_weights_reasons(
    setting: str, weights: str, supported: tuple[str, ...], model: Model
) -> list[str]:
    """Return why a folder of transformers does not fit a model, as sentences; [] also for names of
    the hub and other files.

    Args:
        setting: Name of the setting that has `weights`, such as `model.text.weights`.
        supported: Values of `model_type` in config.json that are accepted.
        model: The `model` section.
    """
    folder = Path(weights).expanduser()
    if not folder.exists():
        is_path = weights.startswith(("/", "./", "../", "~"))
        return [f"{setting}: {weights} does not exist"] if is_path else []
    try:
        saved = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return []
    kind = saved.get("model_type")
    if kind is not None and kind not in supported:
        fits = [name for name, part in KINDS.items() if part.hf_type and part.hf_type == kind]
        advice = f"; set --model.kind {fits[0]}" if fits else ""
        return [
            f"{setting}: {weights} has a model of type `{kind}`, and model.kind {model.kind} takes "
            f"{', '.join(supported)}{advice}"
        ]
    return []


def objective_reasons(config: Config) -> list[str]:
    """Return why the objective cannot train the model, as sentences with a fix; [] if it can.

    Classes of the user are checked later, by a synthetic step before the first one.
    """
    model = config.model
    kind = f"`{model.kind}`"
    if isinstance(model, Towers):
        kind += f" of {', '.join(model.modalities)} (model.inputs.clip_s, frames, audio_rate)"
    values = dict(model)
    usable = model.usable_objectives
    terms = config.objective.terms
    reasons = _dpo_reasons(config)
    if not config.objective.has_teacher and config.objective.teacher != Objective().teacher:
        reasons.append("objective.teacher: only objectives of distillation use it")
    if not usable:
        return reasons
    for term in terms:
        head, flag, _ = HEADS.get(term, ("", "", ""))
        if ":" not in term and term not in usable:
            kinds = [known for known in KINDS if term in model_section(known).objectives]
            reasons.append(
                f"objective {term} is for model.kind {', '.join(f'`{known}`' for known in kinds)}, "
                f"not {kind}; set --objective.kind, such as {usable[0]}, or --model.kind"
            )
        elif head and not getattr(model, head):
            part = "decoder" if term == "captioning" else "head"
            reasons.append(f"objective {term} needs a {part}; set {flag}")
        elif term == "captioning" and model.lora.rank and "decoder" not in model.lora.train:
            reasons.append(
                "objective captioning: model.lora freezes the decoder, which has no trained "
                "weights; set --model.lora.train decoder"
            )
        elif term == "sigmoid" and values["logit_bias"] is None:
            reasons.append(
                "objective sigmoid needs a bias of the scores; set --model.logit-bias, "
                "for example -10"
            )
    if config.optimizer.freeze or model.lora.rank or any(":" in term for term in terms):
        return reasons  # weights without gradient may be frozen, or trained by the user's objective
    if isinstance(model, Towers) and not reasons:
        reasons += _untrained_branches(model, terms)
    if [*terms] == ["captioning"]:
        reasons.append(
            "objective captioning does not train the text branch; set --objective.kind "
            '"contrastive + captioning", or --optimizer.freeze text'
        )
    for term, (head, _, off) in HEADS.items():
        if term in usable and getattr(model, head) and term not in terms:
            advice = f"add `+ {term}` to --objective.kind, or set {off}"
            reasons.append(f"the head of {term}: no objective trains it; {advice}")
    if values.get("logit_bias") is not None and "sigmoid" not in terms:
        reasons.append(
            "model.logit_bias: only objective sigmoid trains it; set --model.logit-bias None"
        )
    return reasons


def _dpo_reasons(config: Config) -> list[str]:
    """Return why the settings of objective dpo cannot be used."""
    objective = config.objective
    if not objective.is_dpo:
        defaults = type(objective)()
        names = ("beta", "loss_type", "reference")
        values = dict(objective)
        changed = [name for name in names if values[name] != dict(defaults)[name]]
        return [f"objective.{name}: only objective dpo uses it" for name in changed]
    reasons = []
    if len(objective.terms) > 1:
        reasons.append("objective dpo cannot be a part of a sum")
    if config.data.targets == "last" or config.data.reasoning == "masked":
        reasons.append(
            "data.targets and data.reasoning: objective dpo compares whole answers; leave them out"
        )
    if objective.reference == "adapters_off" and not config.model.lora.rank:
        reasons.append("objective.reference adapters_off needs adapters: set --model.lora.rank")
    elif objective.reference == "adapters_off":
        # Whether a pattern matches the whole projector is known once the model is built.
        is_frozen = any(
            pattern == "projector" or "*" in pattern or "." in pattern
            for pattern in config.optimizer.freeze
        )
        if config.model.lora.train or not is_frozen:
            reasons.append(
                "objective.reference adapters_off: other weights than adapters would train, so the "
                "model without its adapters is no fixed reference. Set --optimizer.freeze "
                "projector and no model.lora.train, or score the set and leave out "
                "--objective.reference"
            )
    return reasons


def _untrained_branches(model: Towers, terms: Mapping[str, float]) -> list[str]:
    """Return why objectives over pairs of modalities do not train all branches of a model."""
    trained = [PAIRS[term] for term in terms if term in PAIRS]
    untrained = set(model.modalities).difference(*trained)
    if not untrained:
        return []
    pair = next(name for name in model.usable_objectives if untrained & {*PAIRS[name]})
    switch = ", or switch it off with model.inputs.frames 0 or audio_rate 0"
    return [
        f"objective.kind: no objective trains the branch {', '.join(sorted(untrained))}; add one "
        f"of its pairs, for example `+ {pair}`{switch if model.takes_clips else ''}"
    ]


def evaluation_reasons(config: Config) -> list[str]:
    """Return why the model cannot be evaluated as configured, as sentences with a fix; [] if it
    can.
    """
    if config.evaluate.where == "beside" and config.evaluate.every:
        return [
            "evaluate.every: with evaluate.where beside each checkpoint is evaluated; set "
            "--train.checkpoint-every in its place"
        ]
    generates_text = config.model.generates_text
    tasks = {each.task for each in config.data.eval_sets}
    if generates_text and tasks != {""}:
        return [
            f"data.eval: model.kind `{config.model.kind}` generates text and has no task "
            f"{' or '.join(sorted(filter(None, tasks)))}; name the sets without a task"
        ]
    if config.evaluate.classes and len(config.data.eval_sets) > 1:
        return [
            "evaluate.classes: names of one set, and data.eval has "
            f"{len(config.data.eval_sets)}; each set uses the class names that it was prepared with"
        ]
    if generates_text and config.evaluate.classes:
        return [
            f"evaluate.classes: model.kind `{config.model.kind}` has no embeddings for "
            "classification; leave it empty"
        ]
    if not generates_text and config.evaluate.num_generations:
        return [
            f"evaluate.num_generations: model.kind `{config.model.kind}` generates no text; "
            "set it to 0"
        ]
    return []
