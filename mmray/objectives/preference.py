"""Direct preference optimization (DPO): a chosen answer is to gain probability over a rejected one,
compared with a reference model.

Sources: Rafailov et al. 2023 (arXiv:2305.18290, eq. 7), and for `ipo` Azar et al. 2023
(arXiv:2310.12036, eq. 17). The loss types have the names and the formulas of TRL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from mmray.objectives.protocol import Batch, LossSums, Outputs, RowLoss

if TYPE_CHECKING:
    from mmray.config import Objective as ObjectiveConfig


class Dpo(RowLoss):
    """DPO of rows with a chosen and a rejected answer, divided by their number.

    Outputs of the model, each [R, 2] with the chosen answers first: `log_probs`, the sums of the
    log-probabilities of their tokens; `reference_log_probs`, those of the reference model; and
    `num_targets`, the numbers of their tokens.

    Metrics, with rewards beta * (log-probability - that of the reference model): `reward_margin`,
    `reward_accuracy` (share of rows whose chosen answer has the larger reward), `reward_chosen` and
    `reward_rejected`.

    Args:
        settings: The `objective` section, with `beta` and `loss_type`.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ()

    def __init__(self, settings: ObjectiveConfig) -> None:
        self._beta = settings.beta
        self._loss_type = settings.loss_type

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss of the rows of a micro-batch, their number, and the sums of metrics."""
        log_probs = outputs["log_probs"]
        ratios = log_probs - outputs["reference_log_probs"].to(log_probs.dtype)
        scores = ratios if self._loss_type == "sigmoid" else ratios / outputs["num_targets"]
        difference = scores[:, 0] - scores[:, 1]
        if self._loss_type == "ipo":
            losses = (difference - 1 / (2 * self._beta)) ** 2
        else:
            losses = -F.logsigmoid(self._beta * difference)
        rewards = self._beta * ratios.detach()
        chosen, rejected = rewards.unbind(dim=1)
        sums = {
            "reward_margin": (chosen - rejected).sum(),
            "reward_accuracy": (chosen > rejected).to(rewards.dtype).sum(),
            "reward_chosen": chosen.sum(),
            "reward_rejected": rejected.sum(),
        }
        return losses.sum(), self.count(batch), sums
