"""Settings of the `model` section that pretrained weights define, to evaluate or export them
without training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmray.builtin import KINDS
from mmray.data.text.tokenizer_files import tokenizer_file
from mmray.errors import UsageError
from mmray.models import open_clip
from mmray.models.encoders.image import HF_TYPES
from mmray.models.export.export import EXPORT_MARKER, RESAMPLING
from mmray.models.weights import load_config, load_local_or_hub, read_state_dict

SETTING = "--weights"
INTERPOLATIONS = {number: name for name, number in RESAMPLING.items()}
SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")  # no hub name has one
# Names of weights in repositories of the hub.
OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def pretrained_settings(weights: str) -> dict[str, Any]:
    """Return `kind`, `weights`, `vocab_size` (embedding rows) and `inputs` for a folder, hub name
    or open_clip file.

    Settings that the weights do not define are absent. Raises UsageError.
    """
    path = Path(weights).expanduser()
    given = open_clip.read_config(path / "config.json", ("config.json",))
    if EXPORT_MARKER in given and "model_type" not in given:
        if (kind := given.get("model", {}).get("kind")) is None:
            raise UsageError(
                f"{SETTING}: {path / 'config.json'} has no model.kind, so the export is "
                "incomplete; export the run "
                "again: mmray export RUN OUT"
            )
        raise UsageError(
            f"{SETTING}: {weights} is an export of kind {kind}, which only mmray.load opens; "
            "evaluate its run instead: mmray evaluate RUN --data SET"
        )
    if "model_type" not in given and (
        files := [path / name for name in OPEN_CLIP_FILES if (path / name).is_file()]
    ):
        path = files[0]
        weights = str(path)
    if path.is_file() or (path.suffix in SUFFIXES and not path.is_dir()):
        shapes = {
            name: tensor.to("meta") for name, tensor in read_state_dict(SETTING, weights).items()
        }
        hf = open_clip.rename_to_hf(shapes)
        size = open_clip.infer_sizes(weights, hf)
        kind = open_clip.model_kind(hf)
        inputs = {
            name: size[name] for name in ("image_side", "max_tokens")
        } | open_clip.preprocessing(path)
        folder = path.parent
        rows = size["vocab_size"]
    else:
        kinds = {part.hf_type: kind for kind, part in KINDS.items() if part.hf_type}
        config = load_config(SETTING, weights, (*kinds, *HF_TYPES))
        if config.model_type in HF_TYPES:
            raise UsageError(
                f"{SETTING}: {weights} is an image encoder ({config.model_type}) without a text "
                "encoder; train a model "
                f"with it: --model.image.name transformers --model.image.weights {weights}"
            )
        folder = path
        kind = kinds[config.model_type]
        rows = config.text_config.vocab_size
        if hasattr(config, EXPORT_MARKER):
            inputs = dict(config.model["inputs"])
        else:
            inputs = {"image_side": config.vision_config.image_size} | _preprocessing(weights)
            if kind != "generative":
                inputs["max_tokens"] = config.text_config.max_position_embeddings
    if not folder.is_dir():
        inputs["tokenizer"] = weights  # a hub name
    elif (file := tokenizer_file(folder)) is not None:
        inputs["tokenizer"] = str(file.resolve())
    return {"kind": kind, "weights": weights, "vocab_size": rows, "inputs": inputs}


def _preprocessing(weights: str) -> dict[str, Any]:
    """The settings of `model.inputs` that preprocessor_config.json defines.

    Raises UsageError if it is unreachable.
    """
    given = load_local_or_hub(SETTING, weights, _read_processor)
    inputs = {name: given[f"image_{name}"] for name in ("mean", "std") if f"image_{name}" in given}
    if given.get("resample") in INTERPOLATIONS:
        inputs["interpolation"] = INTERPOLATIONS[given["resample"]]
    if given:
        inputs["fit"] = "crop" if given.get("do_center_crop") else "squash"
    return inputs


def _read_processor(name: str, local_files_only: bool = False) -> dict[str, Any]:
    """Settings of the image processor in a folder or on the hub; {} without a file.

    Raises OSError or ValueError.
    """
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for file_name in PROCESSOR_FILES:
        path = Path(name) / file_name
        if not Path(name).is_dir():
            try:
                path = Path(hf_hub_download(name, file_name, local_files_only=local_files_only))
            except LocalEntryNotFoundError:
                if try_to_load_from_cache(name, file_name) is _CACHED_NO_EXIST:
                    continue
                raise OSError(
                    f"the cache has no {file_name}, and the hub cannot be reached"
                ) from None
            except EntryNotFoundError:
                continue
        if path.is_file():
            values = dict(json.loads(path.read_text(encoding="utf-8")))
            return dict(values.get("image_processor", values))
    return {}
