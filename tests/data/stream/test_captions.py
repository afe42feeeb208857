"""Several columns of captions, and the one that a run takes of each row."""

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.config import Data, Inputs
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import UsageError
from mmray.training.sets import held_out_rows, training_rows
from mmray.training.validate import check_selections
from tests.data.prepare.test_pipeline import LAX, color_image, prepare
from tests.made import make_set, row
from tests.training.runs import Silent, config

ROWS = 200
COLUMNS = "text=alt,synthetic"


def texts_of(number):
    """Row 0 has no `synthetic`, row 1 no `alt`, row 2 two of `alt`."""
    alt = {1: None, 2: ["first", "second"]}.get(number, f"alt {number}")
    return {"alt": alt, "synthetic": None if number == 0 else f"synthetic {number}"}


@pytest.fixture
def prepared(tmp_path, in_process):
    return prepare_captions(tmp_path, "rows.jsonl", 6)


def prepare_captions(folder, name, count, columns=COLUMNS):
    rows = []
    for number in range(count):
        (folder / f"{number}.png").write_bytes(color_image(number))
        rows.append({"id": f"k{number}", "image": f"{number}.png"} | texts_of(number))
    if name.endswith("parquet"):
        as_lists = [
            each | {"alt": [each["alt"]] if number != 2 else each["alt"]}
            for number, each in enumerate(rows)
        ]
        pq.write_table(pa.Table.from_pylist(as_lists), folder / name)
    else:
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    prepare(str(folder / name), str(folder / "set"), LAX.replace(columns=(columns,)))
    return PreparedSet.open(str(folder / "set"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_captions_are_stored_with_their_columns(tmp_path, in_process, name):
    prepared = prepare_captions(tmp_path, name, 4)
    assert prepared.manifest.text_columns == ("alt", "synthetic")
    stored = [(each.texts, each.text_columns) for each in prepared.read(np.arange(4))]
    assert stored == [
        (["alt 0"], ["alt"]),
        (["synthetic 1"], ["synthetic"]),
        (["first", "second", "synthetic 2"], ["alt", "alt", "synthetic"]),
        (["alt 3", "synthetic 3"], ["alt", "synthetic"]),
    ]


def test_misspelled_column_of_captions_is_refused(tmp_path, in_process):
    with pytest.raises(UsageError, match=r"--columns text: .*`synthtic`.*did you mean `synthetic`"):
        prepare_captions(tmp_path, "rows.jsonl", 4, "text=alt,synthtic")


def taken(prepared, seed=1, passes=ROWS, start=0):
    """The caption that each row has in each pass, read from the tokens of a run without shuffle."""
    texts = sorted(
        {text for each in prepared.read(np.arange(prepared.num_rows)) for text in each.texts}
    )
    tokenizer = train_tokenizer(texts * 3, 200)
    reader = RowReader(
        prepared, Inputs(image_side=8, fit="squash", max_tokens=12), tokenizer, 10**6
    )
    ids, _ = reader.encoder.encode(texts)
    names = {tuple(line[line != 0].tolist()): text for line, text in zip(ids, texts, strict=True)}
    plan = SamplePlan(prepared.num_rows, 3, 1, seed, steps=10**6, shuffle=False)
    positions = np.arange(start * prepared.num_rows, (start + passes) * prepared.num_rows)
    block = reader.read_block(plan, positions)["input_ids"]
    found = [names[tuple(line[line != 0].tolist())] for line in block]
    return [found[number :: prepared.num_rows] for number in range(prepared.num_rows)]


def test_captions_are_drawn_by_weight_as_a_function_of_seed_pass_and_key(prepared):
    weighted = prepared.with_captions({"alt": 0.3, "synthetic": 0.9})
    by_row = taken(weighted)
    counts = [Counter(each) for each in by_row]
    assert counts[0] == {"alt 0": ROWS}, "a row without the other column"
    assert counts[1] == {"synthetic 1": ROWS}
    assert counts[2]["synthetic 2"] == pytest.approx(0.75 * ROWS, abs=0.1 * ROWS)
    assert counts[2]["first"] == pytest.approx(0.125 * ROWS, abs=0.08 * ROWS), "texts share it"
    share = sum(each[f"alt {number}"] for number, each in enumerate(counts) if number > 2)
    assert share / (3 * ROWS) == pytest.approx(0.25, abs=0.06)
    assert [each[7:9] for each in by_row] == taken(weighted, passes=2, start=7)
    assert taken(weighted, seed=2, passes=20) != taken(weighted, passes=20)
    only = prepared.with_captions({"synthetic": 1.0}).read(np.arange(4))
    assert [each.texts for each in only] == [[], *([f"synthetic {n}"] for n in (1, 2, 3))]


def test_run_names_its_captions_and_evaluation_its_column(prepared, tmp_path):
    address = str(prepared.folder)
    settings = config(address, tmp_path, "r")
    settings = settings.replace(
        data=settings.data.replace(captions="alt=1, synthetic=3", eval_captions="synthetic")
    )
    check_selections(settings)
    reporter = Silent()
    trained = training_rows(prepared, settings, tmp_path, reporter)
    held_out = held_out_rows(prepared, settings, tmp_path, reporter)
    left_out = "1 rows without such a caption are left out"
    assert reporter.notes == [
        ("captions", f"alt 25 %, synthetic 75 % of {address}, data.captions"),
        ("captions", f"synthetic 100 % of {address}, data.eval_captions; {left_out}"),
    ]
    assert trained.num_rows == 6 and trained.read(np.array([3]))[0].text_weights == [1, 3]
    assert [each.texts for each in held_out.read(np.arange(5))] == [
        [f"synthetic {number}"] for number in range(1, 6)
    ]
    default = settings.replace(data=Data(train=address))
    first = held_out_rows(prepared, default, tmp_path, Silent())
    assert first.keys() == ["k0", "k2", "k3", "k4", "k5"]
    assert first.read(np.array([1]))[0].texts == ["first", "second"]
    for setting, value in (("captions", "alt, synthtic=2"), ("eval_captions", "synthtic")):
        wrong = settings.replace(data=settings.data.replace(**{setting: value}))
        with pytest.raises(UsageError, match=rf"data\.{setting}: .*did you mean `synthetic`"):
            check_selections(wrong)


def test_set_without_the_columns_of_a_mixture_is_refused(prepared, tmp_path):
    """Otherwise its rows would be trained on captions that nobody named."""
    settings = config("unused", tmp_path, "r")
    settings = settings.replace(data=Data(train="unused", captions="other", eval_captions="other"))
    for rows in (training_rows, held_out_rows):
        with pytest.raises(UsageError, match="has no captions of other, only of alt, synthetic"):
            rows(prepared, settings, tmp_path, Silent())
    plain = make_set(tmp_path / "plain", [row(0), row(1)])
    reporter = Silent()
    assert training_rows(plain, settings, tmp_path, reporter).num_rows == 2
    assert "captions of one column, which are used instead of other" in reporter.notes[0][1]


def test_caption_of_a_class_is_of_no_column(tmp_path, in_process):
    rows = [{"alt": "a", "label": "cat"}, {"synthetic": "b", "label": "cat"}, {"label": "dog"}]
    for number, each in enumerate(rows):
        (tmp_path / f"{number}.png").write_bytes(color_image(number))
        each["image"] = f"{number}.png"
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    prepare(str(source), str(tmp_path / "set"), LAX.replace(columns=(COLUMNS,)))
    prepared = PreparedSet.open(str(tmp_path / "set"))
    settings = config(str(tmp_path / "set"), tmp_path, "r")
    named = settings.replace(data=settings.data.replace(captions="alt,synthetic"))
    assert training_rows(prepared, settings, tmp_path, Silent()).num_rows == 3
    assert training_rows(prepared, named, tmp_path, Silent()).num_rows == 2
    only = prepared.with_captions({"alt": 1.0}).read(np.arange(3))
    assert [each.texts for each in only] == [["a"], [], []]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_rows_with_and_without_captions_are_selected(tmp_path, in_process, name):
    """Conversations have no columns of captions, so they stay."""
    (tmp_path / "0.png").write_bytes(color_image(0))
    rows = [{"alt text": "a", "id": "both", "long": "b"}, {"alt text": "a", "id": "alt"}]
    if name.endswith("csv"):
        lines = ["image,id,alt text,long", "0.png,both,a,b", "0.png,alt,a,"]
        (tmp_path / name).write_text("\n".join(lines))
    else:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        rows.append({"id": "chat", "messages": messages})
        lines = [json.dumps({"image": "0.png"} | each) for each in rows]
        (tmp_path / name).write_text("\n".join(lines))
    options = LAX.replace(columns=("text=alt text,long",), duplicates="keep")
    prepare(str(tmp_path / name), str(tmp_path / "set"), options)
    prepared = PreparedSet.open(str(tmp_path / "set"))
    settings = config("unused", tmp_path, "r").replace(data=Data(captions="long"))
    kept = training_rows(prepared, settings, tmp_path, Silent())
    assert kept.keys() == (["both"] if name.endswith("csv") else ["both", "chat"])
    assert kept.read(np.array([0]))[0].texts == ["b"]


@pytest.mark.parametrize("value", ["alt=0", "alt=x", "alt, alt", "=3"])
def test_invalid_shares_of_captions_are_refused(value):
    with pytest.raises(UsageError, match=r"data\.captions: "):
        Data(captions=value)


def test_sets_without_columns_of_captions_are_as_before(tmp_path, prepared):
    plain = make_set(tmp_path / "plain", [row(0, texts=["one", "two"]), row(1)])
    assert taken(plain, passes=9) == taken(plain.with_captions({"alt": 1.0}), passes=9)
    both = PreparedMixture([plain, prepared.with_captions({"alt": 1.0})], [1.0, 1.0])
    assert [each.texts for each in both.read(np.array([0, 5]))] == [["one", "two"], ["alt 3"]]
