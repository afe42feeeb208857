"""Branches for text, audio and video with one embedding space (ImageBind's layout, Girdhar et al.
2023, arXiv:2305.05665).

A row may lack any modality. Every branch runs on every row, so all ranks compute the same graph;
the embedding of a missing modality is 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.data.stream.collate import Batch
from mmray.models.clip import MAX_LOG_SCALE
from mmray.models.encoders.audio import AudioTransformer
from mmray.models.encoders.cross_attention import CrossEncoder, PairHeads
from mmray.models.encoders.pretrained_audio import build_pretrained_audio
from mmray.models.encoders.text import build_text_tower
from mmray.models.encoders.video import FrameEncoder, VideoMae
from mmray.models.protocol import PRETRAINED, Model, Outputs, WeightSource
from mmray.models.two_tower import Branch, Encoded, tower_configs

if TYPE_CHECKING:
    from mmray.config.model_kinds import Towers as TowersConfig


class Towers(PairHeads, Model):
    """Text, audio and video branches, a learned temperature, and the configured heads on
    cross-attention from texts to audio and video.

    Forward takes a batch as a dict with texts (`input_ids`, `attention_mask`), `audio` int16 [B, N]
    (mono, `model.inputs.audio_rate` samples per second), `video` uint8 [B, F, 3, S, S], their
    lengths `num_samples` and `num_frames` int64 [B], and `has_text`, `has_audio` and `has_video`
    bool [B]. It returns `text_embed`, `audio_embed` and `video_embed` [B, D], L2-normalized and 0
    where a row lacks the modality, the scalar `logit_scale` and, with heads, `media_embed_sum` [B,
    D], `class_logits` [B, C], `match` and `match_negative` [B]. An embedding is the projected mean
    over tokens, steps of audio or frames. A model may lack audio (`audio_rate` 0) or video
    (`frames` 0).

    Args:
        spec: The `model` section, of kind `towers`.
        vocab_size: Rows of the token embedding, without pretrained weights.
    """

    def __init__(
        self, spec: TowersConfig, vocab_size: int, source: WeightSource = PRETRAINED
    ) -> None:
        super().__init__()
        inputs = spec.inputs
        text = build_text_tower(
            spec.text, vocab_size, inputs.max_tokens, source, inputs.language_token
        )
        self.has_heads = bool(spec.matching or spec.classes)
        self.text = Branch(text, spec.embed_dim, self.has_heads)
        widths = {}
        self.audio: Branch | None = None
        self.video: Branch | None = None
        if inputs.audio_rate:
            tower = (
                AudioTransformer(spec.audio, inputs.audio_rate)
                if spec.audio.weights == "none"
                else build_pretrained_audio(spec.audio, inputs, source)
            )
            self.audio = Branch(tower, spec.embed_dim, self.has_heads)
            widths["audio"] = tower.width
        if inputs.frames:
            frames = (
                FrameEncoder(spec, source)
                if spec.video.weights == "none"
                else VideoMae(spec.video, inputs, source)
            )
            self.video = Branch(frames, spec.embed_dim, self.has_heads, inputs)
            widths["video"] = frames.width
        self.log_scale = nn.Parameter(torch.tensor(-math.log(spec.temperature)))
        if self.has_heads:
            self.add_heads(spec, CrossEncoder(spec.cross, widths, text.width))

    def forward(self, batch: Batch) -> Outputs:
        """Embed the modalities of rows.

        Args:
            batch: `input_ids` and `attention_mask` int64 [B, T]; `audio` int16 [B, N] (mono,
                `model.inputs.audio_rate` samples per second) and `num_samples` int64 [B]; `video`
                uint8 [B, F, 3, S, S] and `num_frames` int64 [B]; `has_text`, `has_audio` and
                `has_video` bool [B]. Columns of a modality that the model does not take may be
                absent. Optional: `negative_ids` and `negative_mask` int64 [B, T], texts that do not
                match.

        Returns:
            `text_embed`, `audio_embed` and `video_embed` [B, D], L2-normalized, 0 for a missing
            modality; and the scalar `logit_scale`. With heads also `media_embed_sum` [B, D], the
            sum of the embeddings of audio and video; `class_logits` [B, C] with a classification
            head; and with a matching head and negatives `match` and `match_negative` [B], the
            logits that a row matches its own and its negative text.
        """
        encoded = self._encode(batch)
        outputs: Outputs = {}
        for name, result in encoded.items():
            embed = _embedding(result)
            outputs[f"{name}_embed"] = embed * batch[f"has_{name}"][:, None].to(embed.dtype)
        if self.has_heads:
            media = [embed for name, embed in outputs.items() if name != "text_embed"]
            outputs["media_embed_sum"] = torch.stack(media).sum(dim=0)
            features, masks = _media_features(encoded)
            mask = batch["attention_mask"] * batch["has_text"][:, None]
            outputs |= self.head_outputs(
                features, encoded["text"].features, batch | {"attention_mask": mask}, masks
            )
        return outputs | {"logit_scale": self.log_scale.exp()}

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of captions."""
        return _embedding(self.text(input_ids, attention_mask))

    def embed_audio(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of audio; arbitrary for a row without."""
        assert self.audio is not None, "the model has no audio"
        return _embedding(self.audio(audio, num_samples))

    def embed_video(self, video: Tensor, num_frames: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of videos; arbitrary for a row without."""
        assert self.video is not None, "the model has no video"
        return _embedding(self.video(video, num_frames))

    def embed_pair(self, batch: Batch) -> Tensor:
        """Return the features [B, W] of texts with their audio and video, which the heads read;
        each row has a text.
        """
        encoded = self._encode(batch)
        features, masks = _media_features(encoded)
        return self.cross(features, encoded["text"].features, batch["attention_mask"], masks)

    def _encode(self, batch: Batch) -> dict[str, Any]:
        """Return the results of the branches by modality."""
        encoded = {"text": self.text(batch["input_ids"], batch["attention_mask"])}
        if self.audio is not None:
            encoded["audio"] = self.audio(batch["audio"], batch["num_samples"])
        if self.video is not None:
            encoded["video"] = self.video(batch["video"], batch["num_frames"])
        return encoded

    def branches(self) -> dict[str, nn.Module]:
        """Return the modules that embed texts, audio and video, under `text`, `audio` and `video`,
        and the cross-attention of the heads, under `cross`; without those that the model lacks.
        """
        cross = self.cross if self.has_heads else None
        branches = {"text": self.text, "audio": self.audio, "video": self.video, "cross": cross}
        return {name: branch for name, branch in branches.items() if branch is not None}

    @torch.no_grad()
    def clamp_parameters(self) -> None:
        self.log_scale.clamp_(min=0.0, max=MAX_LOG_SCALE)

    def architecture(self) -> dict[str, Any]:
        towers: dict[str, nn.Module] = {"text": self.text.tower}
        if self.audio is not None:
            towers["audio"] = self.audio.tower
        if self.video is not None:
            tower = self.video.tower
            if isinstance(tower, FrameEncoder):
                towers["image"] = tower.image
            else:
                towers["video"] = tower
        return tower_configs(towers)


def _media_features(encoded: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the features and the masks of audio and video, from the results of the branches."""
    media = {name: result for name, result in encoded.items() if name != "text"}
    features = {name: result.features for name, result in media.items()}
    masks = {name: result.mask for name, result in media.items()}
    return features, masks


def _embedding(result: Encoded | Tensor) -> Tensor:
    return result.embed if isinstance(result, Encoded) else result
