"""Export to open_clip, whose `create_model_from_pretrained("local-dir:OUT")` opens the folder.

A SigLIP model needs an image encoder that timm has, because open_clip builds it by its name.
"""

from __future__ import annotations

import math
from typing import Any

from tokenizers import Tokenizer

from mmray.data.text.tokenizer import is_clip_bpe
from mmray.errors import UsageError
from mmray.models import open_clip
from mmray.plugins import check_installed

WEIGHTS = "open_clip_model.safetensors"
CONFIG = open_clip.CONFIG_FILES[0]
KINDS = ("clip", "siglip")  # values of `model.kind` that open_clip has
CARD = """---
library_name: open_clip
tags: [retrieval, zero-shot]
---

# {name}

A model of kind {kind}, trained and exported by mmray.

```python
import open_clip
from PIL import Image

model, preprocess = open_clip.create_model_from_pretrained("local-dir:{name}")
tokenizer = open_clip.get_tokenizer("local-dir:{name}")
image = model.encode_image(preprocess(Image.open("photo.jpg"))[None], normalize=True)
text = model.encode_text(tokenizer(["a red circle", "a blue square"]), normalize=True)
scores = image @ text.T
```

open_clip differs from training (`mmray.load`) in three ways. Pixels agree up to rounding and half a
pixel of a crop. Transparent images lose their transparency; training put them on white. HTML
entities, typographic quotes and decoding errors in texts are repaired; training repaired them for
CLIP's vocabulary alone.
"""
_OPTION = "--format open_clip"
_CLIP_VOCABULARY = 49408  # open_clip has this tokenizer itself
_EPS = 1e-5  # of layer norms, open_clip's default


def model_config(
    spec: dict[str, Any], hf: dict[str, Any] | None, tokenizer_json: str
) -> dict[str, Any]:
    """Return the values of open_clip_config.json.

    Args:
        spec: The `model` section as JSON values.
        hf: The values of config.json of transformers; None: transformers cannot represent the
            model, nor can open_clip.
        tokenizer_json: Its tokenizer, the text of a tokenizer.json.

    Raises:
        UsageError: open_clip has no such model.
    """
    if hf is None or spec["kind"] not in KINDS:
        raise unsupported(spec["kind"])
    image = hf["vision_config"]
    text = hf["text_config"]
    text_cfg = {
        "context_length": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
        "width": text["hidden_size"],
        "heads": text["num_attention_heads"],
        "layers": text["num_hidden_layers"],
        "mlp_ratio": _mlp_ratio(text),
        **_norm(text),
    }
    if not _is_own_tokenizer(spec["kind"], text, tokenizer_json):
        text_cfg["hf_tokenizer_name"] = "."  # the files in the folder
    activation = text["hidden_act"]
    if spec["kind"] == "clip":
        # The setting quick_gelu is of both encoders.
        supported = activation in ("gelu", "quick_gelu") and image["hidden_act"] == activation
        model = _clip(image, hf["projection_dim"])
        text_cfg |= {"pool_type": "eos", "eos_id": text["eos_token_id"]}
    else:
        supported = activation in ("gelu", "gelu_pytorch_tanh", "quick_gelu")
        model = _siglip(image, text)
        text_cfg |= {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
        if activation == "gelu_pytorch_tanh":
            text_cfg["act_kwargs"] = {"approximate": "tanh"}
    if not supported:
        raise UsageError(
            f"{_OPTION}: open_clip has no {spec['kind']} with the activations "
            f"{image['hidden_act']} of images and {activation} of texts"
        )
    inputs = spec["inputs"]
    fit = {ours: theirs for theirs, ours in open_clip.FIT.items()}[inputs["fit"]]
    preprocess = {name: inputs[name] for name in ("mean", "std", "interpolation")}
    return {
        "model_cfg": model | {"text_cfg": text_cfg, "quick_gelu": activation == "quick_gelu"},
        "preprocess_cfg": preprocess | {"resize_mode": fit, "fill_color": 255},
    }


def unsupported(kind: str) -> UsageError:
    """Return the error for a model that open_clip does not have."""
    return UsageError(
        f"{_OPTION}: open_clip has no model like this one of kind {kind}; only `clip` with an end "
        "token and without logit_bias, and `siglip` with it, can be exported"
    )


def _is_own_tokenizer(kind: str, text: dict[str, Any], tokenizer_json: str) -> bool:
    """Whether a tokenizer is CLIP's, as open_clip has it: without further tokens, padded with 0."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    # a CLIP does not attend to its padding
    has_padding = kind == "clip" or text["pad_token_id"] == 0
    is_clip = is_clip_bpe(tokenizer) and tokenizer.get_vocab_size() == _CLIP_VOCABULARY
    return is_clip and has_padding


def _mlp_ratio(config: dict[str, Any]) -> float:
    """Return the ratio from which open_clip computes the MLP's width, as int(width * ratio)."""
    width = config["hidden_size"]
    ratio = config["intermediate_size"] / width
    exact = int(width * ratio) == config["intermediate_size"]
    return float(ratio if exact else math.nextafter(ratio, math.inf))


def _norm(config: dict[str, Any]) -> dict[str, Any]:
    eps = config["layer_norm_eps"]
    return {} if eps == _EPS else {"norm_kwargs": {"eps": eps}}


def _clip(image: dict[str, Any], embed_dim: int) -> dict[str, Any]:
    vision = {
        "image_size": image["image_size"],
        "patch_size": image["patch_size"],
        "width": image["hidden_size"],
        "layers": image["num_hidden_layers"],
        "head_width": image["hidden_size"] // image["num_attention_heads"],
        "mlp_ratio": _mlp_ratio(image),
    }
    return {"embed_dim": embed_dim, "vision_cfg": vision | _norm(image)}


def _siglip(image: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    vision = {
        "image_size": image["image_size"],
        "timm_model_name": _timm_name(image),
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    }
    return {
        "embed_dim": text["projection_size"],
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": vision,
    }


def _timm_name(image: dict[str, Any]) -> str:
    """Return the name of the ViT in timm that has the sizes of a SigLIP image encoder."""
    check_installed("timm", _OPTION, "timm")
    import timm

    side = image["image_size"]
    patch = image["patch_size"]
    for name in timm.list_models(f"vit_*_patch{patch}_siglip*"):
        trunk = open_clip.timm_encoder(name)
        block = trunk.blocks[0]
        if (
            trunk.patch_embed.img_size == (side, side)
            and trunk.embed_dim == image["hidden_size"]
            and len(trunk.blocks) == image["num_hidden_layers"]
            and block.attn.num_heads == image["num_attention_heads"]
            and block.mlp.fc1.out_features == image["intermediate_size"]
            and open_clip.TIMM_ACTIVATIONS.get(type(block.mlp.act).__name__) == image["hidden_act"]
            and block.norm1.eps == image["layer_norm_eps"]
        ):
            return str(name)
    raise UsageError(
        f"{_OPTION}: timm has no SigLIP image encoder with images of {side} pixels, patches of "
        f"{patch}, width {image['hidden_size']}, {image['num_hidden_layers']} layers and "
        f"{image['hidden_act']}; open_clip builds it by its name in timm. Export without --format"
    )
