"""Images behind links, and names that look equal."""

import unicodedata

import pytest

from mmray.config import Prepare
from mmray.data.images.read import read_file
from mmray.data.rows import BadRow
from mmray.errors import UsageError
from tests.data.formats.test_formats import prepared
from tests.data.prepare.test_pipeline import add, color_image

pytestmark = pytest.mark.usefixtures("in_process")


def test_links_out_of_the_folder_are_followed_on_request(tmp_path):
    """A linked folder, a link for each file, and a link to a link, as in the cache of a hub."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        (photos / f"{number}.png").write_bytes(color_image(number))
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "linked").symlink_to(photos)
    (raw / "1.png").symlink_to(photos / "1.png")
    (tmp_path / "blob").symlink_to(photos / "2.png")
    (raw / "2.png").symlink_to("../blob")
    for image in ("linked/0.png", "1.png", "2.png", "../photos/0.png"):
        add(raw / "rows.jsonl", {"image": image, "text": "x"})
    _, rows, faults = prepared(raw / "rows.jsonl", tmp_path / "out", follow_links=())
    assert len(rows) == 3 and faults == {"rows.jsonl:4": "path"}
    with pytest.raises(BadRow, match="--follow-links reads it"):
        read_file(raw, "1.png")
    with pytest.raises(UsageError, match="follow_links"):
        Prepare(index_only=True, follow_links=())


def test_links_to_other_folders_than_the_named_ones_are_refused(tmp_path):
    """Also through `..` in the target of a link, and a folder whose name only starts the same."""
    raw = tmp_path / "raw"
    for folder in ("raw", "photos", "photos2", "secret"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.png").write_bytes(color_image(len(folder)))
    (tmp_path / "photos" / "far").symlink_to(tmp_path / "secret")
    (raw / "good.png").symlink_to(tmp_path / "photos" / "0.png")
    (raw / "other.png").symlink_to(tmp_path / "photos2" / "0.png")
    (raw / "up.png").symlink_to("../photos/../secret/0.png")
    (raw / "photos").symlink_to(tmp_path / "photos")
    for image in ("good.png", "other.png", "up.png", "photos/far/0.png", "photos/0.png"):
        add(raw / "rows.jsonl", {"image": image, "text": image})
    folders = (str(tmp_path / "photos"),)
    _, rows, faults = prepared(
        raw / "rows.jsonl", tmp_path / "out", follow_links=folders, duplicates="keep"
    )
    assert [row.texts[0] for row in rows] == ["good.png", "photos/0.png"]
    assert faults == {f"rows.jsonl:{line}": "path" for line in (2, 3, 4)}
    with pytest.raises(BadRow, match=r"0\.png, which is in none of the folders of --follow-links"):
        read_file(raw, "other.png", folders)


def test_links_to_another_file_system_need_its_folder(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "0.png").symlink_to("/proc/version")
    with pytest.raises(BadRow, match="another file system than the source; --follow-links /proc"):
        read_file(tmp_path / "raw", "0.png", ())
    assert read_file(tmp_path / "raw", "0.png", ("/proc",)) is not None


def test_pairs_of_links_are_followed(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (tmp_path / "image").write_bytes(color_image(1))
    (tmp_path / "text").write_text("a caption")
    (raw / "a.png").symlink_to(tmp_path / "image")
    (raw / "a.txt").symlink_to(tmp_path / "text")
    _, rows, faults = prepared(raw, tmp_path / "out", follow_links=())
    assert rows[0].texts == ["a caption"] and not faults


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
