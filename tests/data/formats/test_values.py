"""Types of columns that pandas, spreadsheets and other programs write."""

import base64
import json
import tarfile
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmray.data.formats.columns import Columns
from mmray.data.formats.in_memory import store_rows
from mmray.data.formats.values import normalize_values
from mmray.data.rows import BadRow
from mmray.data.source_row import parse_row
from mmray.errors import DataError
from tests.data.formats.test_formats import COUNT, add, images, prepared
from tests.data.prepare.test_pipeline import color_image
from tests.made import encode

CHAT = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A color."}]
SYSTEM = {"role": "system", "content": "s"}


def pair(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


QA = pair("q", "a")
TURN = {"user": "What?", "assistant": "A color.", "source": "x"}


def normalized(**values):
    return normalize_values(values, ("cat", "red fox"), "a photo of a {}")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"id": 3.0, "label": float("nan")}, {"id": 3}),
        ({"id": 1.5}, {"id": 1.5}),  # parse_row refuses it
        ({"id": Decimal(7), "text": b"caf\xc3\xa9"}, {"id": 7, "text": "café"}),
        ({"image": "", "messages": CHAT}, {"messages": CHAT}),
        ({"id": b"k1", "key": bytes(16)}, {"id": "k1", "key": "00" * 16}),
        ({"label": 1.0, "text": "x"}, {"label": 1, "text": "x"}),
        ({"label": "red_fox", "text": "x"}, {"label": 1, "text": "x"}),
        ({"label": "12", "text": "x"}, {"label": 12, "text": "x"}),
        ({"label": True, "text": "x"}, {"label": 1, "text": "x"}),
        ({"label": " ", "text": "x"}, {"text": "x"}),
        ({"label": 1}, {"label": 1, "text": "a photo of a red fox"}),
        ({"label": 2}, {"label": 2}),
        ({"texts": ["one", None, " ", float("nan"), "two"]}, {"texts": ["one", "two"]}),
        ({"texts": [None]}, {"texts": [None]}),
        ({"text": "x", "texts": ["y"]}, {"texts": ["y"]}),
        ({"text": "x", "texts": None}, {"text": "x"}),
        ({"messages": json.dumps(CHAT)}, {"messages": CHAT}),
        ({"conversations": "[broken"}, {"conversations": "[broken"}),
        # TRL, ms-swift, Alpaca, and questions about images
        ({"prompt": "q", "completion": "a"}, {"messages": QA}),
        (
            {"prompt": QA[:1], "completion": QA[1:], "image": "a.png"},
            {"messages": QA, "image": "a.png"},
        ),
        (
            {"prompt": [*pair("b", "c"), QA[0]], "completion": QA[1:]},
            {"messages": [pair("b", "c")[0], pair("b", "c")[1] | {"loss": False}, *QA]},
        ),
        (
            {"query": "q", "response": "a", "history": [["b", "c"]], "system": "s"},
            {"messages": [SYSTEM, *pair("b", "c"), *QA]},
        ),
        ({"instruction": "q", "input": "x", "output": "a"}, {"messages": pair("q\nx", "a")}),
        (
            {"instruction": "q", "input": "", "output": "a", "text": "t"},
            {"messages": QA, "text": "t"},
        ),
        ({"input": "q", "output": "a"}, {"messages": QA}),
        ({"image": "a.png", "question": "q", "answer": "a"}, {"messages": QA, "image": "a.png"}),
        ({"system": "s", "conversations": QA}, {"conversations": [SYSTEM, *QA]}),
        # columns that are not used stay
        ({"system": "s", "messages": [SYSTEM, *QA]}, {"system": "s", "messages": [SYSTEM, *QA]}),
        *(
            (values, values)
            for values in (
                {"image": "a.png", "text": "t", "question": "q"},
                {"image": "a.png", "text": "t", "question": "q", "answer": "a"},
                {"question": "q", "prompt": "p", "answer": "a"},
            )
        ),
        (
            {"texts": [TURN]},
            {
                "messages": [
                    {"role": "user", "content": "What?"},
                    {"role": "assistant", "content": "A color."},
                ]
            },
        ),
    ],
)
def test_values_get_the_types_of_a_row(values, expected):
    assert normalized(**values) == expected


