"""Contrastive loss against its formula: padding, rows of other ranks, low precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmray.objectives.contrastive import Contrastive

B, D = 7, 5


def drawn(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    image, text = (F.normalize(torch.randn(B, D, generator=draw, dtype=torch.float64), dim=1) for _ in range(2))
    scale = torch.tensor(9.0, dtype=torch.float64)
    outputs = {"image_embed": image.to(dtype), "text_embed": text.to(dtype), "logit_scale": scale.to(dtype)}
    return {name: output.requires_grad_() for name, output in outputs.items()}


def batch_of(*invalid: int) -> dict[str, torch.Tensor]:
    valid = torch.ones(B, dtype=torch.bool)
    valid[list(invalid)] = False
    return {"valid": valid}


def by_formula(outputs, keep) -> torch.Tensor:
    """Reference: row by row in Python."""
    image, text, scale = (outputs[name].detach() for name in ("image_embed", "text_embed", "logit_scale"))
    total = torch.zeros((), dtype=torch.float64)
    for row in keep:
        to_text = torch.stack([scale * image[row] @ text[other] for other in keep]).exp()
        to_image = torch.stack([scale * text[row] @ image[other] for other in keep]).exp()
        own = (scale * image[row] @ text[row]).exp()
        total -= ((own / to_text.sum()).log() + (own / to_image.sum()).log()) / 2
    return total


@pytest.mark.parametrize("invalid", [(), (2,), (0, 5, 6)])
def test_loss_equals_the_formula_over_valid_rows(invalid):
    outputs = drawn()
    loss, count, parts = Contrastive().compute_loss(outputs, batch_of(*invalid))
    keep = [row for row in range(B) if row not in invalid]
    torch.testing.assert_close(loss.detach(), by_formula(outputs, keep), rtol=1e-12, atol=0)
    assert count == len(keep)
    torch.testing.assert_close((parts["loss_image_to_text"] + parts["loss_text_to_image"]) / 2, loss.detach())


def test_gathered_rows_are_negatives_only():
    """The losses of two halves against all rows sum to the full loss, and so do their gradients."""
    outputs, batch = drawn(), batch_of(1, 4)
    whole, _, _ = Contrastive().compute_loss(outputs, batch)
    whole.backward()
    again = drawn()
    gathered = {**{name: again[name] for name in Contrastive.gathered_outputs}, "valid": batch["valid"]}
    losses, counts = [], []
    for part in (slice(0, 4), slice(4, B)):
        mine = {name: again[name][part] for name in Contrastive.gathered_outputs} | {
            "logit_scale": again["logit_scale"]
        }
        valid = {"valid": batch["valid"][part]}
        loss, count, _ = Contrastive().compute_loss(mine, valid, gathered | {"offset": part.start})
        losses.append(loss)
        counts.append(int(count))
    sum(losses).backward()
    assert counts == [3, 2]
    torch.testing.assert_close(sum(losses), whole, rtol=1e-12, atol=0)
    for name, output in outputs.items():
        torch.testing.assert_close(again[name].grad, output.grad, rtol=0, atol=1e-12)


def test_invalid_rows_do_not_affect_loss_or_gradient():
    outputs = drawn()
    with torch.no_grad():
        outputs["image_embed"][3] = float("nan")
        outputs["text_embed"][3] = float("inf")
    loss, _, _ = Contrastive().compute_loss(outputs, batch_of(3))
    loss.backward()
    assert torch.isfinite(loss)
    for output in outputs.values():
        assert torch.isfinite(output.grad).all()
    assert not outputs["image_embed"].grad[3].any()


def test_no_valid_row_gives_zero():
    outputs = drawn()
    loss, count, _ = Contrastive().compute_loss(outputs, batch_of(*range(B)))
    loss.backward()
    assert (loss.item(), count.item()) == (0, 0)
    assert not any(output.grad.any() for output in outputs.values())


def test_half_precision_loss_is_float32():
    loss, _, _ = Contrastive().compute_loss(drawn(dtype=torch.bfloat16), batch_of())
    assert loss.dtype == torch.float32
    assert Contrastive().compute_loss(drawn(), batch_of())[0].dtype == torch.float64
