"""Next-token loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmray.objectives.protocol import ROW_COUNTS, ROW_LOSSES, Batch, LossSums, Outputs


class LanguageModelling:
    """Cross-entropy of the next token, each multiplied by the weight of its message, divided by the
    number of targets in the global batch: tokens whose weight is not 0.

    So a weight scales the gradient of its message, whatever the weights of other messages are.

    The model computes it in its forward, so that the logits of all positions are never in memory.
    Outputs: the scalars `loss_sum`, summed over the targets, and `num_correct`.

    `compute_loss(outputs, batch, gathered)` returns the loss sum, the number of target tokens, and
    the number of correct ones as `token_accuracy`, all scalars.

    Attributes:
        gathered_outputs: Outputs of the model that are gathered from all ranks for the loss: none.
        scalar_output_names: Outputs of the model that are one number for the step, besides those of
            the loss: none.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ()

    def count(self, batch: Batch) -> Tensor:
        """Return the number of target tokens."""
        targets = batch["targets"]
        return targets.new_full((), len(targets))

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss that the model computed, with the number of its target tokens."""
        loss_sum = outputs["loss_sum"]
        sums = {"token_accuracy": outputs["num_correct"].to(loss_sum.dtype)}
        sums |= {name: outputs[name] for name in (ROW_LOSSES, ROW_COUNTS) if name in outputs}
        return loss_sum, self.count(batch), sums
