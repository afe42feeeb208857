"""COCO documents: captions and category names, in one document or joined by image id."""

import json

import pytest

from mmray.data.prepare.pipeline import prepare
from mmray.errors import DataError, UsageError
from tests.data.formats.test_formats import COUNT, LAX, images, prepared, text

pytestmark = pytest.mark.usefixtures("in_process")
CAPTIONS, INSTANCES = "annotations/captions_val2017.json", "annotations/instances_val2017.json"


def test_coco_without_captions_uses_category_names(tmp_path):
    images(tmp_path / "raw", 2)
    notes = [{"image_id": 0, "bbox": [0, 0, 4, 4], "category_id": c} for c in (1, 2, 1)]
    notes.append({"image_id": 1, "bbox": [0, 0, 40, 4], "category_id": 1})
    document = {
        "images": [{"id": n, "file_name": f"{n}.png"} for n in range(2)],
        "annotations": notes,
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }
    (tmp_path / "raw" / "instances.json").write_text(json.dumps(document))
    manifest, rows, faults = prepared(tmp_path / "raw" / "instances.json", tmp_path / "out")
    assert rows[0].texts == ["a photo of a cat, dog"]
    assert rows[1].texts == ["a photo of a cat"] and not faults
    assert manifest.notices["the boxes of objects are not used"]["num_rows"] == 2


def test_annotations_that_are_not_used_are_counted(tmp_path):
    box = {"bbox": [0, 0, 4, 4]}
    notes = [
        {"image_id": 0, "category_id": 1} | box,
        {"image_id": 0, "category_id": 1, "iscrowd": 1} | box,
        {"image_id": 1, "category_id": 7} | box,
        {"image_id": 1, "caption": "x"},
        {"image_id": 9, "category_id": 1} | box,
    ]
    document = {
        "images": [{"id": n, "file_name": f"{n}.png"} for n in range(2)],
        "annotations": notes,
        "categories": [{"id": 1, "name": "cat"}],
    }
    source = images(tmp_path / "raw", 2) / "a.json"
    source.write_text(json.dumps(document))
    logs = []
    manifest, rows, _ = prepared(source, tmp_path / "out", lambda *line: logs.append(line))
    assert [row.texts for row in rows] == [["a photo of a cat"], ["x"]]
    assert {text: n["example"] for text, n in manifest.notices.items()} == {
        "the boxes of objects are not used": "a.json:image 0",
        "annotations of crowds (`iscrowd`) are not used": "a.json:image 0",
        "the category of an object is not in `categories`, so it has no name": "a.json:image 1",
    }
    assert "COCO (1 annotations are of images that it lacks)" in logs[0][0]
    for name, value, message in (
        ("images", {"id": "0", "file_name": "1.png"}, "0.png and 1.png have the id 0"),
        ("categories", {"id": 1, "name": "dog"}, "category 1 is `dog`, and .* `cat`"),
    ):
        source.write_text(json.dumps(document | {name: [*document[name], value]}))
        with pytest.raises(DataError, match=message):
            prepared(source, tmp_path / "other")


def test_incomplete_coco_document_is_reported(tmp_path):
    document = {
        "images": [{"id": n, "file_name": f"{n}.png"} for n in range(2)],
        "annotations": [
            {"image_id": 0, "bbox": [0, 0, 4, 4]},
            {"image_id": 1, "bbox": [0, 0, 4, 4], "category_id": 1},
        ],
        "categories": [{"id": 1, "name": "cat"}],
    }
    source = images(tmp_path / "raw", 2) / "instances.json"
    write_json(source, **document)
    _, rows, faults = prepared(source, tmp_path / "out")
    assert [row.key for row in rows] == ["1"] and faults == {"instances.json:image 0": "no-text"}
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


def write_json(path, **document):
    path.write_text(json.dumps(document))


