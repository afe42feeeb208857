"""Image decoding: every accepted format, transparency, bit depth, orientation, and damaged
bytes.
"""

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, TiffImagePlugin

from mmray.data.images import decode as decode_module
from mmray.data.images.decode import (
    MAX_PIXELS,
    BadImage,
    decode,
    header_size,
    verify_image,
)
from mmray.data.images.pages import image_notices, split_pages
from mmray.data.images.transform import reencode, resize_to_square
from tests.data.formats.bad_inputs import animated, raw_png
from tests.made import encode


def with_pillow(data, max_pixels=MAX_PIXELS):
    """Decode with Pillow alone: the reference for the fast JPEG path."""
    return decode_module.decode_with_pillow(
        decode_module.open_image(data, max_pixels), data, max_pixels
    )


def photo(width=40, height=30):
    """A smooth image that differs in every direction."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(
        np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], -1).astype(np.uint8)
    )


FORMATS = {
    "JPEG": encode(photo(), "JPEG", quality=95),
    "PNG": encode(photo(), "PNG"),
    "WEBP": encode(photo(), "WEBP", lossless=True),
    "GIF": encode(photo(), "GIF"),
    "MPO": encode(photo(), "MPO", save_all=True, append_images=[photo(8, 8)], quality=95),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_detected_by_content_and_decoded(name):
    assert Image.open(io.BytesIO(FORMATS[name])).format == name
    image = with_pillow(FORMATS[name])
    assert (image.mode, image.size) == ("RGB", (40, 30))
    assert np.abs(np.asarray(image).astype(int) - np.asarray(photo())).mean() < 12
    assert np.array_equal(decode(FORMATS[name]), image)
    assert verify_image(FORMATS[name]) == image.size


def rotated(orientation, kind="JPEG"):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = orientation, "a camera"
    return encode(photo(), kind, exif=exif)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind, orientation):
    data = rotated(orientation, kind)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.array_equal(decode(data), expected) and np.array_equal(with_pillow(data), expected)
    assert header_size(data) == verify_image(data) == ((30, 40) if orientation >= 5 else (40, 30))


@pytest.mark.parametrize("name", FORMATS)
def test_header_size_decodes_no_pixels(monkeypatch, name):
    upright, turned = FORMATS[name], rotated(6, name) if name in ("JPEG", "PNG", "WEBP") else None
    for kind in {type(Image.open(io.BytesIO(data))) for data in FORMATS.values()}:
        monkeypatch.setattr(kind, "load", lambda *_: pytest.fail("decoded"))
    assert header_size(upright) == (40, 30)
    assert turned is None or header_size(turned) == (30, 40)


@pytest.mark.parametrize("late", [False, True])
def test_orientation_in_png_text_is_applied(late):
    """Pillow reads the XMP packet of a PNG; after the pixels, where ExifTool writes it, only
    decoding reads it.
    """
    packet = b'XML:com.adobe.xmp\0\0\0\0\0<rdf:Description tiff:Orientation="6"/>'
    chunk = (
        struct.pack(">I", len(packet))
        + b"iTXt"
        + packet
        + struct.pack(">I", zlib.crc32(b"iTXt" + packet))
    )
    data = FORMATS["PNG"]
    at = len(data) - 12 if late else 33  # before IEND; after IHDR
    data = data[:at] + chunk + data[at:]
    assert verify_image(data) == decode(data).shape[1::-1] == (30, 40)
    assert header_size(data) == ((40, 30) if late else (30, 40))


def test_pillow_warnings_are_not_logged():
    """Damaged EXIF, in a process set up like a decode actor."""
    exif = b"Exif\0\0MM\0*" + struct.pack(">LHHHLL", 8, 1, 0x010F, 2, 10**6, 26) + bytes(4)
    code = (
        "import sys; from mmray.data.images.decode import verify_image; "
        "verify_image(sys.stdin.buffer.read())"
    )
    data = encode(photo(), "JPEG", exif=exif)
    run = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert run.stderr == b""


def test_transparency_is_composited_on_white():
    rgba = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    rgba.putpixel((0, 0), (200, 0, 0, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 51))
    pixels = np.asarray(with_pillow(encode(rgba, "PNG")))
    assert pixels[0, 0].tolist() == [200, 0, 0]
    assert pixels[0, 1].tolist() == [204, 204, 204]
    assert (pixels[1:] == 255).all()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            raw_png(16, 0, [struct.pack(">2H", 0, 65535), struct.pack(">2H", 32768, 257)]),
            [0, 255, 128, 1],
        ),
        (raw_png(16, 0, [struct.pack(">2H", 0, 1000)], struct.pack(">H", 1000)), [0, 255]),
        (raw_png(16, 0, [struct.pack(">2H", 65000, 999)], struct.pack(">H", 65000)), [255, 4]),
        (raw_png(4, 0, [b"\x5a"], b"\0\5"), [255, 170]),
        (raw_png(2, 0, [b"\x40"], b"\0\1"), [255, 0]),
        (raw_png(1, 0, [b"\x40"], b"\0\0"), [255, 255]),
        (raw_png(1, 0, [b"\x40"], b"\0\1"), [0, 255]),
        (raw_png(8, 0, [b"\x05\x06"], b"\0\5"), [255, 6]),
        (raw_png(16, 2, [b"\x12\x34" * 3 + b"\x56\x78" * 3], b"\x12\x34" * 3), [255, 86]),
    ],
)  # fmt: skip
def test_bit_depth_is_scaled_and_transparent_color_is_applied(data, expected):
    pixels = np.asarray(with_pillow(data))
    assert pixels[..., 0].ravel().tolist() == expected
    assert (pixels == pixels[..., :1]).all()


def gray_tiff(largest, least=0, **tags):
    """A TIFF of two gray samples of 16 bits, `least` and `largest`, and tags such as t281."""
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    for name, value in tags.items():
        directory[int(name[1:])] = value
    samples = np.array([[least, largest]], np.uint16)
    return encode(Image.fromarray(samples), "TIFF", tiffinfo=directory)


def gray_png(largest, significant_bits=None):
    data = raw_png(16, 0, [struct.pack(">2H", 0, largest)])
    if significant_bits is None:
        return data
    chunk = b"sBIT" + bytes([significant_bits])
    chunk = b"\0\0\0\1" + chunk + struct.pack(">I", zlib.crc32(chunk))
    return data[:33] + chunk + data[33:]


@pytest.mark.parametrize(
    ("data", "expected", "notice"),
    [
        (gray_tiff(4095), 255, "uses fewer"),
        (gray_tiff(1000), 249, "uses fewer"),
        (gray_tiff(16_000), 249, "uses fewer"),
        (gray_tiff(200), 200, "uses fewer"),
        (gray_tiff(40_000), 156, ""),
        (gray_tiff(2000, t281=4095), 125, ""),
        (gray_tiff(2000, t281=3990), 125, ""),
        (gray_tiff(2000, t341=4095), 125, ""),
        (gray_tiff(2000, t341=65535), 8, "dark"),
        (gray_tiff(2000, t281=255), 125, "uses fewer"),
        (gray_tiff(4095, t262=0), 0, "uses fewer"),
        (gray_tiff(40_000, least=30_000), 156, "little contrast"),
        (gray_png(4095), 255, "uses fewer"),
        (gray_png(2000, 12), 125, ""),
        (gray_png(40_000, 12), 156, ""),
        (gray_png(2000, 16), 8, "dark"),
        (b"P5 2 1 4095\n\0\0\x0f\xff", 255, ""),
        (raw_png(16, 2, [struct.pack(">6H", 0, 0, 0, 9000, 9000, 9000)]), 35, "dark"),
        (raw_png(16, 4, [struct.pack(">4H", 0, 65535, 9000, 65535)]), 35, "dark"),
    ],
)  # fmt: skip
def test_images_of_16_bits_that_use_fewer_are_scaled_or_noted(data, expected, notice):
    assert decode(data)[0, 1].tolist() == [expected] * 3
    notices = image_notices(data)
    assert len(notices) == bool(notice) and all(notice in each for each in notices)


def test_gray_of_16_bits_is_scaled_before_it_is_turned():
    data = gray_tiff(4095, t274=6, t281=4095)
    assert decode(data)[..., 0].tolist() == [[0], [255]]
    assert image_notices(data) == []


def pages(*images, **options):
    return encode(images[0], "TIFF", save_all=True, append_images=images[1:], **options)


def test_pages_of_tiff_are_noted_and_split_as_decode_sees_them():
    sheets = [Image.new("1", (9, 7), 1), photo(), Image.new("CMYK", (4, 4), (0, 99, 0, 0))]
    data = pages(*sheets)
    assert decode(data).shape == (7, 9, 3) and "pages 2 and later" in image_notices(data)[0]
    split = [decode(page) for page in split_pages(data)[0]]
    for pixels, sheet in zip(split, sheets, strict=True):
        assert np.array_equal(pixels, decode(encode(sheet, "TIFF")))
    assert split_pages(pages(photo())) == split_pages(animated("GIF")) == ([], [])


def test_gray_pages_of_16_bits_have_one_white():
    slices = [Image.fromarray(np.full((2, 2), value, np.uint16)) for value in (900, 3600)]
    data = pages(photo(), *slices)
    assert [int(decode(page)[0, 0, 0]) for page in split_pages(data)[0][1:]] == [56, 224]
    assert "uses fewer" in split_pages(data)[1][0]
    assert "pages 2 and later" in image_notices(data)[0]


@pytest.mark.parametrize(
    ("samples", "detail"),
    [
        (np.array([[0, 70_000]], np.int32), "its gray samples are 0 to 70,000"),
        (np.array([[-1000, 3000]], np.int32), "its gray samples are -1,000 to 3,000"),
    ],
)
def test_gray_of_unknown_range_is_refused_with_its_range(samples, detail):
    data = encode(Image.fromarray(samples), "TIFF")
    for read in (decode, verify_image, image_notices):
        with pytest.raises(BadImage, match=detail) as info:
            read(data)
        assert info.value.reason == "format"


def test_smaller_copies_in_tiff_are_no_pages():
    photos = [photo(), photo(20, 15)]
    photos[1].encoderinfo = {"tiffinfo": {254: 1}}
    data = pages(*photos)
    assert image_notices(data) == []
    assert split_pages(data) == ([], [])


def test_tiff_with_damaged_second_page_is_noted_and_not_split():
    data = bytearray(pages(photo(), photo()))
    second = struct.unpack_from("<I", data, 4)[0]
    second += 2 + 12 * struct.unpack_from("<H", data, second)[0]
    struct.pack_into("<I", data, second, len(data) + 4)
    assert decode(bytes(data)).shape == (30, 40, 3)
    assert "pages 2 and later" in image_notices(bytes(data))[0]
    with pytest.raises(BadImage, match="corrupt"):
        split_pages(bytes(data))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "AVIF"])
def test_frames_after_the_first_are_noted(kind):
    assert image_notices(animated(kind)) == ["frames after the first of an animation are not used"]
    assert image_notices(encode(photo(), kind)) == []


@pytest.mark.parametrize("transfer", [1, 16, 18])
def test_hdr_images_are_noted(transfer):
    chunk = b"cICP" + bytes([9, transfer, 0, 1])
    chunk = b"\0\0\0\4" + chunk + struct.pack(">I", zlib.crc32(chunk))
    notices = image_notices(FORMATS["PNG"][:33] + chunk + FORMATS["PNG"][33:])
    assert len(notices) == (transfer != 1) and all("HDR" in each for each in notices)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animation_decodes_to_its_first_frame(kind):
    assert decode(animated(kind)).mean((0, 1)) == pytest.approx([255, 0, 0], abs=3)


def test_cmyk_and_gray_become_rgb():
    assert decode(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))[4, 4, 0] > 200
    assert decode(encode(Image.new("L", (8, 8), 77), "PNG"))[4, 4].tolist() == [77, 77, 77]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<svg/>", "format"), (FORMATS["PNG"][:-12], "truncated"),
        (FORMATS["WEBP"][:-40], "truncated"),
        (FORMATS["GIF"][:-400], "truncated"), (b"\x89PNG\r\n\x1a\n", "truncated"),
        (b"\xff\xd8\xff\xe0", "corrupt"),
        (raw_png(8, 0, [b"\0\0"], size=(6000, 6000)), "too-large"),
    ],
)  # fmt: skip
def test_bad_bytes_raise_with_reason(data, reason):
    with pytest.raises(BadImage) as caught:
        with_pillow(data)
    assert caught.value.reason == reason
    assert caught.value.detail


@settings(max_examples=150)
@given(name=st.sampled_from(sorted(FORMATS)), data=st.data())
def test_damaged_bytes_decode_or_raise_bad_image(name, data):
    damaged = bytearray(FORMATS[name])
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(len(damaged) // 2, len(damaged))) :]
    try:
        assert with_pillow(bytes(damaged), 1_000_000).mode == "RGB"
    except BadImage as bad:
        assert bad.reason in ("empty", "format", "too-large", "truncated", "corrupt", "checksum")


def test_flipped_bit_in_a_png_is_always_detected():
    data = FORMATS["PNG"]
    for position in range(8, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 4
        with pytest.raises(BadImage):
            with_pillow(bytes(damaged))


def test_squash_crop_and_pad():
    image = Image.new("RGB", (90, 30), "black")
    image.paste("red", (30, 0, 60, 30))
    squash, crop, pad = (
        resize_to_square(np.asarray(image), 12, fit, "bilinear")
        for fit in ("squash", "crop", "pad")
    )
    for pixels in (squash, crop, pad):
        assert (pixels.shape, pixels.dtype, pixels.flags.c_contiguous) == (
            (3, 12, 12),
            np.uint8,
            True,
        )
    assert (squash[0, :, 0] < 10).all() and (squash[0, :, 6] > 245).all()
    # at the edges the filter reads the black outside, as after a full resize
    assert (crop[0, :, 1:-1] == 255).all()
    assert (crop[0] > 200).all() and (crop[1:] == 0).all()
    assert (pad[:, :4] == 255).all() and (pad[:, 8:] == 255).all() and (pad[1, 4:8] < 10).all()


@pytest.mark.parametrize(
    "options", [{}, {"subsampling": 0}, {"progressive": True}, {"quality": 30}, {"optimize": True}]
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_fast_path_equals_pillow(mode, options):
    for size in ((64, 48), (37, 61), (1, 1), (17, 8)):
        data = encode(photo(*size).convert(mode), "JPEG", **options)
        assert np.array_equal(decode(data), with_pillow(data))
        assert verify_image(data) == size


def test_xmp_orientation_is_applied():
    packet = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encode(photo(40, 30), "JPEG", xmp=packet)
    assert np.array_equal(decode(data), np.asarray(with_pillow(data)))
    assert verify_image(data) == with_pillow(data).size == (30, 40)


def test_upright_jpeg_takes_fast_path(monkeypatch):
    data = rotated(1)
    expected = np.asarray(with_pillow(data))
    monkeypatch.setattr(
        decode_module, "decode_with_pillow", lambda *_: pytest.fail("decoded by Pillow")
    )
    assert np.array_equal(decode(data), expected)


@pytest.mark.parametrize("progressive", [False, True])
def test_damaged_jpegs_give_same_result_on_both_paths(progressive):
    """For any damaged byte, both paths give the same pixels and size, or the same reason."""
    whole, draw = encode(photo(64, 48), "JPEG", progressive=progressive), np.random.default_rng(0)
    outcomes = set()
    for _ in range(800):
        data = bytearray(whole)
        for at in draw.integers(2, len(whole), draw.integers(1, 4)):
            data[at] = draw.integers(256)
        data = bytes(data[: draw.integers(2, len(whole))] if draw.random() < 0.2 else data)
        try:
            expected = with_pillow(data, 10**6)
        except BadImage as bad:
            outcomes.add("bad")
            for read in (decode, verify_image):
                with pytest.raises(BadImage) as judged:
                    read(data, 10**6)
                assert str(judged.value) == str(bad)
            continue
        outcomes.add("good")
        assert verify_image(data, 10**6) == expected.size
        assert np.array_equal(decode(data, 10**6), expected)
    assert outcomes == {"bad", "good"}


def test_shrink_keeps_small_images_and_re_encodes_large_ones():
    jpeg, lossless = FORMATS["JPEG"], FORMATS["PNG"]
    assert reencode(decode(jpeg), jpeg, 30) == (jpeg, (40, 30))
    assert reencode(decode(jpeg), jpeg, 64)[0] is jpeg
    small, size = reencode(decode(jpeg), jpeg, 15)
    assert Image.open(io.BytesIO(small)).format == "JPEG"
    assert with_pillow(small).size == size == (20, 15)
    assert small == reencode(decode(jpeg), jpeg, 15)[0]
    turned, size = reencode(decode(rotated(6)), rotated(6), 15)
    assert with_pillow(turned).size == size == (15, 20)
    for data in (lossless, FORMATS["WEBP"], FORMATS["GIF"]):
        assert Image.open(io.BytesIO(reencode(decode(data), data, 15)[0])).format == "PNG"


def test_reduced_jpeg_has_the_quality_of_pillows():
    data = encode(photo(400, 300))
    small = with_pillow(data).resize((200, 150), Image.Resampling.BICUBIC)
    by_pillow = encode(small, "JPEG", quality=90)
    errors = [
        np.abs(np.subtract(with_pillow(each), small, dtype=float)).mean()
        for each in (reencode(decode(data), data, 150)[0], by_pillow)
    ]
    assert errors[0] < 1.1 * errors[1] < 3.0


def test_png_suite(shared_data):
    """All color types and depths decode; all deliberately damaged files (x*.png) are refused."""
    refused, paths = [], sorted((shared_data / "pngsuite").glob("*.png"))
    for path in paths:
        if path.name.startswith("x"):
            with pytest.raises(BadImage):
                with_pillow(path.read_bytes())
            refused.append(path.stem)
        else:
            assert with_pillow(path.read_bytes()).mode == "RGB"
    assert (len(paths), len(refused)) == (175, 14)
