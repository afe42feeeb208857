"""Bad and unusual inputs and their expected outcomes, for the tests and the table of the README.

`python -m tests.data.formats.bad_inputs` prints the table.
"""

import base64
import io
import json
import os
import struct
import tarfile
import zlib

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.made import encode

BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
KEPT = "kept"
TOO_LARGE = ("decode too-large", "refused before it is decoded")


def encoded(kind="PNG", mode="RGB", size=(9, 6), color=None, **options):
    return encode(Image.new(mode, size, color or 0), kind, **options)


def raw_png(depth, color, rows, trns=b"", size=None):
    """A PNG of a depth that Pillow does not write.

    `rows` are the bytes of each line of 2 pixels.
    """

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", *(size or (2, len(rows))), depth, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + (chunk(b"tRNS", trns) if trns else b"")
    body += chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))) + chunk(
        b"IEND", b""
    )
    return b"\x89PNG\r\n\x1a\n" + body


def animated(kind):
    first, *rest = (Image.new("RGB", (8, 8), color) for color in ("red", "blue", "lime"))
    return encode(first, kind, save_all=True, append_images=rest)


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded("JPEG", color=(orientation, 9, 9), exif=exif)


def palette():
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    return encode(image, "PNG", transparency=1)


def tar(*members):
    """A tar of a valid row `a`, these members (name, bytes, type if not a file), and a valid row
    `z`.
    """
    out = io.BytesIO()
    first, last = ([(f"{key}.png", encoded()), (f"{key}.txt", b"x")] for key in "az")
    with tarfile.open(fileobj=out, mode="w") as file:
        for name, data, *kind in [*first, *members, *last]:
            member = tarfile.TarInfo(name)
            member.size, member.linkname = len(data), "/etc/passwd"
            member.type = kind[0] if kind else tarfile.REGTYPE
            file.addfile(member, io.BytesIO(data))
    return out.getvalue()


def damaged(data, name):
    """A tar with a damaged header of this member."""
    at = data.index(name.encode().ljust(100, b"\0"))
    return data[: at + 5] + b"\xff" + data[at + 6 :]


def long_text():
    text = PngInfo()
    text.add_text("Comment", "x" * 3_000_000, zip=True)
    return text


# name -> (bytes of the image file, outcome of the row, note)
IMAGES = {
    "a truncated JPEG": (
        encoded("JPEG", size=(90, 60))[:-40],
        "decode truncated",
        "never partly decoded",
    ),
    "a truncated PNG": (encoded()[:50], "decode truncated", ""),
    "a PNG with a damaged chunk": (
        encoded().replace(b"IDAT\x78", b"IDAT\x79"),
        "decode checksum",
        "",
    ),
    "zero bytes": (b"", "decode empty", ""),
    "HTML named .jpg": (b"<html><body>404</body></html>", "decode format", ""),
    "SVG named .jpg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "decode format", ""),
    **{
        f"{kind} named .jpg": (
            encoded(kind, size=(24, 24), color=(9, 9, number)),
            KEPT,
            "format by content, not by name",
        )
        for number, kind in enumerate(("TIFF", "BMP", "AVIF", "JPEG2000", "PPM", "ICO"))
    },
    "HEIF without the extra `heif`": (
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64),
        "decode format",
        "",
    ),
    "a PNG with megabytes of text": (
        encoded(pnginfo=long_text(), color=(9, 9, 30)),
        KEPT,
        "texts and color profiles are skipped",
    ),
    "TIFF of floats": (encoded("TIFF", "F", color=0.5), "decode format", ""),
    "WebP named .jpg": (encoded("WEBP", color=(1, 2, 3)), KEPT, "format by content, not by name"),
    "CMYK JPEG": (encoded("JPEG", "CMYK", color=(0, 255, 255, 0)), KEPT, "converted to RGB"),
    "gray": (encoded(mode="L", color=77), KEPT, "converted to RGB"),
    "palette with transparency": (palette(), KEPT, "composited on white"),
    "16-bit gray": (encoded(mode="I;16", color=32768), KEPT, "scaled, not clipped"),
    "RGBA with hidden colors": (
        encoded(mode="RGBA", color=(200, 0, 0, 0)),
        KEPT,
        "composited on white",
    ),
    "animated GIF": (animated("GIF"), KEPT, "first frame"),
    "animated WebP": (animated("WEBP"), KEPT, "first frame"),
    "animated PNG": (animated("PNG"), KEPT, "first frame"),
    **{
        f"EXIF orientation {turn}": (turned(turn), KEPT, "orientation applied")
        for turn in range(1, 9)
    },
    "1 x 1": (encoded(size=(1, 1), color=(5, 5, 5)), KEPT, ""),
    "1 x 4000": (encoded(size=(1, 4000), color=(6, 6, 6)), KEPT, ""),
    "a header that declares 100 megapixels": (
        raw_png(8, 2, [b""], size=(10_000, 10_000)),
        *TOO_LARGE,
    ),
    "a header that declares 900 megapixels": (
        raw_png(8, 2, [b""], size=(30_000, 30_000)),
        *TOO_LARGE,
    ),
}
GOOD = {"image": "good.png", "text": "x"}


