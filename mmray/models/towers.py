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

from mmray.models.clip import MAX_LOG_SCALE, l2_normalize
from mmray.models.encoders.audio import AudioTransformer
from mmray.models.encoders.pretrained_audio import PretrainedAudio, build_pretrained_audio
from mmray.models.encoders.text import build_text_tower, masked_mean
from mmray.models.encoders.video import FrameEncoder, VideoMae
from mmray.models.pixels import NormalizePixels
from mmray.models.protocol import Architecture
from mmray.models.two_tower import TextBranch, tower_configs

if TYPE_CHECKING:
    from mmray.config.model_kinds import ClipInputs
    from mmray.config.model_kinds import Towers as TowersConfig


class AudioBranch(nn.Module):
    """Encode and project audio.

    Args:
        tower: Maps samples to features.
        embed_dim: Size D of the embeddings.
    """

    def __init__(self, tower: AudioTransformer | PretrainedAudio, embed_dim: int) -> None:
        super().__init__()
        self.tower = tower
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Embed audio by the mean over its features.

        Args:
            audio: Samples int16 [B, N], zeros after those of a row.
            num_samples: Samples of each row, int64 [B]; 0 for a row without audio.

        Returns:
            L2-normalized embeddings [B, D]; arbitrary for a row without audio.
        """
        features, mask = self.tower(audio, num_samples)
        return l2_normalize(self.project(masked_mean(features, mask)))


class VideoBranch(nn.Module):
    """Encode and project videos.

    Args:
        tower: Maps normalized pixels to features.
        embed_dim: Size D of the embeddings.
        inputs: The `model.inputs` section, for mean and standard deviation of the pixels.
    """

    def __init__(self, tower: FrameEncoder | VideoMae, embed_dim: int, inputs: ClipInputs) -> None:
        super().__init__()
        self.pixels = NormalizePixels(inputs.mean, inputs.std)
        self.tower = tower
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, video: Tensor, num_frames: Tensor) -> Tensor:
        """Embed videos by the mean over their features.

        Args:
            video: Pixels uint8 [B, F, 3, S, S].
            num_frames: Frames of each row, int64 [B]; 0 for a row without video.

        Returns:
            L2-normalized embeddings [B, D]; arbitrary for a row without video.
        """
        pixels = self.pixels(video.flatten(0, 1)).unflatten(0, video.shape[:2])
        features, mask = self.tower(pixels, num_frames)
        return l2_normalize(self.project(masked_mean(features, mask)))


class Towers(nn.Module):
    """Text, audio and video branches and a learned temperature.

    Args:
        spec: The `model` section, of kind `towers`.
        vocab_size: Rows of the token embedding, without pretrained weights.
        architecture: None: read the pretrained weights that `spec` names, if any. Otherwise the
            weights are random, because the caller loads them: the dict that `architecture()` of the
            same model returned, or {} for the sizes in `spec`.
    """

    def __init__(
        self, spec: TowersConfig, vocab_size: int, architecture: Architecture = None
    ) -> None:
        super().__init__()
        inputs = spec.inputs
        text = build_text_tower(
            spec.text, vocab_size, inputs.max_tokens, architecture, inputs.language_token
        )
        self.text = TextBranch(text, spec.embed_dim, with_features=False)
        self.audio: AudioBranch | None = None
        self.video: VideoBranch | None = None
        if inputs.audio_rate:
            tower = (
                AudioTransformer(spec.audio, inputs.audio_rate)
                if spec.audio.weights == "none"
                else build_pretrained_audio(spec.audio, inputs, architecture)
            )
            self.audio = AudioBranch(tower, spec.embed_dim)
        if inputs.frames:
            frames = (
                FrameEncoder(spec, architecture)
                if spec.video.weights == "none"
                else VideoMae(spec.video, inputs, architecture)
            )
            self.video = VideoBranch(frames, spec.embed_dim, inputs)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(spec.temperature)))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Embed the modalities of rows.

        Args:
            batch: `input_ids` and `attention_mask` int64 [B, T]; `audio` int16 [B, N] and
                `num_samples` int64 [B]; `video` uint8 [B, F, 3, S, S] and `num_frames` int64 [B];
                `has_text`, `has_audio` and `has_video` bool [B].

        Returns:
            `text_embed`, `audio_embed` and `video_embed` [B, D], L2-normalized, 0 for a missing
            modality; and the scalar `logit_scale`.
        """
        outputs = {"text_embed": self.text(batch["input_ids"], batch["attention_mask"])}
        if self.audio is not None:
            outputs["audio_embed"] = self.audio(batch["audio"], batch["num_samples"])
        if self.video is not None:
            outputs["video_embed"] = self.video(batch["video"], batch["num_frames"])
        for name, embed in outputs.items():
            present = batch[f"has_{name.removesuffix('_embed')}"]
            outputs[name] = embed * present[:, None].to(embed.dtype)
        return outputs | {"logit_scale": self.log_scale.exp()}

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed captions.

        Args:
            input_ids: Token ids int64 [B, T], right-padded.
            attention_mask: int64 [B, T], 1 for a token and 0 for padding.

        Returns:
            L2-normalized embeddings [B, D].
        """
        return self.text(input_ids, attention_mask)

    def branches(self) -> dict[str, nn.Module]:
        """Return the modules that embed texts, audio and video, by modality."""
        branches = {"text": self.text, "audio": self.audio, "video": self.video}
        return {name: branch for name, branch in branches.items() if branch is not None}

    @torch.no_grad()
    def clamp_parameters(self) -> None:
        """Limit the temperature to 0.01..1 after an optimizer step."""
        self.log_scale.clamp_(min=0.0, max=MAX_LOG_SCALE)

    def architecture(self) -> dict[str, Any]:
        """Return the transformers configs of the towers that have one, as JSON values by `text`,
        `audio`, `video` and `image`.
        """
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
