"""Evaluation of embedding models on held-out rows; every rank gets the same metrics, for any number of ranks.

Recall@k, median rank and validation loss always; zero-shot accuracy if class names are known (evaluate.classes, or a
set made of one folder per class); accuracy of the classification and region heads, if the model has them. Each rank
embeds its part of the rows (batches.py), embeddings are gathered, and each rank scores its part of the queries against
all rows (retrieval.py, zero_shot.py). Examples of hits and misses come from the same ranks (examples.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmray.data.stream.reader import NO_LABEL
from mmray.errors import DataError
from mmray.evaluate.batches import Batch, EvalBatches, EvalDataset
from mmray.evaluate.embeddings import EmbeddingSet, dedupe_texts, first_index
from mmray.evaluate.examples import retrieval_examples
from mmray.evaluate.retrieval import TIE, compute_ranks, retrieval_metrics
from mmray.evaluate.zero_shot import TOP_K, class_embeddings, fill_prompts, topk_accuracy, topk_correct
from mmray.models.fusion import LabelTexts
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Objective, split_objective

CHUNK = 4096  # gallery rows scored at once; memory is CHUNK x CHUNK


class Group(Protocol):
    """The methods of engine/collectives.py:Group that evaluation uses."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def all_gather_variable(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all ranks in rank order; their number may differ by rank."""


