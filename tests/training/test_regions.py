"""COCO instances are prepared, train a region head, and are evaluated, exported and predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

import mmray
from mmray import config as settings
from mmray.training.driver import train
from mmray.training.evaluate_export import export_model
from tests.training.runs import Silent, lines

COLORS = {"ruby": (220, 20, 30), "leaf": (20, 200, 40), "ocean": (20, 40, 220)}
IDS = {"ruby": 3, "leaf": 7, "ocean": 8}  # with gaps, as COCO's


def instances(folder: Path, count: int = 80) -> Path:
    """Images of 64 x 48 pixels with two colored rectangles each, and their boxes and names."""
    draw, names = np.random.default_rng(0), list(COLORS)
    (folder / "images").mkdir(parents=True)
    notes = []
    for number in range(count):
        pixels = draw.integers(90, 140, (48, 64, 3), dtype=np.uint8)
        for left in (0, 32):
            name = names[int(draw.integers(3))]
            x, y, w, h = left + int(draw.integers(0, 8)), int(draw.integers(0, 16)), 20, 24
            pixels[y : y + h, x : x + w] = COLORS[name]
            notes.append({"image_id": number, "bbox": [x, y, w, h], "category_id": IDS[name]})
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    document = {
        "images": [{"id": number, "file_name": f"{number}.png"} for number in range(count)],
        "annotations": notes,
        "categories": [{"id": label, "name": name} for name, label in IDS.items()],
    }
    (folder / "instances.json").write_text(json.dumps(document))
    return folder / "instances.json"


def config_of(source: Path, storage: Path) -> settings.Config:
    return settings.Config(
        model=settings.Towers(
            inputs=settings.ClipInputs(
                image_side=48, fit="squash", max_tokens=12, max_boxes=4, clip_s=0
            ),
            image=settings.ImageTower(name="convnet", width=16, depth=2),
            text=settings.TextTower(width=32, depth=1, heads=2),
            cross=settings.CrossAttention(width=16, depth=1, heads=2),
            matching=True,
            embed_dim=32,
        ),
        objective=settings.Objective(kind="contrastive + matching + region_text"),
        prepare=settings.Prepare(holdout=0.2, duplicates="keep", max_bad_fraction=0.0),
        data=settings.Data(train=str(source), cache=str(storage / "prepared"), workers=1),
        batch=settings.Batch(micro=8, global_=16),
        optimizer=settings.Optimizer(lr=3e-3, warmup_steps=5),
        train=settings.Train(steps=40, log_every=20),
        evaluate=settings.Evaluate(batch=16),
        cluster=settings.Cluster(workers=1, cpus_per_worker=1),
        run=settings.Run(name="regions", storage=str(storage / "runs")),
    )


def test_coco_instances_train_a_model_that_names_boxes(
    tmp_path: Path, without_ray: None, prepares_here: None
) -> None:
    run = train(config_of(instances(tmp_path / "coco"), tmp_path), Silent())
    metrics = run.result["metrics"]
    assert (run.result["status"], run.result["skipped_steps"]) == ("finished", 0)
    assert lines(run.path)[-1]["train/region_accuracy"] > 0.9
    assert metrics["regions/boxes"] == 2 * metrics["rows"]
    assert metrics["regions/top_1"] > 0.9
    loaded = mmray.load(export_model(run.path, tmp_path / "exported"))
    pixels = np.full((48, 64, 3), 110, np.uint8)
    pixels[10:34, 4:24], pixels[12:36, 36:56] = COLORS["ocean"], COLORS["leaf"]
    named = loaded.classify_boxes(Image.fromarray(pixels), [(4, 10, 20, 24), (36, 12, 20, 24)])
    assert named.argmax(dim=1).tolist() == [IDS["ocean"], IDS["leaf"]]
