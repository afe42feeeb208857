"""Images by absolute paths and behind links, and names that look equal."""

import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.config import Prepare
from mmray.data.images.read import locate_file, read_file, read_image
from mmray.data.rows import BadRow, parse_image
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import UsageError
from mmray.storage.paths import to_path
from tests.data.formats.test_formats import prepared
from tests.data.prepare.test_pipeline import add, color_image

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def photos(tmp_path):
    """Folders `raw`, `photos` and `secret` with an image each, and files of the same name."""
    for number, folder in enumerate(("raw", "photos", "photos2", "secret")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.png").write_bytes(color_image(number))
    return tmp_path / "photos"


def prepare_images(folder, images, **options):
    for image in images:
        add(folder / "raw" / "rows.jsonl", {"image": image, "text": image})
    _, rows, faults = prepared(
        folder / "raw" / "rows.jsonl", folder / "out", duplicates="keep", **options
    )
    return [row.texts[0] for row in rows], faults


def test_links_to_other_folders_than_the_roots_are_refused(tmp_path, photos):
    """Also through `..` in the target of a link, and a folder whose name only starts the same."""
    raw = tmp_path / "raw"
    (tmp_path / "blob").symlink_to(photos / "0.png")  # a link to a link, as in the cache of a hub
    (photos / "far").symlink_to(tmp_path / "secret")
    (raw / "good.png").symlink_to("../blob")
    (raw / "other.png").symlink_to(tmp_path / "photos2" / "0.png")
    (raw / "up.png").symlink_to("../photos/../secret/0.png")
    (raw / "photos").symlink_to(photos)
    images = ["good.png", "other.png", "up.png", "photos/far/0.png", "photos/0.png"]
    kept, faults = prepare_images(tmp_path, images, root=(str(photos),))
    assert kept == ["good.png", "photos/0.png"]
    assert faults == {f"rows.jsonl:{line}": "path" for line in (2, 3, 4)}
    with pytest.raises(BadRow, match=rf"photos2/0\.png, outside .*; --root {tmp_path}/photos2 "):
        read_file(raw, "other.png", (str(photos),))


def test_relative_names_are_searched_in_roots(tmp_path, photos):
    """That of the source comes first."""
    for number, name in enumerate(("photos/1.png", "photos2/1.png", "photos2/a/2.png"), 4):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(color_image(number))
    images = ["0.png", "1.png", "a/2.png", "3.png"]
    roots = tuple(str(tmp_path / name) for name in ("gone", "photos", "photos2"))
    kept, faults = prepare_images(tmp_path, images, root=roots, max_bad_fraction=0.5)
    assert kept == images[:3] and faults == {"rows.jsonl:4": "missing-image"}
    found = [row.media[0].data for row in PreparedSet.open(str(tmp_path / "out")).read(range(3))]
    assert found == [color_image(number) for number in (0, 4, 6)]


def test_pairs_of_links_are_read_from_roots(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (tmp_path / "image").write_bytes(color_image(1))
    (tmp_path / "text").write_text("a caption")
    (raw / "a.png").symlink_to(tmp_path / "image")
    (raw / "a.txt").symlink_to(tmp_path / "text")
    _, rows, faults = prepared(raw, tmp_path / "out", root=(str(tmp_path),))
    assert rows[0].texts == ["a caption"] and not faults


def test_absolute_paths_are_read_in_the_folder_of_the_source_and_in_roots(tmp_path, photos):
    (tmp_path / "view").symlink_to(tmp_path / "raw")
    (photos / "a b#.png").write_bytes(color_image(8))
    good = [
        f"{tmp_path}/raw/0.png",
        f"{tmp_path}/raw//./0.png",
        f"file://{tmp_path}/raw/0.png",
        f"{tmp_path}/view/0.png",  # a link to the folder
        "../raw/0.png",
        f"{photos}/0.png",
        f"file://{photos}/a%20b%23.png",
        "../photos/0.png",
    ]
    bad = [
        f"{tmp_path}/photos2/0.png",
        f"{photos}/../secret/0.png",
        "/etc/passwd",
        "file:///etc/passwd",
        "../secret/0.png",
        "s3://bucket/0.png",
    ]
    kept, faults = prepare_images(tmp_path, good + bad, root=(str(photos),))
    assert kept == good
    first = len(good) + 1
    assert faults == {f"rows.jsonl:{line}": "path" for line in range(first, first + len(bad))}


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "chats.jsonl"])
def test_absolute_paths_of_any_format_and_column(tmp_path, photos, name):
    source = tmp_path / "raw" / name
    paths = [f"{tmp_path}/raw/0.png", f"{photos}/0.png", f"{tmp_path}/secret/0.png"]
    if name.endswith("csv"):
        source.write_text("\n".join(["image,text", *(f"{path},a" for path in paths)]))
    elif name.endswith("parquet"):
        rows = [{"image": {"bytes": None, "path": path}, "text": "a"} for path in paths]
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        for path in paths:
            parts = [{"type": "image", "image": path}, {"type": "text", "text": "?"}]
            answer = {"role": "assistant", "content": "!"}
            add(source, {"messages": [{"role": "user", "content": parts}, answer]})
    _, rows, faults = prepared(
        source, tmp_path / "out", root=(str(photos),), duplicates="keep", max_bad_fraction=1
    )
    assert [row.media[0].data for row in rows] == [color_image(0), color_image(1)]
    assert [*faults.values()] == ["path"]


