"""A recipe by its name or file, with the inputs that its weights define."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from mmray.builtin import KINDS
from mmray.config import Config, recipes

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def load_recipe(name: str, kind: str | None = None, weights: str | None = None) -> Config:
    """Return a recipe with the inputs of its model kind and of its weights.

    Weights of a `clip`, `siglip` or `naflex` model define image size, preprocessing and tokenizer,
    except those that the built-in recipe has; inputs in a recipe file take precedence.

    Args:
        name: Name of a built-in recipe, or a YAML file.
        kind: Value of `model.kind` that replaces the recipe's; None: keep it.
        weights: The same of `model.weights`; the caller sets them in the recipe.

    Raises:
        UsageError: The recipe, its kind or its weights cannot be loaded.
    """
    recipe = recipes.load(name)
    if kind is not None:
        recipe = recipe.with_model_kind(kind)
    model = _model_of_file(name)
    weights = weights or str(model.get("weights", "none"))
    given = model.get("inputs", {})
    built_in = KINDS.get(recipe.model.kind)
    is_complete = type(recipe.model.inputs).model_fields.keys() <= given.keys()
    # A path that only the workers have defines nothing here.
    is_readable = Path(weights).expanduser().exists() or _HUB_NAME.fullmatch(weights)
    # The weights of a kind of transformers define the preprocessing.
    if built_in is not None and built_in.hf_type and is_readable and not is_complete:
        # late: it may import transformers
        from mmray.models.pretrained import pretrained_settings

        settings = pretrained_settings(weights)
        if settings["kind"] == recipe.model.kind:
            own = {key: value for key, value in settings["inputs"].items() if key not in given}
            inputs = recipe.model.inputs.replace(**own)
            recipe = recipe.replace(model=recipe.model.replace(inputs=inputs))
    return recipe


def _model_of_file(name: str) -> dict[str, Any]:
    """Return the section `model` of a recipe file, {} for a built-in recipe."""
    if Path(name).suffix not in (".yaml", ".yml"):
        return {}
    values = yaml.safe_load(Path(name).read_bytes())  # recipes.load has checked it
    return dict((values or {}).get("model") or {})
