"""transformers' LLaVA as a model that writes: one picture and a conversation in, what comes next at each token out.

The encoder and the language model are transformers' own; the way between them is ours: the ids hold one token for the
image, and its features take that place on the device, so that no row waits for a count of placeholders. Rows are padded
on the right and attention is causal, so no token sees padding and no mask is needed.
Source: Liu et al. 2023 (arXiv:2304.08485), with the two-layer projection of LLaVA 1.5 (arXiv:2310.03744).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from mmray.errors import UsageError
from mmray.models.clip import NormalizePixels
from mmray.models.weights import load_pretrained, patch_config, transformer_config

if TYPE_CHECKING:
    from mmray.config import Generative as Section
    from mmray.config import Inputs


WEIGHTS_SETTING = "model.weights"
VISION_TYPES = ("clip_vision_model", "siglip_vision_model")


class Generative(nn.Module):
    """transformers' LlavaForConditionalGeneration, taken apart into its two branches.

    spec: the `model` section. vocab_size: tokens the tokenizer has. architecture: what `architecture()` of the same
    model gave; no weights are looked for then, the caller loads them. Raises UsageError.
    """

    hf_names = (
        ("image.tower.", "model.vision_tower."),
        ("image.project.", "model.multi_modal_projector."),
        ("text.tower.", "model.language_model."),
        ("text.head.", "lm_head."),
    )

    def __init__(self, spec: Section, vocab_size: int, architecture: dict[str, Any] | None = None) -> None:
        super().__init__()
        net = _build_hf_model(spec, vocab_size, architecture)
        _check_compatible(net.config, spec.inputs, vocab_size, spec.weights)
        self.image = VisionTokens(net.model.vision_tower, net.model.multi_modal_projector, spec.inputs, net.config)
        self.text = LanguageModel(net.model.language_model, net.lm_head)
        self._config, self.chat = net.config, spec.inputs.chat

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch with `image_pos` [B] -> `logits` [B, T, V]: at each token, what follows it."""
        return {"logits": self.text(self.image(batch["image"]), batch["input_ids"], batch["image_pos"])}

    def branches(self) -> dict[str, nn.Module]:
        """The picture's encoder, and the language model that reads it."""
        return {"image": self.image, "text": self.text}

    def architecture(self) -> dict[str, Any]:
        """The transformers configuration, from which the same model is built."""
        return {"config": self._config.to_dict()}

    @staticmethod
    def random_init_architecture(spec: Section, vocab_size: int) -> dict[str, Any]:
        """The `architecture` of a model with drawn weights in the spec's own shape."""
        return {"config": _random_init_config(spec, vocab_size).to_dict()}

    def hf_config(self, end_id: int, pad_id: int, image_id: int) -> dict[str, Any]:
        """config.json of the same model for transformers."""
        values: dict[str, Any] = self._config.to_dict()
        ends = {"eos_token_id": end_id, "pad_token_id": pad_id}
        places = {"image_token_index": image_id, "image_seq_length": self.image.num_places}
        text = values["text_config"] | ends | {"dtype": None}
        return values | places | ends | {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}

    def hf_processor(self) -> dict[str, Any]:
        """processor_config.json of transformers, which fills in as many tokens for the image as it has features."""
        return {
            "processor_class": "LlavaProcessor",
            "image_token": self.chat.image,
            "patch_size": self.image.tower.config.patch_size,
            "num_additional_image_tokens": _has_class_token(self.image.tower),
            "vision_feature_select_strategy": self._config.vision_feature_select_strategy,
        }


