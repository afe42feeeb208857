"""Values of a row as pandas, spreadsheets and other programs store them, in the types of a row."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import takewhile
from typing import Any

from mmray.builtin import (
    ANSWER_COLUMNS,
    CHAT_COLUMNS,
    CHOSEN_COLUMN,
    OPTION_COLUMNS,
    QUESTION_COLUMNS,
    REJECTED_COLUMNS,
)
from mmray.data.labels import number_label
from mmray.data.message_fields import OPTIONS, REJECTED
from mmray.data.messages import role_of
from mmray.data.rows import (
    IMAGE_COLUMNS,
    MEDIA_COLUMNS,
    MESSAGE_COLUMNS,
    TEXT_COLUMNS,
    BadRow,
    Values,
    has_any,
    is_blank,
    is_missing,
)

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_TURN = re.compile(r"\n\n(Human|Assistant): ?")  # of hh-rlhf


def normalize_values(values: Values, class_names: Sequence[str], caption_template: str) -> Values:
    """Convert the values of a source row, as pandas or a spreadsheet stores them, to the types of a
    row: text, int, list or None.

    NaN becomes a missing value, a float such as 3.0 an integer, the name of a class its number, and
    a conversation in JSON a list. If a row has `text` and `texts`, `texts` is taken. Missing and
    blank captions are dropped if others are left. A row with a class and no text gets
    `caption_template` with the name of the class as its `text`. A value that cannot be converted
    stays as it is; `parse_row` then rejects the row.

    Args:
        values: Values by mmray's column names. Only `image`, `text`, `texts`, `id`, `key`, `label`,
            `messages`, `conversations` and CHAT_COLUMNS (such as `prompt` and `completion`) are
            converted.
        class_names: Names of the labels 0, 1, ...; empty: unknown.
        caption_template: Caption of a row with a class, with `{}` for its name: `a photo of a {}`.

    Returns:
        A new dict of the values by the same names, without missing ones.

    Raises:
        BadRow: An id or a label is a float that may be a rounded integer, or a label is none of
            the classes.
    """
    values = {name: value for name, value in values.items() if not is_missing(value)}
    if values.get("image") == "" and has_any(values, MESSAGE_COLUMNS):
        del values["image"]  # a conversation without images
    if isinstance(values.get("text"), bytes):  # a Parquet file whose texts are not marked as texts
        with suppress(UnicodeDecodeError):
            values["text"] = values["text"].decode()
    for name in ("id", "key", "label"):
        if name in values:
            values[name] = _as_identifier(name, values[name])
    for name in MESSAGE_COLUMNS:
        if isinstance(values.get(name), str):
            with suppress(ValueError, RecursionError):  # parse_row rejects the text
                values[name] = json.loads(values[name])
    if "texts" in values:
        values.pop("text", None)
    for name in ("text", "texts"):
        if isinstance(values.get(name), list):
            texts = [caption for caption in values[name] if not is_blank(caption)]
            values[name] = texts or values[name]
    if _is_question_and_answer(values.get("texts")) and not has_any(values, MESSAGE_COLUMNS):
        values["messages"] = [
            {"role": role, "content": turn[role]}
            for turn in values.pop("texts")
            for role in ("user", "assistant")
        ]
    _join_options(values)
    _join_answers(values)
    values["label"] = label = number_label(values.get("label"), class_names)
    if label is None:
        del values["label"]
    has_text = has_any(values, (*TEXT_COLUMNS, *MESSAGE_COLUMNS))
    if not has_text and isinstance(label, int) and 0 <= label < len(class_names):
        values["text"] = caption_template.replace("{}", class_names[label])
    return values


def _as_identifier(name: str, value: object) -> Any:
    """Return a whole number as an integer, and bytes as text or in hexadecimal.

    Raises BadRow for a float that may be a rounded integer.
    """
    if isinstance(value, float) and 2**53 <= abs(value) < math.inf:
        raise BadRow(
            "columns",
            name,
            f"{name} {value:.0f} is a float, which cannot store all integers from 2^53 on, so it "
            "may be another row's: store integers or texts (in pandas: dtype Int64)",
        )
    if isinstance(value, (float, Decimal)) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
        return text if text.isprintable() and "\ufffd" not in text else value.hex()
    return value


def _join_options(values: Values) -> None:
    """Replace the answer to a multiple-choice question, which may be the number or the letter of
    an option, by a message with the text of the option and the field OPTIONS. Raises BadRow.

    Options that are not used stay: those of a row without an answer of its own.
    """
    names = [name for name in OPTION_COLUMNS if name in values]
    answers = [name for name in ANSWER_COLUMNS if name in values]
    if len(names) != 1 or len(answers) != 1 or has_any(values, MESSAGE_COLUMNS):
        return
    given = values[names[0]]
    if isinstance(given, str):  # MMMU
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            given = ast.literal_eval(given)
    letters = [chr(ord("A") + number) for number in range(26)]
    if isinstance(given, dict):
        letters = [*map(str, given)]
        given = [*given.values()]
    if not isinstance(given, list):
        return
    options = [str(option) for option in given if not is_missing(option)]
    if not options:  # an open question
        del values[names[0]]
        return
    answer = values[answers[0]]
    if str(answer) in options and not isinstance(answer, int):
        number = options.index(str(answer))
    elif isinstance(answer, str) and answer.strip() in letters:
        number = letters.index(answer.strip())
    elif isinstance(answer, int) or (isinstance(answer, str) and _INTEGER.fullmatch(answer)):
        number = int(answer)
    else:
        number = -1
    if not 0 <= number < len(options):
        raise BadRow(
            "columns",
            "answer",
            f"{answers[0]} must be the text, the letter or the number from 0 of one of the "
            f"{len(options)} {names[0]} (got {str(answer)[:40]!r})",
        )
    del values[names[0]]
    values[answers[0]] = [{"role": "assistant", "content": options[number], OPTIONS: options}]


def _join_answers(values: Values) -> None:
    """Replace the columns of a conversation by `messages`. The first message that a rejected answer
    replaces has that answer as its field REJECTED.

    The prompt is in columns of its own, or chosen and rejected are conversations with it, as in
    TRL.
    """
    columns = [name for name in REJECTED_COLUMNS if name in values]
    if not columns:
        _check_chosen(values)
    if len(columns) != 1:
        _join_chat_columns(values)
        return
    given = values.pop(columns[0])
    rejected = _split_turns(given) or _as_messages("assistant", given)
    given_chosen = values.pop(CHOSEN_COLUMN, None)
    chosen = _split_turns(given_chosen)
    if not chosen and given_chosen is not None:
        chosen = _as_messages("assistant", given_chosen)
    prompt = next((name for name in MESSAGE_COLUMNS if isinstance(values.get(name), list)), None)
    if chosen and role_of(chosen[0]) != "assistant":  # with its prompt
        values[MESSAGE_COLUMNS[0]] = chosen
    elif chosen and prompt is not None:  # LLaMA-Factory
        values[prompt] = [*_as_messages("user", values[prompt]), *chosen]
    elif chosen and not has_any(values, (*QUESTION_COLUMNS, "input")):
        raise BadRow(
            "columns",
            "messages",
            "chosen and rejected have no prompt: add a column prompt, or give both as messages "
            "with it",
        )
    elif chosen:
        values[ANSWER_COLUMNS[0]] = chosen
    _join_chat_columns(values)
    name = next((name for name in MESSAGE_COLUMNS if isinstance(values.get(name), list)), None)
    if name is None or not values[name]:
        values[columns[0]] = given  # is reported as not used
        return
    turns = values[name]
    with_prompt = chosen or turns
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(with_prompt, rejected, strict=False))
    shared = sum(1 for _ in pairs)
    num_chosen = len(with_prompt) - shared if chosen or shared else 1
    first = len(turns) - max(1, num_chosen)
    if isinstance(turns[first], dict):
        answer = turns[first] | {REJECTED: rejected[shared:]}
        values[name] = [*turns[:first], answer, *turns[first + 1 :]]


def _check_chosen(values: Mapping[str, Any]) -> None:
    """Raise BadRow if the only answer of a row is a chosen one, without a rejected one."""
    has_prompt = isinstance(values.get(CHOSEN_COLUMN), list)
    if CHOSEN_COLUMN not in values or not (has_prompt or has_any(values, QUESTION_COLUMNS)):
        return
    if not has_any(values, (*TEXT_COLUMNS, *MESSAGE_COLUMNS, *ANSWER_COLUMNS, "label")):
        name = MESSAGE_COLUMNS[0] if has_prompt else ANSWER_COLUMNS[0]
        raise BadRow(
            "columns",
            "rejected",
            f"chosen needs a rejected answer; --columns {name}={CHOSEN_COLUMN} trains on chosen "
            "answers alone",
        )


def _split_turns(text: object) -> list[Any]:
    """Return the messages of a conversation in one text, as in hh-rlhf: `\\n\\nHuman: ...`;
    [] for others.
    """
    if not isinstance(text, str) or not text.startswith("\n\nHuman:"):
        return []
    _, *parts = _TURN.split(text)
    return [
        {"role": "user" if name == "Human" else "assistant", "content": content}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _join_chat_columns(values: Values) -> None:
    """Replace the columns of a question and its answer by `messages`, and add `system` to them.

    Columns that are not used stay: those of a row with messages, with captions of its media, or
    with several questions or answers.
    """
    if not has_any(values, (*CHAT_COLUMNS, *MESSAGE_COLUMNS)):
        return
    questions = [name for name in QUESTION_COLUMNS if name in values] or ["input"]
    answers = [name for name in ANSWER_COLUMNS if name in values]
    has_media = has_any(values, (*IMAGE_COLUMNS, *MEDIA_COLUMNS))
    has_captions = has_media and has_any(values, TEXT_COLUMNS)
    is_chat = not has_captions and not has_any(values, MESSAGE_COLUMNS)
    if is_chat and len(questions) == len(answers) == 1 and questions[0] in values:
        question = values.pop(questions[0])
        if isinstance(question, str) and isinstance(values.get("input"), str):
            question = "\n".join(filter(None, (question, values.pop("input"))))  # as ms-swift
        pairs = [(question, values.pop(answers[0]))]
        earlier = values.get("history")
        if isinstance(earlier, list) and all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in earlier
        ):
            pairs[:0] = values.pop("history")
        values["messages"] = [
            message
            for pair in pairs
            for role, content in zip(("user", "assistant"), pair, strict=True)
            for message in _as_messages(role, content)
        ]
    for name in MESSAGE_COLUMNS:
        turns = values.get(name)
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
            continue
        if "system" not in (turns[0].get("role"), turns[0].get("from")):
            system = values.pop("system", None)
            values[name] = [{"role": "system", "content": system}] * bool(system) + turns


def _as_messages(role: str, content: object) -> list[Any]:
    """Return a prompt or a completion as messages; TRL's may be messages already.

    As in TRL, the answers in a prompt are no targets.
    """
    if isinstance(content, dict) and not content.keys().isdisjoint(("role", "from")):
        content = [content]
    if (
        not isinstance(content, list)
        or not all(isinstance(each, dict) for each in content)
        or not any({"role", "from"} & each.keys() for each in content)
    ):
        # a text, or parts
        return [{"role": role, "content": content}]
    is_prompt = role == "user"
    return [
        each | {"loss": False} if is_prompt and role_of(each) == "assistant" else each
        for each in content
    ]


def _is_question_and_answer(texts: object) -> bool:
    """Return whether these are turns {user, assistant}, as The Cauldron has."""
    return (
        isinstance(texts, list)
        and bool(texts)
        and all(isinstance(turn, dict) and {"user", "assistant"} <= turn.keys() for turn in texts)
    )
