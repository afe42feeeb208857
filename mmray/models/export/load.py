"""An exported model that writes, ready to be asked about pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmray.data.text.chat import ChatEncoder
from mmray.models.export.pictures import Picture, stacked

if TYPE_CHECKING:
    from mmray.config import ChatInputs


class Answerer:
    """Questions about pictures to answers: at each token the likeliest, until the model ends its answer."""

    def __init__(self, model: Any, inputs: ChatInputs, encoder: ChatEncoder, device: torch.device):
        self.model, self.inputs, self.device = model, inputs, device
        self._encoder = encoder

    def answer(
        self, images: Sequence[Picture], question: str | Sequence[str] | None = None, max_new_tokens: int = 64
    ) -> list[str]:
        """What the model says of each picture (PIL image, encoded bytes, or path).

        question: one for all, or one for each; none: what it was asked in training about captions. Raises DataError
        naming the first picture that cannot be read.
        """
        asked = question if question is not None else self.inputs.chat.question
        questions = [asked] * len(images) if isinstance(asked, str) else list(asked)
        pairs = zip(images, questions, strict=True)
        return [
            answered(self.model, self._encoder, stacked([image], self.inputs, number), text, max_new_tokens)
            for number, (image, text) in enumerate(pairs)
        ]


@torch.no_grad()
def answered(model: Any, encoder: ChatEncoder, pixels: Tensor, question: str, most: int) -> str:
    """The model's answer to a question about one image, uint8 [1, 3, S, S], of `most` tokens at the longest."""
    device = next(model.parameters()).device
    ids, at = (torch.from_numpy(array.astype(np.int64)).to(device) for array in encoder.prompted(question))
    said = model.text.continued(model.image(pixels.to(device)), ids, at, encoder.end_id, most)
    return str(encoder.tokenizer.decode(said)).strip()
