"""Settings of a run as table rows, with their difference from the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mmray.config import Config, Section
from mmray.config.recipes import RECIPES
from mmray.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """A setting: its full name, value, value in the recipe, description."""

    name: str
    value: str
    recipe: str
    description: str = ""

    @property
    def differs(self) -> bool:
        return self.value != self.recipe


def settings_of(config: dict[str, Any]) -> list[Setting]:
    """Return all settings in order; without descriptions if this mmray version cannot parse the config."""
    recipe = RECIPES.get(str(config.get("recipe")), Config)()
    theirs = _flat(recipe.model_dump(mode="json", by_alias=True))
    try:
        said = dict(_descriptions(Config.model_validate(config)))
    except UsageError:
        said = {}
    return [
        Setting(name, _text(value), _text(theirs[name]) if name in theirs else "", said.get(name, ""))
        for name, value in _flat(config).items()
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


def _descriptions(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in type(section).model_fields.items():
        value, full = getattr(section, name), prefix + (field.alias or name)
        if isinstance(value, Section):
            yield from _descriptions(value, full + ".")
        else:
            yield full, field.description or ""


def _text(value: Any) -> str:
    """Format a value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
