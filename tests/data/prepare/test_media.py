"""Rows with any number of images: the same set from every source, and each image is checked."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmray.config import Prepare
from mmray.data.images.decode import decode
from mmray.data.prepare import map_shards
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from tests.data.prepare.test_contamination import patches_image
from tests.data.prepare.test_pipeline import quarantine
from tests.made import encode

pytestmark = pytest.mark.usefixtures("in_process")
LAX = Prepare(max_bad_fraction=1.0, rows_per_shard=3, vocab_size=0)
# Numbers of the images of each row.
ROWS = [[0], [], [1, 2, 3], [2, 1], [4, 4], [5]]


def image(number: int) -> bytes:
    return encode(patches_image(number).resize((40 + number, 30)))


def chat(number: int) -> list[dict[str, Any]]:
    """A conversation with the images of a row in its first turn."""
    marks = "<image>" * len(ROWS[number])
    return [
        {"role": "user", "content": f"{marks}question {number}"},
        {"role": "assistant", "content": f"answer {number}"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "because"},
    ]


def jsonl(folder: Path) -> Path:
    folder.mkdir()
    lines = []
    for number, images in enumerate(ROWS):
        for each in images:
            (folder / f"{each}.png").write_bytes(image(each))
        row = {"id": number, "images": [f"{each}.png" for each in images], "messages": chat(number)}
        lines.append(json.dumps(row) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    return folder / "rows.jsonl"


def parquet(folder: Path) -> Path:
    """As Hugging Face's `Sequence(Image)`, with the messages as LLaVA's conversations."""
    folder.mkdir()
    names = {"user": "human", "assistant": "gpt"}
    columns = {
        "id": list(range(len(ROWS))),
        "images": [[{"bytes": image(each), "path": None} for each in row] for row in ROWS],
        "conversations": [
            [{"from": names[turn["role"]], "value": turn["content"]} for turn in chat(number)]
            for number in range(len(ROWS))
        ],
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


def tar(folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "rows.tar", "w") as file:
        for number, images in enumerate(ROWS):
            parts = [{"type": "image"}] * len(images)
            first = {
                "role": "user",
                "content": [*parts, {"type": "text", "text": f"question {number}"}],
            }
            messages = json.dumps({"messages": [first, *chat(number)[1:]]}).encode()
            members = {f"{number}.json": messages}
            members |= {f"{number}.{at}.png": image(each) for at, each in enumerate(images)}
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return folder / "rows.tar"


def read_all(folder: Path) -> list[Row]:
    prepared = PreparedSet.open(str(folder))
    return prepared.read(np.arange(prepared.num_rows))


@pytest.mark.parametrize(
    ("make", "index_only"),
    [(jsonl, False), (jsonl, True), (parquet, False), (tar, False), (tar, True)],
)
def test_rows_with_several_images_from_every_source(
    tmp_path: Path, make: Any, index_only: bool
) -> None:
    source = make(tmp_path / "raw")
    settings = LAX.replace(index_only=index_only)
    manifest = prepare(str(source), str(tmp_path / "out"), settings)
    assert quarantine(tmp_path / "out") == []
    assert manifest.num_images == {"": {"0": 1, "1": 2, "2": 2, "3": 1}}
    assert PreparedSet.open(str(tmp_path / "out")).rows_by_num_images == {0: 1, 1: 2, 2: 2, 3: 1}
    for number, row in enumerate(read_all(tmp_path / "out")):
        assert [media.data for media in row.media] == [image(each) for each in ROWS[number]]
        assert [(media.width, media.height) for media in row.media] == [
            (40 + each, 30) for each in ROWS[number]
        ]
        assert all(bool(media.ref) == index_only for media in row.media)
        assert row.checksum_ok and row.messages is not None
        *images, text = row.messages[0]["content"]
        assert images == [{"type": "image", "text": None}] * len(ROWS[number])
        assert text == {"type": "text", "text": f"question {number}"}
        assert row.texts == [f"answer {number}", "because"]


def test_a_damaged_image_of_several_makes_the_row_invalid(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "raw")
    prepare(str(source), str(tmp_path / "out"), LAX.replace(index_only=True))
    (tmp_path / "raw" / "3.png").write_bytes(image(9))
    ok = [row.checksum_ok for row in read_all(tmp_path / "out")]
    assert ok == [3 not in images for images in ROWS]


def test_duplicates_have_the_same_images_and_the_same_conversation(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "raw")
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    again = [
        rows[2] | {"id": "other question", "messages": chat(2)[:2]},
        rows[2] | {"id": "same images"},
        rows[2] | {"id": "other order", "images": ["3.png", "2.png", "1.png"]},
        rows[1] | {"id": "same text"},
        rows[1] | {"id": "other text", "messages": chat(1)[2:]},
    ]
    with source.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in again)
    manifest = prepare(str(source), str(tmp_path / "out"), LAX)
    faults = {fault["key"]: fault["detail"] for fault in quarantine(tmp_path / "out")}
    assert faults == {"same images": "duplicate of row 2", "same text": "duplicate of row 1"}
    assert manifest.num_images == {"": {"0": 2, "1": 2, "2": 2, "3": 3}}


def test_contamination_covers_every_image_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_shards, "map_tasks", map_closable)
    prepare(str(jsonl(tmp_path / "raw")), str(tmp_path / "eval"), LAX)
    folder = tmp_path / "train"
    folder.mkdir()
    images = {"a": image(30), "b": image(3), "c": encode(patches_image(5).resize((90, 60)))}
    for name, data in images.items():
        (folder / f"{name}.png").write_bytes(data)
    rows = [["a"], [], ["a", "b"], ["a", "a", "c"]]
    lines = [
        json.dumps({"id": f"t{number}", "images": [f"{each}.png" for each in row]} | extra) + "\n"
        for number, row in enumerate(rows)
        for extra in [{"messages": [{"role": "user", "content": f"q{number}"}, *chat(0)[1:2]]}]
    ]
    (folder / "rows.jsonl").write_text("".join(lines))
    settings = LAX.replace(check_contamination=(str(tmp_path / "eval"),), drop_overlap=True)
    manifest = prepare(str(folder / "rows.jsonl"), str(tmp_path / "out"), settings)
    assert (manifest.leakage["exact"], manifest.leakage["near"]) == (1, 1)
    assert PreparedSet.open(str(tmp_path / "out")).keys() == ["t0", "t1"]
    leaks = [json.loads(line) for line in (tmp_path / "out/leaks.jsonl").read_text().splitlines()]
    assert [(leak["key"], leak["other"]) for leak in leaks] == [("t2", "2"), ("t3", "5")]


def map_closable(work: Any, items: Any, **_: Any) -> Any:
    """A generator, because callers close it."""
    yield from map(work, items)


@pytest.mark.parametrize("pages", ["first", "images"])
def test_pages_of_tiff_become_images_of_a_conversation_or_are_counted(tmp_path, pages):
    sheets = [patches_image(number).resize((40 + number, 30)) for number in range(3)]
    wide = Image.fromarray(np.full((4, 4), 4095, np.uint16))
    wide.save(tmp_path / "gray.tif", save_all=True, append_images=[wide])
    (tmp_path / "scan.tif").write_bytes(
        encode(sheets[0], "TIFF", save_all=True, append_images=sheets[1:])
    )
    (tmp_path / "a.png").write_bytes(encode(sheets[0]))
    rows = [
        {"images": ["a.png", "scan.tif"], "messages": chat(0)},
        {"images": ["gray.tif"], "messages": chat(0)},
    ]
    rows[0]["messages"][0]["content"] = "first <image> then <image> what"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(
        str(tmp_path / "rows.jsonl"), str(tmp_path / "set"), LAX.model_copy(update={"pages": pages})
    )
    prepared = PreparedSet.open(str(tmp_path / "set"))
    (row,) = prepared.read(np.arange(1))
    types = [part["type"] for part in row.messages[0]["content"]]
    num_pages = 3 if pages == "images" else 1
    assert types == ["text", "image", "text", *["image"] * num_pages, "text"]
    for media, sheet in zip(row.media, [sheets[0], *sheets[:num_pages]], strict=True):
        assert np.array_equal(decode(media.data), sheet)
        assert (media.width, media.height) == sheet.size
    assert row.checksum_ok
    counted = {text: each["num_rows"] for text, each in prepared.manifest.notices.items()}
    later = [number for text, number in counted.items() if "pages 2 and later" in text]
    assert later == ([2] if pages == "first" else [])
    assert [number for text, number in counted.items() if "16 bits" in text] == [1]
