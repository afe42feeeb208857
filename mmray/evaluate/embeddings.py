"""The embeddings of an evaluation set, all in one place: what score.py makes, and examples.py looks into."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EmbeddingSet:
    """Embeddings on the CPU, sorted by row: of each row's image, and of every caption with its row.

    Images may share a caption, word for word (those of a class do, where captions are made of its name). Whatever has
    the same text has one embedding, and answers for each of them.
    """

    row: Tensor  # int64 [N]
    image: Tensor  # float32 [N, D]
    owner: Tensor  # int64 [C]
    text: Tensor  # float32 [C, D]
    said: Tensor  # int64 [C]: number of the caption's text, 0, 1, ...
    label: Tensor  # int64 [N], -1 where there is none
    right: Tensor  # int64 [3]: the classification head's rights among the top 1, the top 5, and the labelled rows
    regions: Tensor  # int64 [3]: the same of the boxes that the region head names
    scalar_outputs: dict[str, Tensor]  # outputs of the model that belong to no row, such as the temperature

    @property
    def of(self) -> Tensor:
        """Place of each caption's image among the images, int64 [C]."""
        return torch.searchsorted(self.row, self.owner)

    def right_captions(self, image: int) -> Tensor:
        """Which captions are right of the image at this place: its own, and those of the same text; bool [C]."""
        return torch.isin(self.said, self.said[self.of == image])

    def right_images(self, caption: int) -> Tensor:
        """Which images have this caption's text among theirs: bool [N]."""
        right = torch.zeros(len(self.row), dtype=torch.bool)
        right[self.of[self.said == self.said[caption]]] = True
        return right


def dedupe_texts(text: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings of captions [C, D], those of the same text made one; and numbers of the texts, int64 [C].

    `said` int64 [C] is the same for the same text. The first of a text counts: the rest differ by rounding.
    """
    _, number = said.unique(return_inverse=True)
    return text[first_index(number)][number], number


def first_index(number: Tensor) -> Tensor:
    """Where each of the numbers 0, 1, ... stands first."""
    places = torch.arange(len(number))
    least = torch.full((int(number.max()) + 1 if len(number) else 0,), len(number))
    return least.scatter_reduce_(0, number, places, "amin")