def coco_halves(folder):
    """Captions in one document, boxes and categories in another, as COCO distributes them; image 3
    has no box.
    """
    images(folder / "val2017")
    (folder / "annotations").mkdir()
    pictures = [{"id": n, "file_name": f"{n}.png"} for n in range(COUNT)]
    captions = [
        {"image_id": f"{n:04d}", "id": 2 * n + k, "caption": c}  # some documents have texts
        for n in range(COUNT)
        for k, c in enumerate((text(n), "x"))
    ]
    boxes = [
        {"image_id": n, "bbox": [3, 2, 6, 4], "category_id": 7 + n % 2, "segmentation": []}
        for n in (6, 0, 1, 2, 4)
    ]
    boxes.append({"image_id": 2, "bbox": [0, 0, 12, 8], "category_id": 8})
    boxes.append({"image_id": 5, "bbox": [0, 0, 3, 4], "category_id": 7})
    kinds = [{"id": 8, "name": "dog"}, {"id": 7, "name": "cat"}]
    write_json(folder / CAPTIONS, images=pictures, annotations=captions)
    write_json(folder / INSTANCES, images=pictures[::-1], annotations=boxes, categories=kinds)
    return folder / f"{CAPTIONS},{INSTANCES.rpartition('/')[2]}"


def test_coco_captions_and_instances_are_joined_by_image_id(tmp_path):
    manifest, rows, faults = prepared(coco_halves(tmp_path / "raw"), tmp_path / "out")
    assert [(row.key, row.texts) for row in rows] == [
        (str(n), [text(n), "x"]) for n in range(COUNT)
    ] and not faults
    assert rows[3].source == f"{CAPTIONS}:image 3"
    assert manifest.notices["the boxes of objects are not used"]["num_rows"] == 6


def test_change_of_the_second_document_is_detected(tmp_path, in_process):
    source, out = coco_halves(tmp_path / "raw"), tmp_path / "out"
    before = prepared(source, out)[0]
    in_process.clear()
    assert prepare(str(source), str(out), LAX) == before and in_process == []
    document = json.loads((tmp_path / "raw" / INSTANCES).read_text())
    document["annotations"][0]["category_id"] = 9  # of image 6, in the last chunk, without a name
    write_json(tmp_path / "raw" / INSTANCES, **document)
    manifest, rows, _ = prepared(source, out)
    assert in_process == [2] and len(rows) == COUNT
    assert any("has no name" in notice for notice in manifest.notices)
    with pytest.raises(
        UsageError,
        match=r"holds the set made from .*instances_val2017\.json: choose another folder",
    ):
        prepared(tmp_path / "raw" / CAPTIONS, out)


def test_mismatched_coco_documents_are_refused(tmp_path):
    source = coco_halves(tmp_path / "raw")
    path = tmp_path / "raw" / INSTANCES
    good = json.loads(path.read_text())
    others = [{"id": n, "file_name": f"other-{n}.png"} for n in range(COUNT)]
    for document, message in (
        ({"images": []}, r"instances_val2017\.json is not COCO's JSON \('annotations'\)"),
        (
            good | {"images": []},
            r"captions_val2017\.json and .*instances_val2017\.json have no image in common",
        ),
        (good | {"images": others}, "have no image in common"),
    ):
        write_json(path, **document)
        with pytest.raises(DataError, match=message):
            prepared(source, tmp_path / "out")
    path.unlink()
    with pytest.raises(DataError, match=r"there is no file .*instances_val2017\.json"):
        prepared(source, tmp_path / "out")


def test_documents_of_karpathy_and_lvis_are_read(tmp_path):
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
    lvis = [{"id": n, "coco_url": f"http://host/val2014/{n}.png"} for n in range(2)]
    notes = [{"image_id": n, "bbox": [0, 0, 4, 4], "category_id": 1} for n in range(2)]
    categories = [{"id": 1, "name": "cat"}]
    write_json(
        tmp_path / "raw" / "lvis.json", images=lvis, annotations=notes, categories=categories
    )
    manifest, rows, _ = prepared(tmp_path / "raw" / "lvis.json", tmp_path / "lvis")
    assert manifest.num_rows == 2 and rows[0].texts == ["a photo of a cat"]
