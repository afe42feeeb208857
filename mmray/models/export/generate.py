"""Greedy answers of a generative model; imported by the driver, so it does not import the models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmray.data.text.chat import ChatEncoder


@torch.no_grad()
def generate_answer(model: Any, encoder: ChatEncoder, pixels: Tensor, question: str, max_new_tokens: int) -> str:
    """Answer a question about one image, uint8 [1, 3, S, S]."""
    device = next(model.parameters()).device
    ids, image_pos = (torch.from_numpy(array.astype(np.int64)).to(device) for array in encoder.encode_prompt(question))
    tokens = model.text.greedy_decode(model.image(pixels.to(device)), ids, image_pos, encoder.end_id, max_new_tokens)
    return str(encoder.tokenizer.decode(tokens)).strip()