class VisionTokens(nn.Module):
    """A vision transformer and a projection: what a language model sees of a picture."""

    def __init__(self, tower: Any, project: nn.Module, inputs: Inputs, config: Any) -> None:
        super().__init__()
        self.pixels, self.tower, self.project = NormalizePixels(inputs.mean, inputs.std), tower, project
        layers, wanted = tower.encoder.layers, config.vision_feature_layer
        self.depth = wanted if wanted >= 0 else len(layers) + 1 + wanted  # layers whose output is read
        self.skip = 1 if config.vision_feature_select_strategy == "default" else 0  # CLIP's class token
        self.num_places = (inputs.image_side // tower.config.patch_size) ** 2 + _has_class_token(tower) - self.skip
        unread = [*layers[self.depth :], *(getattr(tower, name, None) for name in ("post_layernorm", "head"))]
        for part in unread:
            if part is not None:
                part.requires_grad_(False)  # they stay in the file, and would wait for a gradient for ever

    def forward(self, image: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> features [B, N, W] in the language model's width."""
        hidden = self.tower.embeddings(self.pixels(image))
        if hasattr(self.tower, "pre_layrnorm"):
            hidden = self.tower.pre_layrnorm(hidden)
        for layer in self.tower.encoder.layers[: self.depth]:
            hidden = layer(hidden, attention_mask=None)
        features: Tensor = self.project(hidden[:, self.skip :])
        return features


class LanguageModel(nn.Module):
    """A causal language model that reads a picture's features at one place of each row."""

    def __init__(self, tower: Any, head: nn.Linear) -> None:

        super().__init__()
        self.tower, self.head, self._no_cache = tower, head, empty_cache

    def forward(self, picture: Tensor, input_ids: Tensor, image_pos: Tensor) -> Tensor:
        """Features [B, N, W], ids [B, T], place of the image's token [B] -> logits [B, T, V].

        A row without a place (-1: padding, or its image was cut off) is shown the picture first.
        """
        # Given neither mask nor cache, transformers looks whether rows were packed; the host waits for the device in
        # each micro-batch. With a mask, attention could not be told that it is causal, which is its fastest kernel.
        joined = self._joined(picture, input_ids, image_pos)
        hidden = self.tower(inputs_embeds=joined, past_key_values=self._no_cache(), use_cache=False).last_hidden_state
        # What follows the image's token is said by the last of its features.
        text = torch.arange(input_ids.shape[1], device=hidden.device)[None]
        at, more = image_pos.clamp(min=0)[:, None], picture.shape[1] - 1
        logits: Tensor = self.head(_gather_rows(hidden, torch.where(text < at, text, text + more)))
        return logits

    def continued(self, picture: Tensor, input_ids: Tensor, image_pos: Tensor, end_id: int, most: int) -> list[int]:
        """The likeliest next token again and again, until `end_id` or `most` of them; a row as forward takes it."""
        said: list[int] = []
        hidden, past = self._joined(picture, input_ids, image_pos), None
        while len(said) < most:
            out = self.tower(inputs_embeds=hidden, past_key_values=past, use_cache=True)
            token = int(self.head(out.last_hidden_state[:, -1]).argmax())
            if token == end_id:
                break
            said.append(token)
            past, hidden = out.past_key_values, self.tower.embed_tokens(input_ids.new_tensor([[token]]))
        return said

    def _joined(self, picture: Tensor, input_ids: Tensor, image_pos: Tensor) -> Tensor:
        """What the language model reads, [B, T + N - 1, W]: the words, and the picture in the place of its token."""
        num_places = picture.shape[1]
        embedded = self.tower.embed_tokens(input_ids)
        at = image_pos.clamp(min=0)[:, None]
        place = torch.arange(input_ids.shape[1] + num_places - 1, device=at.device)[None]
        seen = (place >= at) & (place < at + num_places)
        word = torch.where(place < at, place, (place - num_places + 1).clamp(min=0))
        # As the words are: the sums of all layers would stay in the half precision that autocast gives the picture.
        return torch.where(
            seen[..., None], _gather_rows(picture, place - at).to(embedded.dtype), _gather_rows(embedded, word)
        )


def _gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Vectors [B, N, W] and places [B, M] -> [B, M, W]; a place outside gives the nearest."""
    index = index.clamp(0, rows.shape[1] - 1).expand(len(rows), -1)
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def _build_hf_model(spec: Section, vocab_size: int, architecture: dict[str, Any] | None) -> Any:
    """transformers' own model: of a known configuration, of saved weights, or drawn."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    if architecture is None and spec.weights != "none":
        net = load_pretrained(WEIGHTS_SETTING, LlavaForConditionalGeneration, LlavaConfig, spec.weights)
    else:
        config = (
            LlavaConfig.from_dict(architecture["config"]) if architecture else _random_init_config(spec, vocab_size)
        )
        config._attn_implementation = "sdpa"
        net = LlavaForConditionalGeneration(config)
    return net


def _random_init_config(spec: Section, vocab_size: int) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    places: dict[str, Any] = patch_config(spec.inputs.image_side, spec.image.patch)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # export learns them
    text = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=spec.text.max_positions, **transformer_config(spec.text), **ends
    )
    return LlavaConfig(
        vision_config=CLIPVisionConfig(**transformer_config(spec.image), **places),
        text_config=text,
        image_seq_length=(places["image_size"] // places["patch_size"]) ** 2,
        image_token_index=0,
        vision_feature_layer=-1,
    )


def _has_class_token(tower: Any) -> int:
    return int(hasattr(tower.embeddings, "class_embedding"))


def _check_compatible(config: Any, inputs: Inputs, vocab_size: int, weights: str) -> None:
    """Every pixel, id and position of the data has its place in the model, and its parts are those known here."""
    vision, text = config.vision_config, config.text_config
    if vision.model_type not in VISION_TYPES or not isinstance(config.vision_feature_layer, int):
        raise UsageError(
            f"{WEIGHTS_SETTING}: the vision encoder of {weights} is a {vision.model_type!r} read at "
            f"{config.vision_feature_layer}; taken are {' and '.join(VISION_TYPES)}, read at one layer"
        )
    if vision.image_size != inputs.image_side:
        raise UsageError(
            f"model.inputs.image_side: {weights} takes images of {vision.image_size} pixels, not {inputs.image_side}"
        )
    places = inputs.max_tokens + (inputs.image_side // vision.patch_size) ** 2
    if places > text.max_position_embeddings:
        raise UsageError(
            f"model.inputs.max_tokens: {inputs.max_tokens} and the image's places are {places}, more than the "
            f"{text.max_position_embeddings} positions of the language model; take fewer"
        )
    if text.vocab_size < vocab_size:
        raise UsageError(
            f"{WEIGHTS_SETTING}: {weights}: {text.vocab_size} rows of embedding are too few for a tokenizer of "
            f"{vocab_size} tokens; take the tokenizer of the weights (model.inputs.tokenizer)"
        )


# A cache of transformers that keeps nothing: what generative.py gives a language model that is trained.
#
# A module of its own, since it imports transformers, which not everyone who imports generative.py needs.
class _PassThroughLayer(DynamicLayer):
    """Each layer has the keys and values it was just given."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def empty_cache() -> Cache:
    """A cache that is empty, and stays so."""
    return Cache(layer_class_to_replicate=_PassThroughLayer)
