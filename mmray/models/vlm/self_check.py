"""Checks of a model before its run: rows packed and alone, weights without a gradient, and, without
a descriptor, whether it is trained as transformers computes it. `model` is a `Vlm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from mmray.data.messages import Message
from mmray.data.stream.collate import Batch
from mmray.data.vlm.encoder import CHECK_SIDE, EncodedRow
from mmray.data.vlm.families import CHECK_ERRORS, refusal

if TYPE_CHECKING:
    from mmray.models.vlm.model import Vlm

# Relative differences of losses and gradients in float32, and how much larger they may be under
# autocast. A row that attends to another one differs by more.
TOLERANCE = 1e-3
HALF_PRECISION_FACTOR = 50


def check_general_model(model: Vlm) -> None:
    """Compare a batch of three padded rows, two with images of different shapes, with a plain
    forward of each row; and check that the image encoder gets a gradient.

    Raises:
        UsageError: They differ, or the model cannot compute them.
    """
    was_training = model.training
    model.eval()
    check = "loss"
    try:
        rows, expected = _plain_losses(model)
        batch = model.collator()(rows)
        loss = model.forward(batch)["loss_sum"]
        if abs(loss.item() - expected) > TOLERANCE * abs(expected):
            raise ValueError(
                f"it is {loss.item():.6g} in a batch, and {expected:.6g} in a forward of each row"
            )
        check = "gradient"
        weights = [each for each in model.branches()["vision"].parameters() if each.requires_grad]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        if not any(each is not None and bool(each.any()) for each in gradients):
            raise ValueError("that of the image encoder is zero")
    except CHECK_ERRORS as error:
        raise refusal(model.encoder.weights, model.encoder.config, check, error) from error
    finally:
        model.train(was_training)


def _plain_losses(model: Vlm) -> tuple[list[EncodedRow], float]:
    """Return three encoded rows, all of whose tokens are targets, and the sum of their losses as
    the model and the processor of transformers compute them.
    """
    shapes: tuple[tuple[int, ...], ...] = ((2, 1), (), (1, 3))
    rows = []
    total = 0.0
    for number, shape in enumerate(shapes):
        content: list[dict[str, Any]] = [{"type": "text", "text": "What color?" * (1 + number)}]
        media: list[Image.Image] = []
        if shape:
            noise = np.random.default_rng(number).integers(0, 255, (*shape, 3), np.uint8)
            image = Image.fromarray(noise).resize((shape[1] * CHECK_SIDE, shape[0] * CHECK_SIDE))
            content.insert(0, {"type": "image"})
            media = [image]
        turns: list[Message] = [{"role": "user", "content": content}]
        row = model.encoder.encode_prompt(turns, media)
        rows.append(replace(row, loss_weights=np.ones(len(row.input_ids), np.float32)))
        total += _plain_loss(model, turns, media, row)
    return rows, total


def _plain_loss(
    model: Vlm, turns: list[Message], media: list[Image.Image], row: EncodedRow
) -> float:
    """Return the sum of the losses of the tokens of a prompt, but the first one."""
    processor = model.encoder.processor
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    adds = not text.startswith(processor.tokenizer.bos_token or text + " ")
    inputs = processor(
        text=[text], images=[media] if media else None, add_special_tokens=adds, return_tensors="pt"
    )
    ids: Tensor = inputs["input_ids"]
    if ids[0].tolist() != row.input_ids.tolist():
        raise ValueError(f"a row has {len(row.input_ids)} tokens, and plain {ids.shape[1]}")
    with torch.no_grad():
        logits = model.net(**inputs, use_cache=False).logits[0].float()
    return F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").item()


def differs_if_packed(model: Vlm) -> bool:
    """Return whether packed rows have another loss or other gradients than separate rows.

    This tests the model with three short rows, two of them with an image. It computes gradients and
    then resets them to None. Gradients are compared by the norm of each parameter, so that two sets
    of gradients are never in memory. If the model is sharded, only the shards of this rank count.

    Returns:
        True if the loss, or the vector of gradient norms, differs by more than 0.1 %, or by more
        than 5 % under autocast.
    """
    question = {"role": "user", "content": "What is in the image?"}
    rows = [
        replace(row, loss_weights=np.ones(len(row.input_ids), np.float32))
        for row in (model.dummy, model.encoder.encode_prompt([question], []), model.dummy)
    ]
    collate = model.collator()
    packed_loss, packed_norms = _try_backward(model, [collate(rows)])
    loss, norms = _try_backward(model, [collate([row]) for row in rows])
    tolerance = TOLERANCE
    if torch.is_autocast_enabled(model.mean.device.type):
        tolerance *= HALF_PRECISION_FACTOR
    loss_differs = abs(packed_loss - loss) > tolerance * abs(loss)
    distance = torch.linalg.vector_norm(packed_norms - norms)
    return loss_differs or bool(distance > tolerance * torch.linalg.vector_norm(norms))


def _try_backward(model: Vlm, batches: Sequence[Batch]) -> tuple[float, Tensor]:
    """Return the loss of batches, and the norm of the gradient of each parameter."""
    total = 0.0
    for batch in batches:
        loss = model({name: each.to(model.mean.device) for name, each in batch.items()})["loss_sum"]
        loss.backward()
        total += float(loss.detach())
    norms = [
        torch.zeros(()) if weight.grad is None else _local_norm(weight.grad).cpu()
        for weight in model.parameters()
    ]
    model.zero_grad(set_to_none=True)
    return total, torch.stack(norms)


def _local_norm(gradient: Tensor) -> Tensor:
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return torch.linalg.vector_norm(local.float())


def find_unused_parameters(model: Vlm) -> list[str]:
    """Return the weights that never get a gradient, such as pooling heads.

    DDP waits for the gradient of each weight, so they have to be frozen. The names are those of
    `net`.
    """
    names = {weight: name for name, weight in model.net.named_parameters()}
    with_gradient: set[nn.Parameter] = set()

    def add_weight(weight: nn.Parameter) -> None:
        with_gradient.add(weight)
        weight.grad = None

    hooks = [
        weight.register_post_accumulate_grad_hook(add_weight)
        for weight in names
        if weight.requires_grad
    ]
    row = replace(model.dummy, loss_weights=np.ones(len(model.dummy.input_ids), np.float32))
    model.forward(model.collator()([row]))["loss_sum"].backward()
    for hook in hooks:
        hook.remove()
    return [name for weight, name in names.items() if weight not in with_gradient]