def chat(content="What?", **columns):
    """A row with a question and its answer."""
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    return columns | {"messages": turns}


FIRST = {
    "a byte order mark": (b'\xef\xbb\xbf{"id": "bom", "image": "good.png", "text": "x"}', KEPT, "")
}
# name -> (line of JSONL, outcome of the row, note)
LINES = {
    "a missing image": (GOOD | {"image": "gone.png"}, "read missing-image", ""),
    "a symbolic link out of the folder": (GOOD | {"image": "link.png"}, "read path", ""),
    "a path with ../ out of the folder": (GOOD | {"image": "../secret.png"}, "columns path", ""),
    "an absolute path out of the folder": (GOOD | {"image": "/etc/passwd"}, "columns path", ""),
    "a URL": (
        GOOD | {"image": "https://example.org/a.png"},
        "columns path",
        "nothing is downloaded",
    ),
    "a named pipe": (
        GOOD | {"image": "pipe.png"},
        "read not-regular-file",
        "reading it would block",
    ),
    "a malformed line": (b'{"image": "good.png", "text"', "parse json", ""),
    "no caption": ({"image": "good.png"}, "columns no-text", ""),
    "no image": ({"text": "x"}, "columns no-image", ""),
    "an image that is a number": (GOOD | {"image": 5}, "columns image", ""),
    "a caption that is a number": (GOOD | {"text": 5}, "text type", ""),
    "NaN": (
        b'{"id": "n", "image": "good.png", "text": "x", "label": NaN}',
        KEPT,
        "a missing value",
    ),
    "Infinity": (b'{"image": "good.png", "text": "x", "label": Infinity}', "parse json", ""),
    "a duplicate JSON key": (b'{"image": "good.png", "text": "x", "text": "y"}', "parse json", ""),
    "NUL in a path": (GOOD | {"image": "a\0.png"}, "columns path", ""),
    "NUL in a caption": (
        GOOD | {"id": "nul", "text": "a\0b"},
        KEPT,
        "control characters are removed",
    ),
    "CRLF": (b'{"id": "crlf", "image": "good.png", "text": "x"}\r', KEPT, ""),
    "a lone surrogate": (b'{"image": "good.png", "text": "\\ud800"}', "text encoding", ""),
    "a line that is not UTF-8": (b'{"image": "good.png", "text": "caf\xe9"}', "parse encoding", ""),
    "a blank caption": (GOOD | {"text": " \n"}, "text blank", ""),
    "a missing and a blank caption of three": (
        {"image": "good.png", "texts": [None, " ", "x"]},
        KEPT,
        "the other caption is kept",
    ),
    "an image in base64, or as data URI": (
        {"image": base64.b64encode(encoded(size=(40, 40))).decode(), "text": "x"},
        KEPT,
        "",
    ),
    "pixels in a row": (
        {"image": [[[0, 0, 0]]], "text": "x"},
        "columns image",
        "store encoded bytes",
    ),
    "a camera's raw file": (
        {"image": "a.dng", "text": "x"},
        "decode format",
        "its thumbnail is never taken for the image",
    ),
    "a caption of 1 MB": (GOOD | {"text": "x" * 1_000_000}, "text too-long", "the limit is 64 KiB"),
    "several images in one row": (
        GOOD | {"id": "several", "image": ["good.png"] * 2},
        KEPT,
        "models that take one image are refused at the start of a run",
    ),
    "a missing image among three": (
        chat(content="<image><image><image>", images=["good.png", "gone.png", "good.png"]),
        "read missing-image",
        "",
    ),
    "a truncated image among three": (
        chat(content="<image><image><image>", images=["good.png", "good.png", "0.jpg"]),
        "decode truncated",
        "",
    ),
    "more `<image>` marks than images": (
        chat(id="marks", content="<image><image>", images=["good.png"]),
        KEPT,
        "the last mark is text; counted",
    ),
    "fewer `<image>` marks than images": (
        chat(id="images", content="<image>", images=["good.png"] * 2),
        KEPT,
        "the first image is before the first user's text; counted",
    ),
    "more image parts than images": (
        chat(content=[{"type": "image"}] * 2, images=["good.png"]),
        "columns image-count",
        "",
    ),
    "images and messages without a mark": (
        chat(id="unmarked", images=["good.png"] * 2),
        KEPT,
        "the images are before the first user's text",
    ),
    "a conversation without images": (chat(id="text alone"), KEPT, ""),
    "an image of 1 x 4000 in a conversation": (
        chat(images=["narrow.png"]),
        "decode aspect-ratio",
        "the limit is 1 to 200",
    ),
    "a conversation of the assistant alone": (
        {"messages": [{"role": "assistant", "content": "x"}]},
        "columns messages",
        "",
    ),
    "an empty turn of the user": (chat(content=" "), "columns messages", ""),
    "an image part of an unknown type": (
        chat(content=[{"type": "file", "file": "a.pdf"}]),
        "columns messages",
        "",
    ),
    "a data URI that is not base64": (
        chat(content=[{"type": "image_url", "image_url": "data:image/png;base64,??"}]),
        "columns image",
        "",
    ),
    "a duplicate id": (
        GOOD | {"id": "crlf"},
        KEPT,
        "by `--duplicates keep`; otherwise quarantined: `duplicates duplicate-key`",
    ),
}
TEXT = ("m.txt", b"x")
MASKED = tar(("m.mask.png", b"?"), ("m.png", encoded()), TEXT)
UNUSED_NAN = tar(("m.png", encoded()), ("m.json", b'{"caption": "x", "similarity": NaN}'))
# name -> (bytes of a tar with a valid row before and after, outcome of the row, note)
TARS = {
    "a member with ../ in a tar": (
        tar(("../up.png", encoded())),
        "columns path",
        "nothing is extracted",
    ),
    "a symbolic link in a tar": (
        tar(("m.png", b"", tarfile.SYMTYPE), TEXT),
        "read not-regular-file",
        "",
    ),
    "a device in a tar": (tar(("m.png", b"", tarfile.CHRTYPE), TEXT), "read not-regular-file", ""),
    "a.mask.png before a.png in a tar": (
        MASKED,
        KEPT,
        "the extension is everything after the first dot",
    ),
    "a member twice in a tar": (
        tar(("m.png", encoded()), TEXT, TEXT),
        "columns no-image",
        "a separate row without image",
    ),
    "NaN in an unused field of a tar's JSON": (UNUSED_NAN, KEPT, ""),
    "a hidden file (._m.png), a README and a LICENSE in a tar": (
        tar(("._m.png", b"x"), ("README.md", b"x"), ("LICENSE", b"x"), ("m.png", encoded()), TEXT),
        KEPT,
        "hidden files, README and LICENSE are skipped",
    ),
    "a byte order mark in the text of a tar": (
        tar(("m.png", encoded()), ("m.txt", b"\xef\xbb\xbfx")),
        KEPT,
        "the mark is removed",
    ),
    "a truncated tar": (tar()[:2300], "read truncated", "the rows before are kept"),
    "a damaged header in a tar": (
        damaged(tar(), "z.txt"),
        "read truncated",
        "the rows before and after are kept",
    ),
}

