"""Embeddings of a teacher: scored, read with the captions of each pass, and trained on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmray import api
from mmray.config.model import Objective
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.errors import DataError, UsageError
from mmray.report.run import RunRecord
from mmray.training.driver import train
from mmray.training.references import open_teacher
from mmray.training.resolve import resolve_run
from mmray.training.saved_model import load_model, open_run
from tests.made import make_set, noisy, row
from tests.training.runs import Silent, config, lines

ROWS = 16
LOSSES = "contrastive + 0.5 * distillation + 0.25 * feature_distillation"


@pytest.fixture(scope="module")
def run(tmp_path_factory, forked_children):
    """A teacher of one step, and two sets that it has scored: row 4 has three captions, row 5 no
    image.
    """
    folder = tmp_path_factory.mktemp("run")
    rows = [row(number, noisy(number)) for number in range(ROWS)]
    rows[4] = row(4, noisy(4), ["one", "another", "a third caption"])
    rows[5] = row(5, data=b"nothing")
    make_set(folder / "set", rows)
    make_set(folder / "other", [row(number, noisy(50 + number)) for number in range(8)])
    settings = config(folder / "set", folder, "teacher", steps=1, parallel="single")
    path = train(settings.with_cluster(workers=1, cpus_per_worker=1), Silent(), local=True).path
    for name in ("set", "other"):
        api.score(folder / name, path, embeddings=True, reporter=Silent())
    return path


def student(folder, data, kind=LOSSES, **objective):
    settings = config(data, folder, "student", steps=2, parallel="single")
    settings = settings.with_cluster(workers=1, cpus_per_worker=1)
    return settings.replace(objective=Objective(kind=kind, **objective))


def test_rows_have_the_teacher_of_their_image_and_chosen_caption(run):
    settings, tokenizer, checkpoint = open_run(run, None)
    model = load_model(settings, checkpoint).eval()
    sets = [PreparedSet.open(str(run.parent / name)) for name in ("set", "other")]
    mixture = PreparedMixture(sets, [1, 1])
    settings = settings.replace(objective=Objective(kind=LOSSES))
    teacher, _ = open_teacher(settings, mixture, Silent())
    reader = RowReader(mixture, settings.model.inputs, tokenizer, 10**7, teacher=teacher)
    plan = SamplePlan(num_rows=24, global_batch_size=24, world_size=1, seed=1, steps=8)
    texts = set()
    for first in range(0, 8 * 24, 24):  # passes choose other captions
        block = reader.read_block(plan, np.arange(first, first + 24))
        valid = block["valid"]
        assert valid.sum() == 23 and not block["teacher_image"][~valid].any()
        ids = torch.from_numpy(block["input_ids"]).long()
        mask = torch.arange(ids.shape[1]) < torch.from_numpy(block["num_tokens"])[:, None]
        with torch.no_grad():
            image = model.embed_image(torch.from_numpy(block["image"]))
            text = model.embed_text(ids, mask.long())
            scale = model.logit_scale.exp() if hasattr(model, "logit_scale") else None
        assert scale is None or teacher.logit_scale == pytest.approx(float(scale))
        expected = teacher.logit_scale * image.numpy()
        np.testing.assert_allclose(block["teacher_image"][valid], expected[valid], atol=0.02)
        np.testing.assert_allclose(block["teacher_text"][valid], text.numpy()[valid], atol=1e-3)
        texts |= {tuple(each.tolist()) for each in ids[valid]}
    assert len(texts) == 3 + 3  # captions of the other rows, and of row 4


def test_run_distils_and_names_its_teacher(run, tmp_path):
    made = f"{run.parent / 'set'} + {run.parent / 'other'}"
    result = train(student(tmp_path, made), Silent(), local=True)
    line = lines(result.path)[-1]
    parts = [line[f"train/loss_{name}"] for name in Objective(kind=LOSSES).terms]
    assert parts[1] > 0 and parts[2] > 0
    assert line["train/loss"] == pytest.approx(parts[0] + 0.5 * parts[1] + 0.25 * parts[2])
    shares = [line[f"source/{name}/gradient_share"] for name in ("set", "other")]
    assert min(shares) > 0 and sum(shares) == pytest.approx(1)
    losses = [line[f"source/{name}/loss"] for name in ("set", "other")]
    assert min(losses) < line["train/loss"] < max(losses)
    assert "Loss by source" in (result.path / "report.html").read_text()
    assert RunRecord(result.path).data["teacher"].startswith("clip_score ")


def test_missing_and_unequal_teachers_are_refused(run, tmp_path):
    made = str(run.parent / "set")
    make_set(tmp_path / "bare", [row(number) for number in range(ROWS)])
    with pytest.raises(DataError, match=r"mmray score \S+bare --weights TEACHER --embeddings"):
        resolve_run(student(tmp_path, tmp_path / "bare"), Silent())
    with pytest.raises(DataError, match=r"no embeddings `mine` of a teacher.*--name mine"):
        resolve_run(student(tmp_path, made, teacher="mine"), Silent())
    with pytest.raises(UsageError, match="only objectives of distillation use it"):
        train(student(tmp_path, made, "contrastive", teacher="mine"), Silent(), local=True)
    other = student(tmp_path, made)
    wide = other.replace(model=other.model.replace(embed_dim=24))
    with pytest.raises(UsageError, match=r"set --model.embed-dim \d+ \(not 24\)"):
        resolve_run(wide, Silent())
    resolve_run(wide.replace(objective=Objective(kind="distillation")), Silent())
