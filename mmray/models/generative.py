"""transformers' LLaVA: one image and a conversation in, next-token logits out.

Only the insertion of image features is reimplemented: the ids contain one image token, which is
replaced on the device. Rows are right-padded and attention is causal, so no token attends to
padding and no mask is needed.
Source: Liu et al. 2023 (arXiv:2304.08485), with the two-layer projection of LLaVA 1.5
(arXiv:2310.03744).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from mmray.errors import UsageError
from mmray.models.pixels import PatchEmbeddings
from mmray.models.protocol import Architecture
from mmray.models.weights import WEIGHTS_SETTING, HfModel, transformer_config, vision_config

if TYPE_CHECKING:
    from mmray.config import Generative as GenerativeConfig
    from mmray.config import Inputs
    from mmray.data.text.chat import ChatEncoder


VISION_TYPES = ("clip_vision_model", "siglip_vision_model")


class Generative(HfModel, nn.Module):
    """transformers' LlavaForConditionalGeneration as two branches."""

    hf_class = "LlavaForConditionalGeneration"
    hf_names = (
        ("image.tower.", "model.vision_tower."),
        ("image.project.", "model.multi_modal_projector."),
        ("text.tower.", "model.language_model."),
        ("text.head.", "lm_head."),
    )

    def __init__(
        self, spec: GenerativeConfig, vocab_size: int, architecture: Architecture = None
    ) -> None:
        super().__init__()
        net = self.build_hf(spec, vocab_size, architecture)
        self.image = VisionTokens(
            net.model.vision_tower, net.model.multi_modal_projector, spec.inputs, net.config
        )
        self.text = LanguageModel(net.model.language_model, net.lm_head)
        self._hf_config = net.config
        self.chat = spec.inputs.chat

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `logits` [B, T, V] of the next token; the batch has `image_pos` [B]."""
        return {
            "logits": self.text(self.image(batch["image"]), batch["input_ids"], batch["image_pos"])
        }

    def branches(self) -> dict[str, nn.Module]:
        return {"image": self.image, "text": self.text}

    @torch.no_grad()
    def answer(
        self, encoder: ChatEncoder, image: Tensor, questions: Sequence[str], max_new_tokens: int
    ) -> list[str]:
        """Answer a question about each image by greedy decoding.

        Args:
            encoder: Encoder of the prompts, and decoder of the answers.
            image: Pixels uint8 [B, 3, S, S].
            questions: One for each image.
            max_new_tokens: Maximum length of an answer.
        """
        from transformers import LlavaForConditionalGeneration

        with torch.device("meta"):
            net: Any = LlavaForConditionalGeneration(self._hf_config)
        net.model.vision_tower = self.image.tower
        net.model.multi_modal_projector = self.image.project
        net.model.language_model = self.text.tower
        net.lm_head = self.text.head
        device = self.text.head.weight.device
        prompts = []
        for features, question in zip(
            self.image(image.to(device)).split(1), questions, strict=True
        ):
            prompt = (
                torch.from_numpy(array).long().to(device)
                for array in encoder.encode_prompt(question)
            )
            prompts.append(self.text.insert_image(features, *prompt)[0])
        masks = [prompt.new_ones(len(prompt), dtype=torch.long) for prompt in prompts]
        # a compiled block has graphs for each layer of the cache
        with torch.compiler.set_stance("force_eager"):
            rows = net.generate(
                inputs_embeds=pad_sequence(prompts, batch_first=True, padding_side="left"),
                attention_mask=pad_sequence(masks, batch_first=True, padding_side="left"),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=encoder.eos_id,
                pad_token_id=encoder.eos_id,
            )
        tokens = [
            list(takewhile(lambda token: token != encoder.eos_id, row)) for row in rows.tolist()
        ]
        return [str(encoder.tokenizer.decode(row)).strip() for row in tokens]

    @staticmethod
    def default_hf_config(spec: GenerativeConfig, vocab_size: int) -> Any:
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

        text = transformer_config(spec.text)
        num_patches = (spec.inputs.image_side // spec.image.patch) ** 2
        # Llama has no weights for positions; 2048 is the default of transformers.
        text["max_position_embeddings"] = max(2048, spec.inputs.max_tokens + num_patches)
        # set at export
        ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return LlavaConfig(
            vision_config=CLIPVisionConfig(**vision_config(spec)),
            text_config=LlamaConfig(vocab_size=vocab_size, **text, **ends),
            image_seq_length=num_patches,
            image_token_index=0,
            vision_feature_layer=-1,
        )

    @staticmethod
    def num_image_tokens(config: Any) -> int:
        vision = config.vision_config
        layer = config.vision_feature_layer
        if vision.model_type not in VISION_TYPES or not isinstance(layer, int):
            raise UsageError(
                f"{WEIGHTS_SETTING}: a vision encoder of type {vision.model_type!r} with feature "
                f"layer {layer} is not "
                f"supported; use {' or '.join(VISION_TYPES)} with a single layer"
            )
        return int(vision.image_size // vision.patch_size) ** 2

    def export_hf_config(self, eos_id: int, pad_id: int, image_id: int) -> dict[str, Any]:
        """Return config.json for transformers.

        Args:
            eos_id: Token at the end of an answer.
            pad_id: Token of the padding.
            image_id: Token that the image replaces.
        """
        values: dict[str, Any] = self._hf_config.to_dict()
        ends = {"eos_token_id": eos_id, "pad_token_id": pad_id}
        image = {"image_token_index": image_id, "image_seq_length": self.image.num_tokens}
        text = values["text_config"] | ends | {"dtype": None}
        return values | image | ends | {"architectures": [self.hf_class], "text_config": text}

    def hf_processor(self) -> dict[str, Any]:
        """processor_config.json for transformers, which inserts one image token per image
        feature.
        """
        return {
            "processor_class": "LlavaProcessor",
            "image_token": self.chat.image,
            "patch_size": self.image.tower.config.patch_size,
            "num_additional_image_tokens": _has_class_token(self.image.tower),
            "vision_feature_select_strategy": self._hf_config.vision_feature_select_strategy,
        }


class VisionTokens(nn.Module):
    """A vision transformer and a projection to the language model's width."""

    def __init__(self, tower: Any, project: nn.Module, inputs: Inputs, config: Any) -> None:
        super().__init__()
        tower.embeddings = PatchEmbeddings(tower.embeddings, inputs.mean, inputs.std)
        self.tower = tower
        self.project = project
        layers = tower.encoder.layers
        layer = config.vision_feature_layer
        self.num_layers_used = layer if layer >= 0 else len(layers) + 1 + layer
        # CLIP's class token
        self.num_skipped_tokens = 1 if config.vision_feature_select_strategy == "default" else 0
        num_patches = (inputs.image_side // tower.config.patch_size) ** 2
        self.num_tokens = num_patches + _has_class_token(tower) - self.num_skipped_tokens
        unused = [
            *layers[self.num_layers_used :],
            *(getattr(tower, name, None) for name in ("post_layernorm", "head")),
        ]
        for part in unused:
            if part is not None:
                part.requires_grad_(False)  # kept for export; they never get a gradient

    def forward(self, image: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> image features [B, N, W] in the language model's width."""
        hidden = self.tower.embeddings(image)
        if hasattr(self.tower, "pre_layrnorm"):
            hidden = self.tower.pre_layrnorm(hidden)
        for layer in self.tower.encoder.layers[: self.num_layers_used]:
            hidden = layer(hidden, attention_mask=None)
        return self.project(hidden[:, self.num_skipped_tokens :])


class LanguageModel(nn.Module):
    """A causal language model that reads image features at one position of each row."""

    def __init__(self, tower: Any, head: nn.Linear) -> None:
        super().__init__()
        self.tower = tower
        self.head = head

    def forward(self, image: Tensor, input_ids: Tensor, image_pos: Tensor) -> Tensor:
        """Predict the next token at each position.

        Args:
            image: Image features [B, N, W].
            input_ids: [B, T].
            image_pos: Position of the image token [B]; -1: none (padding, or truncated), the image
                is then at the start.

        Returns:
            Logits [B, T, V].
        """
        # Without mask and cache transformers checks for packed rows, which synchronizes the device
        # in each micro-batch. A mask would disable the causal attention kernel, the fastest. So it
        # gets an empty cache.
        inputs = self.insert_image(image, input_ids, image_pos)
        empty = _EmptyCache(layers=[])
        hidden = self.tower(
            inputs_embeds=inputs, past_key_values=empty, use_cache=False
        ).last_hidden_state
        # At the image token, the prediction of the last image feature is returned.
        text = torch.arange(input_ids.shape[1], device=hidden.device)[None]
        image_start = image_pos.clamp(min=0)[:, None]
        num_extra = image.shape[1] - 1
        return self.head(
            _gather_rows(hidden, torch.where(text < image_start, text, text + num_extra))
        )

    def insert_image(self, image: Tensor, input_ids: Tensor, image_pos: Tensor) -> Tensor:
        """Return the input embeddings with the image features in place of the image token.

        Args:
            image: Image features [B, N, W].
            input_ids: [B, T].
            image_pos: Position of the image token [B].

        Returns:
            [B, T + N - 1, W].
        """
        num_image = image.shape[1]
        embedded = self.tower.embed_tokens(input_ids)
        start = image_pos.clamp(min=0)[:, None]
        position = torch.arange(input_ids.shape[1] + num_image - 1, device=start.device)[None]
        is_image = (position >= start) & (position < start + num_image)
        word = torch.where(position < start, position, (position - num_image + 1).clamp(min=0))
        # In the dtype of the token embeddings: autocast features would keep the residual stream in
        # half precision.
        return torch.where(
            is_image[..., None],
            _gather_rows(image, position - start).to(embedded.dtype),
            _gather_rows(embedded, word),
        )


def _gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Vectors [B, N, W] and indices [B, M] -> [B, M, W]; indices are clamped."""
    index = index.clamp(0, rows.shape[1] - 1).expand(len(rows), -1)
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def _has_class_token(tower: Any) -> int:
    return int(getattr(tower.embeddings, "class_embedding", None) is not None)


class _EmptyCache(Cache):
    """A cache that stores nothing: with layers, each compiled block would depend on its index."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states
