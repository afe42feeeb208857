"""Distillation: the student learns from embeddings of a teacher that `mmray score --embeddings`
stored (training/references.py).

`teacher_image` [B, D], times the logit scale of the teacher, and `teacher_text` [B, D] are columns
of the batch, which the step adds to the outputs of the model. They are 0 for a row without an
embedding, which has no loss and does not serve as a negative.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.errors import UsageError
from mmray.objectives.contrastive import mask_invalid
from mmray.objectives.protocol import (
    ROW_LOSSES,
    Batch,
    LossSums,
    Outputs,
    RowLoss,
    at_least_float32,
)


class TeacherLoss(RowLoss):
    """Base of losses of the rows that have embeddings of the teacher."""

    def counted_rows(self, batch: Batch) -> Tensor:
        return batch["valid"] & _has_teacher(batch)


class Distillation(TeacherLoss):
    """Affinity mimicking (Wu et al. 2023, TinyCLIP, arXiv:2309.12314, equations 1 to 4; the loss of
    MobileCLIP, Vasu et al. 2023, arXiv:2311.17049, equation 3).

    Outputs: `image_embed`, `text_embed` [B, D], L2-normalized, and `logit_scale`. A row's loss is
    the KL divergence from the teacher's distribution over the texts of all rows to the student's,
    and the same over the images, averaged.

    Attributes:
        gathered_outputs: Outputs that are gathered from all ranks for the loss.
        scalar_output_names: Outputs of the model that are one number for the step.
    """

    gathered_outputs: tuple[str, ...] = (
        "image_embed",
        "text_embed",
        "teacher_image",
        "teacher_text",
    )
    scalar_output_names: tuple[str, ...] = ("logit_scale",)

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the divergences summed over the local rows, and the number of these rows.

        Each local row is compared with all rows of all ranks, so the matrices are [B, G].
        """
        if gathered is None:
            gathered = {**outputs, "valid": batch["valid"]}
        local = batch["valid"] & _has_teacher(outputs)
        remote = gathered["valid"] & _has_teacher(gathered)
        dtype = at_least_float32(outputs["image_embed"]).dtype
        lowest = torch.finfo(dtype).min
        excluded = torch.zeros_like(remote, dtype=dtype).masked_fill(~remote, lowest)

        def log_softmax(row: str, column: str) -> Tensor:
            logits = mask_invalid(outputs[row], local) @ mask_invalid(gathered[column], remote).T
            if row.endswith("_embed"):
                logits = outputs["logit_scale"].to(logits.dtype) * logits
            return F.log_softmax(logits + excluded.to(logits.dtype), dim=1)

        total = torch.zeros_like(local, dtype=excluded.dtype)
        for query, gallery in (("image", "text"), ("text", "image")):
            student = log_softmax(f"{query}_embed", f"{gallery}_embed")
            teacher = log_softmax(f"teacher_{query}", f"teacher_{gallery}").detach()
            losses = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
            total = total + torch.where(local, losses, 0) / 2
        return total.sum(), local.sum(), {ROW_LOSSES: total.detach()}


class FeatureDistillation(TeacherLoss):
    """Half the squared distance of the student's and the teacher's L2-normalized embeddings (1 -
    cosine), the mean of image and text (Yang et al. 2023, CLIP-KD, arXiv:2307.12732, section 3.3).

    Attributes:
        gathered_outputs: Outputs that are gathered from all ranks for the loss: none.
        scalar_output_names: Outputs of the model that are one number for the step: none.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ()

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss of the rows of a micro-batch, and the number of these rows.

        Raises:
            UsageError: The embeddings have other widths than those of the teacher.
        """
        counted = self.counted_rows(batch)
        cosines = []
        for modality in ("image", "text"):
            student = mask_invalid(outputs[f"{modality}_embed"], counted)
            teacher = F.normalize(mask_invalid(outputs[f"teacher_{modality}"], counted), dim=1)
            # rows of a dry run have teachers of one number
            if teacher.shape[1] not in (1, student.shape[1]):
                raise UsageError(
                    f"objective feature_distillation: embeddings of the teacher have "
                    f"{teacher.shape[1]} dimensions, those of the model {student.shape[1]}: set "
                    f"--model.embed-dim {teacher.shape[1]}, or use objective distillation"
                )
            cosines.append((student * teacher).sum(dim=1))
        losses = torch.where(counted, 1 - (cosines[0] + cosines[1]) / 2, 0)
        return losses.sum(), counted.sum(), {ROW_LOSSES: losses.detach()}


def _has_teacher(columns: dict[str, Any]) -> Tensor:
    """Return which rows have embeddings of the teacher, bool [B]."""
    return columns["teacher_image"].detach().any(dim=1) & columns["teacher_text"].detach().any(
        dim=1
    )
