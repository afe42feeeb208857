"""Evaluation of generative models: loss, perplexity and token accuracy of held-out answers, BLEU-4
and CIDEr-D.

Each caption of a row counts as an answer to the same question.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mmray.errors import DataError
from mmray.evaluation.batches import EvalBatches, EvalDataset
from mmray.evaluation.evaluator import Group, eval_mode
from mmray.objectives.language_modelling import LanguageModelling

# BLEU (Papineni et al. 2002) is that of torchmetrics. CIDEr-D (Vedantam et al. 2015,
# arXiv:1411.5726, equations 1 to 4 with the penalties of section 6) is implemented here, because
# pycocoevalcap needs Java for its tokenizer. Words are in lower case without punctuation, so the
# scores differ slightly from published ones.
MAX_NEW_TOKENS = 64  # of an answer
MAX_NGRAM = 4  # longest n-gram
SIGMA = 6.0  # of the Gaussian length penalty
SCALE = 10.0  # as in the paper


def caption_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return BLEU-4 and CIDEr-D of generated captions.

    Args:
        hypotheses: One generated caption per image.
        references: The captions of each image.

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
        # by length of the n-gram
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


def gather_sorted(results: list[Any], group: Group) -> list[Any]:
    """Return the results of all ranks, sorted; a collective call.

    Args:
        results: JSON values of this rank, such as [row number, answer, reference texts].
        group: The ranks.

    Returns:
        The values of all ranks, equal on all ranks; tuples become lists.
    """
    lines = "".join(json.dumps(result) + "\n" for result in results).encode()
    gathered = group.all_gather_variable(
        torch.frombuffer(bytearray(lines or b"\n"), dtype=torch.uint8)
    )
    return sorted(json.loads(line) for line in bytes(gathered.cpu().numpy()).splitlines() if line)


@torch.no_grad()
def answer_scores(model: Any, batches: EvalBatches, group: Group) -> dict[str, float]:
    """Generate an answer for each row and compare it with the texts of the row; a collective call.

    Args:
        model: A generative model, with the method `answer`.
        batches: Batches of the held-out rows of this rank.
        group: The ranks, which exchange their answers.

    Returns:
        `bleu_4` (0 to 1), `cider` (0 to 10) and `answered` (number of rows) over the rows of all
        ranks, equal on all ranks; empty if no row is readable.
    """
    results: list[Any] = []
    encoder = batches.data.encoder
    for readable in batches.readable_rows():
        pixels = torch.from_numpy(np.stack([record.pixels for _, record in readable]))
        prompts = [encoder.prompt_and_references(record.texts) for _, record in readable]
        answers = model.answer(
            encoder, pixels, [question for question, _ in prompts], MAX_NEW_TOKENS
        )
        references = [texts for _, texts in prompts]
        results += zip([row for row, _ in readable], answers, references, strict=True)
    results = gather_sorted(results, group)
    if not results:
        return {}
    scores = caption_scores(
        [answer for _, answer, _ in results], [texts for _, _, texts in results]
    )
    return scores | {"answered": float(len(results))}


class GenerationEvaluator(EvalDataset):
    """Computes loss, perplexity and the scores of generated answers of a model with `logits`.

    Its arguments, such as the set of held-out rows, are those of EvalDataset.
    """

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Any,
        global_rows: int,
        save_examples: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of a generative model on held-out rows.

        A collective call of all ranks, each of which reads its part of the rows.

        Args:
            model: The unwrapped model, whose outputs have `logits`.
            group: The ranks.
            objective: Unused; the loss is the cross-entropy of the answers.
            global_rows: Unused.
            save_examples: Unused.

        Returns:
            Equal on all ranks: `loss` (mean over the tokens of the answers), `perplexity`,
            `token_accuracy` (0 to 1), `tokens`, `rows` and `bad_rows` (counts). With
            `evaluate.num_generations` also `bleu_4` (0 to 1), `cider` (0 to 10) and `answered`
            (rows with a generated answer).

        Raises:
            DataError: No row is readable; raised on every rank.
        """
        settings = self.settings
        batches = EvalBatches(self, group.rank, group.world_size, settings.limit)
        sums = torch.zeros(5, dtype=torch.float64)  # loss, tokens, correct tokens, rows, bad rows
        with eval_mode(model):
            for batch in batches:
                sums[3] += len(batch["row"])
                image_index = torch.searchsorted(batch["row"], batch["caption_row"])
                # conversations of these images
                for part in torch.arange(len(image_index)).split(settings.batch):
                    local = {
                        name: batch[name][part].to(group.device)
                        for name in ("input_ids", "labels", "image_pos")
                    }
                    local["image"] = batch["image"][image_index[part]].to(group.device)
                    local["valid"] = torch.ones(len(part), dtype=torch.bool, device=group.device)
                    loss, count, metrics = LanguageModelling().compute_loss(model(local), local)
                    sums[:3] += torch.stack(
                        [loss.double(), count.double(), metrics["token_accuracy"].double()]
                    ).cpu()
        sums[4] = len(batches.skipped)
        loss, tokens, correct, rows, bad_rows = (
            group.all_gather_variable(sums[None]).sum(0).tolist()
        )
        if not rows:
            raise DataError(
                f"cannot read any of {bad_rows:.0f} evaluation rows: "
                f"{'; '.join(batches.skipped[:1])}"
            )
        mean = loss / max(1.0, tokens)
        answers = {}
        if settings.num_generations:
            with eval_mode(model):
                limit = min(settings.num_generations, settings.limit or settings.num_generations)
                batches = EvalBatches(self, group.rank, group.world_size, limit)
                answers = answer_scores(model, batches, group)
        return answers | {
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),  # exp of more is infinite
            "token_accuracy": correct / max(1.0, tokens),
            "tokens": tokens,
            "rows": rows,
            "bad_rows": bad_rows,
        }
