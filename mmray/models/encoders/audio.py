"""Audio encoder: samples -> log-mel spectrogram -> features of each 40 ms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.models.encoders.text import TransformerLayers, init_as_bert, length_mask

if TYPE_CHECKING:
    from mmray.config.model_kinds import AudioTower

NUM_MELS = 64
WINDOW_S = 0.025
HOP_S = 0.01
# Power below it is silence; samples are in -1..1.
MIN_POWER = 1e-6


def mel_power(samples: Tensor, window: Tensor, filters: Tensor, hop: int, pad_mode: str) -> Tensor:
    """Compute the power of mel bands, float [B, mels, N // hop + 1], of samples [B, N].

    Args:
        window: Weights of the samples of a spectrum, float [W].
        filters: Weights of the frequencies of each band [W // 2 + 1, mels].
        hop: Samples from a spectrum to the next.
    """
    spectrum = torch.stft(
        samples,
        len(window),
        hop,
        window=window,
        center=True,
        pad_mode=pad_mode,
        return_complex=True,
    )
    power = spectrum.real.square() + spectrum.imag.square()
    return filters.T.to(power.dtype) @ power


class LogMel(nn.Module):
    """Log-mel spectrogram of samples, about zero mean and unit variance for speech.

    Filters are triangles on the mel scale of O'Shaughnessy (2595 log10(1 + f / 700)).

    Forward takes samples int16 [B, N] and returns the spectrogram float32 [B, 64, T] of 64 mel
    bands: T = N // round(rate / 100) + 1 frames, one each 10 ms, of 25 ms each. A value is
    (log10(power) + 2) / 2, for samples scaled to -1..1.

    Args:
        rate: Samples per second of the audio.

    Attributes:
        window: Hann window of a spectrum, float32 [W], W samples in 25 ms.
        filters: Weights of the frequencies in each band, float32 [W // 2 + 1, 64].
    """

    window: Tensor
    filters: Tensor

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.hop = round(HOP_S * rate)
        size = round(WINDOW_S * rate)
        num_bins = size // 2 + 1
        frequencies = torch.linspace(0, rate / 2, num_bins, dtype=torch.float64)
        top = 2595 * math.log10(1 + rate / 2 / 700)
        mels = torch.linspace(0, top, NUM_MELS + 2, dtype=torch.float64)
        edges = 700 * (10 ** (mels / 2595) - 1)
        rising = (frequencies[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
        falling = (edges[2:] - frequencies[:, None]) / (edges[2:] - edges[1:-1])
        filters = torch.minimum(rising, falling).clamp(min=0)
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        self.register_buffer("filters", filters.float(), persistent=False)

    def forward(self, audio: Tensor) -> Tensor:
        # Half precision has too few bits for the power of a spectrum.
        with torch.autocast(audio.device.type, enabled=False):
            samples = audio.to(self.window.dtype) / 32768
            mels = mel_power(samples, self.window, self.filters, self.hop, "constant")
            return (mels.clamp(min=MIN_POWER).log10() + 2) / 2

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Return how many frames of each row's spectrogram have audio and not only padding, int64
        [B].
        """
        return (num_samples + self.hop - 1) // self.hop


class AudioTransformer(nn.Module):
    """Two convolutions over a log-mel spectrogram, and a transformer (Whisper's layout, Radford et
    al. 2022, arXiv:2212.04356).

    Outputs do not depend on padding. transformers' encoders with random weights need clips padded
    to the longest of the settings: for clips of up to 3 s a step takes 2.2 times as long with
    WhisperEncoder, which also attends to padding, and 3.6 times with ASTModel if clips may have 10
    s (0.9 times, with 160 ms a token, if they may have 3 s).

    Forward takes samples int16 [B, N] and the number of samples of each row, int64 [B], and returns
    a feature vector for each 40 ms, [B, T, width], and a mask int64 [B, T], 0 for padding. There is
    no pooling.

    Args:
        spec: The `model.audio` section.
        rate: Samples per second of the audio.
    """

    def __init__(self, spec: AudioTower, rate: int) -> None:
        super().__init__()
        self.width = spec.width
        self.mels = LogMel(rate)
        self.conv1 = nn.Conv1d(NUM_MELS, spec.width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(spec.width, spec.width, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.layers = TransformerLayers(spec.width, spec)
        init_as_bert(self)

    def forward(self, audio: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        mels = self.mels(audio)
        frames = self.mels.num_frames(num_samples)
        hidden = F.gelu(self.conv1(_masked(mels, frames)))
        frames = (frames + 1) // 2
        hidden = F.gelu(self.conv2(_masked(hidden, frames)))
        frames = (frames + 1) // 2
        hidden = hidden.transpose(1, 2)
        hidden = self.dropout(self.norm(hidden + _sinusoids(hidden)))
        mask = length_mask(frames, hidden.shape[1])
        return self.layers(hidden, mask), mask


def _masked(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Return [B, C, T] with zeros after the length of each row, as a convolution pads its input."""
    return hidden * length_mask(lengths, hidden.shape[2])[:, None].to(hidden.dtype)


def _sinusoids(hidden: Tensor) -> Tensor:
    """Return position embeddings [T, W] for hidden states [B, T, W] (Vaswani et al. 2017)."""
    length, width = hidden.shape[1:]
    half = width // 2
    exponents = torch.arange(half, device=hidden.device, dtype=hidden.dtype) / max(1, half - 1)
    angles = torch.arange(length, device=hidden.device, dtype=hidden.dtype)[:, None]
    angles = angles * torch.exp(-math.log(10_000) * exponents)
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width - 2 * half))
