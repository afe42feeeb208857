"""Checkpoints of open_clip and OpenAI -> config and weights of transformers' CLIPModel or
SiglipModel, and back.

Shapes come from the tensors, activation and heads from open_clip_config.json or config.json next to
the file. It imports torch when it is called, because a driver that reads the config needs none.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmray.errors import UsageError, first_line
from mmray.plugins import check_installed
from mmray.storage.weights_json import read_weights_json

if TYPE_CHECKING:
    from torch import Tensor

    from mmray.config.model_kinds import ClipFamily

# Names in checkpoints -> transformers, replaced in this order; q, k and v of a block are packed.
_BLOCK_NAMES = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
    ".attn.": ".self_attn.",
}
_IMAGE_NAMES = {
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    **_BLOCK_NAMES,
}
_TEXT_NAMES = {
    "transformer.resblocks.": "text_model.encoder.layers.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.": "text_model.final_layer_norm.",
    **_BLOCK_NAMES,
}
# timm's ViT with attention pooling (SigLIP)
_TIMM_NAMES = {
    "visual.trunk.blocks.": "vision_model.encoder.layers.",
    "visual.trunk.pos_embed": "vision_model.embeddings.position_embedding.weight",
    "visual.trunk.patch_embed.proj.": "vision_model.embeddings.patch_embedding.",
    "visual.trunk.norm.": "vision_model.post_layernorm.",
    "visual.trunk.attn_pool.latent": "vision_model.head.probe",
    "visual.trunk.attn_pool.proj.": "vision_model.head.attention.out_proj.",
    "visual.trunk.attn_pool.norm.": "vision_model.head.layernorm.",
    "visual.trunk.attn_pool.": "vision_model.head.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.qkv.": ".self_attn.in_proj_",
    ".attn.proj.": ".self_attn.out_proj.",
}
# x @ P
_PROJECTIONS = {
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
}
_IMAGE_POSITIONS = "vision_model.embeddings.position_embedding.weight"
_TEXT_POSITIONS = "text_model.embeddings.position_embedding.weight"
_PROBE = "vision_model.head.probe"  # only SigLIP has attention pooling
CONFIG_FILES = ("open_clip_config.json", "config.json")  # next to the weights
# further entries of OpenAI's files
_OPENAI_ENTRIES = ("input_resolution", "context_length", "vocab_size")
# All published models up to width 1024 have heads of this width; wider image encoders have 16.
HEAD_WIDTH = 64
# open_clip's defaults
TEXT_HEADS = 8
DEFAULT_TOKENS = 77
DEFAULT_VOCAB_SIZE = 49408
FIT = {"shortest": "crop", "squash": "squash", "longest": "pad"}  # open_clip's resize_mode
# Settings in open_clip's config that change a model, but not its weights -> values of transformers'
# classes; the first value of CLIP is open_clip's default.
_SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "clip": {
        "vision_cfg.pool_type": ("tok",),
        "vision_cfg.act_kwargs": (None, {}),
        "vision_cfg.norm_kwargs": (None, {}),
        "text_cfg.pool_type": ("argmax", "eos"),
        "text_cfg.no_causal_mask": (False,),
        "text_cfg.act_kwargs": (None, {}),
        "text_cfg.norm_kwargs": (None, {}),
    },
    "siglip": {"text_cfg.pool_type": ("last",), "text_cfg.no_causal_mask": (True,)},
}
# classes of timm -> names of transformers
TIMM_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_pytorch_tanh"}


def preprocessing(file: Path) -> dict[str, Any]:
    """Return the settings of `model.inputs` that `preprocess_cfg` of the config next to the weights
    has, of `mean`, `std`, `interpolation` and `fit`.
    """
    given = _read_config(file).get("preprocess_cfg", {})
    inputs = {name: given[name] for name in ("mean", "std", "interpolation") if name in given}
    if given.get("resize_mode") in FIT:
        inputs["fit"] = FIT[given["resize_mode"]]
    return inputs


def declared_sizes(file: Path) -> dict[str, int]:
    """Return `image_side`, `max_tokens` and `vocab_size` of a CLIP with a ViT by the config next to
    its weights; {} if it is another model, or has no config.
    """
    model = _read_config(file).get("model_cfg", {})
    vision = model.get("vision_cfg", {})
    text = model.get("text_cfg", {})
    if "hf_model_name" in text or not all(
        isinstance(vision.get(name), int) for name in ("layers", "patch_size", "image_size")
    ):
        return {}
    return {
        "image_side": vision["image_size"],
        "max_tokens": text.get("context_length", DEFAULT_TOKENS),
        "vocab_size": text.get("vocab_size", DEFAULT_VOCAB_SIZE),
    }


def _read_config(file: Path) -> dict[str, Any]:
    return read_weights_json("model.weights", str(file.parent), CONFIG_FILES)


def rename_to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of an open_clip or OpenAI checkpoint to those of transformers' CLIPModel
    or SiglipModel.

    Args:
        state: Tensors by their names in the checkpoint.

    Returns:
        Tensors in float32 by their names in transformers, such as
        `vision_model.post_layernorm.weight`; packed q, k and v are split. Unknown names are kept,
        and values that are not weights are dropped.
    """
    out: dict[str, Tensor] = {}
    for given, tensor in state.items():
        # DDP adds the first prefix, open_clip's custom text encoders the second.
        name = given.removeprefix("module.").removeprefix("text.")
        tensor = tensor.float()
        if name in (*_OPENAI_ENTRIES, "attn_mask"):
            continue
        if name in _PROJECTIONS:
            out[_PROJECTIONS[name]] = tensor.T.contiguous()
            continue
        name = _replaced(name, _TIMM_NAMES | _IMAGE_NAMES | _TEXT_NAMES)
        if "in_proj_" in name:
            for part, weight in zip("qkv", tensor.chunk(3), strict=True):
                out[name.replace("in_proj_", f"{part}_proj.")] = weight
        else:
            out[name] = tensor
    return _to_siglip(out) if _PROBE in out else out


