"""Scores of generated answers and captions."""

from __future__ import annotations

import math

import pytest

from mmray.evaluation import answers
from mmray.evaluation.answers import caption_scores, cider_d, split_words
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


def test_the_best_captions_have_the_highest_scores() -> None:
    right = [
        "A red circle, on a green ground.",
        "two blue squares in the corner",
        "one yellow ring at the left side",
    ]
    references = [[text] for text in right]
    best = caption_scores(right, references)
    assert best == {"bleu_4": pytest.approx(1.0), "cider": pytest.approx(10.0)}
    shuffled = caption_scores([right[1], right[2], right[0]], references)
    near = caption_scores([text.replace("a", "the") for text in right], references)
    assert shuffled["cider"] < 0.5 < near["cider"] < best["cider"]
    assert shuffled["bleu_4"] < near["bleu_4"] < 1 or near["bleu_4"] == shuffled["bleu_4"] == 0
    assert caption_scores(["", "", ""], references) == {"bleu_4": 0.0, "cider": 0.0}


def test_combining_marks_belong_to_their_words() -> None:
    assert split_words("लाल कुत्ता, घास!") == ["लाल", "कुत्ता", "घास"]
    assert split_words("Cafe\u0301 \u2764\ufe0f 3.5 'dogs' don't_stop") == [
        "café",
        "3",
        "5",
        "dogs",
        "don't",
        "stop",
    ]
    wrong = caption_scores(["लील कोत्ते घास पर बैठा"], [["लाल कुत्ता घास पर बैठा"]])
    assert wrong["bleu_4"] == 0  # the consonants are equal


def test_cider_equals_hand_computed_value() -> None:
    """Two images with one word in common: idf is ln 2 for words of one image, 0 for words of
    both.
    """
    references = [[["a", "dog"]], [["a", "cat"]]]
    assert cider_d([["a", "dog"], ["a", "dog"]], references) == pytest.approx(10 * (2 / 4 + 0) / 2)
    twice = cider_d([["a", "dog", "dog"], ["a", "cat"]], references)  # the second "dog" is clipped
    one_gram = math.exp(-1 / 72) * 1 * 1 / (2 * 1)
    two_grams = math.exp(-1 / 72) * 1 / math.sqrt(1 + 1)
    assert twice == pytest.approx(10 * ((one_gram + two_grams) / 4 + 2 / 4) / 2)
