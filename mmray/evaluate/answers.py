"""What a model that writes says of held-out images, beside what people said: each rank asks about its part."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import torch

from mmray.data.store.prepared_set import ROW_ERRORS
from mmray.evaluate.batches import EvalBatches
from mmray.evaluate.captions import caption_scores
from mmray.evaluate.evaluator import Group
from mmray.models.export.load import answered


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
            question, right = batches.encoder.question_of(conversations)
            found.append([row, answered(model, batches.encoder, torch.from_numpy(pixels)[None], question, most), right])
    everyone = sorted(_gathered(found, group))
    if not everyone:
        return {}
    scores = caption_scores([said for _, said, _ in everyone], [right for _, _, right in everyone])
    return scores | {"answered": float(len(everyone))}


def _gathered(found: list[list[Any]], group: Group) -> list[list[Any]]:
    """The rows of all ranks; text travels as bytes."""
    mine = "".join(json.dumps(row) + "\n" for row in found).encode()
    everyone = group.gather_plain(torch.frombuffer(bytearray(mine or b"\n"), dtype=torch.uint8))
    return [json.loads(line) for line in bytes(everyone.cpu().numpy()).splitlines() if line]
