"""How near written captions come to those of people: BLEU-4 and CIDEr-D, over words in lower case without punctuation.

BLEU (Papineni et al. 2002) is torchmetrics'. CIDEr-D (Vedantam et al. 2015, arXiv:1411.5726, equations 1 to 4 with the
penalties of its section 6) stands here: other implementations take Java with them for their tokenizer, whose words
differ a little from these, and so do its figures.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

LONGEST = 4  # words of an n-gram
SIGMA = 6.0  # of the Gaussian by which another length is punished
SCALE = 10.0  # the published figures are ten times the mean similarity
_WORD = re.compile(r"[^\W_]+(?:'\w+)?")

Ngrams = Counter[tuple[str, ...]]


def caption_scores(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """bleu_4 (0 to 1) and cider (0 to 10; of one caption alone, or of captions that are all the same, 0)."""
    from torchmetrics.functional.text import bleu_score

    said = [words(text) for text in written]
    wanted = [[words(text) for text in texts] for texts in references]
    joined = [" ".join(text) for text in said]
    bleu = bleu_score(joined, [[" ".join(text) for text in texts] for texts in wanted], n_gram=LONGEST)
    return {"bleu_4": float(bleu), "cider": cider_d(said, wanted)}


def words(text: str) -> list[str]:
    """The words of a caption, in lower case."""
    return _WORD.findall(text.lower())


def cider_d(written: Sequence[list[str]], references: Sequence[Sequence[list[str]]]) -> float:
    """Mean over the images of CIDEr-D; rare n-grams weigh more, by how many images' references have them."""
    counted = [[ngrams(reference) for reference in texts] for texts in references]
    seen_in: Ngrams = Counter(gram for texts in counted for gram in set().union(*texts))
    scores = [
        _of_image(ngrams(text), texts, seen_in, len(counted)) for text, texts in zip(written, counted, strict=True)
    ]
    return SCALE * sum(scores) / max(1, len(scores))


def ngrams(text: list[str]) -> Ngrams:
    """Counts of the runs of one to four words."""
    return Counter(
        tuple(text[first : first + length])
        for length in range(1, LONGEST + 1)
        for first in range(len(text) - length + 1)
    )


def _of_image(written: Ngrams, references: Sequence[Ngrams], seen_in: Ngrams, images: int) -> float:
    """Mean similarity to the references of the image, over the lengths of n-grams."""
    mine = _weighed(written, seen_in, images)
    scores = [_similarity(mine, _weighed(reference, seen_in, images), written, reference) for reference in references]
    return sum(scores) / max(1, len(scores))


def _weighed(counts: Ngrams, seen_in: Ngrams, images: int) -> list[dict[tuple[str, ...], float]]:
    """Counts times the logarithm of the images over those that have the n-gram, for each length."""
    weighed: list[dict[tuple[str, ...], float]] = [{} for _ in range(LONGEST)]
    for gram, count in counts.items():
        weighed[len(gram) - 1][gram] = count * math.log(images / max(1, seen_in[gram]))
    return weighed


def _similarity(mine: list[dict], theirs: list[dict], written: Ngrams, reference: Ngrams) -> float:
    """Cosine for each length, of counts clipped to the reference's, times the penalty of another length."""
    apart = _length(written) - _length(reference)
    penalty = math.exp(-(apart**2) / (2 * SIGMA**2))
    total = 0.0
    for own, other in zip(mine, theirs, strict=True):
        norms = math.sqrt(sum(w * w for w in own.values())) * math.sqrt(sum(w * w for w in other.values()))
        if norms:
            total += (
                penalty
                * sum(min(weight, other[gram]) * other[gram] for gram, weight in own.items() if gram in other)
                / norms
            )
    return total / LONGEST


def _length(counts: Ngrams) -> int:
    """Words of a caption, from its n-grams."""
    return sum(count for gram, count in counts.items() if len(gram) == 1)
