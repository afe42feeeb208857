"""Branches for text and other modalities with one embedding space, and heads on cross-attention.

The other modality is the image of a row (ALBEF's layout, Li et al. 2021, arXiv:2107.07651), or they
are audio and video (ImageBind's layout, Girdhar et al. 2023, arXiv:2305.05665). A row of clips may
lack any modality. Every branch runs on every row, so all ranks compute the same graph; the
embedding of a missing modality is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.data.stream.collate import Batch
from mmray.models.dual_encoder import MultiEncoder
from mmray.models.encoders.audio import AudioTransformer
from mmray.models.encoders.cross_attention import CrossEncoder
from mmray.models.encoders.image import build_image_tower
from mmray.models.encoders.pretrained_audio import build_pretrained_audio
from mmray.models.encoders.text import build_text_tower
from mmray.models.encoders.video import FrameEncoder
from mmray.models.protocol import (
    PRETRAINED,
    Encoded,
    HeadScores,
    Outputs,
    WeightSource,
    class_scores,
)
from mmray.models.two_tower import Branch, tower_configs

if TYPE_CHECKING:
    from mmray.config.model_kinds import Towers as TowersConfig

COLUMNS = {
    "text": ("input_ids", "attention_mask"),
    "image": ("image",),
    "audio": ("audio", "num_samples"),
    "video": ("video", "num_frames"),
}
"""Columns of a batch that the branch of a modality takes."""


class Towers(MultiEncoder):
    """A text branch, and an image branch or branches for audio and video; a learned temperature;
    and the configured heads of matching and classification, on cross-attention from texts to the
    other modalities.

    Args:
        spec: The `model` section, of kind `towers`.
        vocab_size: Rows of the token embedding, without pretrained weights.

    Attributes:
        cross: The cross-attention, whose features [B, W] of pairs the heads read; None without
            them.
        match_head: To the logit [B, 1] that a text and the other modalities of its row match, or
            None.
        class_head: To the logits [B, C] of the classes of the pair, or None.
    """

    text: Branch
    image: Branch

    def __init__(
        self, spec: TowersConfig, vocab_size: int, source: WeightSource = PRETRAINED
    ) -> None:
        inputs = spec.inputs
        has_pairs = bool(spec.matching or spec.classes)
        branches: dict[str, Branch] = {}
        for name, tower in _build_towers(spec, vocab_size, source):
            pixels = inputs if name in ("image", "video") else None
            branches[name] = Branch(tower, spec.embed_dim, pixels, with_features=has_pairs)
        super().__init__(branches, spec)
        widths = {name: branch.tower.width for name, branch in branches.items()}
        text_width = widths.pop("text")
        self.cross: CrossEncoder | None = None
        if has_pairs:
            num_positions = 0
            if "image" in branches:
                num_positions = branches["image"].tower.num_positions(inputs.image_side)
            self.cross = CrossEncoder(spec.cross, widths, text_width, num_positions)
        width = spec.cross.width
        self.match_head = nn.Linear(width, 1) if spec.matching else None
        self.class_head = nn.Linear(width, spec.classes) if spec.classes else None

    def forward(self, batch: Batch) -> Outputs:
        """Embed the modalities of rows, and compute the heads.

        Args:
            batch: `input_ids` and `attention_mask` int64 [B, T]. Of a model of images: `image`
                uint8 [B, 3, S, S]. Of a model of clips: `audio` int16 [B, N] (mono,
                `model.inputs.audio_rate` samples per second) and `num_samples` int64 [B]; `video`
                uint8 [B, F, 3, S, S] and `num_frames` int64 [B]; `has_text`, `has_audio` and
                `has_video` bool [B]; the columns of a modality that it lacks may be absent.
                Optional: `negative_ids` and `negative_mask` int64 [B, T], texts that do not match.

        Returns:
            `text_embed`, and `image_embed` or `audio_embed` and `video_embed` [B, D],
            L2-normalized, 0 for a missing modality; the scalar `logit_scale` and, if configured,
            `logit_bias`. With a classification head `class_logits` [B, C]; with a matching head and
            negatives `match` and `match_negative` [B], the logits that a row matches its own and
            its negative text; with either head, of clips also `media_embed_sum` [B, D], the sum of
            the embeddings of audio and video.
        """
        encoded = self._encode(batch)
        outputs: Outputs = {}
        for name, result in encoded.items():
            embed = Encoded.embedding(result)
            if "has_text" in batch:
                embed = embed * batch[f"has_{name}"][:, None].to(embed.dtype)
            outputs[f"{name}_embed"] = embed
        if self.cross is not None and "has_text" in batch:
            media = [embed for name, embed in outputs.items() if name != "text_embed"]
            outputs["media_embed_sum"] = torch.stack(media).sum(dim=0)
        matches = self.match_head is not None and "negative_ids" in batch
        if self.class_head is not None or matches:
            pair = self._pair(encoded, batch.get("has_text"))
        if self.class_head is not None:
            outputs["class_logits"] = self.class_head(pair)
        if self.match_head is not None and matches:
            text = self.text(batch["negative_ids"], batch["negative_mask"])
            negative = self._pair(encoded | {"text": text})
            outputs["match"] = self.match_head(pair).squeeze(1)
            outputs["match_negative"] = self.match_head(negative).squeeze(1)
        return outputs | self.scalar_outputs()

    def embed(self, modality: str, *columns: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of a modality; arbitrary for a row without."""
        return Encoded.embedding(self.get_submodule(modality)(*columns))

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.embed("text", input_ids, attention_mask)

    def embed_image(self, image: Tensor) -> Tensor:
        return self.embed("image", image)

    def embed_pair(self, batch: Batch) -> Tensor:
        """Return the features [B, W] of texts with the other modalities of their rows, which the
        heads of matching and classification read.
        """
        return self._pair(self._encode(batch), batch.get("has_text"))

    def _encode(self, batch: Batch) -> dict[str, Any]:
        """Return the results of the branches by modality."""
        encoded = {}
        for name in self.modalities:
            columns = [batch[column] for column in COLUMNS[name]]
            encoded[name] = self.get_submodule(name)(*columns)
        return encoded

    def _pair(self, encoded: dict[str, Encoded], has_text: Tensor | None = None) -> Tensor:
        """Return the features [B, W] of each text with the other modalities of its row.

        Args:
            encoded: Results of the branches by modality.
            has_text: bool [B], False for rows without text; None: all have one.
        """
        assert self.cross is not None
        media = dict(encoded)
        text = media.pop("text")
        if has_text is not None and text.mask is not None:
            text = text._replace(mask=text.mask * has_text[:, None])
        return self.cross(media, text)

    def head_scores(self, batch: Batch) -> dict[str, HeadScores]:
        return {} if self.class_head is None else class_scores(self.forward(batch), batch)

    def branches(self) -> dict[str, nn.Module]:
        cross = {} if self.cross is None else {"cross": self.cross}
        return super().branches() | cross

    def architecture(self) -> dict[str, Any]:
        branches: dict[str, Any] = super().branches()
        towers = {name: branch.tower for name, branch in branches.items()}
        video = towers.get("video")
        if isinstance(video, FrameEncoder):
            towers["image"] = video.image
        return tower_configs(towers)


def _build_towers(
    spec: TowersConfig, vocab_size: int, source: WeightSource
) -> Iterator[tuple[str, Any]]:
    """Yield each modality of the settings and its encoder, which is built when it is requested."""
    inputs = spec.inputs
    yield "text", build_text_tower(spec.text, vocab_size, inputs.max_tokens, source)
    if not inputs.clip_s:
        yield "image", build_image_tower(spec.image, inputs.image_side, spec.batch_norm, source)
        return
    if inputs.audio_rate and spec.audio.weights == "none":
        yield "audio", AudioTransformer(spec.audio, inputs.audio_rate)
    elif inputs.audio_rate:
        yield "audio", build_pretrained_audio(spec.audio, inputs, source)
    if inputs.frames:
        yield "video", FrameEncoder(spec, source)