def test_absolute_paths_of_files_in_folders_are_not_moved(tmp_path, photos):
    (tmp_path / "raw" / "part").mkdir()
    (tmp_path / "raw" / "part" / "1.png").write_bytes(color_image(8))
    for image in (f"{tmp_path}/raw/0.png", "1.png", "../0.png", f"{photos}/0.png"):
        add(tmp_path / "raw" / "part" / "rows.jsonl", {"image": image, "text": image})
    _, rows, faults = prepared(
        tmp_path / "raw", tmp_path / "out", format="jsonl", duplicates="keep"
    )
    assert [row.media[0].data for row in rows] == [color_image(n) for n in (0, 8, 0)]
    assert faults == {"part/rows.jsonl:4": "path"}


def test_index_only_refers_to_absolute_paths_in_the_folder_of_the_source(tmp_path, photos):
    images = [f"{tmp_path}/raw/0.png", f"{photos}/0.png"]
    kept, faults = prepare_images(tmp_path, images, index_only=True, check="header")
    assert kept == images[:1] and faults == {"rows.jsonl:2": "path"}
    stored = PreparedSet.open(str(tmp_path / "out")).read(np.arange(1))
    assert stored[0].media[0].data == color_image(0) and stored[0].media[0].ref["file"] == "0.png"
    with pytest.raises(UsageError, match=r"prepare\.root"):
        Prepare(index_only=True, root=(str(photos),))


def test_folder_to_name_is_in_the_message(tmp_path):
    image = parse_image("/photos/a/0.png", ())
    with pytest.raises(BadRow, match=r"/photos/a/0\.png is outside .*; --root /photos/a reads"):
        locate_file(tmp_path, image)


def test_addresses_on_a_store_are_read_in_the_folder_of_the_source_and_in_roots(memory):
    for folder in ("raw", "photos"):
        (to_path(memory) / folder / "0.png").write_bytes(folder.encode())
    raw = to_path(f"{memory}/raw")
    for folder in ("raw", "photos"):
        image = locate_file(raw, parse_image(f"{memory}/{folder}/0.png", ()), [f"{memory}/photos"])
        assert read_image(raw, image) == folder.encode()
    with pytest.raises(BadRow, match=r"--root .*/photos reads"):
        locate_file(raw, parse_image(f"{memory}/photos/0.png", ()))


@pytest.mark.parametrize(("stored", "given"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_that_differ_in_normalization_are_found(tmp_path, stored, given):
    (tmp_path / unicodedata.normalize(stored, "café.png")).write_bytes(b"x")
    assert read_file(tmp_path, unicodedata.normalize(given, "café.png")) == b"x"
    with pytest.raises(BadRow, match="there is no file thé"):
        read_file(tmp_path, "thé.png")


def test_backslashes_in_a_path_are_explained(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.png").write_bytes(b"x")
    with pytest.raises(BadRow, match=r"backslashes, and a/b\.png exists: write it with /"):
        read_file(tmp_path, "a\\b.png")
