"""Fields of a message besides its role and content: weights, calls of tools, reasoning."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import orjson

# {"role": "system" | "developer" | "user" | "assistant" | "tool", "content": [part, ...]}; a part
# is {"type": "text", "text": ...}, or {"type": "image", "text": None}, which is the next image of
# the row; `video` and `audio` alike. Further fields: `weight` (a factor of the loss; 1 if missing),
# those that chat templates read (TEMPLATE_FIELDS), in the first message `tools` of the row,
# REJECTED and OPTIONS.
Message = dict[str, Any]

# Field of a message of the assistant: the messages of a rejected answer, which replace this message
# and those after it.
REJECTED = "rejected"
# Field of a message of the assistant that answers a multiple-choice question: the texts of all
# options, of which its own text is one.
OPTIONS = "options"
# Fields of a message that are factors of the loss of its tokens; true is 1, false 0.
_WEIGHT_FIELDS = ("weight", "loss", "train")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # as in transformers
# Fields that chat templates read, with their types.
TEMPLATE_FIELDS = {"reasoning_content": str, "tool_calls": list, "tool_call_id": str, "name": str}
_BASIC_FIELDS = frozenset(("role", "from", "content", "value"))  # most messages have no others
_USED_FIELDS = {*_BASIC_FIELDS, "function_call", REJECTED, OPTIONS, *TEMPLATE_FIELDS}
_USED_FIELDS |= {*_WEIGHT_FIELDS, *_REASONING_FIELDS}


def parse_fields(item: dict[str, Any], role: str) -> dict[str, Any]:
    """Return the fields of a message besides role and content. Raises ValueError."""
    if item.keys() <= _BASIC_FIELDS:
        return {}
    weight = 1.0
    for name in _WEIGHT_FIELDS:
        if (value := item.get(name)) is not None:
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(
                    f"`{name}` of a message must be true, false or a number from 0 (got "
                    f"{str(value)[:40]!r})"
                )
            weight *= value
    fields: dict[str, Any] = {} if role != "assistant" or weight == 1 else {"weight": weight}
    for name, kind in TEMPLATE_FIELDS.items():
        names = _REASONING_FIELDS if name in _REASONING_FIELDS else (name,)
        value = next((item[each] for each in names if item.get(each) is not None), None)
        if name == "tool_calls" and item.get("function_call") is not None:  # OpenAI's earlier name
            value = [{"type": "function", "function": item["function_call"]}, *(value or [])]
        if name == "tool_calls" and isinstance(value, str):
            value = _parse_json(value)
        if name == "tool_calls" and isinstance(value, list):
            value = [*map(_parse_arguments, value)]
        if value is None:
            continue
        is_list = kind is list
        if not isinstance(value, kind) or (
            is_list and not all(isinstance(each, dict) for each in value)
        ):
            raise ValueError(f"`{name}` of a message has a wrong form (got {str(value)[:80]!r})")
        if value:
            fields[name] = value
    return fields


def field_notices(items: list[dict[str, Any]], messages: list[Message]) -> list[str]:
    """Return what messages have and models may not use; other fields that a template lacks make a
    bad row of the run.
    """
    notices = set()
    for item, message in zip(items, messages, strict=True):
        if item.keys() <= _BASIC_FIELDS:
            continue
        given = {name for name, value in item.items() if value is not None}
        notices |= {f"`{str(name)[:40]}` of a message is not used" for name in given - _USED_FIELDS}
        for name in message.keys() & {"name", "tool_call_id"}:
            notices.add(f"`{name}` of a message is used only by a chat template that reads it")
        if message["role"] != "assistant":
            weights = [name for name in _WEIGHT_FIELDS if item.get(name)]
            notices |= {
                f"`{name}` is not used but for the assistant's messages" for name in weights
            }
    return sorted(notices)


def parse_calls(content: object) -> list[dict[str, Any]]:
    """Return the calls of a message of ShareGPT: JSON of a call {name, arguments} or several."""
    value = _parse_json(content) if isinstance(content, str) else content
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(each, dict) and each.get("name") for each in calls):
        raise ValueError(f"a call must be JSON of {{name, arguments}} (got {str(content)[:80]!r})")
    return [_parse_arguments({"type": "function", "function": call}) for call in calls]


def _parse_arguments(call: object) -> Any:
    """Return a call whose arguments are an object, as chat templates expect them; OpenAI's API has
    JSON of it, of which `tojson` would make a text.
    """
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    if isinstance(arguments := function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(arguments), dict):
                return call | {"function": function | {"arguments": value}}
    return call


def parse_tools(value: object) -> list[dict[str, Any]]:
    """Return the descriptions of tools of a row: a list of dicts, or JSON of it.

    Raises:
        ValueError: It is none.
    """
    tools = _parse_json(value) if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise ValueError(f"tools must be a list of JSON schemas (got {str(value)[:80]!r})")
    to_json(tools)
    return tools


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"must be JSON (got {text[:80]!r})") from None


def to_json(value: object) -> bytes:
    """Return a JSON value as bytes; raise ValueError for another one."""
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise ValueError(f"a message has a field that is no JSON: {error}") from None