def test_float_that_may_be_a_rounded_integer_is_no_key(tmp_path, in_process):
    assert normalized(id=2.0**53 - 1, label=3.0) == {"id": 2**53 - 1, "label": 3}
    folder = images(tmp_path / "raw", 2)
    table = {"image": ["0.png", "1.png"], "text": ["x", "y"]}
    ids = pa.array([1700000000000000001, 1700000000000000100])
    for name, column in (("floats", ids.cast(pa.float64(), safe=False)), ("integers", ids)):
        pq.write_table(pa.table(table | {"id": column}), folder / f"{name}.parquet")
    with pytest.raises(DataError, match=r"2 id, .*1700000000000000000 is a float.*2\^53"):
        prepared(folder / "floats.parquet", tmp_path / "floats")
    _, rows, _ = prepared(folder / "integers.parquet", tmp_path / "integers")
    assert [row.key for row in rows] == list(map(str, ids.to_pylist()))


def test_mapped_column_replaces_others_of_its_kind():
    values = {"title": "x", "text": "y", "texts": ["z"], "image": b"", "image_path": "a"}
    assert Columns({"text": "title", "image": "image"}).rename(values) == {
        "text": "x",
        "image": b"",
    }


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "TIFF", "BMP", "AVIF", "JPEG2000"])
def test_images_of_each_format_in_base64_are_read(kind):
    data = encode(Image.new("RGB", (24, 24), (9, 99, 7)), kind)
    for text in (base64.b64encode(data).decode(), base64.urlsafe_b64encode(data)):
        assert parse_row({"image": text, "text": "x"}, "f:1").images[0].data == data


@pytest.mark.parametrize("encoding", ["base64", "lines", "data URI"])
def test_images_in_base64_are_read(encoding):
    data = color_image(7)
    text = base64.b64encode(data).decode()
    if encoding == "lines":
        text = base64.encodebytes(data).decode()
    if encoding == "data URI":
        text = f"data:image/png;base64,{text}"
    row = parse_row({"image": text, "text": "x"}, "f:1")
    assert row.images[0].data == data


def test_pixels_are_refused_with_what_was_found():
    with pytest.raises(BadRow, match="array of numbers"):
        parse_row({"image": [[[0, 1, 2]]], "text": "x"}, "f:1")
    with pytest.raises(BadRow, match="an object with array, shape"):
        parse_row({"image": {"array": [1], "shape": [1]}, "text": "x"}, "f:1")
    with pytest.raises(BadRow, match=r"the name of a class"):
        parse_row({"image": "a.png", "label": 1}, "f:1")


def test_names_of_classes_are_numbered_and_stored(tmp_path, in_process):
    folder = images(tmp_path / "raw")
    names = ["red_fox", "cat", "cat", "dog", "cat", "dog", "red_fox"]
    table = {"image": [f"{n}.png" for n in range(COUNT)], "label": names}
    pq.write_table(pa.table(table), folder / "rows.parquet")
    manifest, rows, _ = prepared(folder / "rows.parquet", tmp_path / "out", caption="the {}")
    assert manifest.class_names == ("cat", "dog", "red fox")
    assert [row.label for row in rows] == [2, 0, 0, 1, 0, 1, 2]
    assert rows[0].texts == ["the red fox"]
    # a new class changes the numbers of all
    in_process.clear()
    table["label"] = ["ant", *names[1:]]
    pq.write_table(pa.table(table), folder / "rows.parquet")
    manifest, rows, _ = prepared(folder / "rows.parquet", tmp_path / "out", caption="the {}")
    assert manifest.class_names == ("ant", "cat", "dog", "red fox")
    assert [row.label for row in rows] == [0, 1, 1, 2, 1, 2, 3]


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["3", "-1", "12"], (), [3, -1, 12]),
        (["3.0", "", "1.0"], (), [3, None, 1]),  # of pandas, which has no missing integers
        (["00", "0", "01", "1"], ("0", "00", "01", "1"), [1, 0, 2, 3]),
        (["nan", "infinity", "3.7", "inf"], ("3.7", "inf", "infinity", "nan"), [3, 2, 0, 1]),
        (["10", "9", "cat", ""], ("10", "9", "cat"), [0, 1, 2, None]),
        (["02", "10", "1"], ("1", "02", "10"), [1, 2, 0]),
        (["99999999999999999999", "1"], ("1", "99999999999999999999"), [1, 0]),
        (["red_fox", "red fox", " Cat"], ("Cat", "red fox"), [1, 1, 0]),
        (["cafe\u0301", " ", "caf\u00e9"], ("café",), [0, None, 0]),  # of macOS and of others
    ],
)
@pytest.mark.parametrize("kind", ["csv", "tar", "grouped", "parquet"])
def test_labels_are_numbers_only_if_all_are(tmp_path, in_process, kind, labels, names, numbers):
    folder = images(tmp_path / "raw", len(labels))
    lines = [f"{number}.png,x,{label}" for number, label in enumerate(labels)]
    source = folder / "a.csv"
    source.write_text("\n".join(["image,text,label", *lines]))
    if kind == "tar":
        source = folder / "a.tar"
        with tarfile.open(source, "w") as tar:
            for number, label in enumerate(labels):
                add(tar, f"{number}.png", color_image(number))
                add(tar, f"{number}.txt", b"x")
                if label:
                    add(tar, f"{number}.cls", f"{label}\n".encode())
    if kind == "parquet":
        source = folder / "a.parquet"
        paths = [f"{number}.png" for number in range(len(labels))]
        table = {"image": paths, "text": ["x"] * len(labels), "label": [x or None for x in labels]}
        pq.write_table(pa.table(table), source)
    group = "image" if kind == "grouped" else None
    manifest, rows, faults = prepared(source, tmp_path / "out", group=group)
    assert (manifest.class_names, faults) == (names, {})
    assert [row.label for row in rows] == numbers


