"""The classes of a run, of its sets and of sets to evaluate it on are matched by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import mmray
from mmray import config as settings
from mmray.data.store.manifest import write_manifest
from mmray.errors import DataError, UsageError
from mmray.training.driver import train
from mmray.training.resolve import resolve_run
from mmray.training.saved_model import load_run_config
from tests.made import encode, make_set, row
from tests.training.runs import Silent

COLORS = {"red": (220, 20, 30), "green": (20, 200, 40), "blue": (20, 40, 220)}


def colored(folder: Path, names: tuple[str, ...], with_held_out: bool = True) -> str:
    """Rows of one color each, whose label is that of its name in `names`."""
    used = [name for name in names if name in COLORS] or list(COLORS)
    rows = [
        replace(
            row(number, encode(Image.new("RGB", (24, 24), COLORS[name])), [f"a {name} square"]),
            label=names.index(name),
        )
        for number, name in enumerate(used * 8)
    ]
    made = make_set(folder, rows, rows[:6] if with_held_out else ())
    write_manifest(folder, replace(made.manifest, class_names=names))
    return str(folder)


def config_of(data: str, storage: Path, **changes: object) -> settings.Config:
    model = settings.Towers(
        inputs=settings.ClipInputs(image_side=16, fit="squash", max_tokens=8, clip_s=0),
        image=settings.ImageTower(name="convnet", width=16, depth=2),
        text=settings.TextTower(width=16, depth=1, heads=2),
        cross=settings.CrossAttention(width=16, depth=1, heads=2),
        embed_dim=16,
        classes=3,
    )
    return settings.Config(
        model=model.replace(**changes),
        objective=settings.Objective(kind="contrastive + classification"),
        data=settings.Data(train=data, workers=1),
        batch=settings.Batch(micro=8, global_=8),
        optimizer=settings.Optimizer(lr=1e-2, warmup_steps=2),
        train=settings.Train(steps=15, log_every=15),
        evaluate=settings.Evaluate(batch=16),
        cluster=settings.Cluster(workers=1, cpus_per_worker=1),
        run=settings.Run(name="classes", storage=str(storage)),
    )


def numbered(folder: Path, labels: list[int | None], held_out: list[int | None]) -> str:
    image = encode(Image.new("RGB", (24, 24), COLORS["red"]))
    rows = [replace(row(n, image, ["a"]), label=each) for n, each in enumerate(labels)]
    others = [replace(row(50 + n, image, ["a"]), label=each) for n, each in enumerate(held_out)]
    return str(make_set(folder, rows, others).folder)


def test_rows_without_a_label_are_stated(tmp_path: Path) -> None:
    data = numbered(tmp_path / "set", [0, 1, 2, None, 0, 1, 2, -1] * 2, [0])
    reporter = Silent()
    resolve_run(config_of(data, tmp_path), reporter)
    [line] = [text for label, text in reporter.notes if label == "labels"]
    assert line.startswith("4 of 16 sampled rows have no label (-1 is none, too), and the ")
    complete = numbered(tmp_path / "complete", [0, 1, 2, 0] * 4, [0])
    reporter = Silent()
    resolve_run(config_of(complete, tmp_path), reporter)
    assert "labels" not in [label for label, _ in reporter.notes]


@pytest.mark.parametrize("label", [3, -2])
def test_held_out_labels_without_a_class_are_refused(
    label: int, tmp_path: Path, without_ray: None
) -> None:
    data = numbered(tmp_path / "set", [0, 1, 2, 0] * 4, [0, -1, None, label])
    run = config_of(data, tmp_path).replace(train=settings.Train(steps=1))
    with pytest.raises(DataError, match=f"label {label}, and the classes of the model are 0 to 2"):
        train(run, Silent())


def test_classes_are_matched_by_name_from_training_to_export(
    tmp_path: Path, without_ray: None
) -> None:
    first = colored(tmp_path / "first", ("blue", "green"))
    second = colored(tmp_path / "second", ("green", "red"), with_held_out=False)
    run = train(config_of(f"{first} + {second}", tmp_path), Silent())
    assert run.result["metrics"]["classification/top_1"] == 1.0
    assert load_run_config(run.path).model.class_names == ("blue", "green", "red")
    reversed_set = colored(tmp_path / "reversed", ("red", "green", "blue"))
    scores = mmray.evaluate(run.path, reversed_set, reporter=Silent())
    assert (scores["classification/rows"], scores["classification/top_1"]) == (6, 1.0)
    unknown = colored(tmp_path / "unknown", ("green", "violet"))
    with pytest.raises(UsageError, match=r"classes green, violet, and .* are blue, green, red "):
        mmray.evaluate(run.path, unknown, reporter=Silent())
    exported = mmray.export(run.path, tmp_path / "exported")
    stored = json.loads((Path(str(exported)) / "config.json").read_text())
    assert stored["model"]["class_names"] == ["blue", "green", "red"]
    # the same command after the sources got other classes
    colored(tmp_path / "second", ("amber", "red"), with_held_out=False)
    with pytest.raises(UsageError, match=r"set --model\.classes 4"):
        train(config_of(f"{first} + {second}", tmp_path), Silent())
    colored(tmp_path / "first", ("red", "green"))
    colored(tmp_path / "second", ("green", "blue"), with_held_out=False)
    with pytest.raises(UsageError, match=r"class_names.*blue.*green.*red.* -> .*red.*green.*blue"):
        train(config_of(f"{first} + {second}", tmp_path), Silent())
