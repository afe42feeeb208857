"""One entry in KINDS adds a model kind: settings, flags, YAML, checks, training and export."""

import re
from pathlib import Path

import pytest
import torch

import mmray
from mmray import objectives
from mmray.builtin import KINDS, OBJECTIVES, ModelKind
from mmray.cli.train import train
from mmray.config import from_yaml, model_section, to_yaml
from mmray.data.text.tokenizer import train_tokenizer
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.models.synthetic import synthetic_batch
from mmray.plugins import load_class
from mmray.training.validate import unsupported_reasons
from tests.made import CAPTIONS


@pytest.fixture
def pixel_means(monkeypatch):
    module = "tests.models.pixel_means"
    kind = ModelKind(f"{module}:PixelMeansSettings", f"{module}:PixelMeans")
    monkeypatch.setitem(KINDS, "pixel_means", kind)


def test_added_kind_has_settings_flags_and_checks(pixel_means):
    flags = ["sample", "--model.kind", "pixel_means", "--model.embed-dim", "8"]
    config = train.parse(flags)["settings"]
    assert config.model.embed_dim == 8 and unsupported_reasons(config) == []
    assert from_yaml(to_yaml(config), "run.yaml") == config
    matching = config.replace(objective=config.objective.replace(kind="matching"))
    assert "is for model.kind `towers`, not `pixel_means`" in unsupported_reasons(matching)[0]


def test_added_kind_is_trained_and_exported(pixel_means, tmp_path):
    config = train.parse(["sample", "--model.kind", "pixel_means"])["settings"]
    tokenizer_json = train_tokenizer(CAPTIONS, 60)
    model = build(config.model, 60)
    batch = synthetic_batch(config.model.inputs, 60, 4, "cpu")
    loss, count, _ = objectives.build(config.objective).compute_loss(model(batch), batch)
    loss.backward()
    assert count == 4 and model.image.project.weight.grad.abs().sum() > 0
    spec = config.model.replace(vocab_size=60).model_dump(mode="json")
    loaded = mmray.load(export(model, spec, tokenizer_json, tmp_path / "out"))
    ids = torch.tensor([loaded._encoder.encode(["a red circle"])[0][0].tolist()])
    expected = model.embed_text(ids, torch.ones_like(ids))
    torch.testing.assert_close(loaded.embed_texts(["a red circle"]), expected)


@pytest.mark.parametrize("name", KINDS)
def test_entry_names_a_section_and_a_module_of_its_kind(name):
    section = model_section(name)
    assert section().kind == name
    assert section.branches and set(section.objectives) <= OBJECTIVES.keys()
    assert issubclass(load_class(KINDS[name].model, "model.kind"), torch.nn.Module)


@pytest.mark.parametrize(("title", "table"), [("Models\n", KINDS), ("Objectives\n", OBJECTIVES)])
def test_readme_has_a_row_for_each_kind_and_objective(title, table):
    text = (Path(mmray.__file__).parent / "models" / "README.md").read_text()
    section = next(part for part in text.split("\n## ") if part.startswith(title))
    section = section.partition("\n###")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall("`(.+?)`", cell)]
    assert sorted({*names} - {"model.kind", "package.module:Class"}) == sorted(table)