def test_a_name_that_makes_numbers_names_is_logged(tmp_path, in_process):
    images(tmp_path, 3)
    (tmp_path / "a.csv").write_text("image,text,label\n0.png,x,0\n1.png,x,NA\n2.png,x,2\n")
    logs = []
    prepared(tmp_path / "a.csv", tmp_path / "out", lambda *line: logs.append(line))
    assert ("3: 0, 2, NA (all are names, because `NA` is no integer)", "classes") in logs


def test_marks_of_missing_values_are_kept_and_counted(tmp_path, in_process):
    images(tmp_path, 4)
    lines = ["image,text,label", "0.png,NA,cat", "1.png,x,None", "2.png,x,", "3.png,A NA,dog"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    manifest, rows, _ = prepared(tmp_path / "a.csv", tmp_path / "out")
    assert [row.texts for row in rows] == [["NA"], ["x"], ["x"], ["A NA"]]
    assert manifest.class_names == ("None", "cat", "dog")
    ((text, notice),) = manifest.notices.items()
    assert "used as it is" in text and notice == {"num_rows": 2, "example": "a.csv:2"}


def test_lists_and_unknown_names_are_no_labels(tmp_path, in_process):
    images(tmp_path, 3)
    (tmp_path / "a.csv").write_text('image,text,label\n0.png,x,"[0, 1]"\n1.png,x,cat\n')
    manifest, _, faults = prepared(tmp_path / "a.csv", tmp_path / "out")
    assert (manifest.class_names, faults) == (("cat",), {"a.csv:2": "label"})
    with pytest.raises(BadRow, match="label 'dog' is none of the classes cat, red fox"):
        normalized(label="dog", text="x")
    with pytest.raises(BadRow, match="a row has one label"):
        parse_row({"image": "a.png", "text": "x", "label": ["cat"]}, "a:1")


def test_files_that_number_classes_differently_are_refused_with_both_lists(tmp_path, in_process):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

    parts = {}
    for split, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        features = Features({"image": Image(), "label": ClassLabel(names=names)})
        pictures = [{"bytes": color_image(n), "path": None} for n in range(2)]
        parts[split] = Dataset.from_dict({"image": pictures, "label": [0, 1]}, features)
        parts[split].to_parquet(tmp_path / "files" / f"{split}-0.parquet")
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    in_memory = store_rows(DatasetDict(parts), tmp_path / "rows", {})
    for source in (tmp_path / "files", tmp_path / "saved", in_memory):
        with pytest.raises(DataError, match=r"label differently: .*(cat, dog|dog, cat) and "):
            prepared(source, tmp_path / "out")


def test_names_next_to_typed_numbers_are_no_classes(tmp_path, in_process):
    folder = images(tmp_path / "raw", 3)
    rows = [
        {"image": f"{n}.png", "text": "x", "label": label} for n, label in enumerate([3, "cat"])
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    manifest, read, faults = prepared(folder / "a.jsonl", tmp_path / "out")
    assert [row.label for row in read] == [3] and manifest.class_names == ()
    assert faults == {"a.jsonl:2": "label"}


def test_numbers_in_a_tar_are_those_of_its_list_of_classes(tmp_path, in_process):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "classes.txt").write_text("1\n2\n3\n")
    with tarfile.open(tmp_path / "raw" / "a.tar", "w") as tar:
        add(tar, "a.png", color_image(0))
        add(tar, "a.cls", b"1")
    _, rows, _ = prepared(tmp_path / "raw", tmp_path / "out", caption="number {}")
    assert [(row.label, row.texts) for row in rows] == [(1, ["number 2"])]


def test_folders_of_numbers_are_in_their_order(tmp_path, in_process):
    for number in range(12):
        (tmp_path / "raw" / str(number)).mkdir(parents=True)
        (tmp_path / "raw" / str(number) / "a.png").write_bytes(color_image(number))
    logs = []
    manifest, rows, _ = prepared(
        tmp_path / "raw", tmp_path / "out", lambda text, heading: logs.append((heading, text))
    )
    assert manifest.class_names == tuple(map(str, range(12)))
    assert ("classes", "12: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11") in logs
    assert {row.key: (row.label, row.texts) for row in rows} == {
        f"{number}/a.png": (number, [f"a photo of a {number}"]) for number in range(12)
    }


def test_class_labels_of_datasets_give_captions(tmp_path, in_process):
    from datasets import ClassLabel, Dataset, Features, Image, Value

    features = Features(
        {"image": Image(), "label": ClassLabel(names=["cat", "red_fox"]), "id": Value("int64")}
    )
    pictures = [{"bytes": color_image(n), "path": None} for n in range(2)]
    rows = {"image": pictures, "label": [1, 0], "id": [0, 1]}
    dataset = Dataset.from_dict(rows, features)
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "rows.parquet")
    for source in ("saved", "rows.parquet"):
        manifest, read, _ = prepared(tmp_path / source, tmp_path / f"{source}-out")
        assert manifest.class_names == ("cat", "red fox")
        assert [(row.label, row.texts) for row in read] == [
            (1, ["a photo of a red fox"]),
            (0, ["a photo of a cat"]),
        ]


