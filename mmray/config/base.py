"""Base class of all settings: frozen, typed, with errors that name the setting."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mmray.errors import UsageError


class Section(BaseModel):
    """A frozen group of settings; unknown names and invalid values raise UsageError with the full setting name."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)
    path: ClassVar[str] = ""

    def replace(self, **settings: Any) -> Self:
        """Return a validated copy with these fields changed, unlike `model_copy`. Raises UsageError."""
        return type(self).model_validate(dict(self) | settings)

    @model_validator(mode="wrap")
    @classmethod
    def _raise_usage_error(cls, value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise UsageError("\n".join(_explain(cls, item) for item in error.errors())) from None


def _is_type(part: str) -> bool:
    """Return whether a part of pydantic's `loc` is a union tag instead of a setting."""
    return part in ("int", "float", "str", "constrained-int") or part.startswith("literal[")


def _explain(section: type[Section], item: Any) -> str:
    """Format one pydantic error: setting, problem, value, and the closest known name."""
    name = ".".join([section.path, *(str(part) for part in item["loc"] if not _is_type(str(part)))])
    name = name.strip(".") or "config"
    if item["type"] == "extra_forbidden":
        known = [field.alias or key for key, field in section.model_fields.items()]
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        return f"{name}: unknown setting; " + (f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}")
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if item["type"] == "value_error":
        return f"{name}: {message}"
    return f"{name}: {message} (got {item['input']!r})"
