"""Names of files and folders define splits by one rule in every format."""

import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.data.formats.splits import split_of_file, splits_of_files, splits_of_folders
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from tests.data.formats.test_formats import LAX, add
from tests.data.prepare.test_pipeline import color_image


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"),
        ("validation-00000-of-00001.parquet", "validation"),
        ("cc3m_val_0001.tar", "val"),
        ("Test.jsonl", "test"),
        ("split=dev/part-0.snappy.parquet", "dev"),
        ("Training/0.parquet", "train"),
        ("val2017/000.tar", "val"),
        ("train_images/000.tar", "train"),
        ("test/train-0.parquet", "test"),
        ("testA.parquet", "test"),
        ("TestSet.parquet", "test"),
        ("trn/0.tar", "train"),
        ("held_out-0.tar", "test"),
        ("subset=validation/0.parquet", "validation"),
        ("train_station/0.parquet", None),
        ("contest.parquet", None),
        ("year=2020/0.parquet", None),
    ],
)
def test_split_of_a_path(path, split):
    assert split_of_file(path) == split


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("seg_train seg_test seg_pred", ("train", "test", None)),
        ("train-clean-100 test-clean dev-other", ("train", "test", "dev")),
        ("1_train 2_val", ("train", "val")),
        ("train val_unseen", ("train", "val")),
        ("train_station test_tube bus", (None, None, None)),
        ("train bus", ("train", None)),
    ],
)
def test_folders_that_differ_in_the_word_of_a_split_only_are_splits(names, splits):
    folders = names.split()
    assert splits_of_folders(folders) == dict(zip(folders, splits, strict=True))


def test_one_train_folder_among_others_is_no_split():
    assert set(splits_of_files(["bus/0.tar", "train/0.tar"]).values()) == {None}
    # rows named test are never trained on
    assert splits_of_files(["0.tar", "test.tar"]) == {"0.tar": None, "test.tar": "test"}
    assert splits_of_files(["train-0.tar", "train-1.tar"])["train-1.tar"] == "train"


def write_parquet(folder, name, numbers):
    images = [{"bytes": color_image(number), "path": None} for number in numbers]
    table = pa.table({"image": images, "text": [f"color {number}" for number in numbers]})
    pq.write_table(table, folder / name)


def write_tar(folder, name, numbers):
    with tarfile.open(folder / name, "w") as tar:
        for number in numbers:
            add(tar, f"{number}.png", color_image(number))
            add(tar, f"{number}.txt", f"color {number}".encode())


def write_members(folder, name, numbers):
    """Add a folder of a tar."""
    with tarfile.open(folder / "all.tar", "a") as tar:
        for number in numbers:
            add(tar, f"{name}{number}.png", color_image(number))
            add(tar, f"{name}{number}.txt", f"color {number}".encode())


def write_lines(folder, name, numbers):
    lines = []
    for number in numbers:
        (folder / f"{number}.png").write_bytes(color_image(number))
        lines.append(f"{number}.png,color {number}")
    (folder / name).write_text("\n".join(("image,text", *lines)))


def write_pairs(folder, name, numbers):
    for number in numbers:
        (folder / f"{name}{number}.png").write_bytes(color_image(number))
        (folder / f"{name}{number}.txt").write_text(f"color {number}")


@pytest.mark.parametrize(
    ("write", "names", "splits"),
    [
        (write_parquet, ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"), "test"),
        (write_parquet, ("split=train/0.parquet", "split=dev/0.parquet"), "dev"),
        (write_parquet, ("0.parquet", "validation/0.parquet"), "validation"),
        (write_tar, ("train/000.tar", "val/000.tar"), "val"),
        (write_tar, ("cc-train-000.tar", "cc-test-000.tar"), "test"),
        (write_tar, ("train/000.tar", "testA/000.tar"), "test"),
        (write_members, ("train/", "valid/"), "valid"),
        (write_lines, ("my_train.csv", "my_dev.csv"), "dev"),
        (write_pairs, ("Train/", "Testing/"), "test"),
        (write_pairs, ("train2014/", "val2014/"), "val"),
    ],
)
def test_layout_gives_splits_in_each_format(tmp_path, in_process, write, names, splits):
    for name, numbers in zip(names, (range(4), range(4, 6)), strict=True):
        folder = tmp_path / "raw" / name
        (folder if name.endswith("/") else folder.parent).mkdir(parents=True, exist_ok=True)
        write(tmp_path / "raw", name, numbers)
    logs = []
    source = str(tmp_path / "raw")
    manifest = prepare(source, str(tmp_path / "out"), LAX, log=lambda *line: logs.append(line))
    assert manifest.splits == {"train": 4, splits: 2}
    training = PreparedSet.open(str(tmp_path / "out"), "train")
    assert {text for texts in training.texts(range(4)) for text in texts} == {
        f"color {number}" for number in range(4)
    }
    line = next((text for text, label in logs if label == "splits"), "")
    # files without a split become training rows when the set is assembled; the folders of a tar are
    # known after it was read
    assert bool(line) == (write is not write_members)
    assert not line or (f"{splits} " in line and "--split none" in line)
    without = LAX.model_copy(update={"split": "none"})
    assert prepare(source, str(tmp_path / "none"), without).splits == {}
    other = LAX.model_copy(update={"split": "dev"})
    assert prepare(source, str(tmp_path / "dev"), other).splits == {"dev": 6}
