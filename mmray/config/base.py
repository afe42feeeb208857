"""What every group of settings shares: frozen, typed, and errors that name the setting."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mmray.errors import UsageError


class Section(BaseModel):
    """A frozen group of settings; an unknown or bad value raises UsageError with the setting's full name."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)
    path: ClassVar[str] = ""

    def replace(self, **settings: Any) -> Self:
        """The same settings but for these, by the names of their fields; checked as typed ones are. Raises UsageError.

        pydantic's own `model_copy` takes any name and any value.
        """
        return type(self).model_validate(dict(self) | settings)

    @model_validator(mode="wrap")
    @classmethod
    def _say_it_plainly(cls, value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise UsageError("\n".join(_explain(cls, item) for item in error.errors())) from None


def _is_type(part: str) -> bool:
    """Whether a part of a place names one of several types that a value may have, and no setting."""
    return part in ("int", "float", "str", "constrained-int") or part.startswith("literal[")


def _explain(section: type[Section], item: Any) -> str:
    """One line for one pydantic error: setting, what is wrong, the value, and the nearest name for a typo."""
    name = ".".join([section.path, *(str(part) for part in item["loc"] if not _is_type(str(part)))])
    name = name.strip(".") or "config"
    if item["type"] == "extra_forbidden":
        known = [field.alias or key for key, field in section.model_fields.items()]
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        return f"{name}: there is no such setting" + (f"; did you mean `{near[0]}`?" if near else f" (known: {known})")
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if item["type"] == "value_error":
        return f"{name}: {message}"
    return f"{name}: {message} (got {item['input']!r})"
