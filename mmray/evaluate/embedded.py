"""The embeddings of an evaluation set, all in one place: what score.py makes, and examples.py looks into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Embedded:
    """Embeddings on the CPU, sorted by row: of each row's image, and of every caption with its row."""

    row: Tensor  # int64 [N]
    image: Tensor  # float32 [N, D]
    owner: Tensor  # int64 [C]
    text: Tensor  # float32 [C, D]
    label: Tensor  # int64 [N], -1 where there is none
    right: Tensor  # int64 [3]: the classification head's rights among the top 1, the top 5, and the labelled rows
    regions: Tensor  # int64 [3]: the same of the boxes that the region head names
    shared: dict[str, Tensor]  # outputs of the model that belong to no row, such as the temperature
