"""Scores of a model that writes: loss and perplexity of what the assistant says in held-out rows, and tokens guessed.

Each rank reads its part of the rows (batches.py), and sums and counts meet; a row's captions count each, as the answer
to the same question.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from mmray.data.store.prepared_set import ROW_ERRORS
from mmray.errors import DataError
from mmray.evaluate.batches import Batch, EvalBatches, EvalDataset
from mmray.evaluate.evaluator import Group, eval_mode
from mmray.models.export.load import generate_answer
from mmray.objectives.language_modelling import LanguageModelling

# How near written captions come to those of people: BLEU-4 and CIDEr-D, over words in lower case without punctuation.
#
# BLEU (Papineni et al. 2002) is torchmetrics'. CIDEr-D (Vedantam et al. 2015, arXiv:1411.5726, equations 1 to 4 with
# the
# penalties of its section 6) stands here: other implementations take Java with them for their tokenizer, whose words
# differ a little from these, and so do its figures.
MAX_NGRAM = 4  # words of an n-gram
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
    bleu = bleu_score(joined, [[" ".join(text) for text in texts] for texts in wanted], n_gram=MAX_NGRAM)
    return {"bleu_4": float(bleu), "cider": cider_d(said, wanted)}


def words(text: str) -> list[str]:
    """The words of a caption, in lower case."""
    return _WORD.findall(text.lower())


def cider_d(written: Sequence[list[str]], references: Sequence[Sequence[list[str]]]) -> float:
    """Mean over the images of CIDEr-D; rare n-grams weigh more, by how many images' references have them."""
    counted = [[ngrams(reference) for reference in texts] for texts in references]
    seen_in: Ngrams = Counter(gram for texts in counted for gram in set().union(*texts))
    scores = [
        _image_score(ngrams(text), texts, seen_in, len(counted)) for text, texts in zip(written, counted, strict=True)
    ]
    return SCALE * sum(scores) / max(1, len(scores))


def ngrams(text: list[str]) -> Ngrams:
    """Counts of the runs of one to four words."""
    return Counter(
        tuple(text[first : first + length])
        for length in range(1, MAX_NGRAM + 1)
        for first in range(len(text) - length + 1)
    )


def _image_score(written: Ngrams, references: Sequence[Ngrams], seen_in: Ngrams, images: int) -> float:
    """Mean similarity to the references of the image, over the lengths of n-grams."""
    mine = _tf_idf(written, seen_in, images)
    scores = [_similarity(mine, _tf_idf(reference, seen_in, images), written, reference) for reference in references]
    return sum(scores) / max(1, len(scores))


def _tf_idf(counts: Ngrams, seen_in: Ngrams, images: int) -> list[dict[tuple[str, ...], float]]:
    """Counts times the logarithm of the images over those that have the n-gram, for each length."""
    weighed: list[dict[tuple[str, ...], float]] = [{} for _ in range(MAX_NGRAM)]
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
    return total / MAX_NGRAM


def _length(counts: Ngrams) -> int:
    """Words of a caption, from its n-grams."""
    return sum(count for gram, count in counts.items() if len(gram) == 1)


# What a model that writes says of held-out images, beside what people said: each rank asks about its part.
@torch.no_grad()
def answer_scores(model: Any, batches: EvalBatches, group: Group, most: int) -> dict[str, float]:
    """bleu_4, cider and answered (rows) over the first `batches.limit` rows, the same on every rank.

    A row is asked its first question; its captions, or the assistant's first answer, are what is right. Answers are of
    `most` tokens at the longest. Rows that cannot be read are left out.
    """
    found = []
    with closing(batches):
        for row in batches.rows.tolist():
            try:
                pixels, _, conversations, _ = batches.read(row)
            except ROW_ERRORS:
                continue  # counted and named where the loss is measured
            question, right = batches.encoder.prompt_and_references(conversations)
            found.append(
                [row, generate_answer(model, batches.encoder, torch.from_numpy(pixels)[None], question, most), right]
            )
    everyone = sorted(_gathered(found, group))
    if not everyone:
        return {}
    scores = caption_scores([said for _, said, _ in everyone], [right for _, _, right in everyone])
    return scores | {"answered": float(len(everyone))}


def _gathered(found: list[list[Any]], group: Group) -> list[list[Any]]:
    """The rows of all ranks; text travels as bytes."""
    mine = "".join(json.dumps(row) + "\n" for row in found).encode()
    everyone = group.all_gather_variable(torch.frombuffer(bytearray(mine or b"\n"), dtype=torch.uint8))
    return [json.loads(line) for line in bytes(everyone.cpu().numpy()).splitlines() if line]


class GenerationEvaluator(EvalDataset):
    """Scores a model with `logits` on one set of held-out rows, as often as wanted; called as `Evaluator` is."""

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Any,
        global_rows: int,
        show: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, float]:
        """loss, perplexity, token_accuracy, tokens, rows, bad_rows; the same on every rank. Where answers are asked
        for (evaluate.num_generations) also bleu_4, cider and answered.

        Raises DataError, on every rank, when no row could be read.
        """
        settings = self._settings
        batches = self._batches(group.rank, group.world, settings.limit)
        sums = torch.zeros(5, dtype=torch.float64)  # loss, tokens, right, rows, and rows that cannot be read
        with eval_mode(model):
            for batch in batches:
                for part in _parts(batch, settings.batch):
                    sums[:3] += _loss_sums(model, part, group.device)
                sums[3] += len(batch["row"])
        sums[4] = len(batches.faults)
        loss, tokens, right, rows, bad_rows = group.all_gather_variable(sums[None]).sum(0).tolist()
        if not rows:
            raise DataError(f"none of {bad_rows:.0f} evaluation rows can be read, {'; '.join(batches.faults[:1])}")
        mean, answers = loss / max(1.0, tokens), {}
        if settings.num_generations:
            with eval_mode(model):
                asked = self._batches(
                    group.rank, group.world, min(settings.num_generations, settings.limit or settings.num_generations)
                )
                answers = answer_scores(model, asked, group, settings.max_new_tokens)
        return answers | {
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),  # beyond it a float is infinite
            "token_accuracy": right / max(1.0, tokens),
            "tokens": tokens,
            "rows": rows,
            "bad_rows": bad_rows,
        }


def _parts(batch: Batch, rows: int) -> list[Batch]:
    """Conversations with the image that each is about, `rows` of them at once."""
    place = torch.searchsorted(batch["row"], batch["owner"])
    words = {name: batch[name].split(rows) for name in ("input_ids", "labels", "image_pos")}
    return [
        {name: parts[number] for name, parts in words.items()} | {"image": batch["image"][images]}
        for number, images in enumerate(place.split(rows))
    ]


def _loss_sums(model: nn.Module, part: Batch, device: torch.device) -> Tensor:
    """Sums of loss, learned tokens and right ones, float64 [3] on the CPU."""
    here = {name: tensor.to(device) for name, tensor in part.items()}
    here["valid"] = torch.ones(len(here["labels"]), dtype=torch.bool, device=device)
    loss, count, parts = LanguageModelling().compute_loss(model(here), here)
    return torch.stack([loss.double(), count.double(), parts["token_accuracy"].double()]).cpu()
