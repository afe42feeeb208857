"""Model card (README.md) and image preprocessing config of an exported model."""

from __future__ import annotations

from typing import Any

RESAMPLING = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
FIT = {"squash": "Squashed to", "crop": "Centre-cropped and resized to", "pad": "Padded with white and resized to"}


def model_card(name: str, spec: dict[str, Any], num_parameters: int) -> str:
    """Return the card as Markdown. spec: the `model` section as JSON values."""
    inputs = spec["inputs"]
    if "chat" in inputs:
        return _generative_card(name, spec, num_parameters)
    return f"""---
library_name: mmray
tags: [image-text, retrieval, zero-shot]
---

# {name}

An image-text model with one embedding space, trained with mmray: {num_parameters:,} parameters. Embeddings are
L2-normalised; the dot product of an image's and a text's embedding is their similarity.

```python
import mmray
model = mmray.load("{name}")
scores = model.embed_images(["photo.jpg"]) @ model.embed_texts(["a red circle", "a blue square"]).T
```

- Images: PIL images, encoded bytes or paths. {FIT[inputs["fit"]]} {inputs["image_side"]} x {inputs["image_side"]}
  pixels ({inputs["interpolation"]}); transparency is composited on white, EXIF orientation is applied.
- Texts: up to {inputs["max_tokens"]} tokens; longer ones are truncated.{_language_note(inputs)}
- Kind: {spec["kind"]}{_encoder_names(spec)}. All settings are in `config.json`.
- `tokenizer.json` opens in transformers as `PreTrainedTokenizerFast(tokenizer_file=...)`.
- {_hf_preprocessing_note(inputs)}
"""


def _generative_card(name: str, spec: dict[str, Any], num_parameters: int) -> str:
    inputs, chat = spec["inputs"], spec["inputs"]["chat"]
    return f"""---
library_name: mmray
tags: [image-text-to-text]
---

# {name}

A model that answers questions about an image, trained with mmray: {num_parameters:,} parameters.

```python
import mmray
model = mmray.load("{name}")
model.answer(["photo.jpg"], "{chat["question"]}")
```

- Images: PIL images, encoded bytes or paths. {FIT[inputs["fit"]]} {inputs["image_side"]} x {inputs["image_side"]}
  pixels ({inputs["interpolation"]}), one crop each.
- Conversations of up to {inputs["max_tokens"]} tokens and one image, formatted as
  `{chat["user"].format(chat["image"] + "...").strip()} {chat["assistant"].format("...")}{chat["end"]}`.
- Kind: {spec["kind"]}. All settings are in `config.json`; in transformers it is a `LlavaForConditionalGeneration`.
- {_hf_preprocessing_note(inputs)}
"""


def _hf_preprocessing_note(inputs: dict[str, Any]) -> str:
    """How transformers preprocesses the images."""
    if preprocessor_config(inputs) is None:
        return (
            "transformers has no image processor that pads with white, so there is no `preprocessor_config.json`.\n"
            "  Outside mmray, pad and resize images as above, then normalise them with mean and std of `config.json`."
        )
    return (
        "`preprocessor_config.json` opens in transformers as `AutoImageProcessor.from_pretrained(...)`. Its pixels\n"
        "  agree up to rounding: a crop can be shifted by half a pixel, and Pillow 13 resizes tall images in another\n"
        "  order."
    )


def _language_note(inputs: dict[str, Any]) -> str:
    """How to pass the language of a text, for models with language tokens."""
    if not (pattern := inputs.get("language_token", "")):
        return ""
    mark = pattern.replace("{}", "de")
    return f' Their language: `embed_texts(texts, language="de")`, or the prefix `{mark}` outside mmray.'


def _encoder_names(spec: dict[str, Any]) -> str:
    """The names of the towers, if they have names."""
    named = [f"{part} {spec[part]['name']}" for part in ("image", "text") if "name" in spec.get(part, {})]
    return f" ({', '.join(named)})" if named else ""


def preprocessor_config(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """preprocessor_config.json for transformers; None for padding with white, which it does not support."""
    if inputs["fit"] == "pad":
        return None
    side = inputs["image_side"]
    square = {"height": side, "width": side}
    if inputs["fit"] == "crop":
        shape = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": side},
            "do_center_crop": True,
            "crop_size": square,
            "do_convert_rgb": True,
        }
    else:
        shape = {"image_processor_type": "ViTImageProcessor", "size": square, "do_convert_rgb": True}
    return shape | {
        "fit": inputs["fit"],
        "do_resize": True,
        "resample": RESAMPLING[inputs["interpolation"]],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(inputs["mean"]),
        "image_std": list(inputs["std"]),
    }
