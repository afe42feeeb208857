"""Columns exchanged between partners are packed: one vote and one collective for any objective."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mmray.engine.grad_cache import gather_negative_inputs
from mmray.engine.memory_probe import FakeGroup
from mmray.engine.prefetch import make_local_batch
from tests.engine import toy

WIDER = 9  # the longest caption of another rank


@dataclass(frozen=True)
class Counted(FakeGroup):
    """Two ranks with the same rows; captions of the other rank are wider."""

    calls: list[str] = field(default_factory=list)

    def all_reduce_min(self, value: int) -> int:
        self.calls.append("vote")
        return min(value, -WIDER)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls.append("gather")
        return super().all_gather(rows)


def test_columns_are_exchanged_unchanged_in_one_vote_and_one_collective():
    batch, mining = toy.rows(7, 0, invalid=(6,)), toy.objective("matching")
    batch["attention_mask"] = batch["attention_mask"].int()
    group = Counted(rank=0, world=2)
    found = gather_negative_inputs(group, mining, make_local_batch(toy.cut(batch, 3)))
    assert group.calls == ["vote", "gather"]
    ids, mask = batch["input_ids"] * (torch.arange(6) < widest(batch)), batch["attention_mask"]
    assert found["pos"].tolist() == [0, 1, 2, 3, 4, 5, 6] * 2
    for name, column in {"input_ids": ids, "attention_mask": mask}.items():
        wide = torch.nn.functional.pad(column, (0, WIDER - 6))
        assert found[name].dtype == column.dtype and torch.equal(found[name], torch.cat([wide, wide]))


def widest(batch):
    """For each row the width of its micro-batch, beyond which its tokens are trimmed."""
    lengths = batch["attention_mask"].sum(1)
    return torch.cat([part.max().expand(len(part)) for part in lengths.split(3)])[:, None]
