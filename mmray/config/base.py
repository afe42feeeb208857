"""Base class of all settings: frozen, typed, with errors that name the setting."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core.core_schema import CoreSchema, no_info_wrap_validator_function

from mmray.errors import UsageError, suggest

if TYPE_CHECKING:
    from typing import Unpack

    from pydantic import ModelWrapValidatorHandler
    from pydantic_core import ErrorDetails

# a union's member in `loc`, not a setting
UNION_TAG = re.compile(r"bool|int|float|str|constrained-int|literal\[.*")
# `weight * name`, weight optional
_TERM = re.compile(r"(?:((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) \* +)?((?!\S+ \* )\S.*)")


def parse_range(text: int | str) -> tuple[int, int]:
    """Parse a number of at least 1, or an ascending range: `4` becomes (4, 4), and `1-4` (1, 4).

    Raises:
        ValueError: It is anything else.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(text))
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"must be a number of at least 1, or a range such as 1-4 (got {text!r})")
    return low, high


def check_name(name: str, known: Collection[str]) -> str:
    """Return the name of a built-in or a user's part; raise ValueError if it is neither."""
    if name not in known and ":" not in name:
        raise ValueError(
            f"no `{name}`; use one of {', '.join(known)}, or name your own as package.module:Name"
        )
    return name


class Section(BaseModel):
    """A frozen group of settings; unknown names and invalid values raise UsageError with the full
    setting name.

    A section is a pydantic model whose fields are the settings. `settings_prefix`, given as `class
    Train(Section, settings_prefix="train")`, is put before a field in messages: `train.steps`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False
    )
    # such as `model.text`, from the class argument of this name
    settings_prefix: ClassVar[str] = ""

    def __init_subclass__(cls, settings_prefix: str = "", **config: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**config)
        cls.settings_prefix = settings_prefix or cls.settings_prefix

    def replace(self, **settings: object) -> Self:
        """Return a copy with some fields changed and all fields validated, unlike `model_copy`."""
        return type(self).model_validate(dict(self) | settings)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values by their names in config.yaml, such as `global` for
        `global_`.
        """
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Outside of the validators of subclasses, whose errors a wrap validator would miss.
        return no_info_wrap_validator_function(cls._raise_usage_error, handler(source))

    @classmethod
    def _raise_usage_error(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            section = handler(value)
        except ValidationError as error:
            raise UsageError("\n".join(_explain(cls, item) for item in error.errors())) from None
        values: dict[str, Any] = value if isinstance(value, dict) else {}
        for key, field in cls.model_fields.items():
            name = field.alias or key
            given = values.get(name, values.get(key))
            # pydantic takes true for 1
            if isinstance(given, bool) and getattr(section, key) is not given:
                setting = f"{cls.settings_prefix}.{name}"
                raise UsageError(f"{setting}: input should not be a boolean (got {given})")
        return section


def _explain(section: type[Section], item: ErrorDetails) -> str:
    """Format one pydantic error: setting, problem, value, and the closest known name."""
    parts = [part for part in map(str, item["loc"]) if not UNION_TAG.fullmatch(part)]
    name = ".".join([section.settings_prefix, *parts]).strip(".") or "config"
    if item["type"] == "extra_forbidden":
        known = [field.alias or key for key, field in section.model_fields.items()]
        return f"{name}: unknown setting; {suggest(str(item['loc'][-1]), known)}"
    message = item["msg"].removeprefix("Value error, ")
    value = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
    return f"{name}: {message[0].lower()}{message[1:]}{value}"


def parse_weighted_sum(text: str) -> dict[str, float]:
    """Parse a sum of names with weights: `a + 0.5 * b` becomes {"a": 1.0, "b": 0.5}.

    Args:
        text: The terms, separated by ` + `. A term is a name or `weight * name`.

    Raises:
        ValueError: A term is invalid, repeats a name, or has a weight that is not above 0. The
            message of the error is the invalid term.
    """
    weights: dict[str, float] = {}
    for part in text.split(" + "):
        term = part.strip()
        match = _TERM.fullmatch(term)
        if match is None or match[2] in weights:
            raise ValueError(term)
        weight = float(match[1] or 1)
        if not 0 < weight < math.inf:
            raise ValueError(term)
        weights[match[2]] = weight
    return weights
