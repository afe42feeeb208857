"""Dual encoders of transformers: CLIP, SigLIP and SigLIP 2 with native aspect ratio.

Only the forward pass is reimplemented: it pools captions at their last token, can drop patches in
training, and builds no mask that synchronizes the GPU. Sources: Radford et al. 2021 (CLIP,
arXiv:2103.00020), Zhai et al. 2023 (SigLIP, arXiv:2303.15343), patch dropout of Li et al. 2023
(FLIP, arXiv:2212.00794).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.init import normal_, uniform_, zeros_

from mmray.data.images.patches import takes_patches
from mmray.errors import UsageError, only_errors
from mmray.models import open_clip
from mmray.models.caption_decoder import build_decoder, left_out_decoder
from mmray.models.dual_encoder import DualEncoder, l2_normalize
from mmray.models.encoders.positions import lengthen_text_model, resize_vision_model
from mmray.models.pixels import NaflexEmbeddings, PatchEmbeddings, residual_stream
from mmray.models.pretrained import checkpoint_file
from mmray.models.protocol import PRETRAINED, Encoded, WeightSource
from mmray.models.weights import (
    WEIGHTS_SETTING,
    check_vocab_size,
    load_config,
    load_pretrained,
    load_state,
    parameters_on,
    read_state_dict,
    transformer_config,
)
from mmray.plugins import load_class

if TYPE_CHECKING:
    from transformers import (
        CLIPModel,
        CLIPTextModel,
        PreTrainedConfig,
        SiglipTextModel,
    )

    from mmray.config import Inputs
    from mmray.config.model_kinds import Clip as ClipConfig
    from mmray.config.model_kinds import ClipFamily
    from mmray.config.model_kinds import Siglip as SiglipConfig


LEGACY_EOS_ID = 2  # with this eos id transformers' CLIP pools at the largest id instead


class PretrainedDualEncoder(DualEncoder):
    """A dual encoder of transformers, also for other image sizes and longer texts than those of its
    weights.

    A subclass sets `hf_class` and `hf_names`, and implements `default_hf_config` and `text_branch`.

    Args:
        spec: The `model` section.
        vocab_size: Rows of the token embedding, without pretrained weights.

    Attributes:
        hf_class: Name of its class in transformers, such as `CLIPModel`.
        default_hf_config: Static method of (`model` section, vocabulary size): a config of
            transformers with these sizes.
        text_branch: Static method of (model of transformers, `model` section).
        build_notes: Lines for the console about interpolated positions and unused weights.
    """

    hf_class: ClassVar[str]
    default_hf_config: ClassVar[Callable[..., Any]]
    text_branch: ClassVar[Callable[..., nn.Module]]

    def __init__(
        self, spec: ClipFamily, vocab_size: int, source: WeightSource = PRETRAINED
    ) -> None:
        net = self.build_hf(spec, vocab_size, source)
        notes = (
            self.resize_images(net.vision_model, spec),
            lengthen_text_model(
                net.text_model, spec.inputs.max_tokens, spec.kept_positions, spec.weights
            ),
        )
        decoder = build_decoder(spec, net.config.vision_config.hidden_size, vocab_size, source)
        left_out = left_out_decoder(spec) if source.pretrained else None
        image = VisionBranch(
            net.vision_model,
            net.visual_projection if self.hf_class == Clip.hf_class else None,
            spec.inputs,
            spec.patch_dropout,
            with_features=decoder is not None,
        )
        super().__init__(image, self.text_branch(net, spec), spec, decoder)
        self.build_notes = tuple(note for note in (*notes, left_out) if note is not None)
        self._hf_config: PreTrainedConfig = net.config
        if source.pretrained and spec.weights != "none":
            self.log_scale.data.copy_(net.logit_scale.detach().squeeze())
            if self.logit_bias is not None and self.hf_class != Clip.hf_class:
                self.logit_bias.data.copy_(net.logit_bias.detach().squeeze())

    @classmethod
    def model_class(cls) -> Any:
        """Return the class `hf_class` of transformers, which takes seconds to import."""
        return load_class(f"transformers:{cls.hf_class}", WEIGHTS_SETTING)

    @staticmethod
    def resize_images(vision_model: Any, spec: ClipFamily) -> str | None:
        """Adapt the vision model to the size of the images; return a line for the console."""
        return resize_vision_model(vision_model, spec.inputs.image_side, spec.weights)

    def architecture(self) -> dict[str, Any]:
        return {"config": self._hf_config.to_dict()}

    def _updated_hf_config(self, text: dict[str, int | None]) -> dict[str, Any]:
        """config.json for transformers, with `text` in the config of the text model."""
        values: dict[str, Any] = self._hf_config.to_dict()
        return values | {
            "architectures": [self.hf_class],
            "text_config": values["text_config"] | text,
        }

    @classmethod
    # transformers warns about the token ids of its default SiglipTextConfig, which no model has.
    @only_errors("transformers.configuration_utils")
    def build_hf(cls, spec: ClipFamily, vocab_size: int, source: WeightSource) -> Any:
        """Build the model of transformers that `hf_class` names, with its weights.

        Raises:
            UsageError: Weights cannot be read or are missing, or they do not suit the tokenizer.
        """
        model_class = cls.model_class()
        if "config" in source.saved:
            net = model_class(model_class.config_class.from_dict(source.saved["config"]))
        elif source.pretrained and spec.weights != "none":
            net = _pretrained_network(spec, model_class)
        else:
            net = model_class(cls.default_hf_config(spec, vocab_size))
            if source.pretrained:
                cls.initialize(net)
        rows = net.config.text_config.vocab_size
        check_vocab_size(WEIGHTS_SETTING, spec.weights, rows, vocab_size)
        return net

    @staticmethod
    def initialize(net: Any) -> None:
        """Draw the weights of a model without pretrained ones; by default as transformers does."""


def _pretrained_network(spec: ClipFamily, model_class: Any) -> Any:
    """Return a model of transformers with the weights that `spec` names."""
    config_class = model_class.config_class
    spec = spec.replace(weights=checkpoint_file(spec.weights))
    if not spec.is_checkpoint_file:
        config = load_config(WEIGHTS_SETTING, spec.weights, (config_class.model_type,))
        open_clip.check_activation(spec, config.text_config.hidden_act)
        return load_pretrained(WEIGHTS_SETTING, spec.weights, model_class, config)
    state = read_state_dict(WEIGHTS_SETTING, spec.weights)
    hf_state = open_clip.rename_to_hf(state)
    config = config_class.from_dict(open_clip.hf_config(state, hf_state, spec))
    from transformers.initialization import no_init_weights

    # otherwise random values would be drawn, to be replaced
    with parameters_on("meta"), no_init_weights():
        net = model_class(config)
    problem = f"{WEIGHTS_SETTING}: {spec.weights} is not a checkpoint of open_clip with a ViT"
    load_state(net, hf_state, problem)
    return net


class Clip(PretrainedDualEncoder):
    """transformers' CLIPModel as an image branch (projected class token) and a text branch
    (projected last token) with a learned temperature.
    """

    hf_class = "CLIPModel"
    hf_names: ClassVar[dict[str, str]] = {
        "image.tower.": "vision_model.",
        "image.project.": "visual_projection.",
        "text.tower.": "text_model.",
        "text.project.": "text_projection.",
        "log_scale": "logit_scale",
    }

    @staticmethod
    def default_hf_config(spec: ClipConfig, vocab_size: int) -> Any:
        from transformers import CLIPConfig

        shared = {"projection_dim": spec.embed_dim, "hidden_act": spec.activation or "quick_gelu"}
        text, vision = _hf_configs(spec, vocab_size)
        return CLIPConfig(
            text_config=text | shared,
            vision_config=vision | shared,
            projection_dim=spec.embed_dim,
        )

    @staticmethod
    def text_branch(net: CLIPModel, spec: ClipFamily) -> nn.Module:
        return ClipText(net.text_model, net.text_projection)

    @staticmethod
    @torch.no_grad()
    def initialize(net: CLIPModel) -> None:
        """Draw the weights of a CLIPModel again, as OpenAI's and open_clip's code does.

        transformers scales the two towers alike. OpenAI scales only the text tower by its depth,
        and leaves the layers of the vision transformer at torch's defaults. In both, biases of
        attention are 0, and those of the MLPs are torch's default.
        """
        for layer in net.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d | nn.LayerNorm):
                layer.reset_parameters()
        vision = net.vision_model
        text = net.text_model
        for layer in (*vision.encoder.layers, *text.encoder.layers):
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                # Xavier's bound of the matrix [3 W, W] for q, k and v in torch's attention.
                bound = math.sqrt(6 / (4 * projection.in_features))
                uniform_(projection.weight, -bound, bound)
                zeros_(projection.bias)
            zeros_(attention.out_proj.bias)
        scale = vision.config.hidden_size**-0.5
        normal_(vision.embeddings.class_embedding, std=scale)
        normal_(vision.embeddings.position_embedding.weight, std=scale)
        normal_(net.visual_projection.weight, std=scale)

        width = text.config.hidden_size
        normal_(text.embeddings.token_embedding.weight, std=0.02)
        normal_(text.embeddings.position_embedding.weight, std=0.01)
        # for layers that add to the residual stream
        residual_std = (width * 2 * text.config.num_hidden_layers) ** -0.5
        for layer in text.encoder.layers:
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                normal_(projection.weight, std=width**-0.5)
            normal_(attention.out_proj.weight, std=residual_std)
            normal_(layer.mlp.fc1.weight, std=(2 * width) ** -0.5)
            normal_(layer.mlp.fc2.weight, std=residual_std)
        normal_(net.text_projection.weight, std=width**-0.5)

    def export_hf_config(self, eos_id: int | None, pad_id: int) -> dict[str, Any] | None:
        if eos_id in (None, LEGACY_EOS_ID) or self.logit_bias is not None:
            return None
        return self._updated_hf_config({"eos_token_id": eos_id, "pad_token_id": pad_id})


class Siglip(PretrainedDualEncoder):
    """transformers' SiglipModel as an image branch (attention pooling) and a text branch (projected
    last position) with a learned temperature, which is not clamped.
    """

    max_log_scale = None
    hf_class = "SiglipModel"
    hf_names: ClassVar[dict[str, str]] = {
        "image.tower.": "vision_model.",
        "text.tower.": "text_model.",
        "log_scale": "logit_scale",
    }
    text: SiglipText

    @classmethod
    def default_hf_config(cls, spec: ClipFamily, vocab_size: int) -> Any:
        text, vision = _hf_configs(spec, vocab_size)
        text |= {"projection_size": spec.image.width, "pad_token_id": 0}
        return cls.model_class().config_class(text_config=text, vision_config=vision)

    @staticmethod
    def text_branch(net: Any, spec: SiglipConfig) -> nn.Module:
        config = net.config.text_config
        # configs can be wrong: SigLIP 2's has a default that its tokenizer does not use
        if spec.pad_id is not None:
            config.pad_token_id = spec.pad_id
        if config.pad_token_id is None or not 0 <= config.pad_token_id < config.vocab_size:
            raise UsageError(
                f"model.pad_id: {config.pad_token_id} is not a token of a model with "
                f"{config.vocab_size} embedding rows; set the pad id of the tokenizer"
            )
        return SiglipText(net.text_model, config)

    def export_hf_config(self, eos_id: int | None, pad_id: int) -> dict[str, Any] | None:
        if self.logit_bias is None:
            return None
        return self._updated_hf_config({"eos_token_id": eos_id})

    @property
    def padding_length_and_id(self) -> tuple[int, int]:
        return self.text.length, self.text.pad_id


class Naflex(Siglip):
    """transformers' Siglip2Model: SigLIP with images in their own aspect ratio, as patches within a
    budget.
    """

    hf_class = "Siglip2Model"

    @staticmethod
    def resize_images(vision_model: Any, spec: Any) -> str | None:
        patch = vision_model.config.patch_size
        if patch != spec.inputs.patch:
            raise UsageError(
                f"model.inputs.patch: {spec.weights} has patches of {patch} pixels, not "
                f"{spec.inputs.patch}; set it to {patch}"
            )
        return None  # positions are resized for each image


def _hf_configs(spec: ClipFamily, vocab_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """transformers' config values of the text and the vision model; the ids of special tokens are
    set at export.
    """
    sizes = {"max_position_embeddings": spec.inputs.max_tokens, "vocab_size": vocab_size}
    text = transformer_config(spec.text) | sizes | {"bos_token_id": None, "eos_token_id": None}
    inputs: Any = spec.inputs
    if takes_patches(inputs):
        # the positions, of a square grid
        num_patches = math.isqrt(inputs.max_patches) ** 2
        image = {"num_patches": num_patches, "patch_size": inputs.patch}
    else:
        image = {"image_size": inputs.image_side, "patch_size": spec.image.patch}
    return text, transformer_config(spec.image) | image


class VisionBranch(nn.Module):
    """The vision transformer of CLIP (projected class token) or, without `project`, of SigLIP
    (attention pooling).

    Forward takes pixels uint8 [B, 3, S, S], or images as patches, and returns L2-normalized
    embeddings [B, D]; with `with_features` an `Encoded`, which also has the hidden states of the
    last layer.

    Args:
        tower: The vision transformer of transformers' CLIPModel, SiglipModel or Siglip2Model; its
            `embeddings` are replaced in place by a module that also normalizes the pixels.
        project: Projection of CLIP's class token; None for SigLIP.
        inputs: The `model.inputs` section, for mean and standard deviation of the pixels.
        patch_dropout: Fraction of the patches to drop in training.
    """

    def __init__(
        self,
        tower: Any,
        project: nn.Linear | None,
        inputs: Inputs,
        patch_dropout: float,
        with_features: bool = False,
    ) -> None:
        super().__init__()
        embeddings = NaflexEmbeddings if takes_patches(inputs) else PatchEmbeddings
        tower.embeddings = embeddings(tower.embeddings, inputs.mean, inputs.std)
        self.tower = tower
        self.project = project
        self.patch_dropout = patch_dropout
        self.with_features = with_features

    def forward(self, image: Tensor) -> Encoded | Tensor:
        tower = self.tower
        # SigLIP has no such norm. CLIP's is per token, so it may precede the drop of patches.
        norm = None if self.project is None else tower.pre_layrnorm
        hidden = tower.embeddings(image, norm)
        mask = tower.embeddings.attention_mask(image)
        if self.training and self.patch_dropout:
            prefix = 0 if self.project is None else 1  # the class token
            patches = drop_patches(hidden[:, prefix:], self.patch_dropout)
            hidden = torch.cat([hidden[:, :prefix], patches], dim=1)
        hidden = tower.encoder(inputs_embeds=hidden, attention_mask=mask).last_hidden_state
        if self.project is None:
            masks = () if mask is None else (mask,)  # of Siglip2Model
            embed = l2_normalize(tower.head(tower.post_layernorm(hidden), *masks))
        else:
            embed = l2_normalize(self.project(tower.post_layernorm(hidden[:, 0])))
        return Encoded(hidden, None, embed) if self.with_features else embed


class ClipText(nn.Module):
    """CLIP's causal text transformer; an embedding is the projected hidden state of the last token
    that is not padding.

    Forward takes token ids and an attention mask (1 for a token, 0 for padding), both int64 [B, T],
    right-padded, and returns L2-normalized embeddings [B, D].

    Args:
        tower: The text transformer of transformers' CLIPModel, its `text_model`.
        project: Projection of the last token's hidden state to the embedding.
    """

    def __init__(self, tower: CLIPTextModel, project: nn.Linear) -> None:
        super().__init__()
        self.tower = tower
        self.project = project

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = residual_stream(self.tower.embeddings(input_ids=input_ids))
        # No padding mask: attention is causal, and the last real token is read.
        hidden = self.tower.encoder(inputs_embeds=hidden, is_causal=True).last_hidden_state
        last = (attention_mask.sum(dim=1) - 1).clamp(min=0)
        features = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)
        return l2_normalize(self.project(self.tower.final_layer_norm(features)))


class SiglipText(nn.Module):
    """SigLIP's text transformer: captions are padded to a fixed length, attention includes the
    padding, and an embedding is the projected hidden state of the last position.

    Forward takes token ids and an attention mask (1 for a token, 0 for padding), both int64 [B, T],
    right-padded, and returns L2-normalized embeddings [B, D].

    Args:
        tower: The text transformer of transformers' SiglipModel, its `text_model`.
        config: Its config of transformers; `max_position_embeddings` is the fixed length and
            `pad_token_id` the padding token.
    """

    def __init__(self, tower: SiglipTextModel, config: PreTrainedConfig) -> None:
        super().__init__()
        self.tower = tower
        self.length: int = config.max_position_embeddings
        self.pad_id: int = config.pad_token_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        ids = input_ids.masked_fill(attention_mask == 0, self.pad_id)
        ids = F.pad(ids, (0, self.length - ids.shape[1]), value=self.pad_id)
        hidden = residual_stream(self.tower.embeddings(input_ids=ids))
        hidden = self.tower.encoder(inputs_embeds=hidden).last_hidden_state
        return l2_normalize(self.tower.head(self.tower.final_layer_norm(hidden[:, -1])))


def drop_patches(patches: Tensor, dropout: float) -> Tensor:
    """Keep a random subset of the patches [B, N, W] of each row, in their order; at least one."""
    num_kept = max(1, round(patches.shape[1] * (1 - dropout)))
    index = (
        torch.rand(patches.shape[:2], device=patches.device)
        .argsort(dim=1)[:, :num_kept]
        .sort(dim=1)
        .values
    )
    return patches.gather(1, index[..., None].expand(-1, -1, patches.shape[-1]))
