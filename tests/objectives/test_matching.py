"""Hard negatives: never an equal caption or padding, sampled by softmax, and dependent only on the
rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.objectives.matching import NO_NEGATIVE, Matching, sample_negatives

D = 6


def rows(num: int, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and a batch of `num` rows with distinct captions."""
    draw = torch.Generator().manual_seed(seed)
    outputs = {
        name: F.normalize(torch.randn(num, D, generator=draw), dim=1)
        for name in ("image_embed", "text_embed")
    }
    batch = {
        "input_ids": torch.arange(5, 5 + num)[:, None].expand(-1, 3).contiguous(),
        "attention_mask": torch.tensor([[1, 1, 0]]).expand(num, -1).contiguous(),
        "pos": torch.arange(num) + 100,
        "valid": torch.ones(num, dtype=torch.bool),
    }
    return outputs | {"logit_scale": torch.tensor(2.0)}, batch


def gathered_of(
    outputs: dict[str, Tensor], batch: dict[str, Tensor], offset: int = 0
) -> dict[str, object]:
    return {**{name: outputs[name] for name in Matching.score_outputs}, **batch, "offset": offset}


def test_negatives_exclude_self_padding_and_equal_captions() -> None:
    outputs, batch = rows(8)
    batch["input_ids"][1] = batch["input_ids"][0]
    batch["input_ids"][1, 2] = 99  # masked token: still the same caption
    batch["valid"][5] = False
    for shift in range(50):
        batch["pos"] = torch.arange(8) + 8 * shift
        chosen = sample_negatives(outputs, batch, gathered_of(outputs, batch))
        assert not set(chosen.tolist()) & {5, NO_NEGATIVE}
        assert all(int(chosen[row]) != row for row in range(8))
        assert int(chosen[0]) != 1
        assert int(chosen[1]) != 0


def test_sampling_does_not_depend_on_the_split() -> None:
    outputs, batch = rows(9)
    whole = sample_negatives(outputs, batch, gathered_of(outputs, batch))
    columns = Matching().sample_hard_negatives(outputs, batch, gathered_of(outputs, batch))
    assert torch.equal(columns["negative_ids"], batch["input_ids"][whole])
    assert torch.equal(columns["negative_mask"], batch["attention_mask"][whole])
    part = slice(4, 7)
    mine = {name: value if value.ndim == 0 else value[part] for name, value in outputs.items()}
    cut = {name: value[part] for name, value in batch.items()}
    assert torch.equal(
        sample_negatives(mine, cut, gathered_of(outputs, batch, offset=4)), whole[part]
    )


def test_negatives_follow_the_softmax_distribution() -> None:
    outputs, batch = rows(5)
    counts = torch.zeros(5)
    for step in range(4000):
        batch["pos"] = torch.arange(5) + 5 * step
        counts[sample_negatives(outputs, batch, gathered_of(outputs, batch))[0]] += 1
    scores = 2 * outputs["image_embed"][0] @ outputs["text_embed"].T
    scores[0] = -torch.inf
    torch.testing.assert_close(counts / 4000, scores.softmax(0), rtol=0, atol=0.03)


def test_rows_without_negative_and_invalid_rows_do_not_count() -> None:
    outputs, batch = rows(1)
    columns = Matching().sample_hard_negatives(outputs, batch, gathered_of(outputs, batch))
    assert columns["has_negative"].tolist() == [False]
    logits = {"match": torch.tensor([0.0]), "match_negative": torch.tensor([50.0])}
    loss, count, parts = Matching().compute_loss(logits, batch | columns)
    assert loss.item() == pytest.approx(torch.tensor(2.0).log().item() / 2)
    assert (int(count), parts["match_accuracy"].item()) == (1, 0)
    logits = {"match": torch.tensor([1.0, float("nan")]), "match_negative": torch.zeros(2)}
    invalid = {"valid": torch.tensor([True, False]), "has_negative": torch.tensor([True, True])}
    assert torch.isfinite(Matching().compute_loss(logits, invalid)[0])
