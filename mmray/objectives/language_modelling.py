"""Next-token loss of models that compute it themselves, without keeping their logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmray.objectives.protocol import Batch, LossSums, Outputs


class LanguageModelling:
    """Cross-entropy of the next token, divided by the number of targets in the global batch.

    Outputs: `loss_sum`, summed over the `targets` [N] of the batch, and `num_correct`, how many of
    them were the argmax; both are scalars.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ()

    def count(self, batch: Batch) -> Tensor:
        """Number of targets."""
        targets = batch["targets"]
        return targets.new_full((), len(targets))

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        loss_sum = outputs["loss_sum"]
        sums = {"token_accuracy": outputs["num_correct"].to(loss_sum.dtype)}
        return loss_sum, self.count(batch), sums
