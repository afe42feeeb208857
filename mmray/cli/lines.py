"""What a command line defines before its flags are parsed: the recipe, or pretrained weights, whose
settings are the defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any

from tyro.conf import arg

from mmray.config import Config
from mmray.training.recipe import load_recipe

RecipeSettings = Annotated[Config, arg(name="")]


@dataclass(frozen=True)
class Line:
    """The words of a command line, and what they define before the flags are parsed.

    Args:
        words: words to parse.
        given: arguments that are no flags of this line.
        defaults: defaults other than those of the functions.
        recipe: name of the recipe, for the usage.
        description: text of --help; None: the docstring of the function.
    """

    words: Sequence[str] = ()
    given: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    description: str | None = None


def read_recipe(words: Sequence[str], description: str, overridden: Collection[str] = ()) -> Line:
    """Read a line such as `clip --train.steps 10`, with the recipe as the defaults of `settings`.

    Args:
        words: words after the command.
        description: text of --help, with `{name}` for the recipe.
        overridden: settings that are overridden without a flag; those of length and batch that
            would contradict them, or a flag, have no default.

    Raises:
        UsageError: the recipe, its kind or its weights cannot be loaded.
    """
    rest = list(words)
    name = "sample"
    if rest and not rest[0].startswith("-"):
        name = rest.pop(0)
    flags = [word for word in rest if word != "--print-config"]
    # --model.kind determines which flags of --model exist.
    kinds = flag_values("--model.kind", flags)
    weights = flag_values("--model.weights", flags)
    recipe = load_recipe(name, kinds[-1] if kinds else None, weights[-1] if weights else None)
    settings = recipe.without_overridden_length_and_batch(flag_names(flags) | {*overridden})
    return Line(
        flags,
        {"recipe": recipe, "print_config": flags != rest},
        {"settings": settings},
        name,
        description.format(name=name),
    )


def read_weights(words: Sequence[str]) -> Line:
    """Read a line of a command of a run, or with `--weights` of pretrained weights, whose settings
    are the defaults.

    Raises:
        UsageError: the weights are unknown or cannot be read.
    """
    weights = flag_values("--weights", words)
    if not weights:
        return Line(words, {"weights": "", "model": None})
    from mmray.training.saved_model import pretrained_config

    config = pretrained_config(weights[-1])
    defaults = {"model": config.model, "evaluate": config.evaluate.outside_run(""), "out": ""}
    return Line(words, {"run": config}, defaults)


def flag_values(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of one flag before the flags are parsed."""
    values = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == flag and (equals or following):
            values.append(value if equals else following)
    return values


def flag_names(words: Sequence[str]) -> set[str]:
    """Return the settings that have a flag, such as `evaluate.loss_batch`."""
    return {
        word.removeprefix("--").partition("=")[0].replace("-", "_")
        for word in words
        if word.startswith("--")
    }
