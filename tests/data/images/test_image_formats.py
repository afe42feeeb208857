"""Every format of images that is read: pixels, orientation, odd samples, and corrupted files."""

import io
import random
import struct
import zlib
from contextlib import closing

import numpy as np
import pytest
from PIL import Image, ImageOps

from mmray.data.formats.listing import is_image
from mmray.data.images.decode import BadImage, decode, header_size, verify_image
from mmray.data.images.formats import IMAGE_FORMATS, IMAGE_SUFFIXES, detect_format
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from tests.made import encode

RAMP = Image.fromarray(np.linspace(0, 255, 40 * 60 * 3).reshape(40, 60, 3).astype(np.uint8))
# the formats of cameras and the web that were added last, with the options of their encoders
OPTIONS = {
    "AVIF": {"quality": 90},
    "TIFF": {"compression": "tiff_lzw"},
    "JPEG2000": {},
    "ICO": {"sizes": [(60, 40)], "bitmap_format": "bmp"},
    "PPM": {},
    "BMP": {},
}


def test_each_format_has_suffixes_of_images():
    assert len(set(IMAGE_SUFFIXES)) == len(IMAGE_SUFFIXES)
    for name in ("a.JPE", "a.jfif", "a.avif", "a.TIFF", "a.jp2", "a.ppm", "a.heic", "a.dng"):
        assert is_image(name)
    assert not is_image("a.mp4") and set(OPTIONS) <= IMAGE_FORMATS.keys()


@pytest.mark.parametrize("kind", OPTIONS)
def test_pixels_equal_those_of_pillow(kind):
    data = encode(RAMP, kind, **OPTIONS[kind])
    assert detect_format(data) == kind
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    pixels = decode(data)
    assert np.array_equal(pixels, expected)
    assert verify_image(data) == header_size(data) == pixels.shape[1::-1]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["TIFF", "AVIF"])
def test_orientation_is_applied(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(RAMP, kind, exif=exif)
    pixels = decode(data)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(pixels, np.asarray(expected))
    assert verify_image(data) == header_size(data) == pixels.shape[1::-1]


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP", b"tEXt"])
@pytest.mark.parametrize("at_end", [False, True])
def test_large_metadata_of_a_png_is_accepted(kind, at_end):
    plain = encode(RAMP, "PNG")
    body = zlib.compress(bytes(8_000_000))
    data = {
        b"zTXt": b"Comment\0\0" + body,
        b"iTXt": b"Comment\0\1\0\0\0" + body,
        b"iCCP": b"profile\0\0" + body,
        b"tEXt": b"Comment\0" + bytes(8_000_000),
    }[kind]
    position = plain.index(b"IEND") - 4 if at_end else plain.index(b"IDAT") - 4
    padded = plain[:position] + png_chunk(kind, data) + plain[position:]
    assert np.array_equal(decode(padded), np.asarray(RAMP))
    assert verify_image(padded) == (60, 40)


def test_orientation_of_a_png_in_a_text_is_kept():
    exif = Image.Exif()
    exif[0x0112] = 6
    text = f"\nexif\n{len(exif.tobytes()):8d}\n{exif.tobytes().hex()}\n".encode()
    plain = encode(RAMP, "PNG")
    position = plain.index(b"IDAT") - 4
    chunk = png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text))
    assert header_size(plain[:position] + chunk + plain[position:]) == (40, 60)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(Image.new("F", (4, 4), 0.5), "TIFF"), "format"),
        (encode(Image.new("I", (4, 4), 70_000), "TIFF"), "format"),
        (encode(Image.new("RGB", (7000, 5000)), "TIFF", compression="packbits"), "too-large"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "format|corrupt"),
    ],
)
def test_samples_of_unknown_range_and_large_images_are_refused(data, reason):
    with pytest.raises(BadImage, match=reason):
        decode(data)


def test_own_limit_is_named_where_pillow_has_another():
    with pytest.raises(BadImage, match="over 2000 pixels"):
        decode(encode(Image.new("1", (20_000, 10_000)), "PNG"), 2000)


def test_damaged_tiff_is_an_error_without_output_of_its_library(capfd):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encode(Image.fromarray(pixels), "TIFF", compression="tiff_lzw")
    with pytest.raises(BadImage, match="corrupt"):
        decode(data[:20] + bytes(255 - byte for byte in data[20:200]) + data[200:])
    assert capfd.readouterr() == ("", "")


def test_large_png_in_an_icon_is_refused():
    data = encode(RAMP, "ICO", sizes=[(60, 40)])
    with pytest.raises(BadImage, match="60 x 40 is over 2000 pixels"):
        decode(data, 2000)
    start = data.index(b"\x89PNG")
    huge = data[: start + 16] + struct.pack(">II", 30_000, 30_000) + data[start + 24 :]
    with pytest.raises(BadImage, match="corrupt"):
        decode(huge)


def corrupted(rng, data):
    """Truncate, flip bits, or write large numbers into the header."""
    changed = bytearray(data)
    kind = rng.randrange(3)
    if kind == 0:
        return data[: rng.randrange(1, len(data))]
    for _ in range(rng.randrange(1, 30) if kind == 1 else rng.randrange(1, 6)):
        position = rng.randrange(len(data) if kind == 1 else min(len(data), 200))
        changed[position] = changed[position] ^ 1 << rng.randrange(8) if kind == 1 else 255
    return bytes(changed)


def check_corrupted(count):
    """Return (good, bad) numbers of corrupted images, and crashes of the decoder process."""
    rng = random.Random(0)
    images = [encode(RAMP, kind, **options) for kind, options in OPTIONS.items()]
    images += [encode(RAMP, "TIFF", compression=each) for each in ("jpeg", "tiff_adobe_deflate")]
    good = bad = 0
    with closing(SubprocessDecoder()) as decoder:
        for number in range(count):
            try:
                decoder.check(corrupted(rng, images[number % len(images)]), 25_000_000)
                good += 1
            except BadImage:
                bad += 1
        return good, bad, decoder.num_crashes


def test_corrupted_images_are_kept_or_refused():
    good, bad, crashes = check_corrupted(80)
    assert good + bad == 80 and bad > 20 and crashes == 0


@pytest.mark.slow
def test_thousand_corrupted_images_are_kept_or_refused():
    good, bad, crashes = check_corrupted(1000)
    print(f"{good} good, {bad} bad, {crashes} crashes")
    assert good + bad == 1000
