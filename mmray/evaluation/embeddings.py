"""Embeddings of held-out rows, computed by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.data.stream.collate import Batch
from mmray.evaluation import retrieval
from mmray.evaluation.batches import EvalDataset
from mmray.evaluation.captions import perplexity
from mmray.evaluation.classification import HeadHits
from mmray.evaluation.retrieval import RankedDirection, RetrievalItems, number_equal, rank_direction
from mmray.models.protocol import ImageTextModel, Outputs, as_model, is_sharded
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Objective

if TYPE_CHECKING:
    from mmray.engine.collectives import Group

ROW_COLUMNS = ("row", "label", "image_hash")
TOKEN_COLUMNS = ("input_ids", "attention_mask")
CAPTION_COLUMNS = ("caption_row", "caption_number", "text_hash")


@dataclass(frozen=True)
class EmbeddingSet:
    """Embeddings of N distinct images and C captions on the CPU, sorted by row, as `embed_dataset`
    returns them.

    Rows with the same image are one image with the captions of all. Equal captions are one text
    and are correct for all their images.

    Attributes:
        row: int64 [N], the first row of the set with the image.
        image: Embeddings of the images, float32 [N, D].
        label: Class of each image, int64 [N]; -1: none.
        image_index: Index in `image` of the image of each caption, int64 [C].
        text: Embeddings of the U distinct texts of captions, float32 [U, D].
        text_id: int64 [C], index in `text` of each caption.
        locations: Row that has the caption, and its number within the row, int64 [C, 2].
        head_metrics: Accuracy of the classification heads, and `caption_perplexity` of the first
            captions, if the model has a decoder of captions.
        scalar_outputs: Outputs of the model that belong to no row, scalars by name, such as
            `logit_scale`.
    """

    row: Tensor
    image: Tensor
    label: Tensor
    image_index: Tensor
    text: Tensor
    text_id: Tensor
    locations: Tensor
    head_metrics: dict[str, float]
    scalar_outputs: Outputs

    def rank(self, group: Group) -> dict[str, RankedDirection]:
        """Return the ranks of `image_to_text` and `text_to_image`; a collective call."""
        index = torch.arange(len(self.row))
        first_captions = torch.stack([self.row, torch.zeros_like(self.row)], dim=1)
        images = RetrievalItems(self.image, index, first_captions)
        texts = RetrievalItems(self.text, self.text_id, self.locations)
        positives = torch.stack([self.image_index, self.text_id])
        return {
            "image_to_text": rank_direction(images, texts, positives, group),
            "text_to_image": rank_direction(texts, images, positives.flip(0), group),
        }


@torch.no_grad()
def embed_dataset(
    model: ImageTextModel,
    data: EvalDataset,
    group: Group,
    objective: Objective,
    with_texts: bool = True,
) -> EmbeddingSet:
    """Embed the held-out rows of all ranks; a collective call.

    Args:
        model: The unwrapped model, with the methods `embed_image` and `embed_text`. It may be
            sharded by FSDP, whose ranks must make the same calls; ranks with fewer rows then embed
            synthetic ones.
        objective: Names the scalar outputs to keep, such as the temperature.
        with_texts: Embed the captions; False: the result has no captions.
    """
    # Each starts with a tensor without rows, which a rank without rows gathers.
    columns = {
        name: [torch.zeros(0, dtype=torch.int64)] for name in (*ROW_COLUMNS, *CAPTION_COLUMNS)
    }
    with eval_mode(model):
        synthetic = _synthetic_batch(data, group.device)
        outputs = model(synthetic)
        has_captions = with_texts and "caption_losses" in outputs
        losses = [torch.zeros(0, 2, dtype=torch.float64)]
        images = [model.embed_image(synthetic["image"])[:0].float().cpu()]
        texts = images.copy()
        hits = HeadHits(as_model(model).head_scores(synthetic))
        batches = data.batches(group.rank, group.world_size, data.settings.limit)
        for own in steps_in_lockstep(model, batches, group):
            batch = synthetic if own is None else own
            # index of the first caption of each row, int64 [B]
            first = torch.searchsorted(batch["caption_row"], batch["row"])
            rows = {name: column.to(group.device) for name, column in batch.items()}
            rows |= {name: rows[name][first] for name in TOKEN_COLUMNS}
            if has_captions:
                outputs = model(rows)
            image = outputs["image_embed"] if has_captions else model.embed_image(rows["image"])
            known = outputs.get("text_embed") if has_captions else None
            text = _embed_captions(model, batch, data, group, first, known) if with_texts else None
            heads = as_model(model).head_scores(rows)
            if own is None:
                continue
            if has_captions:
                columns_of_loss = outputs["caption_losses"], rows["attention_mask"].sum(dim=1)
                losses.append(torch.stack([each.double().cpu() for each in columns_of_loss], 1))
            hits.add(heads)
            images.append(image.float().cpu())
            for name in ROW_COLUMNS:
                columns[name].append(own[name])
            if text is not None:
                texts.append(text)
                for name in CAPTION_COLUMNS:
                    columns[name].append(own[name])
    gathered = {name: gather_rows(parts, group) for name, parts in columns.items()}
    return _merge_equal(
        gathered,
        gather_rows(images, group),
        gather_rows(texts, group),
        head_metrics=hits.metrics(group)
        | perplexity(gather_rows(losses, group), data.encoder.has_start),
        scalar_outputs={name: outputs[name].detach() for name in objective.scalar_output_names},
    )


def _synthetic_batch(data: EvalDataset, device: torch.device) -> Batch:
    """Return a batch for a rank without rows.

    It has two rows, because torch.compile makes separate graphs for one.
    """
    row = torch.arange(2)
    batch = synthetic_batch(data.inputs, vocab_size=1, rows=2, device=device)
    return batch | {"row": row, "caption_row": row}


def _embed_captions(
    model: ImageTextModel,
    batch: Batch,
    data: EvalDataset,
    group: Group,
    first: Tensor,
    known: Tensor | None,
) -> Tensor:
    """Embed the captions of a batch as `embed_texts` does, `evaluate.batch` at a time.

    Args:
        first: Index of the first caption of each row, int64 [B].
        known: Embeddings of these captions [B, D], which a forward has returned; None: they are
            computed too.
    """
    rows = data.settings.batch
    if known is None:
        return embed_texts(model, batch, rows, group)
    index = first.cpu()
    is_other = torch.ones(len(batch["input_ids"]), dtype=torch.bool)
    is_other[index] = False
    others = {name: batch[name].cpu()[is_other] for name in TOKEN_COLUMNS}
    text = torch.empty(len(is_other), known.shape[1])
    text[index] = known.float().cpu()
    embedded = embed_texts(model, others, rows, group)
    if len(embedded):
        text[is_other] = embedded
    return text


def in_lockstep(model: nn.Module, group: Group) -> bool:
    """Return whether all ranks must make the same calls of a model, because FSDP2 shards it and its
    forwards have collectives.
    """
    return group.world_size > 1 and is_sharded(model)


def steps_in_lockstep(model: nn.Module, batches: Iterable[Any], group: Group) -> Iterator[Any]:
    """Yield the batches of this rank; if the model is sharded, as many on every rank: a rank that
    has fewer than another one then gets None in the last steps.
    """
    if not in_lockstep(model, group):
        yield from batches
        return
    remaining = iter(batches)
    while True:
        own = next(remaining, None)
        has_batch = torch.tensor([own is not None])
        if not group.all_gather_variable(has_batch).any():
            return
        yield own


@torch.no_grad()
def embed_texts(
    model: ImageTextModel,
    tokens: Batch,
    rows: int,
    group: Group,
    on_texts: Callable[[int], None] | None = None,
) -> Tensor:
    """Embed captions, some at a time; a collective call if the model is sharded.

    Captions are sorted by length, so that those of a call need little padding.

    Args:
        model: The model; its `embed_text(input_ids, attention_mask)` returns embeddings [B, D].
        tokens: `input_ids` and `attention_mask` int64 [C, T], padded on the right.
        rows: Captions per call.
        on_texts: Called with the number of captions of a call when it is done; None: not called.

    Returns:
        Float32 [C, D] on the CPU, in the order of the captions; without captions [0, 0].
    """
    num_tokens = tokens["attention_mask"].sum(dim=1)
    # The longest first: a batch that is too large fails at once.
    order = num_tokens.argsort(descending=True, stable=True)
    batches = order.split(rows) if len(order) else ()
    most = len(batches)
    if in_lockstep(model, group):
        # Before the forwards, whose collectives would otherwise meet this one on another rank.
        most = int(group.all_gather_variable(torch.tensor([most])).max())
    parts = []
    for batch in batches:
        width = max(1, int(num_tokens[batch[0]]))
        ids = tokens["input_ids"][batch, :width].to(group.device)
        mask = tokens["attention_mask"][batch, :width].to(group.device)
        parts.append(model.embed_text(ids, mask).float().cpu())
        if on_texts is not None:
            on_texts(len(batch))
    token = torch.zeros(2, 1, dtype=torch.int64, device=group.device)
    for _ in range(most - len(parts)):
        model.embed_text(token, torch.ones_like(token))
    return torch.cat(parts)[order.argsort()] if parts else torch.zeros(0, 0)


def gather_rows(own: list[Tensor], group: Group) -> Tensor:
    """Gather the rows of all ranks; a collective call.

    Args:
        own: The rows of this rank, in parts [N, ...] on the CPU.

    Returns:
        All rows on the CPU, in rank order, which is that of the rows in the set.
    """
    rows = torch.cat(own)
    if group.world_size == 1:
        return rows
    counts = group.all_gather_variable(torch.tensor([len(rows)])).tolist()
    size = retrieval.CHUNK  # so that a GPU has these of each rank at a time
    whole = rows.new_empty(sum(counts), *rows.shape[1:])
    for start in range(0, max(counts), size):
        gathered = group.all_gather_variable(rows[start : start + size]).cpu()
        parts = gathered.split([min(size, max(0, count - start)) for count in counts])
        for part, offset in zip(parts, accumulate([0, *counts]), strict=False):
            whole[offset + start : offset + start + len(part)] = part
    return whole


def _merge_equal(
    columns: dict[str, Tensor],
    image: Tensor,
    text: Tensor,
    head_metrics: dict[str, float],
    scalar_outputs: Outputs,
) -> EmbeddingSet:
    """Merge rows with equal images, which get the captions of all and the first label, and equal
    captions.

    Equal captions may have embeddings that differ by rounding; the first is kept.

    Args:
        columns: ROW_COLUMNS int64 [N] and CAPTION_COLUMNS int64 [C], by row.
        image: Float32 [N, D].
        text: Float32 [C, D].
    """
    image_id, first_of_image = number_equal(columns["image_hash"])
    label = columns["label"]
    by_image = (2 * image_id + (label < 0)).argsort(stable=True)  # rows without a label are last
    first_labeled = by_image[
        torch.searchsorted(image_id[by_image], torch.arange(len(first_of_image)))
    ]
    label_of_image = label[first_labeled]
    num_other = ((label >= 0) & (label != label_of_image[image_id])).sum()
    if num_other:
        head_metrics = head_metrics | {"other_label_rows": float(num_other)}
    row = columns["row"]
    caption_row = columns["caption_row"]
    image_index = image_id[torch.searchsorted(row, caption_row)]
    # captions of one row keep their order
    order = image_index.argsort(stable=True)
    text_id, first_of_text = number_equal(columns["text_hash"][order])
    return EmbeddingSet(
        row=row[first_of_image],
        image=image[first_of_image],
        label=label_of_image,
        image_index=image_index[order],
        text=text[order[first_of_text]],
        text_id=text_id,
        locations=torch.stack([caption_row, columns["caption_number"]], dim=1)[order],
        head_metrics=head_metrics,
        scalar_outputs=scalar_outputs,
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Return a context manager that sets a model to evaluation mode (`eval()`) in its block, and
    then restores the mode before.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
