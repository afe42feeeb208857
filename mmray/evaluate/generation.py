"""Evaluation of generative models: loss, perplexity and token accuracy of held-out answers, BLEU-4 and CIDEr-D.

Each rank reads its part of the rows (batches.py), and sums are reduced. Each caption of a row counts as an answer to
the same question.
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
from mmray.models.export.generate import generate_answer
from mmray.objectives.language_modelling import LanguageModelling

# BLEU (Papineni et al. 2002) is that of torchmetrics. CIDEr-D (Vedantam et al. 2015, arXiv:1411.5726, equations 1 to 4
# with the penalties of section 6) is implemented here, because pycocoevalcap needs Java for its tokenizer. Words are in
# lower case without punctuation, so the figures differ slightly from published ones.
MAX_NGRAM = 4  # longest n-gram
SIGMA = 6.0  # of the Gaussian length penalty
SCALE = 10.0  # as in the paper
_WORD = re.compile(r"[^\W_]+(?:'\w+)?")

Ngrams = Counter[tuple[str, ...]]


def caption_scores(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """bleu_4 (0 to 1) and cider (0 to 10; 0 for a single caption or equal captions)."""
    from torchmetrics.functional.text import bleu_score

    hypotheses = [words(text) for text in written]
    references_words = [[words(text) for text in texts] for texts in references]
    joined = [" ".join(text) for text in hypotheses]
    bleu = bleu_score(joined, [[" ".join(text) for text in texts] for texts in references_words], n_gram=MAX_NGRAM)
    return {"bleu_4": float(bleu), "cider": cider_d(hypotheses, references_words)}


def words(text: str) -> list[str]:
    """The words of a caption, in lower case."""
    return _WORD.findall(text.lower())


def cider_d(written: Sequence[list[str]], references: Sequence[Sequence[list[str]]]) -> float:
    """Mean CIDEr-D over the images; n-grams are weighted by inverse document frequency over the references."""
    counted = [[ngrams(reference) for reference in texts] for texts in references]
    document_frequency: Ngrams = Counter(gram for texts in counted for gram in set().union(*texts))
    scores = [
        _image_score(ngrams(text), texts, document_frequency, len(counted))
        for text, texts in zip(written, counted, strict=True)
    ]
    return SCALE * sum(scores) / max(1, len(scores))


def ngrams(text: list[str]) -> Ngrams:
    """Counts of the 1- to 4-grams."""
    return Counter(
        tuple(text[first : first + length])
        for length in range(1, MAX_NGRAM + 1)
        for first in range(len(text) - length + 1)
    )


def _image_score(written: Ngrams, references: Sequence[Ngrams], document_frequency: Ngrams, images: int) -> float:
    """Mean similarity of a caption to the references of its image."""
    mine = _tf_idf(written, document_frequency, images)
    scores = [
        _similarity(mine, _tf_idf(reference, document_frequency, images), written, reference)
        for reference in references
    ]
    return sum(scores) / max(1, len(scores))


def _tf_idf(counts: Ngrams, document_frequency: Ngrams, images: int) -> list[dict[tuple[str, ...], float]]:
    """tf-idf weights of the n-grams, for each n."""
    weighed: list[dict[tuple[str, ...], float]] = [{} for _ in range(MAX_NGRAM)]
    for gram, count in counts.items():
        weighed[len(gram) - 1][gram] = count * math.log(images / max(1, document_frequency[gram]))
    return weighed


def _similarity(candidate: list[dict], target: list[dict], written: Ngrams, reference: Ngrams) -> float:
    """Mean cosine over n, with counts clipped to the reference's, times the length penalty."""
    penalty = math.exp(-((_length(written) - _length(reference)) ** 2) / (2 * SIGMA**2))
    total = 0.0
    for own, other in zip(candidate, target, strict=True):
        norms = math.sqrt(sum(w * w for w in own.values())) * math.sqrt(sum(w * w for w in other.values()))
        if norms:
            dot = sum(min(weight, other[gram]) * other[gram] for gram, weight in own.items() if gram in other)
            total += penalty * dot / norms
    return total / MAX_NGRAM


