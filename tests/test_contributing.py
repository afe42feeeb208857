"""The examples of CONTRIBUTING.md work."""

import re

import pytest
from pydantic import Field

from mmray.cli.args import parse_args, parse_config
from mmray.config import recipes
from mmray.config.base import Section
from mmray.errors import UsageError
from mmray.models.build import build
from tests.conftest import ROOT

SECTIONS = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")


def example(title, number=0):
    """Return a Python example of the section with this title."""
    section = next(section for section in SECTIONS if section.startswith(f"{title}\n"))
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)[number]


def test_setting_is_a_flag_with_range_and_help(capsys):
    field = "\n    ".join(example("Add a setting").splitlines())
    scope = {"Section": Section, "Field": Field}
    exec(f"class Example(Section, settings_prefix='train'):\n    {field}\n", scope)
    assert parse_args(scope["Example"], ["--patience", "5"], "example").patience == 5
    with pytest.raises(UsageError, match=r"train\.patience: .* \(got 0\)"):
        scope["Example"](patience=0)
    with pytest.raises(SystemExit):
        parse_args(scope["Example"], ["--help"], "example")
    assert "Evaluations without a better score" in capsys.readouterr().out


def test_recipe_is_found_by_name_and_builds_its_model(monkeypatch):
    scope = dict(vars(recipes))
    exec(example("Add a recipe"), scope)
    monkeypatch.setitem(recipes.RECIPES, "tiny-siglip", scope["tiny_siglip"])
    config, _ = parse_config(["tiny-siglip", "--batch.micro", "16"], "train")
    assert (config.recipe, config.batch.micro, config.batch.global_) == ("tiny-siglip", 16, 64)
    assert sum(weight.numel() for weight in build(config.model, 512).parameters()) < 1_000_000
