"""Next-token loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmray.objectives.cross_entropy import TokenCrossEntropy
from mmray.objectives.protocol import Batch, LossSums, Outputs


class LanguageModelling(TokenCrossEntropy):
    """Cross-entropy of the next token, divided by the number of targets in the global batch.

    A vision-language model computes it without keeping its logits: its outputs are `loss_sum`,
    summed over the `targets` [N] of the batch, and `num_correct`, how many of them were the argmax;
    both are scalars. Other models return `logits` (TokenCrossEntropy).
    """

    def count(self, batch: Batch) -> Tensor:
        if "targets" not in batch:
            return super().count(batch)
        targets = batch["targets"]
        return targets.new_full((), len(targets))

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        if "loss_sum" not in outputs:
            return super().compute_loss(outputs, batch, gathered)
        loss_sum = outputs["loss_sum"]
        sums = {self.accuracy: outputs["num_correct"].to(loss_sum.dtype)}
        return loss_sum, self.count(batch), sums