class Evaluator(EvalDataset):
    """Scores a model that embeds images and texts on one set of held-out rows."""

    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Objective,
        global_rows: int,
        show: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of `retrieval_scores`, accuracies and `bad_rows`; a collective call of all ranks.

        The model's mode is restored. `show`, on one rank or none, is called with examples of hits and misses. Raises
        DataError on every rank if no row could be read.
        """
        settings = self._settings
        batches = self._batches(group.rank, group.world, settings.limit)
        embedded = embed_dataset(model, batches, group, objective, CHUNK)
        bad_rows = int(group.all_gather_variable(torch.tensor([len(batches.skipped)])).sum())
        if len(embedded.row) == 0:
            raise DataError(f"cannot read any of {bad_rows} evaluation rows: {'; '.join(batches.skipped[:1])}")
        ranks = retrieval_ranks(embedded, group, CHUNK)
        metrics = retrieval_scores(embedded, ranks, group, objective, global_rows, CHUNK)
        if show is not None:
            show(retrieval_examples(embedded, ranks, self._prepared, CHUNK, group.device, self._max_pixels))
        if classes := settings.classes or self._prepared.manifest.class_names:
            metrics |= self._zero_shot(model, embedded, group, classes)
        if (head := class_head(model)) is not None:
            metrics |= topk_accuracy(embedded.class_correct, "classification", head.out_features)
        if (labels := region_labels(model)) is not None:
            metrics |= topk_accuracy(embedded.region_correct, "regions", int(labels.named.sum()), "boxes")
        return metrics | {"bad_rows": float(bad_rows)}

    @torch.no_grad()
    def _zero_shot(
        self, model: nn.Module, embedded: EmbeddingSet, group: Group, classes: tuple[str, ...]
    ) -> dict[str, float]:
        """Accuracy of the nearest class embedding, each rank on its part of the rows."""
        prompts, language = self._settings.prompts, self._settings.language
        captions = [self._encoder.format_caption(text, language) for text in fill_prompts(classes, prompts)]
        ids, num_tokens = self._encoder.encode(captions)
        mask = (torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]).long()
        with eval_mode(model):
            text = _embed_texts(model, torch.from_numpy(ids.astype("int64")), mask, self._settings.batch, group.device)
        weights, mine = class_embeddings(text, len(prompts)), slice(group.rank, None, group.world)
        image, label = (
            embedded.image[mine].split(CHUNK),
            embedded.label[mine].split(CHUNK),
        )
        counts = [topk_correct(rows @ weights.T, labels, TIE) for rows, labels in zip(image, label, strict=True)]
        correct = group.all_gather_variable(torch.stack([torch.zeros(3, dtype=torch.int64), *counts]).sum(0)[None]).sum(
            0
        )
        return topk_accuracy(correct.cpu(), "zero_shot", len(classes))


def retrieval_ranks(embedded: EmbeddingSet, group: Group, chunk: int) -> dict[str, Tensor]:
    """Rank of each image among captions and of each caption among images, int64 on the CPU.

    Equal captions are interchangeable as answers.
    """
    text_id = embedded.text_id
    text, correct = embedded.text[first_index(text_id)], torch.stack([embedded.image_index, text_id])
    images = _ranks(embedded.image, text, correct, group, chunk, text_id.bincount())
    texts = _ranks(text, embedded.image, correct.flip(0), group, chunk)
    return {"image_to_text": images, "text_to_image": texts[text_id]}


def _ranks(
    queries: Tensor, gallery: Tensor, correct: Tensor, group: Group, chunk: int, copies: Tensor | None = None
) -> Tensor:
    """`compute_ranks`, each rank of the group on its part of the queries."""
    mine = slice(group.rank, None, group.world)
    own = correct[:, correct[0] % group.world == group.rank]
    own = torch.stack([own[0] // group.world, own[1]])
    ranks = group.all_gather_variable(compute_ranks(queries[mine], gallery, own, chunk, group.device, copies)).cpu()
    interleaved = torch.cat([torch.arange(len(queries))[rank :: group.world] for rank in range(group.world)])
    return torch.empty_like(ranks).scatter_(0, interleaved, ranks)


def retrieval_scores(
    embedded: EmbeddingSet, ranks: dict[str, Tensor], group: Group, objective: Objective, global_rows: int, chunk: int
) -> dict[str, float]:
    """recall_at_{1,5,10} and median_rank, each /image_to_text and /text_to_image; recall_at_1/mean; loss; rows.

    ranks: of `retrieval_ranks`. `loss` is the global loss of the objective, if it reads only the two embeddings.
    """
    metrics: dict[str, float] = {}
    for direction, values in ranks.items():
        metrics |= retrieval_metrics(values, direction)
    both = [metrics[f"recall_at_1/{direction}"] for direction in ("image_to_text", "text_to_image")]
    metrics["recall_at_1/mean"] = sum(both) / 2
    global_loss = split_objective(objective).global_loss
    if global_loss is not None and set(global_loss.gathered_outputs) <= {"image_embed", "text_embed"}:
        metrics["loss"] = _loss(embedded, group, global_loss, global_rows, chunk)
    return metrics | {"rows": float(len(embedded.row))}


@torch.no_grad()
def embed_dataset(
    model: nn.Module, batches: EvalBatches, group: Group, objective: Objective, chunk: int
) -> EmbeddingSet:
    """Embed the rows of all ranks; every rank gets all embeddings, gathered `chunk` rows at a time."""
    with eval_mode(model):
        # A synthetic row: a rank without rows needs the width and the scalar outputs too.
        outputs = model(synthetic_batch(batches.inputs, 1, 1, group.device))
        none = {"row": torch.zeros(0, dtype=torch.int64), "image": outputs["image_embed"][:0].float().cpu()}
        correct = torch.zeros(0, len(TOP_K) + 1, dtype=torch.int64)
        none |= {"label": none["row"], "owner": none["row"], "text_id": none["row"], "text": none["image"]}
        parts = [none | {"class_correct": correct, "region_correct": correct}]
        parts += [_embed_batch(model, batch, batches.batch, group.device) for batch in batches]
    mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    gathered = {name: _gather(mine[name], group, chunk) for name in mine}
    by_row, by_owner = gathered["row"].argsort(), gathered["owner"].argsort(stable=True)
    text, text_id = dedupe_texts(gathered["text"][by_owner], gathered["text_id"][by_owner])
    return EmbeddingSet(
        row=gathered["row"][by_row],
        image=gathered["image"][by_row],
        owner=gathered["owner"][by_owner],
        text=text,
        text_id=text_id,
        label=gathered["label"][by_row],
        class_correct=gathered["class_correct"].sum(dim=0),
        region_correct=gathered["region_correct"].sum(dim=0),
        scalar_outputs={name: outputs[name].detach() for name in objective.scalar_outputs},
    )


def _embed_batch(model: Any, batch: Batch, text_rows: int, device: torch.device) -> dict[str, Tensor]:
    """Embeddings of a batch on the CPU; captions are embedded `text_rows` at a time."""
    text = _embed_texts(model, batch["input_ids"], batch["attention_mask"], text_rows, device)
    image = model.embed_image(batch["image"].to(device)).float().cpu()
    embedded = {"row": batch["row"], "image": image, "owner": batch["owner"], "text_id": batch["text_id"], "text": text}
    correct = {
        "class_correct": _class_correct(model, batch, device),
        "region_correct": _region_correct(model, batch, device),
    }
    return embedded | correct | {"label": batch["label"]}


def _embed_texts(model: Any, input_ids: Tensor, attention_mask: Tensor, rows: int, device: torch.device) -> Tensor:
    """Embeddings of captions on the CPU, `rows` at a time."""
    pairs = zip(input_ids.split(rows), attention_mask.split(rows), strict=True)
    return torch.cat([model.embed_text(ids.to(device), mask.to(device)).float().cpu() for ids, mask in pairs])


def class_head(model: Any) -> nn.Linear | None:
    """The model's classification head, if it has one."""
    head: nn.Linear | None = getattr(model, "class_head", None)
    return head


