"""Decoder of captions: predicts the tokens of a caption from those before it and an image.

Sources: CoCa's captioning loss next to the contrastive one (Yu et al. 2022, arXiv:2205.01917,
equation 3), and the decoder with cross-attention to the unpooled image encoder of SigLIP 2
(Tschannen et al. 2025, arXiv:2502.14786, section 2.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from mmray.models.encoders.cross_attention import cross_attention_layers
from mmray.models.encoders.text import INIT_STD
from mmray.models.pixels import residual_stream
from mmray.models.protocol import WeightSource, is_sharded
from mmray.models.vlm.loss import chunked_log_probs
from mmray.models.weights import load_state

if TYPE_CHECKING:
    from mmray.config.model_kinds import ClipFamily, DropoutTransformer
    from mmray.models.encoders.image import ImageEncoder

DECODER_FILE = "decoder.safetensors"  # of an export; transformers has no class with a decoder


def build_decoder(
    spec: Any,
    image_width: int,
    vocab_size: int,
    source: WeightSource,
    tower: ImageEncoder | None = None,
) -> CaptionDecoder | None:
    """Return the decoder of a `model` section, with the weights of an export in `model.weights`;
    None if the section has none.

    Args:
        tower: The image encoder, if its features may have no positions of their own.

    Raises:
        UsageError: The decoder of the export has other sizes.
    """
    shape = getattr(spec, "decoder", None)  # exports of earlier versions have no such section
    if shape is None or not shape.depth:
        return None
    inputs = spec.inputs
    num_positions = 0 if tower is None else tower.num_positions(inputs.image_side)
    decoder = CaptionDecoder(shape, image_width, vocab_size, inputs.max_tokens, num_positions)
    file = Path(getattr(spec, "weights", "none")).expanduser() / DECODER_FILE
    if source.pretrained and file.exists():
        state = {name.removeprefix("decoder."): each for name, each in load_file(file).items()}
        load_state(decoder, state, f"model.decoder: its sizes are not those of {file}")
    return decoder


def left_out_decoder(spec: ClipFamily) -> str | None:
    """Return a line for the console if `model.weights` has a decoder that the model has not."""
    if spec.decoder.depth or not (Path(spec.weights).expanduser() / DECODER_FILE).exists():
        return None
    return (
        f"the decoder of captions in {spec.weights} is left out; --model.decoder.depth with the "
        "depth in its config.json keeps it"
    )


class CaptionDecoder(nn.Module):
    """Causal self-attention over the tokens of a caption, and cross-attention to the positions of
    an image. The output layer has the weights of the token embedding.

    A learned vector precedes the first token, so tokenizers need no start token.

    Args:
        spec: The `model.decoder` section: width, depth, heads and dropout.
        image_width: Width of the features of the image.
        vocab_size: Number of tokens of the tokenizer.
        max_tokens: Maximum number of tokens of a caption.
        num_positions: Number of positions of an image whose features have no positions of their
            own, such as a feature map; 0: they have.
    """

    def __init__(
        self,
        spec: DropoutTransformer,
        image_width: int,
        vocab_size: int,
        max_tokens: int,
        num_positions: int = 0,
    ) -> None:
        super().__init__()
        width = spec.width
        self.image_norm = nn.LayerNorm(image_width)
        self.from_image = nn.Linear(image_width, width)
        self.image_positions: nn.Parameter | None = None
        if num_positions:
            self.image_positions = nn.Parameter(INIT_STD * torch.randn(num_positions, width))
        self.start = nn.Parameter(INIT_STD * torch.randn(width))
        self.tokens = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.tokens.weight, std=INIT_STD)
        self.positions = nn.Parameter(INIT_STD * torch.randn(max_tokens, width))
        self.layers = cross_attention_layers(spec)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return the loss of captions, or the scores of their next tokens.

        Args:
            features: Features of N positions of the images [B, N, image_width].
            input_ids: Token ids int64 [B, T], right-padded.
            attention_mask: 1 for a token, 0 for padding, int64 [B, T]; None: captions that are
                continued, without padding.

        Returns:
            The cross-entropies of the tokens of each caption, summed, at least float32 [B]; without
            a mask the logits of the token after each caption [B, vocabulary size].
        """
        previous = input_ids if attention_mask is None else input_ids[:, :-1]
        start = self.start.expand(len(previous), 1, -1)
        hidden = torch.cat([start, self.tokens(previous)], dim=1)
        hidden = residual_stream(hidden + self.positions[: hidden.shape[1]])
        image = self.from_image(self.image_norm(features))
        if self.image_positions is not None:
            image = image + self.image_positions
        # Padding is on the right, so causal attention never reads it.
        length = hidden.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, image, tgt_mask=later, tgt_is_causal=True)
        hidden = self.norm(hidden)
        if attention_mask is None:
            return F.linear(hidden[:, -1], self.tokens.weight)
        log_probs = chunked_log_probs(
            hidden.flatten(0, 1), self.tokens.weight, input_ids.flatten()
        ).view_as(input_ids)
        return -torch.where(attention_mask.bool(), log_probs, 0).sum(dim=1)

    def generate(self, features: Tensor, end_id: int) -> Tensor:
        """Return captions int64 [B, T] of features [B, N, image_width] by the most likely tokens.

        Tokens after `end_id` are arbitrary. Ranks of a sharded decoder call layers equally often.
        """
        shape = len(features), len(self.positions)
        ids = torch.full(shape, end_id, device=features.device)
        for position in range(ids.shape[1]):
            ids[:, position] = self(features, ids[:, :position]).argmax(dim=1)
            if not is_sharded(self) and (ids[:, : position + 1] == end_id).any(dim=1).all():
                break
        return ids
