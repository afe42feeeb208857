"""Families of vision-language models that have a small descriptor, and GENERAL for all others.

Without torch, because the driver and the data processes import it. A descriptor earns packing,
pixels as uint8, token counts and data processes without torch. A further one is an entry of
FAMILIES, and one of tests/models/vlm/folders.py, whose tests it must pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmray.errors import UsageError
from mmray.storage.weights_json import read_weights_json

WEIGHTS_SETTING = "model.weights"
MODEL_CONFIG = "config.json"
# What a model or a processor without a descriptor may raise in a check.
CHECK_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError)


@dataclass(frozen=True)
class Family:
    """How a family of models of transformers (one `model_type`) represents its inputs.

    `media_kinds(frames, weights)` returns which of `image`, `video` and `audio` a row may have.

    Args:
        pixels: Layout of `pixel_values` of a row: `patches` [patches, values of a patch], `images`
            [images or tiles, 3, H, W], `tiles` [images, most tiles, 3, H, W], or `row_tiles`
            [1, tiles, 3, H, W]; `any`: whatever the processor returns, normalized by it. Empty: the
            family takes no images.
        packable: Whether rows may be concatenated to one sequence.
        mrope: Whether positions have the planes time, height and width, of `get_rope_index`.
        token_types: Name of the model input that is 1 at image tokens and 2 at video tokens; empty
            if there is none.
        count_is_exact: Whether the processor computes the number of tokens of an image from its
            size, and images with equal numbers have the same placeholder text.
        video: What the limits of pixels of the video processor are for: `frame` (each frame) or
            `clip` (all frames together); empty: the family has no videos here.
        audio: Length of the log-mel spectrograms: `fixed` (the model needs the length that its
            processor pads them to) or `own`; empty: the family takes no audio.
        min_audio_s: Shorter audio is padded with silence to so many seconds, because transformers
            merges a single token of audio in another way.
    """

    pixels: str
    packable: bool = True
    mrope: bool = False
    token_types: str = ""
    count_is_exact: bool = False
    video: str = ""
    audio: str = ""
    min_audio_s: float = 0.1

    @property
    def shares_media(self) -> bool:
        """Whether the media of a chosen and a rejected answer are encoded once for both."""
        return self.pixels not in ("", "any")

    def media_kinds(self, frames: int, weights: str) -> tuple[str, ...]:
        """Return the kinds of media that a row may have.

        Args:
            frames: `model.inputs.frames`, the most frames of a video; 0: no videos.
            weights: Name or folder of the model, for the message.

        Raises:
            UsageError: There are frames, and models of this family take no videos.
        """
        if frames and not self.video:
            supported = ", ".join(name for name, each in FAMILIES.items() if each.video)
            raise UsageError(
                f"model.inputs.frames: {weights} takes no videos here; set it to 0, or use a model "
                f"of type {supported}"
            )
        takes = {"image": self.pixels, "audio": self.audio, "video": frames}
        return tuple(kind for kind, is_taken in takes.items() if is_taken)


_QWEN = Family(
    pixels="patches",
    mrope=True,
    token_types="mm_token_type_ids",
    count_is_exact=True,
    video="frame",
)
_OMNI = replace(_QWEN, token_types="", audio="own")
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_5_vl": _QWEN,
        "qwen3_vl": replace(_QWEN, video="clip"),
        "internvl": Family(pixels="images", count_is_exact=True),
        "idefics3": Family(pixels="row_tiles"),
        "smolvlm": Family(pixels="row_tiles"),
        # Its mask of blocks of image tokens is wrong for packed rows (transformers 5.24).
        "gemma3": Family(pixels="images", packable=False, token_types="token_type_ids"),
        "llava": Family(pixels="images", count_is_exact=True),
        "llava_next": Family(pixels="tiles", count_is_exact=True),
        "llava_onevision": Family(pixels="tiles"),
        "qwen2_audio": Family(pixels="", audio="fixed"),
        "qwen2_5_omni_thinker": _OMNI,
        # Its encoder computes other features for shorter audio alone than next to longer audio.
        "qwen3_omni_moe_thinker": replace(_OMNI, min_audio_s=1.0),
    }
)
"""Families by `model_type` of config.json."""

GENERAL = Family(pixels="any", packable=False)
"""Any other model of images and text, if its self-check succeeds (models/vlm/self_check.py)."""


def read_config(weights: str) -> dict[str, Any]:
    """Return the content of config.json of a model.

    Of a whole Omni model it is that of its thinker, the part that reads media and writes text.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub, from which the
            file is downloaded unless it is in the cache.

    Raises:
        UsageError: It does not exist, or cannot be read.
    """
    config = read_weights_json(WEIGHTS_SETTING, weights, [MODEL_CONFIG])
    if not config:
        raise UsageError(
            f"{WEIGHTS_SETTING}: {weights} has no {MODEL_CONFIG}; set a folder saved by "
            "transformers, or a name of the hub"
        )
    return dict(config.get("thinker_config", config))


def has_weights(weights: str) -> bool:
    """Return whether a model has files of weights, and not only a config; True for a name of the
    hub, which is not looked up.
    """
    folder = Path(weights).expanduser()
    return not folder.is_dir() or any(
        file.suffix in (".safetensors", ".bin") for file in folder.iterdir()
    )


def find_family(config: dict[str, Any], weights: str) -> Family:
    """Return how models of the `model_type` of a config.json represent their inputs.

    Raises:
        UsageError: It is no model of images or audio and text.
    """
    model_type = str(config.get("model_type"))
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise UsageError(
            f"{WEIGHTS_SETTING}: {weights} holds a model of type `{model_type}`, which "
            "model.kind `vlm` does not support: it is none of AutoModelForImageTextToText of the "
            f"installed transformers, nor of {', '.join(FAMILIES)}"
        )
    return GENERAL


def refusal(weights: str, config: dict[str, Any], check: str, error: object) -> UsageError:
    """Return the error of a model without a descriptor that cannot be trained.

    Args:
        check: The check that failed: `placeholders`, `loss` or `gradient`.
        error: What it found.
    """
    return UsageError(
        f"{WEIGHTS_SETTING}: {weights} is a {config.get('model_type')}, which has no descriptor "
        f"here, and the check of its {check} failed: {error}"
    )


def is_packable(config: dict[str, Any], family: Family) -> bool:
    """Return whether rows may be packed: all layers of the model have full causal attention.

    The attention function for packed rows supports neither sliding windows nor soft caps.

    Args:
        config: Content of the model's config.json; `text_config` is read.
        family: Description of the model's inputs; its `packable` may exclude packing.
    """
    text = config.get("text_config") or {}
    layers = text.get("layer_types") or ()
    has_window = any(layer != "full_attention" for layer in layers)
    if text.get("model_type") == "mistral":
        has_window = text.get("sliding_window") is not None
    return family.packable and not has_window and not text.get("attn_logit_softcapping")


def budget_arguments(
    image_settings: Mapping[str, Any], max_pixels: int | None, min_pixels: int | None
) -> dict[str, Any]:
    """Return the arguments of transformers' image processor that limit the size of an image.

    Args:
        image_settings: Settings of the model's image processor, which are the defaults; {}: it has
            none.
        max_pixels: Maximum width x height after resizing; None: the processor's default.
        min_pixels: Minimum width x height after resizing; None: the processor's default.

    Returns:
        Such as {"size": {"shortest_edge": 1024, "longest_edge": 4096}}; {} if both limits are None.

    Raises:
        UsageError: The processor does not support a given limit.
    """
    size = dict(image_settings.get("size") or {})
    # The edges in Qwen's `size` are pixels of an image.
    is_of_qwen = "merge_size" in image_settings
    by_pixels = is_of_qwen and {"shortest_edge", "longest_edge"} <= size.keys()
    by_tiles = image_settings.get("crop_to_patches")
    # The longest one of an image; without tiles images have one size.
    by_edge = image_settings.get("do_image_splitting") and image_settings.get("max_image_size")
    for name, value, has_limit in (
        ("max_pixels", max_pixels, by_pixels or by_edge or by_tiles),
        ("min_pixels", min_pixels, by_pixels),
    ):
        if value is not None and not has_limit:
            raise UsageError(
                f"model.inputs.{name}: the images of this model have a fixed size, or it has none; "
                "leave it empty"
            )
    if max_pixels is None and min_pixels is None:
        return {}
    if by_pixels:
        least = min_pixels or size["shortest_edge"]
        most = max_pixels or size["longest_edge"]
        return {"size": {"shortest_edge": min(least, most), "longest_edge": most}}
    assert max_pixels is not None
    if by_edge:
        tile = by_edge["longest_edge"]
        edge = max(tile, int(max_pixels**0.5) // tile * tile)
        return {"size": {"longest_edge": edge}}
    tiles = max(1, max_pixels // (size["height"] * size["width"]))
    return {"max_patches": tiles, "min_patches": min(image_settings["min_patches"], tiles)}