def _class_correct(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """`topk_correct` of the classification head, int64 [1, 3]; each image with its first caption."""
    head = class_head(model)
    if head is None:
        return torch.zeros(1, len(TOP_K) + 1, dtype=torch.int64)
    first = torch.searchsorted(batch["owner"], batch["row"])
    ids, mask = batch["input_ids"][first].to(device), batch["attention_mask"][first].to(device)
    logits = head(model.embed_pair(batch["image"].to(device), ids, mask))
    return topk_correct(logits.float().cpu(), batch["label"])[None]


def region_labels(model: Any) -> LabelTexts | None:
    """The label texts of the region head, if the model has one."""
    labels = getattr(model, "labels", None)
    return labels if isinstance(labels, LabelTexts) else None


def _region_correct(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """`topk_correct` of the labelled boxes, int64 [1, 3]."""
    if region_labels(model) is None or "boxes" not in batch:
        return torch.zeros(1, len(TOP_K) + 1, dtype=torch.int64)
    logits = model.classify_regions(batch["image"].to(device), batch["boxes"].to(device)).float().cpu()
    label = torch.where(batch["box_mask"], batch["box_labels"], NO_LABEL)
    return topk_correct(logits.flatten(0, 1), label.flatten())[None]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; the previous mode is restored."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _gather(rows: Tensor, group: Group, chunk: int) -> Tensor:
    """Gather rows of all ranks to the CPU; captions of one row keep their order."""
    if group.world == 1:
        return rows
    longest = int(group.all_gather_variable(torch.tensor([len(rows)])).max())
    starts = range(0, max(1, longest), chunk)
    return torch.cat([group.all_gather_variable(rows[start : start + chunk]).cpu() for start in starts])


@torch.no_grad()
def _loss(embedded: EmbeddingSet, group: Group, objective: Objective, global_rows: int, chunk: int) -> float:
    """Mean loss over consecutive groups of `global_rows` rows with their first captions; the last may be smaller.

    Groups and the order of summation do not depend on the number of ranks.
    """
    first_caption = torch.searchsorted(embedded.owner, embedded.row)
    spans = [(start, min(start + global_rows, len(embedded.row))) for start in range(0, len(embedded.row), global_rows)]
    sums = [torch.zeros(0, 3, dtype=torch.float64)]
    for index in range(group.rank, len(spans), group.world):
        rows = slice(*spans[index])
        image, text = embedded.image[rows], embedded.text[first_caption[rows]]
        total, count = _loss_of_group(image, text, embedded.scalar_outputs, group.device, objective, chunk)
        sums.append(torch.tensor([[index, total, count]], dtype=torch.float64))
    gathered = group.all_gather_variable(torch.cat(sums)).cpu()
    _, total, count = gathered[gathered[:, 0].argsort()].sum(dim=0).tolist()
    return total / count


def _loss_of_group(
    image: Tensor, text: Tensor, shared: dict[str, Tensor], device: torch.device, objective: Objective, chunk: int
) -> tuple[float, float]:
    """(loss sum, count) of a group of pairs [G, D], `chunk` rows against all at a time."""
    image, text = image.to(device), text.to(device)
    valid = torch.ones(len(image), dtype=torch.bool, device=device)
    total = count = 0.0
    with torch.autocast(device.type, enabled=False):  # as in training, the loss is computed in float32
        for start in range(0, len(image), chunk):
            rows = slice(start, start + chunk)
            gathered = {"image_embed": image, "text_embed": text, "valid": valid, "offset": start}
            outputs = {"image_embed": image[rows], "text_embed": text[rows], **shared}
            loss_sum, rows_counted, _ = objective.compute_loss(outputs, {"valid": valid[rows]}, gathered)
            total, count = total + float(loss_sum.sum()), count + float(rows_counted.reshape(-1)[0])
    return total, count
