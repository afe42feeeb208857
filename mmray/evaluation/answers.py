"""Scores of generated answers against reference answers: exact match, VQA accuracy and ANLS."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

ARTICLES = ("a", "an", "the")
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {"none": "0"} | {name: str(number) for number, name in enumerate(_NAMES)}
# A comma of thousands and a period that starts no fraction join what is around them.
_JOINING = re.compile(r"(?<=\d),(?=\d)|\.(?!\d)")
AGREEING = 3  # people who must have given an answer for it to count fully
ANLS_THRESHOLD = 0.5  # a lower similarity counts 0

References = Sequence[Sequence[str]]


def exact_match(answers: Sequence[str], references: References) -> float:
    """Return the fraction of answers that equal a reference, without surrounding white space.

    Returns:
        The fraction, 0 to 1; 0 without questions.
    """
    hits = [
        answer.strip() in [text.strip() for text in texts]
        for answer, texts in zip(answers, references, strict=True)
    ]
    return sum(hits) / max(1, len(hits))


def vqa_accuracy(answers: Sequence[str], references: References) -> float:
    """Return the VQA accuracy (Antol et al. 2015, arXiv:1505.00468, section 3).

    The references of a question are the answers of several people. An answer counts fully if at
    least three people gave it, averaged over the sets of all people but one. With fewer than four
    references any equal one counts fully. Texts are compared as in its evaluation code: in lower
    case, without punctuation and articles, and with digits for numbers. Its list of contractions
    (`dont`) is not used, and a text of articles or punctuation alone equals only itself.

    Returns:
        The mean over the questions, 0 to 1; 0 without questions.
    """
    scores = []
    for answer, texts in zip(answers, references, strict=True):
        own = _normalize(answer)
        matches = [_normalize(text) == own for text in texts]
        if len(matches) <= AGREEING:
            scores.append(float(any(matches)))
            continue
        total = sum(matches)
        scores.append(sum(min(1.0, (total - match) / AGREEING) for match in matches) / len(matches))
    return sum(scores) / max(1, len(scores))


def anls(answers: Sequence[str], references: References) -> float:
    """Return the average normalized Levenshtein similarity (Biten et al. 2019, arXiv:1905.13648).

    Letter case and the amount of white space are ignored; a similarity below 0.5 counts as 0.
    """
    scores = []
    for answer, texts in zip(answers, references, strict=True):
        best = max((_similarity(answer, text) for text in texts), default=0.0)
        scores.append(best if best >= ANLS_THRESHOLD else 0.0)
    return sum(scores) / max(1, len(scores))


def split_words(text: str) -> list[str]:
    """Split a text into words in lower case without punctuation: `It's a Dog.` -> [it's, a, dog].

    A combining mark, such as a vowel sign of Hindi, is a part of its word. Numbers keep their
    period, colon, currency and percent sign, but no commas: `$1,000.5` -> [$1000.5].
    """
    characters = _JOINING.sub("", unicodedata.normalize("NFC", text.lower()))
    words = "".join(each if _is_in_word(each) else " " for each in characters).split()
    return [word.strip("':") for word in words if any(map(str.isalnum, word))]


def _is_in_word(character: str) -> bool:
    category = unicodedata.category(character)
    return character.isalnum() or character in "'.:%" or category == "Sc" or category[0] == "M"


def _normalize(text: str) -> list[str]:
    words = split_words(text)
    without_articles = [DIGITS.get(word, word) for word in words if word not in ARTICLES]
    # Otherwise an empty answer would be equal to the option `A`.
    return without_articles or words or [text.strip()]


def _similarity(first: str, second: str) -> float:
    first = " ".join(first.lower().split())
    second = " ".join(second.lower().split())
    longest = max(len(first), len(second))
    return 1 - _levenshtein(first, second) / longest if longest else 1.0


def _levenshtein(first: str, second: str) -> int:
    """Fewest insertions, deletions and substitutions of characters between two texts.

    ANLS of 5,000 answers with three references of 20 characters takes 2.8 s, so no package is
    needed.
    """
    row = list(range(len(second) + 1))
    for index, letter in enumerate(first, 1):
        previous = row[0]
        row[0] = index
        for column, other in enumerate(second, 1):
            cost = previous + (letter != other)
            previous = row[column]
            row[column] = min(cost, row[column] + 1, row[column - 1] + 1)
    return row[-1]
