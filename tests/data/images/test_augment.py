"""Augmentation depends only on (seed, epoch, key), and each kind equals torchvision's."""

import itertools

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from mmray.config import Augment, Inputs
from mmray.data.images.transform import (
    CROP_SLICE,
    FLIP_INDEX,
    JITTER_ORDER_SLICE,
    JITTER_SLICE,
    NUM_UNIFORMS,
    random_crop_box,
    resize_to_square,
    transform,
)
from mmray.data.stream.order import SamplePlan, hash_uniform
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import UsageError
from tests.made import CAPTIONS, make_set, noisy, row

INPUTS = Inputs(image_side=16, fit="squash", interpolation="bilinear", max_tokens=12)
ALL = Augment(crop_scale=(0.5, 0.9), flip=0.5, color_jitter=(0.2, 0.2, 0.2, 0.1))


def photo(width=40, height=30):
    ramp = np.arange(width * height * 3).reshape(height, width, 3) * 7 % 256
    return Image.fromarray(ramp.astype(np.uint8))


def drawn(**places):
    """Draws of 0.5, which have no effect, except at these indices."""
    numbers = np.full(NUM_UNIFORMS, 0.5)
    numbers[JITTER_ORDER_SLICE] = [0.1, 0.2, 0.3, 0.4]
    for place, value in places.items():
        places = {
            "flip": FLIP_INDEX,
            "factors": JITTER_SLICE,
            "turns": JITTER_ORDER_SLICE,
            "crop": CROP_SLICE,
        }
        numbers[places[place]] = value
    return numbers


PIXELS = np.asarray(photo())


def test_uniform_is_flat_and_depends_only_on_its_arguments():
    key = np.arange(2000, dtype=np.int64)
    numbers = hash_uniform(3, np.zeros(2000, np.int64), key, 5)
    assert numbers.shape == (2000, 5) and numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert abs(counts / numbers.size - 0.1).max() < 0.01
    assert abs(np.corrcoef(numbers.T) - np.eye(5)).max() < 0.08
    assert np.array_equal(numbers[7:9], hash_uniform(3, np.zeros(2, np.int64), key[7:9], 5))
    assert (numbers != hash_uniform(3, np.ones(2000, np.int64), key, 5)).all()
    assert (numbers != hash_uniform(4, np.zeros(2000, np.int64), key, 5)).all()


@settings(max_examples=100)
@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**62), st.floats(0.01, 1.0))
def test_random_crop_is_inside_the_image_and_within_limits(width, height, key, low):
    augment = Augment(crop_scale=(low, 1.0))
    numbers = hash_uniform(0, np.zeros(1, np.int64), np.array([key]), NUM_UNIFORMS)[0]
    box = random_crop_box((width, height), augment, numbers[CROP_SLICE])
    left, top, right, bottom = box
    assert all(isinstance(edge, int) for edge in box)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    w, h = right - left, bottom - top  # both rounded by half a pixel
    central = abs(left + right - width) <= 1 and abs(top + bottom - height) <= 1
    assert (w + 0.5) / max(h - 0.5, 0.5) >= 0.75 and (w - 0.5) / (h + 0.5) <= 4 / 3
    assert central or (w + 0.5) * (h + 0.5) >= low * width * height


def test_random_crop_equals_torchvision():
    """Includes the central crop after ten failed tries; the ends of both ranges are reached."""
    for size in ((512, 64), (64, 512), (801, 128), (101, 32), (90, 90)):
        image = torch.zeros(3, size[1], size[0])
        never = drawn(crop=np.tile([2000.0, 0.5, 0.5, 0.5], 10))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "uniform_", lambda self, low, high: self.fill_(5.0))
            top, left, h, w = RandomResizedCrop.get_params(image, [1.0, 1.0], [0.75, 4 / 3])
        box = random_crop_box(size, Augment(crop_scale=(0.5, 0.9)), never[CROP_SLICE])
        assert box == (left, top, left + w, top + h)
    places = {
        random_crop_box(
            (12, 10), Augment(crop_scale=(0.5, 0.5)), np.tile([0, 0.5, across, 0.999], 10)
        )
        for across in (0.0, 0.5, 0.999)
    }
    assert places == {(0, 2, 8, 10), (2, 2, 10, 10), (4, 2, 12, 10)}


def test_thin_images_are_cropped_and_enlarged():
    sizes = {
        256: [(512, 64), (400, 64), (801, 128)],
        64: [(293, 32), (128, 16)],
        8: [(1, 1), (1000, 1), (1, 1000)],
    }
    for side, shapes in sizes.items():
        for width, height in shapes:
            pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
            for fit in ("crop", "squash", "pad"):
                inputs = Inputs(image_side=side, fit=fit, interpolation="bicubic", max_tokens=12)
                for numbers in hash_uniform(1, np.zeros(40, np.int64), np.arange(40), len(drawn())):
                    for augment in (Augment(), Augment(crop_scale=(0.08, 1.0))):
                        assert transform(pixels, inputs, augment, numbers).shape == (3, side, side)


