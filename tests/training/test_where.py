"""A run over selected rows equals a run over a set that never had the other rows."""

import json

import pytest

from mmray.config import Prepare
from mmray.data.prepare.pipeline import prepare
from mmray.engine.checkpoint.state_io import load_weights
from mmray.errors import UsageError
from mmray.training.driver import train
from tests.data.prepare.test_pipeline import color_image
from tests.training.runs import Silent, config, lines, same_weights

SETTINGS = Prepare(rows_per_shard=16, vocab_size=100)


def prepare_rows(folder, name, rows, **settings):
    folder.mkdir(exist_ok=True)
    for row in rows:
        (folder / row["image"]).write_bytes(color_image(int(row["id"])))
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(str(folder / f"{name}.jsonl"), str(folder / name), SETTINGS.replace(**settings))
    return folder / name


def test_run_over_selected_rows_is_bitwise_that_over_the_filtered_source(
    tmp_path, without_ray, prepares_here
):
    rows = [
        {"id": f"{n}", "image": f"{n}.png", "text": f"color {n}", "score": n % 7, "split": "train"}
        for n in range(60)
    ]
    rows += [
        row | {"id": f"{200 + n}", "image": f"{200 + n}.png", "split": "test"}
        for n, row in enumerate(rows[:12])
    ]
    whole = prepare_rows(tmp_path / "data", "whole", rows, keep=("score",))
    good = [row for row in rows if row["score"] >= 3]
    filtered = prepare_rows(tmp_path / "data", "filtered", good)
    # the tokenizer of a set is trained on all of its rows
    (filtered / "tokenizer.json").write_bytes((whole / "tokenizer.json").read_bytes())

    def run(data, name, steps=3, **settings):
        base = config(data, tmp_path / "runs", name, steps=steps)
        changed = base.replace(data=base.data.replace(**settings))
        changed = changed.with_cluster(workers=1, cpus_per_worker=1)
        reporter = Silent()
        return train(changed, reporter), reporter.notes

    where = {"where": "score >= 3", "eval_where": "score >= 3"}
    selected, notes = run(whole, "selected", **where)
    assert ("selected", f"33 of 60 rows of {whole}: score >= 3") in notes
    expected, _ = run(filtered, "filtered")
    names = ("step", "rows_start", "rows_sha", "train/loss", "evaluate/loss")
    assert [[line.get(name) for name in names] for line in lines(selected.path)] == [
        [line.get(name) for name in names] for line in lines(expected.path)
    ]
    scores = [
        {name: value for name, value in run.result["metrics"].items() if "recall" in name}
        for run in (selected, expected)
    ]
    assert scores[0] == scores[1] != {}
    folders = [run.path / "checkpoints" / "step-3" for run in (selected, expected)]
    assert same_weights(*map(load_weights, folders))

    with pytest.raises(UsageError, match=r"data\.where: 'score >= 3' -> 'score >= 4'"):
        run(whole, "selected", where="score >= 4", eval_where="score >= 3")
    with pytest.raises(UsageError, match=r"data\.where: .*no column `scor`.*did you mean `score`"):
        run(whole, "other", where="scor >= 4")