def test_repeated_ids_are_kept_on_request(tmp_path, in_process):
    folder = images(tmp_path / "raw")
    lines = [{"id": "same", "image": f"{n}.png", "conversations": CHAT} for n in range(3)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DataError, match=r"2 duplicate-key.*(?s:.*)--duplicates keep"):
        prepared(folder / "rows.jsonl", tmp_path / "none", max_bad_fraction=0.1)
    _, rows, _ = prepared(folder / "rows.jsonl", tmp_path / "out", duplicates="keep")
    assert [row.key for row in rows] == ["same"] * 3


def test_question_of_a_parquet_set_is_kept(tmp_path, in_process):
    folder = images(tmp_path / "raw", 3)
    columns = {name: [f"{name} {number}" for number in range(3)] for name in ("question", "answer")}
    columns |= {"image": [f"{number}.png" for number in range(3)], "prompt": [None, None, "p"]}
    pq.write_table(pa.table(columns), folder / "vqa.parquet")
    manifest, rows, _ = prepared(folder / "vqa.parquet", tmp_path / "all", max_bad_fraction=0.5)
    said = [[part["text"] for each in row.messages for part in each["content"]] for row in rows]
    assert said == [[None, f"question {number}", f"answer {number}"] for number in range(2)]
    assert manifest.reasons == {"no-text": 1}  # it has two questions
    manifest, rows, _ = prepared(
        folder / "vqa.parquet", tmp_path / "text", columns=("text=answer",)
    )
    assert [row.texts for row in rows] == [[f"answer {number}"] for number in range(3)]
    assert {text: notice["num_rows"] for text, notice in manifest.notices.items()} == {
        "column `question` is not used": 3,
        "column `prompt` is not used": 1,
    }


def test_paths_in_parts_are_relative_to_the_file_of_a_folder(tmp_path, in_process):
    for split in ("train", "val"):
        folder = images(tmp_path / "raw" / split, COUNT)
        parts = [{"type": "image", "image": "1.png"}, {"type": "image"}]
        user = {"role": "user", "content": parts}
        lines = [
            {"id": f"{split} {number}", "image": f"{number}.png", "messages": [user, QA[1]]}
            for number in range(2)
        ]
        lines.append({"messages": pair("<img>0.png</img>", "a"), "id": split})
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / "rows.jsonl").write_text(text)
        (folder / "1.png").write_bytes(encode(Image.new("RGB", (9, 8), len(split))))
    _, rows, _ = prepared(tmp_path / "raw", tmp_path / "out")
    for row in rows:
        folder = tmp_path / "raw" / row.split
        names = [f"1.png {row.key[-1]}.png", "0.png"][row.key == row.split].split()
        assert [each.data for each in row.media] == [(folder / name).read_bytes() for name in names]


@pytest.mark.parametrize(
    "address",
    [
        "https://a.b/x.png?sig=hush",
        "http://a.b/x.png#hush",
        "HTTPS://me:hush@a.b/x.png?hush",
    ],
)
def test_url_of_an_image_names_img2dataset_and_no_secret(address):
    with pytest.raises(BadRow) as bad:
        parse_row({"image": address, "text": "x"}, "o")
    assert bad.value.reason == "path" and "img2dataset" in bad.value.detail
    assert "hush" not in bad.value.detail and "a.b/x.png" in bad.value.detail
