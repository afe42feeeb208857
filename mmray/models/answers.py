"""An exported model that writes, ready to be asked about pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmray.data.chat import ChatEncoder
from mmray.models.pictures import Picture, stacked

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
        return [self._answered(number, image, text, max_new_tokens) for number, (image, text) in enumerate(pairs)]

    @torch.no_grad()
    def _answered(self, number: int, image: Picture, question: str, most: int) -> str:
        pixels = stacked([image], self.inputs, number).to(self.device)
        ids, at = self._encoder.prompted(question)
        asked, place = (torch.from_numpy(array.astype(np.int64)).to(self.device) for array in (ids, at))
        said = self.model.text.continued(self.model.image(pixels), asked, place, self._encoder.end_id, most)
        return str(self._encoder.tokenizer.decode(said)).strip()