def _length(counts: Ngrams) -> int:
    """Number of words, from the n-grams."""
    return sum(count for gram, count in counts.items() if len(gram) == 1)


@torch.no_grad()
def answer_scores(model: Any, batches: EvalBatches, group: Group, max_new_tokens: int) -> dict[str, float]:
    """bleu_4, cider and answered (rows) over the first `batches.limit` rows; every rank gets the same.

    The prompt is the first question of a row; references are its captions, or the first answer. Unreadable rows are
    skipped.
    """
    answers = []
    with closing(batches):
        for row in batches.rows.tolist():
            try:
                pixels, _, conversations, _ = batches.read(row)
            except ROW_ERRORS:
                continue  # counted where the loss is computed
            question, references = batches.encoder.prompt_and_references(conversations)
            image = torch.from_numpy(pixels)[None]
            answers.append([row, generate_answer(model, batches.encoder, image, question, max_new_tokens), references])
    gathered = sorted(_gather_json(answers, group))
    if not gathered:
        return {}
    scores = caption_scores([answer for _, answer, _ in gathered], [references for _, _, references in gathered])
    return scores | {"answered": float(len(gathered))}


def _gather_json(rows: list[list[Any]], group: Group) -> list[list[Any]]:
    """Rows of all ranks, sent as JSON lines."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    gathered = group.all_gather_variable(torch.frombuffer(bytearray(lines or b"\n"), dtype=torch.uint8))
    return [json.loads(line) for line in bytes(gathered.cpu().numpy()).splitlines() if line]


class GenerationEvaluator(EvalDataset):
    """Scores a model with `logits` on one set of held-out rows; same interface as `Evaluator`."""

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Any,
        global_rows: int,
        show: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, float]:
        """loss, perplexity, token_accuracy, tokens, rows, bad_rows; every rank gets the same.

        With `evaluate.num_generations` also bleu_4, cider and answered. Raises DataError on every rank if no row is
        readable.
        """
        settings = self._settings
        batches = self._batches(group.rank, group.world, settings.limit)
        sums = torch.zeros(5, dtype=torch.float64)  # loss, tokens, correct tokens, rows, bad rows
        with eval_mode(model):
            for batch in batches:
                for part in _parts(batch, settings.batch):
                    sums[:3] += _loss_sums(model, part, group.device)
                sums[3] += len(batch["row"])
        sums[4] = len(batches.skipped)
        loss, tokens, correct, rows, bad_rows = group.all_gather_variable(sums[None]).sum(0).tolist()
        if not rows:
            raise DataError(f"cannot read any of {bad_rows:.0f} evaluation rows: {'; '.join(batches.skipped[:1])}")
        mean, answers = loss / max(1.0, tokens), {}
        if settings.num_generations:
            with eval_mode(model):
                limit = min(settings.num_generations, settings.limit or settings.num_generations)
                batches = self._batches(group.rank, group.world, limit)
                answers = answer_scores(model, batches, group, settings.max_new_tokens)
        return answers | {
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),  # exp of more is infinite
            "token_accuracy": correct / max(1.0, tokens),
            "tokens": tokens,
            "rows": rows,
            "bad_rows": bad_rows,
        }


def _parts(batch: Batch, rows: int) -> list[Batch]:
    """Conversations with their images, `rows` at a time."""
    image_index = torch.searchsorted(batch["row"], batch["owner"])
    columns = {name: batch[name].split(rows) for name in ("input_ids", "labels", "image_pos")}
    return [
        {name: parts[number] for name, parts in columns.items()} | {"image": batch["image"][images]}
        for number, images in enumerate(image_index.split(rows))
    ]


def _loss_sums(model: nn.Module, part: Batch, device: torch.device) -> Tensor:
    """Sums of loss, target tokens and correct ones, float64 [3] on the CPU."""
    local = {name: tensor.to(device) for name, tensor in part.items()}
    local["valid"] = torch.ones(len(local["labels"]), dtype=torch.bool, device=device)
    loss, count, parts = LanguageModelling().compute_loss(model(local), local)
    return torch.stack([loss.double(), count.double(), parts["token_accuracy"].double()]).cpu()