def test_flip_mirrors_the_image():
    plain = resize_to_square(PIXELS, 16, "squash", "bilinear")
    assert np.array_equal(
        transform(PIXELS, INPUTS, Augment(flip=0.5), drawn(flip=0.4)), plain[:, :, ::-1]
    )
    assert np.array_equal(transform(PIXELS, INPUTS, Augment(flip=0.5), drawn(flip=0.5)), plain)
    assert Augment().flip == 0 and not Augment().is_active, (
        "a flip would make `left` in a caption wrong"
    )


def test_jitter_equals_torchvision_in_the_drawn_order():
    augment = Augment(color_jitter=(0.4, 0.4, 0.4, 0.2))
    square = Image.fromarray(resize_to_square(PIXELS, 16, "squash", "bilinear").transpose(1, 2, 0))
    mine = transform(
        PIXELS, INPUTS, augment, drawn(factors=[0.75, 0.1, 0.9, 0.75], turns=[0.3, 0.9, 0.1, 0.5])
    )
    theirs = F.adjust_saturation(square, 1 + 0.4 * 0.8)
    theirs = F.adjust_brightness(theirs, 1.2)
    theirs = F.adjust_hue(theirs, 0.1)
    theirs = F.adjust_contrast(theirs, 1 - 0.4 * 0.8)
    difference = np.abs(mine.astype(int) - np.asarray(theirs).transpose(2, 0, 1))
    assert difference.max() <= 2  # the hue is rounded here and truncated there


def test_augmentation_depends_on_epoch_and_not_on_position(tmp_path):
    prepared = make_set(tmp_path, [row(number, data=noisy(number)) for number in range(6)])
    plain = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    varied = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6, ALL)
    off = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6, Augment())
    plan = SamplePlan(num_rows=6, global_batch_size=3, world_size=1, seed=1, steps=8)
    positions = np.arange(12)
    block = varied.read_block(plan, positions)
    by_key = [
        {int(k): p for k, p in zip(block["key"][e], block["image"][e], strict=True)}
        for e in (slice(0, 6), slice(6, 12))
    ]
    assert all((by_key[0][key] != by_key[1][key]).any() for key in by_key[0])
    alone = varied.read_block(plan, positions[4:5])
    assert np.array_equal(alone["image"][0], block["image"][4])
    assert np.array_equal(
        off.read_block(plan, positions)["image"], plain.read_block(plan, positions)["image"]
    )


def randomize(image, generator):
    """The user's: the first pixels become random ones."""
    image[0] = generator.integers(0, 256, image[0].shape)
    return image


def wrong_size(image, generator):
    return image[:4]


def test_function_of_the_user_changes_the_square_by_seed_epoch_and_key(tmp_path):
    prepared = make_set(tmp_path, [row(number, data=noisy(number)) for number in range(6)])
    tokenizer = train_tokenizer(CAPTIONS, 60)
    name = "tests.data.images.test_augment"

    def block(positions, seed=1, function="randomize", augment=Augment()):  # noqa: B008
        reader = RowReader(
            prepared, INPUTS, tokenizer, 10**6, augment, function=function and f"{name}:{function}"
        )
        plan = SamplePlan(num_rows=6, global_batch_size=3, world_size=1, seed=seed, steps=8)
        return reader.read_block(plan, positions)

    positions = np.arange(12)
    mine = block(positions)
    plain = block(positions, function=None)
    assert np.array_equal(mine["image"][:, :, 1:], plain["image"][:, :, 1:])
    first_rows = mine["image"][:, :, 0].reshape(12, -1)
    assert len(np.unique(first_rows, axis=0)) == 12, "another in each epoch and for each row"
    assert np.array_equal(block(positions[7:8])["image"][0], mine["image"][7])
    for first, rank in itertools.product(range(4), range(2)):  # of two ranks
        own = SamplePlan(6, 3, world_size=2, seed=1, steps=8).positions(first, rank)
        assert np.array_equal(block(own[own >= 0])["image"], mine["image"][own[own >= 0]])
    assert (block(positions, seed=2)["image"] != mine["image"]).any()
    flipped = block(positions, augment=Augment(flip=1.0), function=None)["image"]
    both = block(positions, augment=Augment(flip=1.0))["image"]
    assert np.array_equal(both[:, :, 1:], flipped[:, :, 1:])
    with pytest.raises(UsageError, match=r"data\.augment: .*wrong_size` returned the shape \(4, "):
        block(positions, function="wrong_size")
