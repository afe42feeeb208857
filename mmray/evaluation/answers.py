"""Scores of generated answers against reference answers: exact match, VQA accuracy, ANLS, and
BLEU-4 and CIDEr-D of captions.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence

ARTICLES = ("a", "an", "the")
DIGITS = {
    name: str(number)
    for number, name in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
}
AGREEING = 3  # people who must have given an answer for it to count fully
ANLS_THRESHOLD = 0.5  # a lower similarity counts 0
# BLEU (Papineni et al. 2002) is that of torchmetrics. CIDEr-D (Vedantam et al. 2015,
# arXiv:1411.5726, equations 1 to 4 with the penalties of section 6) is implemented here, because
# pycocoevalcap had its last release in 2020, and needs pycocotools, and Java for its tokenizer.
# Words are in lower case without punctuation, so the scores differ slightly from published ones.
MAX_NGRAM = 4  # longest n-gram
SIGMA = 6.0  # standard deviation of the Gaussian length penalty
SCALE = 10.0  # the factor of the paper

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
    references any equal one counts fully. Texts are compared in lower case, without punctuation and
    articles, and with digits for numbers.

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

    The similarity of an answer is that to the closest reference (equation 1). Letter case and the
    amount of white space are ignored. A similarity below 0.5 counts as 0.

    Returns:
        The mean over the questions, 0 to 1; 0 without questions.
    """
    scores = []
    for answer, texts in zip(answers, references, strict=True):
        best = max((_similarity(answer, text) for text in texts), default=0.0)
        scores.append(best if best >= ANLS_THRESHOLD else 0.0)
    return sum(scores) / max(1, len(scores))


def caption_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return BLEU-4 and CIDEr-D of generated captions.

    Returns:
        `bleu_4` (0 to 1) and `cider` (0 to 10; 0 for a single image, or if all images have the same
        captions).
    """
    from torchmetrics.functional.text import bleu_score

    words = [split_words(text) for text in hypotheses]
    correct = [[split_words(text) for text in texts] for texts in references]
    joined = [[" ".join(text) for text in texts] for texts in correct]
    bleu = bleu_score([" ".join(text) for text in words], joined, n_gram=MAX_NGRAM)
    return {"bleu_4": float(bleu), "cider": cider_d(words, correct)}


def split_words(text: str) -> list[str]:
    """Split a text into words in lower case without punctuation: `It's a Dog.` -> [it's, a, dog].

    A combining mark, such as a vowel sign of Hindi, is a part of its word.
    """
    characters = unicodedata.normalize("NFC", text.lower())
    is_kept = (
        each.isalnum() or each == "'" or unicodedata.category(each)[0] == "M" for each in characters
    )
    words = "".join(
        each if kept else " " for each, kept in zip(characters, is_kept, strict=True)
    ).split()
    return [word.strip("'") for word in words if any(map(str.isalnum, word))]


def cider_d(hypotheses: Sequence[list[str]], references: Sequence[Sequence[list[str]]]) -> float:
    """Return CIDEr-D (Vedantam et al. 2015, arXiv:1411.5726), averaged over the images.

    Compares n-grams of 1 to 4 words, weighted by their inverse document frequency in the
    references.

    Args:
        hypotheses: One generated caption per image, as words in lower case (`split_words`).
        references: The captions of each image, each as such words.

    Returns:
        The score, 0 to 10, with the factor 10 of the paper.
    """
    seen = Counter(gram for texts in references for gram in set().union(*map(_ngrams, texts)))

    def weigh(text: list[str]) -> list[dict[tuple[str, ...], float]]:
        # A dict for each length of n-grams.
        weighed: list[dict[tuple[str, ...], float]] = [{} for _ in range(MAX_NGRAM)]
        for gram, count in _ngrams(text).items():
            weighed[len(gram) - 1][gram] = count * math.log(len(references) / max(1, seen[gram]))
        return weighed

    scores = []
    for text, texts in zip(hypotheses, references, strict=True):
        total = 0.0
        weighed = weigh(text)
        for reference in texts:
            penalty = math.exp(-((len(text) - len(reference)) ** 2) / (2 * SIGMA**2))
            for ours, other in zip(weighed, weigh(reference), strict=True):
                norms = math.hypot(*ours.values()) * math.hypot(*other.values())
                dot = sum(
                    min(weight, other[gram]) * other[gram]
                    for gram, weight in ours.items()
                    if gram in other
                )
                total += penalty * dot / norms / MAX_NGRAM if norms else 0.0
        scores.append(total / max(1, len(texts)))
    return SCALE * sum(scores) / max(1, len(scores))


def _ngrams(text: list[str]) -> Counter[tuple[str, ...]]:
    """Counts of the 1- to 4-grams."""
    lengths = range(1, MAX_NGRAM + 1)
    return Counter(
        tuple(text[at : at + length]) for length in lengths for at in range(len(text) - length + 1)
    )


def _normalize(text: str) -> list[str]:
    return [DIGITS.get(word, word) for word in split_words(text) if word not in ARTICLES]


def _similarity(first: str, second: str) -> float:
    first = " ".join(first.lower().split())
    second = " ".join(second.lower().split())
    longest = max(len(first), len(second))
    return 1 - _levenshtein(first, second) / longest if longest else 1.0


def _levenshtein(first: str, second: str) -> int:
    """Fewest insertions, deletions and substitutions of characters between two texts.

    The function of torchmetrics searches a beam only, and finds more for shifted texts. ANLS of
    5,000 answers with three references of 20 characters takes 2.8 s, so there is no extra for it.
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
