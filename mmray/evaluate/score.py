"""The retrieval evaluator: a model and held-out rows in, recall@k, median rank and validation loss out, on every rank.

Each rank embeds its part of the rows (batches.py), the embeddings meet, and each rank then scores its part of the
queries against everyone (retrieval.py). All figures are those of one process, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from mmray.data.image import MAX_PIXELS
from mmray.data.store import PreparedSet
from mmray.data.text import TextEncoder
from mmray.errors import DataError
from mmray.evaluate.batches import Batch, EvalBatches
from mmray.evaluate.retrieval import ranks, retrieval_metrics
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Objective

if TYPE_CHECKING:
    from mmray.config import Evaluate, Inputs


class Group(Protocol):
    """What is needed here of the ranks that score together (train/group.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def gather_plain(self, rows: Tensor) -> Tensor:
        """Rows of all ranks in rank order; the ranks may bring different numbers of rows."""


@dataclass(frozen=True)
class Embedded:
    """Embeddings on the CPU, sorted by row: of each row's image, and of every caption with its row."""

    row: Tensor  # int64 [N]
    image: Tensor  # float32 [N, D]
    owner: Tensor  # int64 [C]
    text: Tensor  # float32 [C, D]
    shared: dict[str, Tensor]  # outputs of the model that belong to no row, such as the temperature


class Retrieval:
    """Scores a two-tower model on one set of held-out rows, as often as wanted."""

    def __init__(
        self,
        prepared: PreparedSet,
        inputs: Inputs,
        tokenizer_json: str,
        settings: Evaluate,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self._max_pixels = max_pixels
        self._prepared, self._inputs, self._settings = prepared, inputs, settings
        self._encoder = TextEncoder(tokenizer_json, inputs.max_tokens)

    def score(self, model: nn.Module, group: Group, objective: Objective, global_rows: int) -> dict[str, float]:
        """The metrics of `score_embedded`, with `bad_rows`; every rank calls it and gets the same.

        `model` is not wrapped; its mode is left as it was. Raises DataError, on every rank, when no row could be read.
        """
        settings = self._settings
        batches = EvalBatches(
            prepared=self._prepared,
            inputs=self._inputs,
            encoder=self._encoder,
            batch=settings.batch,
            limit=settings.limit,
            rank=group.rank,
            world=group.world,
            max_pixels=self._max_pixels,
        )
        embedded = embed(model, batches, group, objective, settings.chunk)
        bad_rows = int(group.gather_plain(torch.tensor([len(batches.faults)])).sum())
        if len(embedded.row) == 0:
            raise DataError(f"none of {bad_rows} evaluation rows can be read, {'; '.join(batches.faults[:1])}")
        metrics = score_embedded(embedded, group, objective, global_rows, settings.chunk)
        return metrics | {"bad_rows": float(bad_rows)}


def score_embedded(
    embedded: Embedded, group: Group, objective: Objective, global_rows: int, chunk: int
) -> dict[str, float]:
    """recall_at_{1,5,10} and median_rank, each /image_to_text and /text_to_image; recall_at_1/mean; loss; rows.

    Image to text asks for any caption of the image, text to image for the caption's one image. `loss` is there where
    the objective reads nothing but the two embeddings.
    """
    image, text = (embedded.image, embedded.row), (embedded.text, embedded.owner)
    metrics: dict[str, float] = {}
    for direction, (queries, owner), gallery in (("image_to_text", image, text), ("text_to_image", text, image)):
        mine = slice(group.rank, None, group.world)
        found = group.gather_plain(ranks(queries[mine], owner[mine], *gallery, chunk, group.device))
        metrics |= retrieval_metrics(found.cpu(), direction)
    both = [metrics[f"recall_at_1/{direction}"] for direction in ("image_to_text", "text_to_image")]
    metrics["recall_at_1/mean"] = sum(both) / 2
    if objective.coupled and set(objective.coupled) <= {"image_embed", "text_embed"}:
        metrics["loss"] = _loss(embedded, group, objective, global_rows, chunk)
    return metrics | {"rows": float(len(embedded.row))}


@torch.no_grad()
def embed(model: nn.Module, batches: EvalBatches, group: Group, objective: Objective, chunk: int) -> Embedded:
    """Embeddings of all ranks' rows, the same on every rank; they travel `chunk` rows of a rank at a time."""
    was_training = model.training
    model.eval()
    try:
        # One row of noise: a rank may have no row of its own, and must know the width and the shared outputs as well.
        outputs = model(synthetic_batch(batches.inputs, 1, 1, group.device))
        none = {"row": torch.zeros(0, dtype=torch.int64), "image": outputs["image_embed"][:0].float().cpu()}
        parts = [none | {"owner": none["row"], "text": none["image"]}]
        parts += [_embed_batch(model, batch, batches.batch, group.device) for batch in batches]
    finally:
        model.train(was_training)
    mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    everyone = {name: _gather(mine[name], group, chunk) for name in mine}
    by_row, by_owner = everyone["row"].argsort(), everyone["owner"].argsort(stable=True)
    return Embedded(
        row=everyone["row"][by_row],
        image=everyone["image"][by_row],
        owner=everyone["owner"][by_owner],
        text=everyone["text"][by_owner],
        shared={name: outputs[name].detach() for name in objective.shared},
    )


def _embed_batch(model: Any, batch: Batch, text_rows: int, device: torch.device) -> dict[str, Tensor]:
    """Embeddings of a batch, on the CPU; captions, of which there may be many to an image, `text_rows` at once."""
    ids, mask = batch["input_ids"].split(text_rows), batch["attention_mask"].split(text_rows)
    text = [model.embed_text(i.to(device), m.to(device)).float().cpu() for i, m in zip(ids, mask, strict=True)]
    image = model.embed_image(batch["image"].to(device)).float().cpu()
    return {"row": batch["row"], "image": image, "owner": batch["owner"], "text": torch.cat(text)}


def _gather(rows: Tensor, group: Group, chunk: int) -> Tensor:
    """Rows of all ranks, on the CPU; the captions of one row stay in their order."""
    if group.world == 1:
        return rows
    longest = int(group.gather_plain(torch.tensor([len(rows)])).max())
    starts = range(0, max(1, longest), chunk)
    return torch.cat([group.gather_plain(rows[start : start + chunk]).cpu() for start in starts])


@torch.no_grad()
def _loss(embedded: Embedded, group: Group, objective: Objective, global_rows: int, chunk: int) -> float:
    """Mean loss over consecutive groups of `global_rows` rows with their first captions; the last may be smaller.

    The groups, not the ranks, say which rows meet, and the sums are added in one order: the world size leaves no trace.
    """
    first_caption = torch.searchsorted(embedded.owner, embedded.row)
    pairs = [(start, min(start + global_rows, len(embedded.row))) for start in range(0, len(embedded.row), global_rows)]
    sums = [torch.zeros(0, 3, dtype=torch.float64)]
    for index in range(group.rank, len(pairs), group.world):
        rows = slice(*pairs[index])
        image, text = embedded.image[rows], embedded.text[first_caption[rows]]
        total, count = _loss_of_group(image, text, embedded.shared, group.device, objective, chunk)
        sums.append(torch.tensor([[index, total, count]], dtype=torch.float64))
    everyone = group.gather_plain(torch.cat(sums)).cpu()
    _, total, count = everyone[everyone[:, 0].argsort()].sum(dim=0).tolist()
    return total / count


def _loss_of_group(
    image: Tensor, text: Tensor, shared: dict[str, Tensor], device: torch.device, objective: Objective, chunk: int
) -> tuple[float, float]:
    """(loss sum, count) of pairs [G, D] that meet, `chunk` of them against all at once."""
    image, text = image.to(device), text.to(device)
    valid = torch.ones(len(image), dtype=torch.bool, device=device)
    total = count = 0.0
    with torch.autocast(device.type, enabled=False):  # as in training: the loss is float32, whatever the towers were
        for start in range(0, len(image), chunk):
            rows = slice(start, start + chunk)
            everyone = {"image_embed": image, "text_embed": text, "valid": valid, "offset": start}
            outputs = {"image_embed": image[rows], "text_embed": text[rows], **shared}
            loss_sum, rows_counted, _ = objective.measure(outputs, {"valid": valid[rows]}, everyone)
            total, count = total + float(loss_sum), count + float(rows_counted)
    return total, count
