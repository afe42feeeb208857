"""CLIP_benchmark's own runner over an export for open_clip has the metrics of the evaluation.

Neither is a dependency. Install into a folder of its own, which is then in PYTHONPATH: `pip install
--no-deps --target DIR clip-benchmark webdataset braceexpand pycocoevalcap scikit-learn scipy joblib
threadpoolctl narwhals "numpy<2.4"`.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmray import api
from mmray.config import EvalSettings
from mmray.data.store.prepared_set import PreparedSet
from mmray.engine.collectives import Group
from mmray.evaluation.evaluator import Evaluator
from mmray.objectives.contrastive import Contrastive
from tests.models.test_clip import INPUTS, TOKENIZER
from tests.training.runs import Silent

pytest.importorskip("webdataset")
cli = pytest.importorskip("clip_benchmark.cli")
open_clip_export = pytest.importorskip("tests.models.test_open_clip_export")
pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = ("red", "green circle", "blue", "square", "triangle", "left", "ground")
TEMPLATES = ("a {c}", "two {c} on a ground")
WORDS = ("red", "circle", "blue", "square", "green", "ground", "left")  # the tokenizer knows them
ROWS = 40
# suffix of the images, tars, and whether it is a set for retrieval
LAYOUTS = {"cifar": ("png", 1, False), "sketch": ("webp", 3, False), "pairs": ("png", 2, True)}


def write_layout(folder: Path, suffix: str, num_tars: int, is_retrieval: bool) -> None:
    """Write a set as `clip_benchmark_export_wds` does."""
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "nshards.txt").write_text(str(num_tars))
    if is_retrieval:
        (folder / "dataset_type.txt").write_text("retrieval")
    else:
        (folder / "classnames.txt").write_text("\n".join(CLASSES))
        (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    draw = np.random.default_rng(len(suffix))
    for number, rows in enumerate(np.array_split(np.arange(ROWS), num_tars)):
        with tarfile.open(folder / "test" / f"{number}.tar", "w") as tar:
            for row in rows.tolist():
                # coarse, so that embeddings differ; of the model's size, which nothing resizes
                pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
                image = io.BytesIO()
                Image.fromarray(pixels).save(image, suffix, lossless=True)
                words = f"{WORDS[row // len(WORDS)]} {WORDS[row % len(WORDS)]}"
                captions = "\n".join(f"{each} {words}" for each in ("a", "two")[: 1 + row % 2])
                target = ("txt", captions) if is_retrieval else ("cls", str(row % 5))
                for name, data in ((suffix, image.getvalue()), (target[0], target[1].encode())):
                    entry = tarfile.TarInfo(f"s{row:04d}.{name}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runner_has_the_metrics_of_the_evaluation(layout, tmp_path, monkeypatch):
    write_layout(tmp_path / layout, *LAYOUTS[layout])
    is_retrieval = LAYOUTS[layout][2]
    model = open_clip_export.exported("clip", tmp_path / "export")
    arguments = f"eval --dataset wds/{layout} --dataset_root {tmp_path / layout} --no_amp --quiet"
    arguments += f" --model local-dir:{tmp_path / 'export'} --num_workers 0 --recall_k 1 5 10"
    arguments += f" --task zeroshot_{'retrieval' if is_retrieval else 'classification'}"
    arguments += f" --output {tmp_path / 'theirs.json'} --batch_size 16 --pretrained"
    monkeypatch.setattr(sys, "argv", ["clip_benchmark", *arguments.split(), ""])
    cli.main()
    theirs = json.loads((tmp_path / "theirs.json").read_text())["metrics"]
    source, prepared_set = tmp_path / layout, tmp_path / "set"
    api.prepare(source, prepared_set, duplicates="keep", reporter=Silent())
    prompts = tuple(template.replace("{c}", "{}") for template in TEMPLATES)
    prepared = PreparedSet.open(str(prepared_set), "test")
    assert prepared.num_rows == ROWS
    evaluator = Evaluator(prepared, INPUTS, TOKENIZER, EvalSettings(batch=7, prompts=prompts))
    ours = evaluator.score(model, Group(), Contrastive(), 10)
    names = {
        "zero_shot/top_1": "acc1",
        "zero_shot/top_5": "acc5",
        "zero_shot/mean_per_class_recall": "mean_per_class_recall",
    }
    if is_retrieval:
        names = {
            f"recall_at_{k}/{way}": f"{name}_retrieval_recall@{k}"
            for k in (1, 5, 10)
            for way, name in (("image_to_text", "text"), ("text_to_image", "image"))
        }
    for own, name in names.items():
        assert ours[own] == pytest.approx(theirs[name], abs=1e-6), name
    assert 0 < sum(theirs.values()) < len(theirs)
