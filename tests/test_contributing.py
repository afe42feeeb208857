"""The examples of CONTRIBUTING.md work."""

import re
import sys
from types import ModuleType

import pytest
import torch
import tyro
from pydantic import Field
from torch.nn.functional import normalize

from mmray import builtin, cli, objectives
from mmray.cli.args import REGISTRY, STYLE
from mmray.cli.submit import submit
from mmray.cli.train import train
from mmray.config import Clip, Config, Objective, recipes
from mmray.config.base import Section
from mmray.console.reporter import ConsoleReporter
from mmray.data.formats.detect import detect_source
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.objectives import protocol
from mmray.training.validate import unsupported_reasons
from tests.conftest import ROOT
from tests.made import make_set, row

SECTIONS = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")


def example(title, number=0):
    """Return a Python example of the section with this title."""
    section = next(section for section in SECTIONS if section.startswith(f"{title}\n"))
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)[number]


def test_setting_is_a_flag_with_range_and_help(capsys):
    field = "\n    ".join(example("Add a setting").splitlines())
    scope = {"Section": Section, "Field": Field}
    exec(f"class Example(Section, settings_prefix='train'):\n    {field}\n", scope)

    def parse(*words):
        return tyro.cli(scope["Example"], args=words, config=STYLE, registry=REGISTRY)

    assert parse("--patience", "5").patience == 5
    with pytest.raises(UsageError, match=r"train\.patience: .* \(got 0\)"):
        scope["Example"](patience=0)
    with pytest.raises(SystemExit):
        parse("--help")
    assert "Evaluations without a better score" in capsys.readouterr().out


def test_command_has_flags_help_completion_and_submit(monkeypatch, tmp_path, capfd):
    scope = {}
    exec(example("Add a command"), scope)
    monkeypatch.setitem(cli.COMMANDS, "count", scope["count"])
    make_set(tmp_path / "set", [row(number) for number in range(3)])
    assert cli.run(["count", str(tmp_path / "set"), "--split", "test"], ConsoleReporter()) == 0
    assert capfd.readouterr().out == "rows       3\n"  # a set without splits
    assert cli.run(["count", str(tmp_path)], ConsoleReporter()) == 5
    assert "is not a prepared set" in capfd.readouterr().err
    assert cli.run([], ConsoleReporter()) == 0
    assert "mmray count     Print the number of rows of a prepared set\n" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        cli.run(["count", "--help"], ConsoleReporter())
    assert "Split of the set; None: all rows" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        cli.run(["--tyro-print-completion", "bash"], ConsoleReporter())
    assert "'count': {'description'" in capfd.readouterr().out
    line = submit.read(["--detach", "count", "set", "--split", "test"])
    assert (line.words, line.given) == (
        ["--detach"],
        {"words": ["count", "set", "--split", "test"]},
    )


def test_recipe_is_found_by_name_and_builds_its_model(monkeypatch):
    scope = dict(vars(recipes))
    exec(example("Add a recipe"), scope)
    monkeypatch.setitem(recipes.RECIPES, "tiny-siglip", scope["tiny_siglip"])
    config = train.parse(["tiny-siglip", "--batch.micro", "16"])["settings"]
    assert (config.recipe, config.batch.micro, config.batch.global_) == ("tiny-siglip", 16, 64)
    assert sum(weight.numel() for weight in build(config.model, 512).parameters()) < 1_000_000


def test_format_entry_is_detected(monkeypatch, tmp_path):
    formats = {}
    exec(example("Add a source format"), {"FORMATS": formats})
    for name, target in formats.items():
        monkeypatch.setitem(builtin.FORMATS, name, target)
    (tmp_path / "my.captions").write_text("a.png | a caption\n")
    assert detect_source(str(tmp_path / "my.captions")).format == "captions"


def test_objective_of_micro_batches_adds_up_to_the_whole_batch(monkeypatch):
    module = ModuleType("cosine")
    vars(module).update(vars(protocol))
    exec(example("Add an objective"), vars(module))
    monkeypatch.setitem(sys.modules, "cosine", module)
    monkeypatch.setitem(builtin.OBJECTIVES, "cosine", "cosine:CosineDistance")
    objective = objectives.build(Objective(kind="cosine"))
    monkeypatch.setattr(Clip, "objectives", (*Clip.objectives, "cosine"))
    assert unsupported_reasons(Config(model=Clip(), objective=Objective(kind="cosine"))) == []
    embeddings = normalize(torch.randn(2, 6, 8, dtype=torch.float64), dim=-1)
    valid = torch.tensor([True, True, False, True, True, True])

    def loss_of(rows):
        outputs = {"image_embed": embeddings[0][rows], "text_embed": embeddings[1][rows]}
        loss, count, _ = objective.compute_loss(outputs, {"valid": valid[rows]})
        return torch.stack([loss, count])

    whole = loss_of(slice(6))
    assert whole[1] == 5
    torch.testing.assert_close(loss_of(slice(4)) + loss_of(slice(4, 6)), whole, rtol=1e-9, atol=0)


def test_entry_of_a_model_kind_has_flags(monkeypatch):
    kinds = {}
    exec(example("Add a model kind"), {"KINDS": kinds, "ModelKind": builtin.ModelKind})
    for name, kind in kinds.items():
        monkeypatch.setitem(builtin.KINDS, name, kind)
    words = ["sample", "--model.kind", "pixel_means", "--model.embed-dim", "8"]
    config = train.parse(words)["settings"]
    assert config.model.embed_dim == 8
