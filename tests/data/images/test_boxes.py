"""Boxes follow their pixels through squash, crop, pad, random crop and flip, and into padded
batches.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmray.config import Augment, Inputs
from mmray.data.columns import extra_columns
from mmray.data.images.boxes import BoxColumns, clip_boxes, to_model_coords
from mmray.data.images.transform import NUM_UNIFORMS, transform
from mmray.data.stream.blocks import NO_LABEL
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import PADDING, SamplePlan, hash_uniform
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from tests.made import CAPTIONS, encode, make_set, row

SIDE = 64


def inputs(fit="squash", max_boxes=4, side=SIDE):
    return Inputs(
        image_side=side, fit=fit, interpolation="bilinear", max_tokens=12, max_boxes=max_boxes
    )


def scene(width, height, box):
    """A black image with a white rectangle at `box`, in fractions."""
    left, top, right, bottom = (
        round(edge * side) for edge, side in zip(box, (width, height) * 2, strict=True)
    )
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[top:bottom, left:right] = 255
    return Image.fromarray(pixels), [left / width, top / height, right / width, bottom / height]


def bright(square):
    """The box [4] of the white pixels of a square uint8 [3, S, S], padding included, in
    fractions.
    """
    rows, columns = (
        np.flatnonzero(square[0].max(axis=1) > 127),
        np.flatnonzero(square[0].max(axis=0) > 127),
    )
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) / square.shape[1]


def square_with_box(image, fit, *augmented):
    """The box of the rectangle on the model's square; padding is white, so there the colors are
    inverted.
    """
    pixels = np.asarray(image)
    return bright(255 - transform(255 - pixels, inputs(fit), *augmented))


@settings(max_examples=60)
@given(
    st.integers(20, 120), st.integers(20, 120), st.integers(0, 2**62),
    st.sampled_from(["squash", "crop", "pad"]),
    st.sampled_from([0.0, 1.0]), st.sampled_from([(1.0, 1.0), (0.3, 0.9)]),
)  # fmt: skip
def test_augmented_box_matches_its_rectangle(width, height, key, fit, flip, scale):
    """Random crop and flip, with enough of the rectangle visible and a square large enough to
    measure it.
    """
    augment = Augment(crop_scale=scale, flip=flip)
    drawn = hash_uniform(0, np.zeros(1, np.int64), np.array([key]), NUM_UNIFORMS)[0]
    image, box = scene(width, height, (0.2, 0.25, 0.6, 0.7))
    cut, shows = clip_boxes(
        to_model_coords(np.array([box]), (width, height), inputs(fit), augment, drawn)
    )
    if not shows[0] or (cut[0, 2:] - cut[0, :2]).min() < 4 / SIDE:
        return
    # half a pixel of the source and of the square on each side
    blur = 1 / SIDE + 1 / min(width, height)
    assert np.abs(cut[0] - square_with_box(image, fit, augment, drawn)).max() <= blur


def test_boxes_outside_the_crop_are_dropped():
    boxes = np.array(
        [[0.0, 0.2, 0.2, 0.8], [0.2, 0.2, 0.3, 0.8], [0.3, 0.0, 0.7, 1.0], [0.5, 0.5, 0.5, 0.9]]
    )
    # half visible
    cut, shows = clip_boxes(to_model_coords(boxes, (400, 200), inputs("crop"), None, None))
    assert shows.tolist() == [False, True, True, False]
    assert np.allclose(cut[1:3], [[0, 0.2, 0.1, 0.8], [0.1, 0, 0.9, 1]])
    assert not clip_boxes(np.array([[-0.95, 0.0, 0.05, 1.0]]))[1][0]  # a twentieth is visible


def columns_of(boxes, labels, **settings):
    """The columns of one row, whose image has 9 x 9 pixels."""
    made = row(0)
    made.boxes = boxes
    made.box_labels = labels
    extra = BoxColumns(inputs(**settings))
    columns = extra.empty(1)
    extra.set_row(columns, 0, made, (9, 9), None)
    return {name: column[0] for name, column in columns.items()}


def test_largest_boxes_are_kept_in_order():
    boxes = [[0, 0, side, side] for side in (0.3, 0.1, 0.9, 0.5)]
    found = columns_of(boxes, [7, 8, 9, 10], max_boxes=3)
    assert found["box_labels"].tolist() == [7, 9, 10]
    assert np.allclose(found["boxes"][:, 2], [0.3, 0.9, 0.5])
    found = columns_of(boxes[:1], [7], max_boxes=3)
    assert found["box_labels"].tolist() == [7, NO_LABEL, NO_LABEL] and not found["boxes"][1:].any()
    counts = [columns_of(part, None)["num_boxes"] for part in (None, [], boxes)]
    assert counts == [0, 0, 4]
    assert columns_of(boxes, None)["box_labels"].tolist() == [NO_LABEL] * 4
    assert extra_columns(inputs(max_boxes=0)) == []


def boxed(number, count):
    made = row(number, encode(Image.new("RGB", (40, 20), (number, number, number))))
    made.boxes = [[0.5, 0.1 * each, 0.9, 0.1 * each + 0.1] for each in range(count)] or None
    made.box_labels = list(range(count)) or None
    return made


@pytest.mark.parametrize("augment", [None, Augment(flip=1.0)])
def test_batches_carry_boxes_with_a_mask(tmp_path, augment):
    prepared = make_set(tmp_path, [boxed(number, number % 3) for number in range(6)])
    tokenizer = train_tokenizer(CAPTIONS, 60)
    plan = SamplePlan(6, 4, 1, seed=0, steps=2, shuffle=False)
    positions = np.array([*range(6), PADDING, PADDING])
    plain = RowReader(prepared, inputs(max_boxes=0), tokenizer, 10**6, augment).read_block(
        plan, positions
    )
    block = RowReader(prepared, inputs(), tokenizer, 10**6, augment).read_block(plan, positions)
    assert block["num_boxes"].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert not {"boxes", "box_labels", "num_boxes"} & set(plain)
    assert all(np.array_equal(block[name], plain[name]) for name in plain)
    extra = extra_columns(inputs())
    steps = iter_micro_batches([block], plan.rank_rows, 2, extra=extra)
    micros = [micro for step in steps for micro in step]
    assert [tuple(micro["boxes"].shape) for micro in micros] == [
        (2, 1, 4),
        (2, 2, 4),
        (2, 2, 4),
        (2, 0, 4),
    ]
    assert micros[1]["box_mask"].tolist() == [[True, True], [False, False]]
    assert micros[1]["box_labels"].tolist() == [[0, 1], [NO_LABEL, NO_LABEL]]
    left, right = (0.5, 0.9) if augment is None else (0.1, 0.5)
    expected = torch.tensor([[left, 0.0, right, 0.1], [left, 0.1, right, 0.2]])
    assert torch.allclose(micros[1]["boxes"][0], expected, atol=1e-6)
    assert micros[3]["pos"].tolist() == [PADDING, PADDING]
