"""Scores of a set by a model: those of the evaluation, resumed by shard, and used by selections."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from mmray import api
from mmray.config import Evaluate
from mmray.data.prepare import map_shards as map_module
from mmray.data.prepare import select as select_module
from mmray.data.prepare.select import find_similar
from mmray.data.store.manifest import read_manifest, write_manifest
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_values import write_values
from mmray.data.store.selection import select_rows
from mmray.engine.collectives import Group
from mmray.errors import DataError, UsageError
from mmray.evaluation.batches import EvalDataset
from mmray.evaluation.embeddings import embed_dataset
from mmray.storage.paths import to_path
from mmray.training.driver import train
from mmray.training.saved_model import SavedModel, load_model, open_run
from tests.made import make_set, noisy, row
from tests.training.runs import Silent, config

ROWS = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory, forked_children):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("run")
    make_set(folder / "set", [row(number, noisy(number)) for number in range(ROWS)])
    settings = config(folder / "set", folder, "r", steps=1, parallel="single")
    return train(settings.with_cluster(workers=1, cpus_per_worker=1), Silent(), local=True).path


@pytest.fixture
def tasks(monkeypatch):
    """Run tasks here; the files of the shards that were scored. `fail_after` of them raises."""

    class Tasks(list):
        fail_after = None

    done = Tasks()

    def run_here(work, items, runs_model=False, hint=""):
        for item in items:
            if len(done) == done.fail_after:
                raise KeyboardInterrupt
            done.extend(shard.file for shard in item)
            yield work(item)

    monkeypatch.setattr(map_module, "map_tasks", run_here)
    monkeypatch.setattr(
        select_module, "map_tasks", lambda work, items, hint: (work(item) for item in items)
    )
    return done


def make(folder):
    """Two shards of 12 rows, one with two captions; row 5 is no image, row 20 repeats row 3."""
    rows = [row(number, noisy(number), [f"text {number}"]) for number in range(ROWS)]
    rows[4] = row(4, noisy(4), ["one", "another"])
    rows[5] = row(5, data=b"nothing")
    rows[20] = row(20, noisy(3), ["text 3"])
    return str(make_set(folder, rows).folder)


def column(address, name="clip_score"):
    prepared = PreparedSet.open(address)
    parts = prepared.values.read([shard.key for shard in prepared.shards], [name])
    return [value for part in parts for value in part[name].to_pylist()]


@torch.no_grad()
def similarities(address, run):
    """Cosine of each caption and its image, as the evaluation computes them, by row."""
    settings, tokenizer, checkpoint = open_run(run, None)
    data = EvalDataset(PreparedSet.open(address), settings.model.inputs, tokenizer, Evaluate())
    from mmray import objectives

    group = Group.current(torch.device("cpu"))
    model = load_model(settings, checkpoint)
    found = embed_dataset(model, data, group, objectives.build(settings.objective))
    by_row = {}
    for own, image, text in zip(
        found.locations[:, 0], found.image_index, found.text_id, strict=True
    ):
        cosine = found.image[image] @ found.text[text]
        by_row.setdefault(int(own), []).append(float(cosine))
    return {number: np.mean(values) for number, values in by_row.items()}


def test_scores_are_the_similarities_of_the_evaluation(run, tasks, tmp_path):
    address = make(tmp_path / "set")
    reporter = Silent()
    api.score(address, str(run), batch=5, reporter=reporter)
    scores = column(address)
    assert scores[5] is None and len(scores) == ROWS
    expected = similarities(address, run)
    assert expected.keys() == set(range(ROWS)) - {5}
    for number, value in expected.items():
        assert scores[number] == pytest.approx(value, abs=1e-6)
    assert ("unreadable", "1 rows cannot be read and have no score") in reporter.notes
    middle = sorted(value for value in scores if value is not None)[11]
    selected = select_rows(PreparedSet.open(address), f"clip_score > {middle}", tmp_path)
    assert selected.keys() == [
        f"row-{number}" for number in range(ROWS) if number != 5 and scores[number] > middle
    ]


def test_killed_score_resumes_with_the_next_shard(run, tasks, tmp_path):
    address = make(tmp_path / "set")
    tasks.fail_after = 1
    with pytest.raises(KeyboardInterrupt):
        api.score(address, str(run), reporter=Silent())
    assert "clip_score" not in PreparedSet.open(address).manifest.columns
    before = PreparedSet.open(address)
    tasks.fail_after = None
    reporter = Silent()
    api.score(address, str(run), reporter=reporter)
    assert tasks == ["shards/0.arrow", "shards/1.arrow"]
    assert ("resumed", "12 of 24 rows have scores already") in reporter.notes
    assert PreparedSet.open(address).fingerprint == before.fingerprint
    tasks.clear()
    api.score(address, str(run), embeddings=True, reporter=Silent())
    assert len(tasks) == 2, "the embeddings were missing"
    api.score(address, str(run), embeddings=True, reporter=Silent())
    assert len(tasks) == 2


def test_scores_of_one_column_of_captions(run, tasks, tmp_path):
    folder = to_path(make(tmp_path / "set"))
    settings = {"columns": ["text=alt,synthetic"]}
    write_manifest(folder, replace(read_manifest(folder), settings=settings))
    reporter = Silent()
    api.score(str(folder), str(run), reporter=reporter)
    assert ("captions", f"column alt of {folder}") in reporter.notes
    api.score(str(folder), str(run), captions="alt", reporter=Silent())
    assert len(tasks) == 2, "the first column is the default"
    with pytest.raises(UsageError, match="it is of the captions `alt`, not `synthetic`"):
        api.score(str(folder), str(run), captions="synthetic", reporter=Silent())


@pytest.mark.parametrize("number_with_caption", [1, 0])
def test_rows_without_the_column_have_no_score(run, tasks, tmp_path, number_with_caption):
    """Not that of another caption; their images still have embeddings."""
    rows = [row(number, noisy(number), ["a", "b"]) for number in range(4)]
    for number, each in enumerate(rows):
        each.text_columns = ["alt", "long" if number < number_with_caption else "alt"]
    folder = make_set(tmp_path / "set", rows).folder
    settings = {"columns": ["text=alt,long"]}
    write_manifest(folder, replace(read_manifest(folder), settings=settings))
    reporter = Silent()
    options = {"captions": "long", "embeddings": True}
    api.score(str(folder), str(run), **options, reporter=reporter)
    assert [score is not None for score in column(folder)] == [
        number < number_with_caption for number in range(4)
    ]
    assert None not in column(folder, "clip_score_embedding")
    missing = 4 - number_with_caption
    reason = "cannot be read, or have no caption of long,"
    assert ("unreadable", f"{missing} rows {reason} and have no score") in reporter.notes


def test_weights_whose_embeddings_are_not_finite_are_refused(run, tmp_path, monkeypatch):
    def broken(*args):
        model = load(*args)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        return model

    load = SavedModel.load
    monkeypatch.setattr(SavedModel, "load", broken)
    with pytest.raises(UsageError, match="its embeddings are not finite"):
        api.score(make(tmp_path / "set"), str(run), reporter=Silent())


def test_a_set_without_images_is_refused(run, tmp_path):
    rows = [row(number, noisy(number)) for number in range(2)]
    for each in rows:
        each.media = []
    address = str(make_set(tmp_path / "set", rows).folder)
    with pytest.raises(DataError, match="has no row of one image"):
        api.score(address, str(run), reporter=Silent())


def test_select_writes_a_smaller_set_with_the_same_rows_and_columns(run, tasks, tmp_path):
    address = make(tmp_path / "set")
    api.score(address, str(run), embeddings=True, reporter=Silent())
    scores = column(address)
    manifest = api.select(
        address,
        tmp_path / "out",
        where="clip_score is not None",
        deduplicate="semantic=0.999999",
        reporter=Silent(),
    )
    kept = [number for number in range(ROWS) if number not in (5, 20)]
    assert not (tmp_path / "out/clusters").exists()
    nothing = select_module.drop_rows(PreparedSet.open(address), f"clip_score == {scores[3]}", "w")
    assert select_module._without_similar_rows(
        nothing, "clip_score_embedding", 0.9, tmp_path, lambda _: None
    )[0].keys() == ["row-3"], "a shard without rows"
    small = PreparedSet.open(str(tmp_path / "out"))
    assert small.num_rows == manifest.num_rows == len(kept)
    assert small.read(np.arange(len(kept))) == PreparedSet.open(address).read(np.array(kept))
    assert column(tmp_path / "out") == [scores[number] for number in kept]
    assert len(column(tmp_path / "out", "clip_score_embedding")[0]) == 16
    assert manifest.num_images == {"": {"1": len(kept)}}
    with pytest.raises(UsageError, match="is not empty: choose another folder"):
        api.select(address, tmp_path / "out", where="clip_score > -1", reporter=Silent())
    reporter = Silent()
    api.select(address, tmp_path / "all", deduplicate="semantic=0.999999", reporter=reporter)
    uncompared = "1 of 24 rows have no embedding in clip_score_embedding, and all of them are kept"
    assert ("not compared", uncompared) in reporter.notes
    keys = PreparedSet.open(str(tmp_path / "all")).keys()
    assert keys == [f"row-{number}" for number in range(ROWS) if number != 20]


def test_invalid_scores_and_selections_are_refused(run, tasks, tmp_path):
    address = make(tmp_path / "set")
    with pytest.raises(UsageError, match="has no embeddings; `mmray score"):
        api.select(address, tmp_path / "out", deduplicate="semantic=0.9", reporter=Silent())
    api.score(address, str(run), embeddings=True, reporter=Silent())
    for arguments, message in (
        ({"where": "clip_scor > 1"}, r"--where: .*did you mean `clip_score`"),
        ({"where": "clip_score_embedding > 1"}, r"values, which have no order"),
        ({"deduplicate": "semantic"}, "write for example semantic=0.95"),
        ({"deduplicate": "clip_embedding=0.9"}, "did you mean `clip_score_embedding`"),
        ({}, "select needs --where or --deduplicate"),
    ):
        with pytest.raises(UsageError, match=message):
            api.select(address, tmp_path / "out", reporter=Silent(), **arguments)
    with pytest.raises(UsageError, match="no such run or file; did you mean `r`"):
        api.score(address, str(run.with_name("rr")), reporter=Silent())
    with pytest.raises(UsageError, match="must be a name of letters"):
        api.score(address, str(run), name="clip score", reporter=Silent())
    with pytest.raises(UsageError, match="its captions are of one column"):
        api.score(address, str(run), captions="alt", reporter=Silent())


def test_similar_rows_are_those_of_all_pairs(monkeypatch):
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(300, 6))
    rows[100:] = rows[generator.integers(0, 100, 200)] + 0.2 * generator.normal(size=(200, 6))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    kept: list[int] = []
    expected = []
    for number, each in enumerate(rows):
        is_similar = bool(kept) and bool((rows[kept] @ each >= 0.95).any())
        expected.append(is_similar)
        kept += [] if is_similar else [number]
    monkeypatch.setattr(select_module, "_BLOCK", 32)
    assert find_similar(rows, 0.95).tolist() == expected
    assert 0 < sum(expected) < 200


def test_similar_rows_of_clusters_are_dropped_held_out_rows_are_kept(tmp_path, monkeypatch):
    """Six directions, each in a row of each of three shards, of which the last is held out."""
    monkeypatch.setattr(
        select_module, "map_tasks", lambda work, items, hint: (work(item) for item in items)
    )
    monkeypatch.setattr(select_module, "CLUSTER_ROWS", 6)
    monkeypatch.setattr(select_module, "FILE_ROWS", 6)
    folder = tmp_path / "set"
    rows = [row(number, noisy(number)) for number in range(18)]
    prepared = make_set(folder, rows[:12], rows[12:])
    generator = np.random.default_rng(0)
    direction = []
    for shard in prepared.shards:
        direction += generator.permutation(6).tolist()
        vectors = 5 * np.eye(8)[direction[-6:]] + 0.01 * generator.normal(size=(6, 8))
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel().astype(np.float16)), 8)
        write_values(folder, "e", {shard.key: pa.RecordBatch.from_pydict({"e": vectors})})
    manifest = replace(prepared.manifest, columns={"e": {"e": "float16[8]"}})
    write_manifest(to_path(folder), manifest)
    out = tmp_path / "out"
    api.select(str(folder), str(out), deduplicate="semantic=0.9", reporter=Silent())
    small = PreparedSet.open(str(out))
    assert small.keys() == [f"row-{number}" for number in range(12, 18)]
