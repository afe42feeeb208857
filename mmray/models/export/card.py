"""What an exported model says of itself: a README.md for people, and its preprocessing in transformers' words."""

from __future__ import annotations

from typing import Any

RESAMPLING = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
FIT = {"squash": "Squashed to", "crop": "The central square, resized to", "pad": "Padded with white to"}


def model_card(name: str, spec: dict[str, Any], num_parameters: int) -> str:
    """Markdown: how to load the model, what it takes in, what comes out. `spec` is the `model` section."""
    inputs = spec["inputs"]
    if "chat" in inputs:
        return _generative_card(name, spec, num_parameters)
    return f"""---
library_name: mmray
tags: [image-text, retrieval, zero-shot]
---

# {name}

An image-text model with one embedding space, trained with mmray: {num_parameters:,} parameters, embeddings of
length 1. The dot product of an image's and a text's says how well they go together.

```python
import mmray
model = mmray.load("{name}")
scores = model.embed_images(["photo.jpg"]) @ model.embed_texts(["a red circle", "a blue square"]).T
```

- Images: PIL images, encoded bytes or paths. {FIT[inputs["fit"]]} {inputs["image_side"]} x {inputs["image_side"]}
  pixels ({inputs["interpolation"]}); transparency is laid on white, EXIF orientation applied.
- Texts: up to {inputs["max_tokens"]} tokens; what is longer is cut.{_language_note(inputs)}
- Kind: {spec["kind"]}{_encoder_names(spec)}. All settings are in `config.json`.
- `tokenizer.json` opens in transformers as `PreTrainedTokenizerFast(tokenizer_file=...)`.
- {_hf_preprocessing_note(inputs)}
"""


def _generative_card(name: str, spec: dict[str, Any], num_parameters: int) -> str:
    """The card of a model that writes."""
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
- Conversations of up to {inputs["max_tokens"]} tokens and one image, laid out as
  `{chat["user"].format(chat["image"] + "...").strip()} {chat["assistant"].format("...")}{chat["end"]}`.
- Kind: {spec["kind"]}. All settings are in `config.json`; in transformers it is a `LlavaForConditionalGeneration`.
- {_hf_preprocessing_note(inputs)}
"""


def _hf_preprocessing_note(inputs: dict[str, Any]) -> str:
    """How transformers prepares the images, where it can."""
    if preprocessor_config(inputs) is None:
        return (
            "transformers has no image processor that pads with white, so there is no `preprocessor_config.json`:\n"
            "  elsewhere, pad and resize images as above before they are normalised (`config.json` has mean and std)."
        )
    return (
        "`preprocessor_config.json` opens in transformers as `AutoImageProcessor.from_pretrained(...)`, whose pixels\n"
        "  agree up to rounding (a crop may lie half a pixel aside; Pillow 13 resizes tall pictures in another order,\n"
        "  which bicubic shows at edges)."
    )


def _language_note(inputs: dict[str, Any]) -> str:
    """How a text says its language, where the model has tokens of languages."""
    if not (pattern := inputs.get("language_token", "")):
        return ""
    mark = pattern.replace("{}", "de")
    return f' Their language: `embed_texts(texts, language="de")`, or `{mark}` in front of a text elsewhere.'


def _encoder_names(spec: dict[str, Any]) -> str:
    """The names of the towers, where they have names."""
    named = [f"{part} {spec[part]['name']}" for part in ("image", "text") if "name" in spec.get(part, {})]
    return f" ({', '.join(named)})" if named else ""


def preprocessor_config(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The `inputs` section as transformers' image processors know it; None for padding with white, which none does."""
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
