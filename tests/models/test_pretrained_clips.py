"""Pretrained encoders of audio and video in `towers`, against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmray.config import (
    AudioTower,
    ClipInputs,
    Config,
    FrameTransformer,
    Lora,
    Objective,
    Optimizer,
    Towers,
)
from mmray.engine.checkpoint import state_io
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.protocol import saved_layers
from tests.engine import recipe_models
from tests.models.test_towers import train_and_resume

SIDE = 32
FRAMES = 4


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    """Small random models, as transformers saves them."""
    import transformers as hf

    text = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    whisper = hf.WhisperConfig(**recipe_models.WHISPER)
    clap = hf.ClapConfig(text_config=text, audio_config=recipe_models.CLAP_AUDIO, projection_dim=8)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("pretrained")
    models = {
        "whisper": hf.WhisperForConditionalGeneration(whisper),
        "clap": hf.ClapModel(clap),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


def spec_of(folders: dict[str, Path], audio: str, rate: int, **inputs: Any) -> Towers:
    settings = {"image_side": SIDE, "max_tokens": 6, "clip_s": 1.5, "frames": FRAMES}
    return Towers(
        inputs=ClipInputs(**settings | {"audio_rate": rate} | inputs),
        **recipe_models.TOWERS,
        audio=AudioTower(weights=str(folders[audio])),
        video=FrameTransformer(depth=0),
        embed_dim=8,
    )


def sounds(rate: int) -> tuple[Tensor, Tensor]:
    """Noise of 1.5 and 0.4 s, and a row without audio."""
    draw = np.random.default_rng(0)
    num_samples = torch.tensor([round(1.5 * rate), round(0.4 * rate), 0])
    audio = torch.zeros(3, int(num_samples.max()), dtype=torch.int16)
    for row, count in zip(audio, num_samples.tolist(), strict=True):
        row[:count] = torch.from_numpy(draw.integers(-9999, 9999, count).astype(np.int16))
    return audio, num_samples


@pytest.mark.parametrize(("name", "rate"), [("whisper", 16_000), ("clap", 48_000)])
def test_audio_features_equal_those_of_transformers(name: str, rate: int, folders: Any) -> None:
    import transformers as hf

    tower = build(spec_of(folders, name, rate), recipe_models.VOCAB).eval().audio.tower
    audio, num_samples = sounds(rate)
    waves = [row[:count].numpy() / 32768 for row, count in zip(audio, num_samples, strict=True)]
    if name == "whisper":
        extract: Any = hf.WhisperFeatureExtractor(feature_size=80, chunk_length=2)
        net = hf.WhisperModel.from_pretrained(folders[name]).get_encoder()
        # transformers cannot extract features of no samples.
        waves[2] = np.zeros(rate)
        inputs = extract(waves, sampling_rate=rate, return_tensors="pt").input_features
        expected = net.eval()(inputs).last_hidden_state
        # Logarithms / 4, in float32.
        tolerance = 1e-3
    else:
        extract = hf.ClapFeatureExtractor(truncation="rand_trunc")
        waves = waves[:2]
        net = hf.ClapModel.from_pretrained(folders[name]).audio_model
        inputs = extract(waves, sampling_rate=rate, return_tensors="pt").input_features
        expected = net.eval()(inputs).pooler_output[:, None]
        tolerance = 1e-2  # dB
    features, mask = tower(audio, num_samples)
    own = tower.spectrogram(audio, num_samples)[: len(inputs)]
    difference = (own - inputs).abs()
    assert difference.max() < tolerance and difference.mean() < tolerance / 100
    torch.testing.assert_close(features[: len(inputs)], expected, rtol=0, atol=1e-3)
    # The same encoder: the rest of the difference is that of the spectrograms.
    again = net(own)
    again = again.last_hidden_state if name == "whisper" else again.pooler_output[:, None]
    torch.testing.assert_close(features[: len(inputs)], again, rtol=0, atol=1e-6)
    lengths = [75, 20, 0] if name == "whisper" else [1, 1, 0]
    assert mask.sum(1).tolist() == lengths
    # Shorter batches have less padding.
    short, _ = tower(audio[1:, : num_samples[1]], num_samples[1:])
    torch.testing.assert_close(short, features[1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "rate"), [("whisper", 16_000), ("clap", 48_000)])
def test_every_trained_weight_gets_a_gradient_and_a_copy_is_equal(
    name: str, rate: int, folders: Any
) -> None:
    """DDP waits for the gradient of each weight; statistics of BatchNorm would depend on the
    micro-batch."""
    from mmray.models.synthetic import synthetic_batch

    spec = spec_of(folders, name, rate)
    model: Any = build(spec, recipe_models.VOCAB).double().train()
    batch = synthetic_batch(spec.inputs, recipe_models.VOCAB, 3, "cpu")
    outputs = model(batch)
    sum(each.sum() for key, each in outputs.items() if key.endswith("_embed")).backward()
    lacking = [
        key for key, each in model.named_parameters() if each.requires_grad and each.grad is None
    ]
    assert lacking == ["log_scale"]
    torch.testing.assert_close(
        model({key: column[:1] for key, column in batch.items()})["audio_embed"],
        outputs["audio_embed"][:1],
        rtol=0,
        atol=1e-9,
    )
    copy: Any = build(spec, recipe_models.VOCAB, saved_layers(model.architecture())).double()
    copy.load_state_dict(model.state_dict())
    # A resumed run trains the same weights.
    assert [each.requires_grad for each in copy.parameters()] == [
        each.requires_grad for each in model.parameters()
    ]
    assert torch.equal(copy.eval()(batch)["audio_embed"], model.eval()(batch)["audio_embed"])


@pytest.mark.parametrize(
    ("model", "optimizer", "trained"),
    [
        ({}, {}, r"audio\.tower\.net\.(?!embed_positions).*"),
        (
            {"lora": Lora(rank=2, targets=("*.q_proj",), train="project|log_scale|text")},
            {},
            r".*\.q_proj\.lora_[AB]\..*",
        ),
        (
            {},
            {"freeze": ("audio[:-1]", "video.tower.*")},
            r"audio\.tower\.net\.layer(s\.1|_norm)\..*",
        ),
    ],
)
def test_resumed_run_trains_the_same_weights(
    model: dict[str, Any], optimizer: dict[str, Any], trained: str, folders: Any, tmp_path: Path
) -> None:
    """Whole encoders, adapters in them, or a part of one."""
    config = Config(
        model=spec_of(folders, "whisper", 16_000).replace(**model),
        objective=Objective(kind="audio_text + video_text"),
        optimizer=Optimizer(**optimizer),
    )
    metrics = train_and_resume(config, tmp_path)
    assert (metrics["rows"], metrics["bad_rows"]) == (11, 0)
    assert not any(name.startswith("classification/") for name in metrics)
    first, last = (
        state_io.load_weights(tmp_path / "run" / "checkpoints" / f"step-{step}") for step in (3, 6)
    )
    encoders = {name for name in last if ".tower.net." in name}
    moved = {name for name in encoders if not torch.equal(first[name], last[name])}
    assert moved == {name for name in encoders if re.fullmatch(trained, name)}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"audio_rate": 48_000}, "audio_rate: .*needs 16000, not 48000"),
        ({"clip_s": 3.0}, "clip_s: .*takes up to 2 s, not 3"),
    ],
)
def test_inputs_must_suit_the_weights(inputs: dict[str, Any], message: str, folders: Any) -> None:
    with pytest.raises(UsageError, match=message):
        build(spec_of(folders, "whisper", 16_000, **inputs), recipe_models.VOCAB)
