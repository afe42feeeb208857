"""Embeddings of an evaluation set: written by evaluator.py, read by examples.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EmbeddingSet:
    """Embeddings on the CPU, sorted by row: of each row's image, and of each caption with its row.

    Rows may share a caption word for word, as rows of one class do. Equal captions have one embedding, which is a
    correct answer for each of their images.
    """

    row: Tensor  # int64 [N]
    image: Tensor  # float32 [N, D]
    owner: Tensor  # int64 [C], row of each caption
    text: Tensor  # float32 [C, D]
    text_id: Tensor  # int64 [C], 0, 1, ...; equal for equal captions
    label: Tensor  # int64 [N], -1 for none
    class_correct: Tensor  # int64 [3], `topk_correct` of the classification head
    region_correct: Tensor  # int64 [3], `topk_correct` of the region head
    scalar_outputs: dict[str, Tensor]  # outputs of the model that belong to no row, such as the temperature

    @property
    def image_index(self) -> Tensor:
        """Index of each caption's image, int64 [C]."""
        return torch.searchsorted(self.row, self.owner)

    def matching_captions(self, image: int) -> Tensor:
        """Captions that are correct for an image: its own, and equal ones; bool [C]."""
        return torch.isin(self.text_id, self.text_id[self.image_index == image])

    def matching_images(self, caption: int) -> Tensor:
        """Images that have this caption's text; bool [N]."""
        correct = torch.zeros(len(self.row), dtype=torch.bool)
        correct[self.image_index[self.text_id == self.text_id[caption]]] = True
        return correct


def dedupe_texts(text: Tensor, text_id: Tensor) -> tuple[Tensor, Tensor]:
    """Give equal captions the embedding of the first; returns embeddings [C, D] and text ids renumbered from 0.

    Embeddings of equal captions from different batches differ by rounding.
    """
    _, number = text_id.unique(return_inverse=True)
    return text[first_index(number)][number], number


def first_index(number: Tensor) -> Tensor:
    """Index of the first occurrence of each of the numbers 0, 1, ..."""
    index = torch.arange(len(number))
    first = torch.full((int(number.max()) + 1 if len(number) else 0,), len(number))
    return first.scatter_reduce_(0, number, index, "amin")
