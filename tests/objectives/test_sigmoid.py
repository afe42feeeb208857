"""Sigmoid loss against transformers: chunks, padding, and gradients around the ring."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.grad_cache import ring_loss
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.oom import OomGuard
from mmray.objectives.protocol import Pairwise, split_objective
from mmray.objectives.sigmoid import Sigmoid

B, D = 7, 5
ALONE = OomGuard(Group(), False, PhaseTimers(torch.device("cpu")))


def drawn(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    image, text = (F.normalize(torch.randn(B, D, generator=draw, dtype=torch.float64), dim=1) for _ in range(2))
    outputs = {
        "image_embed": image,
        "text_embed": text,
        "logit_scale": torch.tensor(9.0),
        "logit_bias": torch.tensor(-2.0),
    }
    return {name: output.to(dtype).requires_grad_() for name, output in outputs.items()}


def batch_of(*invalid: int) -> dict[str, Tensor]:
    valid = torch.ones(B, dtype=torch.bool)
    valid[list(invalid)] = False
    return {"valid": valid}


def transformers_loss(outputs: dict[str, Tensor], keep: list[int]) -> Tensor:
    """The loss of SiglipModel.forward, summed over the rows."""
    image, text = outputs["image_embed"][keep], outputs["text_embed"][keep]
    logits = outputs["logit_scale"] * text @ image.T + outputs["logit_bias"]
    signs = -torch.ones_like(logits) + 2 * torch.eye(len(keep))
    return -F.logsigmoid(signs * logits).sum()


@pytest.mark.parametrize("invalid", [(), (2,), (0, 5, 6)])
def test_loss_equals_transformers(invalid: tuple[int, ...]) -> None:
    outputs, again = drawn(), drawn()
    loss, count, parts = Sigmoid().compute_loss(outputs, batch_of(*invalid))
    expected = transformers_loss(again, [row for row in range(B) if row not in invalid])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts["loss_positive"] + parts["loss_negative"], loss.detach())
    assert count == B - len(invalid)
    loss.backward()
    expected.backward()
    for name, output in outputs.items():
        torch.testing.assert_close(output.grad, again[name].grad, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_ring_of_one_equals_any_chunk(chunk: int) -> None:
    outputs, batch = drawn(), batch_of(1, 4)
    loss, _, parts = Sigmoid().compute_loss(outputs, batch)
    expected = torch.autograd.grad(loss * 3, list(outputs.values()))
    factor = torch.tensor([3.0], dtype=torch.float64)
    found, further, gradients = ring_loss(Sigmoid(chunk), drawn(), batch["valid"], B, factor, ALONE)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(further["loss_negative"], parts["loss_negative"])
    for name, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-12, msg=name)


def test_memory_is_bounded_by_the_chunk() -> None:
    """No tensor saved for backward is larger than rows x chunk, for any number of rows."""
    rows, chunk, sizes = 64, 8, []
    leaves = {name: value for name, value in drawn().items() if value.ndim == 0}
    leaves |= {
        name: torch.randn(rows, D, dtype=torch.float64).requires_grad_() for name in ("image_embed", "text_embed")
    }
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda t: t):
        valid, factor = torch.ones(rows, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
        ring_loss(Sigmoid(chunk), leaves, valid, rows, factor, ALONE)
    assert max(sizes) == rows * chunk


def test_invalid_rows_do_not_affect_loss_or_gradient() -> None:
    outputs = drawn()
    with torch.no_grad():
        outputs["image_embed"][3] = float("nan")
        outputs["text_embed"][3] = float("inf")
    loss, _, _ = Sigmoid().compute_loss(outputs, batch_of(3))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(output.grad).all() for output in outputs.values())


def test_half_precision_loss_is_float32() -> None:
    assert Sigmoid().compute_loss(drawn(torch.bfloat16), batch_of())[0].dtype == torch.float32


def test_sigmoid_is_pairwise() -> None:
    assert isinstance(split_objective(Sigmoid()).global_loss, Pairwise)
