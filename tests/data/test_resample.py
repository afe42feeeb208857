"""Resizing by SIMD agrees with Pillow's, in every thread, and Pillow stands in where there is no build."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mmray.data import resample as module
from mmray.data.resample import resample, resample_by_pillow

SIZES = [(1, 1), (3, 200), (224, 224), (257, 131), (640, 17)]


@pytest.mark.skipif(module.simd is None, reason="no build of cykooz.resizer for this processor")
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES)
def test_noise_agrees_with_pillow_to_two_levels(size, interpolation):
    """Noise is the hardest: each weight counts fully. Enlarged and reduced, whole and in part."""
    width, height = size
    rgb = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    for box in ((0, 0, width, height), (width / 3, height / 4, width, height * 0.9)):
        for target in ((32, 32), (224, 5)):
            mine = resample(rgb, target, interpolation, box).astype(int)
            difference = np.abs(mine - resample_by_pillow(rgb, target, interpolation, box))
            assert mine.shape == (target[1], target[0], 3)
            assert difference.max() <= 2 and difference.mean() < 0.3


def test_threads_do_not_disturb_each_other():
    pictures = [np.random.default_rng(seed).integers(0, 256, (300, 200, 3), dtype=np.uint8) for seed in range(8)]
    alone = [resample(rgb, (64, 64), "bicubic", (0, 0, 200, 300)) for rgb in pictures]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = pool.map(lambda rgb: resample(rgb, (64, 64), "bicubic", (0, 0, 200, 300)), pictures)
            assert all(np.array_equal(one, other) for one, other in zip(together, alone, strict=True))


def test_pillow_stands_in(monkeypatch):
    rgb = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    monkeypatch.setattr(module, "simd", None)
    box = (0, 0, 20, 30)
    assert np.array_equal(resample(rgb, (8, 8), "bilinear", box), resample_by_pillow(rgb, (8, 8), "bilinear", box))
