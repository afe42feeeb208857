"""Settings of the `model` section that pretrained weights define, to evaluate or export them
without training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmray.builtin import HF_IMAGE_TYPES, KINDS
from mmray.data.text.tokenizer_files import tokenizer_file
from mmray.data.vlm.families import find_family
from mmray.errors import UsageError
from mmray.models import open_clip
from mmray.storage.weights_json import read_weights_json

SETTING = "--weights"
EXPORT_MARKER = "mmray"  # key in config.json that marks a folder as an export
RESAMPLING = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
INTERPOLATIONS = {number: name for name, number in RESAMPLING.items()}
SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")  # no hub name has one
# Names of weights in repositories of the hub.
OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
# Settings in exports of earlier versions, which are refused if they are set.
REMOVED_INPUTS = ("language_token", "max_boxes")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def pretrained_settings(weights: str) -> dict[str, Any]:
    """Return the settings of the `model` section that pretrained weights define.

    Args:
        weights: A folder of transformers or open_clip, a name on the Hugging Face hub, or a
            checkpoint file of open_clip.

    Returns:
        `weights`, `kind` (`clip`, `siglip`, `naflex` or `vlm`), `inputs`, the section `decoder` of
        an export that has one, and, except for `vlm`, `vocab_size` (rows of the token embedding).
        `inputs` has those of `image_side`, `patch`, `max_patches`, `max_tokens`, `mean`, `std`,
        `interpolation`, `fit` and `tokenizer` that the weights define, for an export of mmray all
        settings of its `model.inputs`, and for `vlm` only `max_tokens`.

    Raises:
        UsageError: The weights cannot be read, or define no model of a built-in kind.
    """
    weights = checkpoint_file(weights)
    path = Path(weights).expanduser()
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        raise UsageError(
            f"{SETTING}: {path} is a run; export it and name the export: mmray export {path} OUT"
        )
    if path.is_file() or (path.suffix in SUFFIXES and not path.is_dir()):
        settings = _checkpoint_settings(path)
        folder = path.parent
    else:
        settings = _hf_settings(weights)
        folder = path
    if settings["kind"] == "vlm":  # its processor is in its weights
        return {"weights": weights} | settings
    file = tokenizer_file(folder) if folder.is_dir() else None
    if file is not None:
        settings["inputs"]["tokenizer"] = str(file.resolve())
    elif not folder.is_dir():
        settings["inputs"]["tokenizer"] = weights  # a hub name
    return {"weights": weights} | settings


def checkpoint_file(weights: str) -> str:
    """Return the file of open_clip in a folder that transformers cannot open; otherwise the weights
    as they are.

    Raises:
        UsageError: The folder is an export that only mmray.load opens.
    """
    path = Path(weights).expanduser()
    given = read_weights_json(SETTING, weights, ["config.json"]) if path.is_dir() else {}
    if "model_type" in given:
        return weights
    for name in OPEN_CLIP_FILES:
        if (path / name).is_file():
            return str(path / name)
    _refuse_export(path, given)
    return weights


def _refuse_export(path: Path, given: dict[str, Any]) -> None:
    """Raise UsageError if config.json is of an export that transformers cannot open."""
    if EXPORT_MARKER not in given:
        return
    kind = given.get("model", {}).get("kind")
    if kind is None:
        raise UsageError(
            f"{SETTING}: {path / 'config.json'} has no model.kind, so the export is incomplete; "
            "export the run again: mmray export RUN OUT"
        )
    raise UsageError(
        f"{SETTING}: {path} is an export of kind {kind}, which only mmray.load opens; evaluate its "
        "run instead: mmray evaluate RUN --data SET"
    )


def _checkpoint_settings(file: Path) -> dict[str, Any]:
    """Return the settings that a checkpoint file of open_clip defines: the config next to it, or
    the shapes of its weights.
    """
    sizes = open_clip.declared_sizes(file) if file.is_file() else {}
    kind = "clip"
    if not sizes:
        from mmray.models.weights import read_state_dict  # late: it imports torch

        hf = open_clip.rename_to_hf(read_state_dict(SETTING, str(file), "meta"))
        kind = open_clip.model_kind(hf)
        inferred = open_clip.infer_sizes(str(file), hf)
        sizes = {
            "image_side": inferred["vision"]["image_size"],
            "max_tokens": inferred["text"]["max_position_embeddings"],
            "vocab_size": inferred["text"]["vocab_size"],
        }
    vocab_size = sizes.pop("vocab_size")
    inputs = sizes | open_clip.preprocessing(file)
    return {"kind": kind, "vocab_size": vocab_size, "inputs": inputs}


def _hf_settings(weights: str) -> dict[str, Any]:
    """Return the settings that a model of transformers defines, in a folder or on the hub."""
    from mmray.models.weights import load_config  # late: it imports torch

    kinds = {part.hf_type: kind for kind, part in KINDS.items() if part.hf_type}
    config = load_config(SETTING, weights)
    if config.model_type in HF_IMAGE_TYPES:
        raise UsageError(
            f"{SETTING}: {weights} is an image encoder ({config.model_type}) without a text "
            "encoder; train a model with it: --model.image.name transformers --model.image.weights "
            f"{weights}"
        )
    if config.model_type not in kinds:
        find_family({"model_type": config.model_type}, weights)
        positions = config.get_text_config().max_position_embeddings
        return {"kind": "vlm", "inputs": {"max_tokens": min(4096, positions)}}
    kind = kinds[config.model_type]
    sections = {}
    if EXPORT_MARKER in config.to_dict():
        given = config.model["inputs"]
        inputs = {name: given[name] for name in given if given[name] or name not in REMOVED_INPUTS}
        decoder = config.model.get("decoder")
        if decoder is not None and decoder["depth"]:
            sections["decoder"] = decoder
    else:
        vision = config.vision_config
        if kind == "naflex":
            inputs = {"patch": vision.patch_size}
        else:
            inputs = {"image_side": vision.image_size}
        inputs |= _preprocessing(weights)
        inputs["max_tokens"] = config.text_config.max_position_embeddings
    sizes = {"vocab_size": config.text_config.vocab_size, "inputs": inputs}
    return {"kind": kind} | sizes | sections


def normalization(weights: str) -> dict[str, tuple[float, ...]]:
    """Return the mean and the standard deviation of pixels that weights were trained with, as
    `mean` and `std`; {} if no file next to them defines both.

    Raises UsageError if the weights are those of the hub, which is unreachable.
    """
    folder = weights_folder(weights)
    timm = read_weights_json(SETTING, folder, ["config.json"]).get("pretrained_cfg", {})
    found = timm | open_clip.preprocessing(Path(folder) / "weights") | _preprocessing(folder)
    if not {"mean", "std"} <= found.keys():
        return {}
    return {name: tuple(found[name]) for name in ("mean", "std")}


def weights_folder(weights: str) -> str:
    """Return the folder of a checkpoint file; otherwise the folder or name of the hub itself."""
    path = Path(weights).expanduser()
    return str(path.parent) if path.is_file() else weights


def _preprocessing(weights: str) -> dict[str, Any]:
    """The settings of `model.inputs` that preprocessor_config.json defines.

    Raises UsageError if it is unreachable.
    """
    settings = read_weights_json(SETTING, weights, PROCESSOR_FILES)
    settings = settings.get("image_processor", settings)
    inputs = {
        name: settings[f"image_{name}"] for name in ("mean", "std") if f"image_{name}" in settings
    }
    if settings.get("resample") in INTERPOLATIONS:
        inputs["interpolation"] = INTERPOLATIONS[settings["resample"]]
    if "max_num_patches" in settings:  # of Siglip2ImageProcessor
        inputs["max_patches"] = settings["max_num_patches"]
    elif settings:
        inputs["fit"] = "crop" if settings.get("do_center_crop") else "squash"
    return inputs
