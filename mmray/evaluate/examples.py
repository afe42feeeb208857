"""Examples of retrieval for the report: hits spread over the set, misses from the smallest rank to the largest."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmray.data.images.decode import decode
from mmray.data.images.transform import thumbnail
from mmray.data.store.prepared_set import PreparedSet, Row, read_or_none
from mmray.evaluate.retrieval import EmbeddingSet, top_k

NUM_SHOWN = 6  # hits, and misses, per direction
NUM_ANSWERS = 5


def retrieval_examples(
    embedded: EmbeddingSet, ranks: dict[str, Tensor], prepared: PreparedSet, device: torch.device, max_pixels: int
) -> dict[str, Any]:
    """`rows`, `image_to_text`, `text_to_image` and `images`, as JSON values for examples.json.

    Each direction is a list of {row, key, caption, rank, answers: [{row, caption, score, correct}]}; an image is
    represented by its first caption. `images` maps a row to a data URI, for the rows that can be read.
    """
    rows_of_text = embedded.caption_row
    image = embedded.image, embedded.row, torch.zeros_like(embedded.row)  # the last: caption within its row
    text = embedded.text, rows_of_text, torch.arange(len(rows_of_text)) - torch.searchsorted(rows_of_text, rows_of_text)
    examples: dict[str, Any] = {"image_to_text": [], "text_to_image": []}
    rows: dict[int, Row | None] = {}

    def describe(side: tuple[Tensor, Tensor, Tensor], index: int) -> dict[str, Any]:
        number = int(side[1][index])
        if number not in rows:
            rows[number] = read_or_none(prepared, np.array([number]), (OSError, ValueError))[0]
        row = rows[number]
        return {"row": number, "caption": row.texts[int(side[2][index])] if row and row.texts else ""}

    for way, queries, gallery in (("image_to_text", image, text), ("text_to_image", text, image)):
        matching = embedded.matching_captions if way == "image_to_text" else embedded.matching_images
        chosen = select_queries(ranks[way])
        is_correct = torch.stack([matching(query) for query in chosen.tolist()])
        best, scores = top_k(queries[0][chosen], gallery[0], is_correct, NUM_ANSWERS, device)
        columns = (chosen, ranks[way][chosen], best, scores, is_correct.gather(1, best))
        for query, rank, *answers in zip(*(column.tolist() for column in columns), strict=True):
            item = describe(queries, query)
            row = rows[item["row"]]
            item |= {"key": row.key if row else "", "rank": rank, "answers": []}
            for index, score, correct in zip(*answers, strict=True):
                rounded = round(score, 4) if math.isfinite(score) else None
                item["answers"].append(describe(gallery, index) | {"score": rounded, "correct": correct})
            examples[way].append(item)
    shown = {item["row"] for way in ("image_to_text", "text_to_image") for item in examples[way]}
    shown |= {answer["row"] for item in examples["text_to_image"] for answer in item["answers"]}
    images = {}
    for number in sorted(shown):
        with suppress(OSError, ValueError):
            if (row := rows[number]) is not None:
                images[str(number)] = thumbnail(decode(row.image, max_pixels))
    return {"rows": len(embedded.row), **examples, "images": images}


def select_queries(ranks: Tensor) -> Tensor:
    """Indices of the queries to show, int64: NUM_SHOWN hits (rank 1) and misses each, or as many as there are."""
    hits, misses = (ranks == 1).nonzero().flatten(), (ranks > 1).nonzero().flatten()
    misses = misses[ranks[misses].argsort(stable=True)]
    steps = torch.arange(NUM_SHOWN)  # first and last included
    return torch.cat([p if len(p) <= NUM_SHOWN else p[steps * (len(p) - 1) // (NUM_SHOWN - 1)] for p in (hits, misses)])
