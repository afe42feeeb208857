"""SIMD resize equals Pillow's, in every thread; Pillow is the fallback without a SIMD build."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mmray.data.images import transform as module
from mmray.data.images.transform import resize, resize_with_pillow, to_pillow

SIZES = [(1, 1), (3, 200), (224, 224), (257, 131), (640, 17), (60, 400)]


def noise(width, height, seed):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def stripes(width, height, seed):
    """Black and white squares of one pixel and more: maximum overshoot, and exact rounding
    everywhere.
    """
    y, x = np.mgrid[:height, :width] // (seed % 4 + 1)
    return (((x + y) % 2)[..., None] * 255).repeat(3, 2).astype(np.uint8)


def center(width, height):
    """A central crop with integer sides, at half-pixel offsets if the difference is odd."""
    w, h = -(-2 * width // 3), -(-3 * height // 4)
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


@pytest.mark.skipif(module.simd is None, reason="no build of cykooz.resizer for this processor")
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("photo", [noise, stripes])
def test_resize_equals_pillow_within_two_levels(photo, size, interpolation):
    """Enlarged and reduced, full image and crop."""
    for seed in range(3):
        rgb = photo(*size, seed)
        for box in ((0, 0, *size), center(*size)):
            for target in ((32, 32), (224, 5), (224, 300)):
                mine = resize(rgb, target, interpolation, box).astype(int)
                difference = np.abs(mine - resize_with_pillow(rgb, target, interpolation, box))
                assert mine.shape == (target[1], target[0], 3)
                assert difference.max() <= 2
                assert difference.mean() < 0.05 or photo is stripes or min(size) < 9


def test_concurrent_threads_resize_correctly():
    pictures = [
        np.random.default_rng(seed).integers(0, 256, (300, 200, 3), dtype=np.uint8)
        for seed in range(8)
    ]
    alone = [resize(rgb, (64, 64), "bicubic", (0, 0, 200, 300)) for rgb in pictures]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = pool.map(
                lambda rgb: resize(rgb, (64, 64), "bicubic", (0, 0, 200, 300)), pictures
            )
            assert all(
                np.array_equal(one, other) for one, other in zip(together, alone, strict=True)
            )


def test_pillow_is_the_fallback(monkeypatch):
    rgb = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    monkeypatch.setattr(module, "simd", None)
    box = (0, 0, 20, 30)
    assert np.array_equal(
        resize(rgb, (8, 8), "bilinear", box), resize_with_pillow(rgb, (8, 8), "bilinear", box)
    )


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("width", [1, 5])
def test_pixels_become_the_same_image_with_three_and_four_channels(channels, width):
    pixels = np.random.default_rng(0).integers(0, 256, (4, width, channels), np.uint8)[:, :, :3]
    image = to_pillow(pixels)
    assert image.mode == "RGB" and np.array_equal(np.asarray(image), pixels)
