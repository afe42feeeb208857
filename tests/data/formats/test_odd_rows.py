"""Invalid rows and file names are quarantined by name and do not stop prepare."""

import csv
import json
import os
import tarfile
from dataclasses import asdict

import pytest

from mmray.data.formats.detect import detect_source
from mmray.data.prepare import pipeline as prepare_module
from mmray.errors import DataError, ResourceError, UsageError
from mmray.storage.storage import Storage
from tests.data.formats import test_formats as formats
from tests.data.formats.test_formats import LAX, prepared
from tests.data.prepare.test_pipeline import colour_image

in_process = formats.in_process
LATIN = os.fsdecode(b"caf\xe9")


def tar_of(path, *stems, **options):
    with tarfile.open(path, "w", **options) as tar:
        for stem in stems:
            formats.add(tar, f"{stem}.png", colour_image(ord(stem[0])))
            formats.add(tar, f"{stem}.txt", b"x")
    return path


def test_tar_member_with_non_utf8_name_is_quarantined(tmp_path):
    tar_of(tmp_path / "a.tar", "a", "caf\xe9", "z", format=tarfile.GNU_FORMAT, encoding="latin-1")
    manifest, _, faults = prepared(tmp_path / "a.tar", tmp_path / "out")
    assert (manifest.num_rows, faults) == (2, {"a.tar/caf\\udce9": "path"})


def test_files_with_non_utf8_names_are_quarantined(tmp_path):
    folder = tmp_path / "raw"
    for number, name in enumerate(("cat", "dog", LATIN)):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.png").write_bytes(colour_image(number))
    (folder / "dog" / f"{LATIN}.png").write_bytes(colour_image(9))
    manifest, _, faults = prepared(folder, tmp_path / "out")
    assert (manifest.num_rows, faults) == (2, {"caf\\udce9/1.png": "key", "dog/caf\\udce9.png": "key"})
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for stem in ("a", LATIN):
        (pairs / f"{stem}.png").write_bytes(colour_image(len(stem)))
        (pairs / f"{stem}.txt").write_text("x")
    manifest, _, faults = prepared(pairs, tmp_path / "out pairs", duplicates="keep")
    assert (manifest.num_rows, faults) == (1, {"caf\\udce9.png": "path"})


def test_source_file_with_non_utf8_name_is_reported(tmp_path):
    (tmp_path / f"{LATIN}.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"the name 'caf\\udce9.tar' is not plain UTF-8: rename the file"):
        prepared(tmp_path, tmp_path / "out")
    with pytest.raises(UsageError, match="is not plain UTF-8: rename the file"):
        detect_source(str(tmp_path / f"{LATIN}.tar"))
    with pytest.raises(UsageError, match="is not empty and is not a prepared set"):
        prepared(tmp_path, tmp_path)


def test_json_extension_is_read_as_jsonl_or_refused_with_a_hint(tmp_path):
    (tmp_path / "a.png").write_bytes(colour_image(1))
    row = json.dumps({"image": "a.png", "text": "x"})
    for name, text in {"one": row, "two": f"{row}\n{row}\n", "long": f'{row}\n{{"text": "{"x" * 70_000}"}}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
        assert detect_source(str(tmp_path / f"{name}.json")).format == "jsonl"
    assert prepared(tmp_path / "two.json", tmp_path / "out", duplicates="keep")[0].num_rows == 2
    (tmp_path / "llava.json").write_text(f"[{row}]")
    with pytest.raises(DataError, match="is a JSON array: write one object a line"):
        prepared(tmp_path / "llava.json", tmp_path / "array")
    with pytest.raises(DataError, match=r"llava\.json is not COCO's JSON, an object .*: it is a list"):
        prepared(tmp_path / "llava.json", tmp_path / "array", format="coco")
    for text in ('{"images": [], "annotations": []}', '{\n"images": [], "annotations": []}'):
        (tmp_path / "coco.json").write_text(text)
        assert detect_source(str(tmp_path / "coco.json")).format == "coco"


def test_existing_file_with_comma_in_its_name_is_one_source(tmp_path):
    (tmp_path / "a.png").write_bytes(colour_image(1))
    (tmp_path / "my,file.jsonl").write_text('{"image": "a.png", "text": "x"}\n')
    assert prepared(tmp_path / "my,file.jsonl", tmp_path / "out")[0].num_rows == 1
    with pytest.raises(DataError, match=r"there is no file .*other"):
        detect_source(str(tmp_path / "other,file.txt"))
    (tmp_path / "my,folder").mkdir()
    (tmp_path / "my,folder" / "a.parquet").touch()
    assert detect_source(str(tmp_path / "my,folder")).format == "parquet"


def test_unreadable_source_is_not_reported_as_write_error(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}\n")
    job = prepare_module.make_job(str(tmp_path / "a.jsonl"), str(tmp_path / "out"), LAX)
    chunk = next(job.open().scan(8, ()))
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "out" / "parts").mkdir(parents=True)
    with pytest.raises(ResourceError, match=rf"^{tmp_path}/a\.jsonl cannot be read: .*rerun the same command"):
        prepare_module._pack_task(asdict(chunk), job)


def test_empty_tars_are_a_source_without_rows(tmp_path):
    (tmp_path / "raw").mkdir()
    tar_of(tmp_path / "raw" / "a.tar")
    with pytest.raises(DataError, match="holds no rows of WebDataset"):
        prepared(tmp_path / "raw", tmp_path / "out")
    tar_of(tmp_path / "raw" / "b.tar", "k")
    assert prepared(tmp_path / "raw", tmp_path / "out")[0].num_rows == 1


def test_concatenated_tars_are_reported(tmp_path):
    first, second = (tar_of(tmp_path / f"{stem}.tar", stem).read_bytes() for stem in "ab")
    (tmp_path / "both.tar").write_bytes(first + second)
    manifest, _, faults = prepared(tmp_path / "both.tar", tmp_path / "out")
    assert (manifest.num_rows, list(faults.values())) == (1, ["truncated"])
    (tmp_path / "a.tar").write_bytes(first + bytes(5 << 20))
    assert prepared(tmp_path / "a.tar", tmp_path / "padded")[0].reasons == {}


def test_csv_may_hold_messages(tmp_path):
    (tmp_path / "a.png").write_bytes(colour_image(1))
    said = json.dumps([{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A colour."}])
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "messages"], ["a.png", said]])
    _, rows, _ = prepared(tmp_path / "a.csv", tmp_path / "out")
    assert [turn["content"] for turn in rows[0].messages] == ["What?", "A colour."]


def test_folder_walk_follows_links_without_cycles(tmp_path):
    for name in ("a/1.txt", "b/2.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "other").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "back").symlink_to(tmp_path / "a")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    place = Storage(str(tmp_path))
    assert place.list_files() == ["a/1.txt", "a/other/2.txt", "b/2.txt", "b/back/1.txt"]
    assert place.list_files("a")[:2] == ["a/1.txt", "a/other/2.txt"]
    with pytest.raises(FileNotFoundError):
        place.list_files("none")
