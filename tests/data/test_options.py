"""Multiple-choice questions in the forms of ScienceQA, MMMU, MMBench and messages."""

from __future__ import annotations

from typing import Any

import pytest

from mmray.data.formats.values import normalize_values
from mmray.data.messages import message_text, split_options
from mmray.data.rows import BadRow
from mmray.data.source_row import parse_row

OPTIONS = ["a cat", "a dog", "3"]
ANSWER = {"role": "assistant", "content": "a dog", "options": OPTIONS}


def parsed(values: dict[str, Any]) -> Any:
    return parse_row(normalize_values(values, (), "{}"), "made:1")


@pytest.mark.parametrize(
    "values",
    [
        {"question": "q", "choices": OPTIONS, "answer": 1},  # ScienceQA
        {"question": "q", "options": str(OPTIONS), "answer": "B"},  # MMMU
        {"question": "q", "options": dict(zip("ABC", OPTIONS, strict=True)), "answer": "B"},
        {"question": "q", "options": {"x": "a cat", "y": "a dog", "z": "3"}, "answer": "y"},
        {"prompt": "q", "options": ["a cat", "a dog", 3], "completion": "a dog"},
        {"question": "q", "choices": OPTIONS, "answer": "1"},
        {"messages": [{"role": "user", "content": "q"}, ANSWER]},
    ],
)
def test_answer_is_the_text_of_the_right_option(values: dict[str, Any]) -> None:
    row = parsed(values)
    assert [message_text(each) for each in row.messages] == ["q", "a dog"]
    conversations, right = split_options(row.messages)
    assert [message_text(each[-1]) for each in conversations] == OPTIONS
    assert right == 1
    assert not row.notices


def test_only_the_last_question_has_targets() -> None:
    user = {"role": "user", "content": "q"}
    row = parsed({"messages": [user, ANSWER, user, ANSWER | {"weight": 2}]})
    conversations, _ = split_options(row.messages)
    assert [each.get("weight") for each in conversations[0]] == [None, 0.0, None, 1.0]
    assert split_options(row.messages[:1]) is None


def test_number_in_the_options_is_their_text() -> None:
    row = parsed({"question": "q", "choices": ["2", "0", "1"], "answer": "1"})
    assert split_options(row.messages)[1] == 2
    assert split_options(parsed({"question": "q", "choices": ["2", "0"], "answer": 1}).messages)[1]


def test_open_question_has_no_options() -> None:
    row = parsed({"question": "q", "options": "[]", "answer": "five"})
    assert message_text(row.messages[1]) == "five"
    assert split_options(row.messages) is None


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        ({"question": "q", "choices": OPTIONS, "answer": 3}, "from 0 of one of the 3 choices"),
        ({"question": "q", "options": OPTIONS, "answer": "D"}, r"\(got 'D'\)"),
        ({"question": "q", "options": ["a", "a"], "answer": 0}, "must be different texts"),
        ({"question": "q", "options": ["a"], "answer": 0}, "at least two"),
        (
            {"messages": [{"role": "user", "content": "q"}, ANSWER | {"content": "a cow"}]},
            "that is one of them",
        ),
    ],
)
def test_answer_that_is_no_option_is_refused(values: dict[str, Any], detail: str) -> None:
    with pytest.raises(BadRow, match=detail):
        parsed(values)