ALL = FIRST | IMAGES | LINES | TARS


def write_source(folder):
    """Write a JSONL file with a row for each entry except tars, and a folder of the tars; return
    both paths.
    """
    (folder / "in").mkdir()
    (folder / "secret.png").write_bytes(encoded())
    (folder / "in" / "good.png").write_bytes(encoded(color=(1, 1, 1)))
    (folder / "in" / "narrow.png").write_bytes(encoded(size=(1, 4000)))
    (folder / "in" / "link.png").symlink_to(folder / "secret.png")
    os.mkfifo(folder / "in" / "pipe.png")
    (folder / "in" / "tars").mkdir()
    for number, (data, _, _) in enumerate(TARS.values()):
        (folder / "in" / "tars" / f"{number}.tar").write_bytes(data)
    lines = [line for line, _, _ in FIRST.values()]
    for number, (data, _, _) in enumerate(IMAGES.values()):
        (folder / "in" / f"{number}.jpg").write_bytes(data)
        lines.append({"id": f"image {number}", "image": f"{number}.jpg", "text": "x"})
    lines += [line for line, _, _ in LINES.values()]
    whole = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )
    (folder / "in" / "rows.jsonl").write_bytes(whole)
    return folder / "in" / "rows.jsonl", folder / "in" / "tars"


def places():
    """(line, or name of a tar; name of the entry) of each entry."""
    return [
        *enumerate(FIRST | IMAGES | LINES, 1),
        *((f"{number}.tar", name) for number, name in enumerate(TARS)),
    ]


def count(source):
    """Number of rows of one source; one tar has an extra row, and one ends before its last."""
    return len(FIRST | IMAGES | LINES) if source.is_file() else 3 * len(TARS)


def table():
    """Format the table of the README: the inputs of each result."""
    inputs = {}
    for name, (_, outcome, word) in (IMAGES | FIRST | LINES | TARS).items():
        if name.startswith("EXIF orientation"):
            if not name.endswith("1"):
                continue
            name = "EXIF orientations 1 to 8"
        result = KEPT if outcome == KEPT else f"quarantined: `{outcome}`"
        inputs.setdefault(f"{result}{f', {word}' if word else ''}", []).append(name)
    rows = [f"| {result} | {'; '.join(names)} |" for result, names in inputs.items()]
    return "\n".join([BEGIN, "| result | inputs |", "|---|---|", *rows, END])


if __name__ == "__main__":
    print(table())
