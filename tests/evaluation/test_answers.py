"""Scores of generated answers."""

from __future__ import annotations

import pytest

from mmray.evaluation import answers
from mmray.evaluation.answers import split_words
from mmray.evaluation.conversations import without_reasoning


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("red", ["red"], (1, 1, 1)),
        ("The red.", ["red"], (0, 1, 0)),
        ("two", ["2"], (0, 1, 0)),
        ("reds", ["red"], (0, 0, 0.75)),
        ("x" * 60 + "abcdefghij" * 10, ["abcdefghij" * 10], (0, 0, 0.625)),
        ("red", ["red"] * 2 + ["blue"] * 8, (1, (8 * 2 / 3 + 2 * 1 / 3) / 10, 1)),
    ],
)
def test_scores_of_answers(answer, references, expected):
    scores = [
        score([answer], [references])
        for score in (answers.exact_match, answers.vqa_accuracy, answers.anls)
    ]
    assert scores == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("none", "0", 1),
        ("1,000", "1000", 1),
        ("U.S.A.", "usa", 1),
        ("Time: 10:30.", "time 10:30", 1),
        ("10:30", "10.30", 0),
        ("$5", "5", 0),
        ("5%", "5", 0),
        ("A.", "a", 1),
        ("", "A", 0),
        ("the", "A", 0),
        ("+", "-", 0),
    ],
)
def test_vqa_accuracy_compares_numbers_and_options_exactly(answer, reference, expected) -> None:
    assert answers.vqa_accuracy([answer], [[reference] * 10]) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("two", "two"),
        ("<think>\nOne and one.\n</think>\n\ntwo", "two"),
        ("One and one.\n</think>\n\ntwo", "two"),  # after a prompt that ends with <think>
        ("<think>One and", "<think>One and"),
    ],
)
def test_reasoning_is_no_part_of_an_answer(text, answer) -> None:
    assert without_reasoning(text) == answer


def test_combining_marks_belong_to_their_words() -> None:
    assert split_words("लाल कुत्ता, घास!") == ["लाल", "कुत्ता", "घास"]
    assert split_words("Cafe\u0301 \u2764\ufe0f 3.5 'dogs' don't_stop") == [
        "café",
        "3.5",
        "dogs",
        "don't",
        "stop",
    ]
    assert answers.vqa_accuracy(["लील"], [["लाल"]]) == 0  # the consonants are equal