def _replaced(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def _to_siglip(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and reshape the tensors of SigLIP's attention pooling and text projection."""
    import torch

    for kv in [name for name in hf if name.startswith("vision_model.head.kv.")]:
        packed = torch.cat([hf.pop(name) for name in (kv.replace("kv", "q"), kv) if name in hf])
        hf[f"vision_model.head.attention.in_proj_{kv.rpartition('.')[2]}"] = packed
    width = hf[_TEXT_POSITIONS].shape[1] if _TEXT_POSITIONS in hf else 0
    # Models without a projection or without a bias get an identity.
    head = {"weight": torch.eye(width), "bias": torch.zeros(width)}
    hf |= {
        f"text_model.head.{name}": hf.pop(f"text_projection.{name}", tensor)
        for name, tensor in head.items()
    }
    if _IMAGE_POSITIONS in hf:
        hf[_IMAGE_POSITIONS] = hf[_IMAGE_POSITIONS].flatten(0, 1)
    return hf | {name: hf[name].reshape(1) for name in ("logit_scale", "logit_bias") if name in hf}


def rename_from_hf(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' CLIPModel or SiglipModel as open_clip does, the inverse
    of `rename_to_hf`.
    """
    import torch

    packed: dict[str, Tensor] = {}
    for name, tensor in hf.items():
        if ".q_proj." in name:
            parts = [hf[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            packed[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            packed[name] = tensor.reshape(()) if name.startswith("logit_") else tensor
    if _PROBE in hf:
        return _from_siglip(packed)
    names = _inverted(_IMAGE_NAMES | _TEXT_NAMES)
    theirs = {_replaced(name, names): each for name, each in packed.items()}
    for name, projection in _PROJECTIONS.items():
        theirs[name] = theirs.pop(projection).T.contiguous()
    return theirs


def _inverted(names: dict[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}


def _from_siglip(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and reshape the tensors of a SigLIP model, whose text encoder is a module `text`."""
    text_names = _inverted(_TEXT_NAMES)
    timm_names = _inverted(_TIMM_NAMES)
    out: dict[str, Tensor] = {}
    for name, tensor in hf.items():
        if name == _IMAGE_POSITIONS:
            tensor = tensor[None]
        if name.startswith("vision_model.head.attention.in_proj_"):
            suffix = name.rpartition("_")[2]
            width = len(tensor) // 3
            out[f"visual.trunk.attn_pool.q.{suffix}"] = tensor[:width]
            out[f"visual.trunk.attn_pool.kv.{suffix}"] = tensor[width:]
        elif name.startswith("text_model.head."):
            out[name.replace("text_model.head.", "text.text_projection.")] = tensor
        elif name.startswith("text_model."):
            out["text." + _replaced(name, text_names)] = tensor
        else:
            out[_replaced(name, timm_names)] = tensor
    return out


def model_kind(hf: dict[str, Tensor]) -> str:
    """Return the `model.kind` of a checkpoint, `clip` or `siglip`."""
    return "siglip" if _PROBE in hf else "clip"


def infer_sizes(weights: str, hf: dict[str, Tensor]) -> dict[str, dict[str, int]]:
    """Infer the sizes of a model from the shapes of its weights.

    Args:
        weights: Address of the weights, for errors.
        hf: The weights under the names of transformers, such as
            `vision_model.post_layernorm.weight`.

    Returns:
        Config values of transformers by `vision` and `text`, such as `hidden_size`.

    Raises:
        UsageError: A weight is missing, so it is no checkpoint of open_clip with a ViT.
    """
    patches = "vision_model.embeddings.patch_embedding.weight"
    tokens = "text_model.embeddings.token_embedding.weight"
    required = [_IMAGE_POSITIONS, _TEXT_POSITIONS, patches, tokens]
    is_clip = model_kind(hf) == "clip"
    if is_clip:
        required += ["visual_projection.weight", "text_projection.weight"]
    missing = [name for name in required if name not in hf]
    if missing and not any(name.startswith(("vision_model.", "text_model.")) for name in hf):
        raise UsageError(
            f"model.weights: {weights} is not a checkpoint of open_clip. If it is an image encoder "
            "without a text encoder, train a model with it: --model.image.name transformers "
            "--model.image.weights DIR, a folder of timm or transformers with config.json (for a "
            "torchvision ResNet: --model.image.name resnet50 and the file)"
        )
    if missing:
        raise UsageError(
            f"model.weights: {weights} is not a checkpoint of open_clip with a ViT and a text "
            "transformer of its own: "
            f"it has no {missing[0]} (its name in transformers). Give a model of transformers by "
            "its folder"
        )
    # CLIP has a position for its class token too.
    num_patches = len(hf[_IMAGE_POSITIONS]) - is_clip
    patch = hf[patches].shape[-1]
    image = {"patch_size": patch, "image_size": patch * math.isqrt(num_patches)}
    text = {"vocab_size": len(hf[tokens]), "max_position_embeddings": len(hf[_TEXT_POSITIONS])}
    return {
        "vision": _transformer_sizes("vision", hf) | image,
        "text": _transformer_sizes("text", hf) | text,
    }


def _transformer_sizes(part: str, hf: dict[str, Tensor]) -> dict[str, int]:
    width = hf[f"{part}_model.embeddings.position_embedding.weight"].shape[1]
    norms = [name for name in hf if name.startswith(part) and name.endswith(".layer_norm1.weight")]
    first = f"{part}_model.encoder.layers.0.mlp.fc1.weight"
    return {
        "hidden_size": width,
        "num_hidden_layers": len(norms),
        "intermediate_size": len(hf[first]) if first in hf else 4 * width,
    }


def hf_config(state: dict[str, Tensor], hf: dict[str, Tensor], spec: ClipFamily) -> dict[str, Any]:
    """Return the values of transformers' CLIPConfig or SiglipConfig for weights of open_clip.

    Args:
        state: Weights under the names of the checkpoint.
        hf: The same under the names of transformers, such as `vision_model.post_layernorm.weight`.
        spec: The `model` section; `kind` and `activation` must suit the weights, and the config is
            read next to the file `weights`.

    Returns:
        `text_config` and `vision_config`, dicts of config values, and for CLIP `projection_dim`.

    Raises:
        UsageError: The weights are of another kind, or the classes of transformers lack a part of
            the model.
    """
    if (kind := model_kind(hf)) != spec.kind:
        raise UsageError(
            f"model.kind: {spec.weights} is a {kind} checkpoint, not {spec.kind}; set "
            f"model.kind {kind}"
        )
    sizes = infer_sizes(spec.weights, hf)
    vision: dict[str, Any] = {**sizes["vision"]}
    text: dict[str, Any] = {**sizes["text"], "bos_token_id": None, "eos_token_id": None}
    config = _read_config(Path(spec.weights).expanduser())
    model = config.get("model_cfg", config)
    shared: dict[str, Any] = {}
    if kind == "siglip":
        vision |= _siglip_image(spec.weights, model)
        text |= _siglip_text(model) | {"projection_size": len(hf["text_model.head.weight"])}
    else:
        shared = {"projection_dim": len(hf["text_projection.weight"])}
        activation = shared | {"hidden_act": _activation(state, spec, config, model)}
        heads = _num_heads("vision", vision["hidden_size"], model.get("vision_cfg"))
        vision |= activation | {"num_attention_heads": heads}
        text |= activation
    _check_supported(spec.weights, model, kind)
    text["num_attention_heads"] = _num_heads("text", text["hidden_size"], model.get("text_cfg"))
    return shared | {"vision_config": vision, "text_config": text}


def _check_supported(weights: str, model: dict[str, Any], kind: str) -> None:
    """Raise UsageError for a setting of open_clip that the classes of transformers do not have."""
    for setting, values in _SUPPORTED[kind].items():
        part, _, name = setting.partition(".")
        value = model.get(part, {}).get(name, values[0] if kind == "clip" else None)
        if value not in values:
            raise UsageError(
                f"model.weights: {weights} has {setting} {value} in open_clip_config.json, but "
                f"model.kind {kind} supports only {values[0]}"
            )


def _siglip_image(weights: str, model: dict[str, Any]) -> dict[str, Any]:
    """Activation and heads of SigLIP's image encoder, which only timm defines.

    Raises UsageError.
    """
    if not (name := model.get("vision_cfg", {}).get("timm_model_name")):
        raise UsageError(
            f"model.weights: {weights} is a SigLIP checkpoint of open_clip, whose config is not "
            "next to it; copy it there as open_clip_config.json (it is model_configs/NAME.json in "
            "the package open_clip)"
        )
    check_installed("timm", "model.weights", "timm")
    try:
        block = timm_encoder(name).blocks[0]
        activation = TIMM_ACTIVATIONS[type(block.mlp.act).__name__]
    except (RuntimeError, AttributeError, TypeError, KeyError) as error:
        raise UsageError(
            f"model.weights: {weights} has the image encoder {name}, which is not a ViT of timm "
            "that SigLIP uses: "
            f"{first_line(error)}"
        ) from None
    return {"hidden_act": activation, "num_attention_heads": block.attn.num_heads}


def timm_encoder(name: str) -> Any:
    """Return an image encoder of timm with attention pooling, on the meta device."""
    import timm
    import torch

    with torch.device("meta"):
        return timm.create_model(name, global_pool="map", num_classes=0)


def _siglip_text(model: dict[str, Any]) -> dict[str, Any]:
    """Activation and epsilon of SigLIP's text encoder."""
    text = model.get("text_cfg", {})
    tanh = text.get("act_kwargs", {}).get("approximate") == "tanh"
    activation = "gelu_pytorch_tanh" if tanh else "gelu"
    if model.get("quick_gelu"):
        activation = "quick_gelu"
    eps = text.get("norm_kwargs", {}).get("eps", 1e-5)
    return {"hidden_act": activation, "layer_norm_eps": eps}


def _num_heads(part: str, width: int, given: dict[str, Any] | None) -> int:
    """Heads of the `vision` or `text` encoder: of its open_clip config, or by convention if that is
    None.

    Raises UsageError if the width is no multiple of the head width.
    """
    if given is not None and ("heads" in given or part == "text"):
        return int(given.get("heads", TEXT_HEADS))
    head_width = int((given or {}).get("head_width", HEAD_WIDTH))
    if width % head_width:
        raise UsageError(
            f"model.weights: the {part} encoder has width {width}, which is no multiple of "
            f"{head_width}, so its heads "
            f'are unknown; write {{"{part}_cfg": {{"heads": N}}}} to open_clip_config.json next to '
            "the file"
        )
    heads = width // head_width
    return min(heads, 16) if part == "vision" and given is None else heads


def _activation(
    state: dict[str, Tensor], spec: ClipFamily, config: dict[str, Any], model: dict[str, Any]
) -> str:
    """The activation of a checkpoint.

    Raises UsageError if nothing defines it, or the setting differs.
    """
    stored = config.get("text_config", {}).get("hidden_act")  # name in transformers
    if "vision_cfg" in model:
        stored = "quick_gelu" if model.get("quick_gelu") else "gelu"
    if all(name in state for name in _OPENAI_ENTRIES):
        stored = "quick_gelu"
    check_activation(spec, stored)
    activation = stored or spec.declared_activation
    if activation is None:
        raise UsageError(
            f"model.activation: {spec.weights} does not define it, and no open_clip_config.json is "
            "next to it; set quick_gelu for OpenAI's and DFN's weights and open_clip models named "
            "-quickgelu, gelu for other models"
        )
    return str(activation)


def check_activation(spec: ClipFamily, stored: str | None) -> None:
    """Check that the setting `model.activation` is the activation of the pretrained weights.

    Args:
        spec: The `model` section, whose `activation` may be None.
        stored: The activation in the config of the weights, such as `quick_gelu`; None: unknown.

    Raises:
        UsageError: Both are known and differ.
    """
    setting = spec.declared_activation
    if stored is not None and setting not in (None, stored):
        raise UsageError(
            f"model.activation: {spec.weights} was trained with {stored}, not "
            f"{setting}; remove the setting"
        )
