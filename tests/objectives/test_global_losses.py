"""Contrastive and sigmoid loss: reference formulas, padding, rows of other ranks, chunks of pairs,
low precision.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.grad_cache import compute_pairwise_loss
from mmray.objectives.contrastive import Contrastive, Sigmoid
from mmray.objectives.protocol import ROW_LOSSES, split_objective

B, D = 7, 5
ALONE = Group()
EMBEDS = Contrastive.gathered_outputs


def random_outputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = {
        name: F.normalize(torch.randn(B, D, generator=generator, dtype=torch.float64), dim=1)
        for name in EMBEDS
    }
    outputs |= {"logit_scale": torch.tensor(9.0), "logit_bias": torch.tensor(-2.0)}
    return {name: output.to(dtype).requires_grad_() for name, output in outputs.items()}


def batch_of(*invalid: int) -> dict[str, Tensor]:
    valid = torch.ones(B, dtype=torch.bool)
    valid[list(invalid)] = False
    return {"valid": valid}


def clip_formula(outputs: dict[str, Tensor], keep: list[int]) -> Tensor:
    image, text, total = (
        outputs["image_embed"],
        outputs["text_embed"],
        torch.zeros((), dtype=torch.float64),
    )
    for row in keep:
        to_text = torch.stack(
            [outputs["logit_scale"] * image[row] @ text[other] for other in keep]
        ).exp()
        to_image = torch.stack(
            [outputs["logit_scale"] * text[row] @ image[other] for other in keep]
        ).exp()
        own = (outputs["logit_scale"] * image[row] @ text[row]).exp()
        total = total - ((own / to_text.sum()).log() + (own / to_image.sum()).log()) / 2
    return total


def siglip_formula(outputs: dict[str, Tensor], keep: list[int]) -> Tensor:
    """The loss of transformers' SiglipModel.forward, summed over the rows."""
    logits = outputs["logit_scale"] * outputs["text_embed"][keep] @ outputs["image_embed"][keep].T
    signs = -torch.ones_like(logits) + 2 * torch.eye(len(keep))
    return -F.logsigmoid(signs * (logits + outputs["logit_bias"])).sum()


@pytest.mark.parametrize("invalid", [(), (2,), (0, 5, 6)])
@pytest.mark.parametrize(
    ("objective", "formula"), [(Contrastive(), clip_formula), (Sigmoid(), siglip_formula)]
)
def test_loss_equals_the_formula_over_valid_rows(objective, formula, invalid) -> None:
    outputs, again = random_outputs(), random_outputs()
    loss, count, parts = objective.compute_loss(outputs, batch_of(*invalid))
    expected = formula(again, [row for row in range(B) if row not in invalid])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.pop(ROW_LOSSES).sum(), loss.detach())
    # means of two directions; positive and negative pairs
    share = 0.5 if isinstance(objective, Contrastive) else 1
    torch.testing.assert_close(share * sum(parts.values()), loss.detach())
    assert count == B - len(invalid)
    loss.backward()
    expected.backward()
    for name in (*objective.gathered_outputs, *objective.scalar_output_names):
        torch.testing.assert_close(
            outputs[name].grad, again[name].grad, rtol=0, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("objective", [Contrastive(), Sigmoid()])
def test_losses_of_two_parts_against_all_rows_add_up(objective) -> None:
    outputs, again, batch = random_outputs(), random_outputs(), batch_of(1, 4)
    whole, _, _ = objective.compute_loss(outputs, batch)
    gathered = {**{name: again[name] for name in EMBEDS}, "valid": batch["valid"]}
    results = []
    for part in (slice(0, 4), slice(4, B)):
        own = again | {name: again[name][part] for name in EMBEDS}
        valid = {"valid": batch["valid"][part]}
        results.append(objective.compute_loss(own, valid, gathered | {"offset": part.start}))
    total = sum(loss for loss, _, _ in results)
    assert [int(count) for _, count, _ in results] == [3, 2]
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    whole.backward()
    total.backward()
    for name in EMBEDS:
        torch.testing.assert_close(again[name].grad, outputs[name].grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", [Contrastive(), Sigmoid()])
def test_invalid_rows_do_not_affect_loss_or_gradient(objective) -> None:
    outputs, none = random_outputs(), random_outputs()
    with torch.no_grad():
        outputs["image_embed"][3], outputs["text_embed"][3] = float("nan"), float("inf")
    loss, _, _ = objective.compute_loss(outputs, batch_of(3))
    loss.backward()
    assert torch.isfinite(loss) and not outputs["image_embed"].grad[3].any()
    assert all(
        torch.isfinite(outputs[name].grad).all()
        for name in (*EMBEDS, *objective.scalar_output_names)
    )
    loss, count, _ = objective.compute_loss(none, batch_of(*range(B)))
    loss.backward()
    assert (loss.item(), count.item()) == (0, 0)
    assert not any(none[name].grad.any() for name in (*EMBEDS, *objective.scalar_output_names))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_pairwise_loss_in_any_chunk_equals_the_plain_one(chunk: int) -> None:
    outputs, batch = random_outputs(), batch_of(1, 4)
    loss, _, parts = Sigmoid().compute_loss(outputs, batch)
    expected = torch.autograd.grad(loss * 3, list(outputs.values()))
    factor = torch.tensor([3.0], dtype=torch.float64)
    arguments = random_outputs(), batch["valid"], B, factor, ALONE
    total, further, gradients = compute_pairwise_loss(Sigmoid(chunk), *arguments)
    torch.testing.assert_close(total, loss.detach())
    torch.testing.assert_close(further["loss_negative"], parts["loss_negative"])
    for name, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-12, msg=name)
    parts = [split_objective(objective) for objective in (Sigmoid(), Contrastive())]
    assert [part.pairwise_loss is None for part in parts] == [False, True]


def test_memory_of_the_pairwise_loss_is_bounded_by_the_chunk() -> None:
    """No tensor saved for backward is larger than rows x chunk, for any number of rows."""
    rows, chunk, sizes = 64, 8, []
    leaves = random_outputs() | {
        name: torch.randn(rows, D, dtype=torch.float64).requires_grad_() for name in EMBEDS
    }
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append(tensor.numel()) or tensor, lambda t: t
    ):
        valid, factor = torch.ones(rows, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
        compute_pairwise_loss(Sigmoid(chunk), leaves, valid, rows, factor, ALONE)
    assert max(sizes) == rows * chunk
