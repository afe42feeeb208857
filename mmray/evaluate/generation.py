"""Scores of a model that writes: loss and perplexity of what the assistant says in held-out rows, and tokens guessed.

Each rank reads its part of the rows (batches.py), and sums and counts meet; a row's captions count each, as the answer
to the same question.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmray.errors import DataError
from mmray.evaluate.answers import answer_scores
from mmray.evaluate.batches import Batch, HeldOut
from mmray.evaluate.evaluator import Group, evaluating
from mmray.objectives.language_modelling import LanguageModelling


class LanguageEvaluator(HeldOut):
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
        for (evaluate.answers) also bleu_4, cider and answered.

        Raises DataError, on every rank, when no row could be read.
        """
        settings = self._settings
        batches = self._batches(group.rank, group.world, settings.limit)
        sums = torch.zeros(5, dtype=torch.float64)  # loss, tokens, right, rows, and rows that cannot be read
        with evaluating(model):
            for batch in batches:
                for part in _parts(batch, settings.batch):
                    sums[:3] += _measured(model, part, group.device)
                sums[3] += len(batch["row"])
        sums[4] = len(batches.faults)
        loss, tokens, right, rows, bad_rows = group.gather_plain(sums[None]).sum(0).tolist()
        if not rows:
            raise DataError(f"none of {bad_rows:.0f} evaluation rows can be read, {'; '.join(batches.faults[:1])}")
        mean, answers = loss / max(1.0, tokens), {}
        if settings.answers:
            with evaluating(model):
                asked = self._batches(
                    group.rank, group.world, min(settings.answers, settings.limit or settings.answers)
                )
                answers = answer_scores(model, asked, group, settings.answer_tokens)
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
    words = {name: batch[name].split(rows) for name in ("input_ids", "labels", "image_at")}
    return [
        {name: parts[number] for name, parts in words.items()} | {"image": batch["image"][images]}
        for number, images in enumerate(place.split(rows))
    ]


def _measured(model: nn.Module, part: Batch, device: torch.device) -> Tensor:
    """Sums of loss, learned tokens and right ones, float64 [3] on the CPU."""
    here = {name: tensor.to(device) for name, tensor in part.items()}
    here["valid"] = torch.ones(len(here["labels"]), dtype=torch.bool, device=device)
    loss, count, parts = LanguageModelling().measure(model(here), here)
    return torch.stack([loss.double(), count.double(), parts["token_accuracy"].double()]).cpu()
