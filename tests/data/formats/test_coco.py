"""COCO documents: captions, also of Karpathy."""

import json

import pytest

from mmray.data.prepare.pipeline import prepare
from mmray.errors import DataError, UsageError
from tests.data.formats.test_formats import COUNT, LAX, images, prepared, text

pytestmark = pytest.mark.usefixtures("in_process")


def write_json(path, **document):
    path.write_text(json.dumps(document))


def pictures(count):
    return [{"id": n, "file_name": f"{n}.png"} for n in range(count)]


def test_annotations_that_are_not_used_are_counted(tmp_path):
    notes = [
        {"image_id": 0, "bbox": [0, 0, 4, 4], "category_id": 1},
        {"image_id": 0, "caption": "x"},
        {"image_id": 1, "caption": "y"},
        {"image_id": 9, "caption": "z"},
    ]
    document = {"images": pictures(2), "annotations": notes}
    source = images(tmp_path / "raw", 2) / "a.json"
    write_json(source, **document)
    logs = []
    manifest, rows, _ = prepared(source, tmp_path / "out", lambda *line: logs.append(line))
    assert [row.texts for row in rows] == [["x"], ["y"]]
    assert {text: n["example"] for text, n in manifest.notices.items()} == {
        "objects (boxes, categories) of the document are not used": "a.json:image 0"
    }
    assert "COCO (1 captions are of images that it lacks)" in logs[0][0]
    document["images"].append({"id": "0", "file_name": "1.png"})
    write_json(source, **document)
    with pytest.raises(DataError, match=r"0\.png and 1\.png have the id 0"):
        prepared(source, tmp_path / "other")


def test_incomplete_coco_document_is_reported(tmp_path):
    notes = [{"image_id": 0, "bbox": [0, 0, 4, 4]}, {"image_id": 1, "caption": "x"}]
    document = {"images": pictures(2), "annotations": notes}
    source = images(tmp_path / "raw", 2) / "instances.json"
    write_json(source, **document)
    _, rows, faults = prepared(source, tmp_path / "out")
    assert [row.key for row in rows] == ["1"] and faults == {"instances.json:image 0": "no-text"}
    write_json(source, **document | {"annotations": notes[:1]})
    with pytest.raises(DataError, match="Each row needs an image and a caption"):
        prepared(source, tmp_path / "objects")
    for name, item, message in (
        (
            "images",
            {"id": 0},
            r"is not COCO's JSON \('file_name'\): it needs `images` with `id` and `file_name`",
        ),
        ("annotations", {"caption": "x"}, r"is not COCO's JSON \('image_id'\)"),
        ("annotations", "image_id", "is not COCO's JSON"),
    ):
        write_json(source, **document | {name: [item]})
        with pytest.raises(DataError, match=message):
            prepared(source, tmp_path / "bad")


def test_ids_as_texts_and_images_in_their_usual_folder_are_found(tmp_path, in_process):
    raw = tmp_path / "raw"
    images(raw / "val2017")
    (raw / "annotations").mkdir()
    source = raw / "annotations" / "captions_val2017.json"
    captions = [
        {"image_id": f"{n:04d}", "caption": caption}
        for n in range(COUNT)
        for caption in (text(n), "x")
    ]
    write_json(source, images=pictures(COUNT), annotations=captions)
    before, rows, faults = prepared(source, tmp_path / "out")
    assert [(row.key, row.texts) for row in rows] == [
        (str(n), [text(n), "x"]) for n in range(COUNT)
    ] and not faults
    assert rows[3].source == "annotations/captions_val2017.json:image 3"
    in_process.clear()
    assert prepare(str(source), str(tmp_path / "out"), LAX) == before and in_process == []
    captions[-1]["caption"] = "y"  # of image 6, in the last chunk
    write_json(source, images=pictures(COUNT), annotations=captions)
    manifest, rows, _ = prepared(source, tmp_path / "out")
    assert in_process == [2] and manifest.fingerprint != before.fingerprint
    assert rows[6].texts == [text(6), "y"]
    write_json(raw / "annotations" / "other.json", images=pictures(COUNT), annotations=captions)
    with pytest.raises(UsageError, match=r"holds the set made from .*captions_val2017\.json"):
        prepared(raw / "annotations" / "other.json", tmp_path / "out")


def test_document_of_karpathy_is_read(tmp_path):
    images(tmp_path / "raw" / "val2014", 3)
    entries = [
        {
            "filepath": "val2014",
            "filename": f"{n}.png",
            "imgid": n,
            "split": split,
            "sentences": [{"raw": f"caption {n}"}, {"raw": "another"}],
        }
        for n, split in enumerate(("train", "restval", "test"))
    ]
    write_json(tmp_path / "raw" / "dataset_coco.json", images=entries, dataset="coco")
    manifest, rows, _ = prepared(tmp_path / "raw" / "dataset_coco.json", tmp_path / "out")
    assert manifest.splits == {"train": 2, "test": 1}
    assert rows[0].texts == ["caption 0", "another"]
