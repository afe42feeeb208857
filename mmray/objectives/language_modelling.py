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
        """Return the number of target tokens, an int64 scalar: the denominator of the loss.

        Args:
            batch: `targets` int64 [N], the tokens to predict, from a vision-language model;
                otherwise `labels` int64 [B, T], -100 for tokens without a loss, and `valid` bool
                [B], False for padding.
        """
        if "targets" not in batch:
            return super().count(batch)
        targets = batch["targets"]
        return targets.new_full((), len(targets))

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the cross-entropy of the next token, summed over the target tokens.

        Args:
            outputs: `loss_sum` and `num_correct`, scalars, of a vision-language model that computes
                the loss itself; otherwise `logits` [B, T, V], the prediction of the next token.
            batch: `targets` int64 [N], the tokens to predict; with `logits` instead `labels` int64
                [B, T], -100 for tokens without a loss, and `valid` bool [B], False for padding.
            gathered: Unused, because rows are independent of each other.

        Returns:
            The loss sum and the number of target tokens, both scalars, and `token_accuracy`: the
            number of targets that had the largest logit.
        """
        if "loss_sum" not in outputs:
            return super().compute_loss(outputs, batch, gathered)
        loss_sum = outputs["loss_sum"]
        sums = {self.accuracy: outputs["num_correct"].to(loss_sum.dtype)}
        return loss_sum, self.count(batch), sums
