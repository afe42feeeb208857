"""Pretrained audio encoders of transformers: Whisper and CLAP.

The log-mel spectrograms of their feature extractors are computed on the training device, from int16
samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.builtin import HF_AUDIO_TYPES
from mmray.errors import UsageError
from mmray.models.encoders.audio import mel_power
from mmray.models.encoders.text import length_mask
from mmray.models.protocol import WeightSource
from mmray.models.weights import encoder_config, freeze_batch_norms, load_pretrained, set_dropout

if TYPE_CHECKING:
    import numpy as np
    from transformers import (
        ClapAudioConfig,
        ClapConfig,
        ClapFeatureExtractor,
        PreTrainedModel,
        WhisperConfig,
        WhisperFeatureExtractor,
    )

    from mmray.config.model_kinds import AudioTower, ClipInputs

WEIGHTS_SETTING = "model.audio.weights"
MIN_POWER = 1e-10


class PretrainedAudio(nn.Module, ABC):
    """Base of the pretrained audio encoders: samples, padded as the weights expect, to features.

    Forward takes samples int16 [B, N], `rate` per second, and the number of samples of each row,
    int64 [B], and returns features [B, T, width], not normalized, and a mask int64 [B, T], 0 for
    padding. A subclass implements `forward` and `spectrogram`, which computes the log-mel
    spectrogram that the weights expect from the same arguments.

    Args:
        net: The encoder of transformers, such as WhisperEncoder; it takes the spectrogram.
        width: Number of channels of its features.
        extractor: Its feature extractor, which has `sampling_rate` and `hop_length`.
        window: Number of samples W of a spectrum. The attribute `window` is the Hann window [W] by
            which they are multiplied.
        filters: Weights of the frequencies in each mel band, float [W // 2 + 1, mels]; also an
            attribute, as a tensor.
        max_samples: Number of samples to which audio is padded, the longest that the encoder takes.

    Attributes:
        rate: Samples per second that the weights expect.
        hop: Samples from a spectrum to the next.
    """

    window: Tensor
    filters: Tensor

    def __init__(
        self,
        net: PreTrainedModel,
        width: int,
        extractor: WhisperFeatureExtractor | ClapFeatureExtractor,
        window: int,
        filters: np.ndarray,
        max_samples: int,
    ) -> None:
        super().__init__()
        self.net = net
        self.width = width
        self.rate = extractor.sampling_rate
        self.hop = extractor.hop_length
        self.max_samples = max_samples
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        self.register_buffer("filters", torch.tensor(filters).float(), persistent=False)

    @abstractmethod
    def forward(self, audio: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, T, width] of T time steps, one of a whole clip for CLAP, and their
        mask.
        """

    @abstractmethod
    def spectrogram(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Return the log-mel spectrogram that the feature extractor of transformers computes from
        the same samples, padded to the longest that the encoder takes.
        """

    def _power(self, audio: Tensor) -> Tensor:
        """Return the mel spectrogram [B, mels, T] of samples [B, max_samples]."""
        # Half precision has too few bits for the power of a spectrum.
        with torch.autocast(audio.device.type, enabled=False):
            samples = audio.to(self.window.dtype) / 32768
            power = mel_power(samples, self.window, self.filters, self.hop, "reflect")
            return power.clamp(min=MIN_POWER).log10()

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, but keep BatchNorm in evaluation mode: statistics of a
        micro-batch would depend on its size.
        """
        super().train(mode)
        freeze_batch_norms(self)
        return self


class WhisperAudio(PretrainedAudio):
    """The encoder of Whisper (Radford et al. 2022, arXiv:2212.04356): a feature vector for each 20
    ms of audio, which is padded with zeros to 30 s.

    Args:
        config: transformers' config of a Whisper model.
        weights: Folder or hub name of the weights; None: random weights.
    """

    def __init__(self, config: WhisperConfig, weights: str | None) -> None:
        from transformers import AutoModel, WhisperFeatureExtractor
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
        if weights is None:
            net = WhisperEncoder(config)
        else:
            net = load_pretrained(WEIGHTS_SETTING, weights, AutoModel, config).get_encoder()
        max_samples = 2 * config.max_source_positions * extractor.hop_length
        super().__init__(
            net, config.d_model, extractor, extractor.n_fft, extractor.mel_filters, max_samples
        )

    def spectrogram(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        padded = F.pad(audio, (0, self.max_samples - audio.shape[1]))
        power = self._power(padded)[..., :-1]
        loudest = power.amax(dim=(1, 2), keepdim=True)
        return (power.maximum(loudest - 8) + 4) / 4

    def forward(self, audio: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net(self.spectrogram(audio, num_samples)).last_hidden_state
        lengths = (num_samples + 2 * self.hop - 1) // (2 * self.hop)
        return features, length_mask(lengths, features.shape[1])


class ClapAudio(PretrainedAudio):
    """The audio encoder of CLAP (Wu et al. 2023, arXiv:2211.06687): one feature vector of a clip,
    which is repeated to fill 10 s.

    Args:
        config: transformers' config of a CLAP model or of its audio encoder.
        weights: Folder or hub name of the weights; None: random weights.

    Raises:
        UsageError: The config is of a CLAP model that fuses parts of long clips (`enable_fusion`).
    """

    def __init__(self, config: ClapConfig | ClapAudioConfig, weights: str | None) -> None:
        from transformers import ClapAudioModel, ClapFeatureExtractor, ClapModel

        audio = _audio_config(config)
        if audio.enable_fusion:
            raise UsageError(
                f"{WEIGHTS_SETTING}: {weights} fuses parts of long clips, which is not supported; "
                "use a model without fusion, such as laion/clap-htsat-unfused"
            )
        extractor = ClapFeatureExtractor(feature_size=audio.num_mel_bins)
        if weights is None:
            net = ClapAudioModel(audio)
        elif audio is config:
            net = load_pretrained(WEIGHTS_SETTING, weights, ClapAudioModel, config)
        else:
            net = load_pretrained(WEIGHTS_SETTING, weights, ClapModel, config).audio_model
        super().__init__(
            net,
            audio.hidden_size,
            extractor,
            extractor.fft_window_size,
            extractor.mel_filters_slaney,
            extractor.nb_max_samples,
        )

    def spectrogram(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        length = num_samples.clamp(min=1)[:, None]
        index = torch.arange(self.max_samples, device=audio.device)
        repeated = audio.gather(1, (index % length).clamp(max=audio.shape[1] - 1))
        is_audio = index < self.max_samples // length * length
        power = self._power(repeated * is_audio.to(audio.dtype))
        return 10 * power.transpose(1, 2)[:, None]

    def forward(self, audio: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net(self.spectrogram(audio, num_samples)).pooler_output
        return features[:, None], (num_samples > 0).long()[:, None]


def _audio_config(config: WhisperConfig | ClapConfig | ClapAudioConfig) -> Any:
    from transformers import ClapConfig

    return config.audio_config if isinstance(config, ClapConfig) else config


def build_pretrained_audio(
    spec: AudioTower, inputs: ClipInputs, source: WeightSource
) -> PretrainedAudio:
    """Build the audio encoder of `model.audio.weights`.

    Args:
        inputs: The `model.inputs` section; rate and length of the audio must suit the weights.
        source: Its part `audio` is the transformers config.

    Returns:
        A WhisperAudio or ClapAudio: a module from samples int16 [B, N], `model.inputs.audio_rate`
        per second, and numbers of samples int64 [B] to features [B, T, width] and their mask int64
        [B, T].

    Raises:
        UsageError: The weights cannot be read, or do not suit the inputs: their rate is not
            `audio_rate`, or they take less than `clip_s` seconds.
    """
    config = encoder_config("audio", WEIGHTS_SETTING, spec.weights, HF_AUDIO_TYPES, source)
    set_dropout(_audio_config(config), spec.dropout)
    weights = spec.weights if source.pretrained else None
    encoder_class = WhisperAudio if config.model_type == "whisper" else ClapAudio
    tower = encoder_class(config, weights)
    if inputs.audio_rate != tower.rate:
        raise UsageError(
            f"model.inputs.audio_rate: {spec.weights} needs {tower.rate}, not {inputs.audio_rate}"
        )
    if inputs.clip_s * tower.rate > tower.max_samples:
        raise UsageError(
            f"model.inputs.clip_s: {spec.weights} takes up to {tower.max_samples / tower.rate:g} "
            f"s, not {inputs.clip_s:g}"
        )
    return tower
