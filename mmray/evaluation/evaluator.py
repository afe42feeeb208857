"""Evaluation of embedding models on held-out rows; every rank gets the same metrics, for any number
of ranks.

Each rank embeds its part of the rows (batches.py), embeddings are gathered, and each rank scores
its part of the queries against all rows (retrieval.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.data.stream.blocks import NO_LABEL
from mmray.data.stream.collate import token_columns
from mmray.errors import DataError
from mmray.evaluation import retrieval
from mmray.evaluation.batches import EvalDataset, Group
from mmray.evaluation.embeddings import (
    TOP_K,
    classes_before,
    count_hits,
    embed_dataset,
    embed_texts,
    eval_mode,
)
from mmray.evaluation.examples import RetrievalExamples, image_examples
from mmray.evaluation.retrieval import EmbeddingSet
from mmray.objectives.protocol import Objective, split_objective


class Evaluator(EvalDataset):
    """Computes retrieval and classification metrics of a model that embeds images and texts.

    The constructor is that of EvalDataset.

    `score(model, group, objective, global_batch_size)` returns metrics by name, such as
    `recall_at_1/image_to_text` and `zero_shot/top_1`.
    """

    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Objective,
        global_batch_size: int,
        save_examples: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of an embedding model on the held-out rows.

        A collective call of all ranks, each of which reads its part of the rows.

        Args:
            model: The unwrapped model, with the methods `embed_image` and `embed_text`.
            global_batch_size: Rows of a step of the run. The loss is computed within groups of this
                many rows, unless `evaluate.loss_batch` is set.
            save_examples: Called with examples of hits and misses, what `RetrievalExamples.values`
                returns (the content of examples.json). Given on one rank or none; None: not called.

        Returns:
            Equal on all ranks: `rows` (distinct images) and `bad_rows`. Unless the task is
            `zero_shot`, `recall_at_K/DIRECTION` (K 1, 5, 10) and `median_rank/DIRECTION` (DIRECTION
            `image_to_text` or `text_to_image`), `recall_at_1/mean`, and maybe `loss` (mean over the
            rows). With class names, unless the task is `retrieval`, `zero_shot/top_1`,
            `zero_shot/top_5`, `zero_shot/mean_per_class_recall` and `zero_shot/rows`. With a
            classification head `classification/top_1`, `classification/top_5` and
            `classification/rows`, and with a region head `regions/top_1`, `regions/top_5` and
            `regions/boxes`. Recall and accuracy are 0 to 1; there is no `top_5` with at most 5
            classes. And those of `evaluate.metrics`.

        Raises:
            DataError: No row is readable, or a label has no class name.
        """
        settings = self.settings
        retrieves = self.task != "zero_shot"
        embedded = embed_dataset(model, self, group, objective, with_texts=retrieves)
        bad_rows = self.count_bad_rows(len(embedded.row), group)
        metrics = {"rows": float(len(embedded.row))}
        if retrieves:
            retrieval_ranks = compute_retrieval_ranks(embedded, group)
            loss_rows = settings.loss_batch or global_batch_size
            metrics |= retrieval_scores(embedded, retrieval_ranks, group, objective, loss_rows)
            if save_examples is not None:
                examples = RetrievalExamples(self.prepared, group.device, self.max_pixels)
                save_examples(image_examples(embedded, retrieval_ranks, examples))
        embeds = {"image": embedded.image}
        label = self._own_labels(embedded.label)
        classes = settings.classes or self.prepared.manifest.class_names
        if classes and self.task != "retrieval":
            if (num_labels := int(label.max()) + 1) > len(classes):
                raise DataError(
                    f"evaluate.classes has {len(classes)} names, and {self.prepared.folder} "
                    f"has the label {num_labels - 1}: give a name for each of the labels 0, 1, ..."
                )
            embeds["classes"] = self._class_embeddings(model, group, classes)
            metrics |= self._zero_shot(embedded.image, label, group, embeds["classes"])
        if settings.metrics and retrieves:  # a row for each caption
            label = label[embedded.image_index]
            embeds["image"] = embedded.image[embedded.image_index]
            embeds["text"] = embedded.text[embedded.text_id]
        for name, head in embedded.heads.items():
            metrics |= topk_accuracy(head.hits, name, head.num_classes, head.unit)
        metrics["bad_rows"] = float(bad_rows)
        return self.add_own_metrics(metrics, group, embeds, label)

    def _own_labels(self, labels: Tensor) -> Tensor:
        """Return the labels as the set numbers its classes, from those that rows have in a run."""
        if self.prepared.label_numbers is None:
            return labels
        own = {in_run: label for label, in_run in self.prepared.label_numbers.items()}
        return torch.tensor([own.get(label, NO_LABEL) for label in labels.tolist()])

    @torch.no_grad()
    def _zero_shot(
        self,
        images: Tensor,
        labels: Tensor,
        group: Group,
        classes: Tensor,
    ) -> dict[str, float]:
        """Accuracy of the nearest class embedding, and the mean recall of the classes."""
        ranks = []
        own_labels = []
        local = slice(group.rank, None, group.world_size)
        columns = (column[local].split(retrieval.CHUNK) for column in (images, labels))
        with retrieval.full_precision("cpu"):
            for image, label in zip(*columns, strict=True):
                ranks.append(classes_before(image @ classes.T, label, retrieval.TIE))
                own_labels.append(label[(label >= 0) & (label < len(classes))])
        none = torch.zeros(0, dtype=torch.int64)
        before = group.all_gather_variable(torch.cat([none, *ranks])).cpu()
        label = group.all_gather_variable(torch.cat([none, *own_labels])).cpu()
        return zero_shot_metrics(before, label, len(classes))

    def _class_embeddings(self, model: nn.Module, group: Group, classes: Sequence[str]) -> Tensor:
        """Embed the classes: the normalized mean of the embeddings of their prompts (Radford et al.
        2021, section 3.1.4). Each rank embeds a part of them.

        Returns:
            Float32 [number of classes, D] on the CPU.
        """
        prompts = self.settings.prompts
        rows = self.settings.batch
        most = -(-len(classes) // group.world_size)  # classes of a rank
        own = classes[group.rank * most : (group.rank + 1) * most]
        texts = [prompt.replace("{}", name) for name in own for prompt in prompts]
        # Without a class a rank embeds one, because it needs the width.
        captions = [
            self.encoder.format_caption(text, self.settings.language) for text in texts or [""]
        ]
        tokens = token_columns(*self.encoder.encode(captions))
        with eval_mode(model):
            num_chunks = -(-most * len(prompts) // rows)  # equal on all ranks
            text = embed_texts(model, tokens, rows, group.device, num_chunks)[: len(texts)]
        mean = text.unflatten(0, (len(own), len(prompts))).mean(dim=1)
        return group.all_gather_variable(F.normalize(mean, dim=1)).cpu()


def zero_shot_metrics(before: Tensor, label: Tensor, num_classes: int) -> dict[str, float]:
    """Return the metrics of zero-shot classification.

    Args:
        before: Number of classes that rank before the correct one, int64 [N]; 0 is a hit.
        label: The correct classes, int64 [N], 0..num_classes-1.
        num_classes: Number of classes; with at most 5 there is no top 5.

    Returns:
        `zero_shot/top_1`, `zero_shot/top_5` and `zero_shot/mean_per_class_recall` (0 to 1; the mean
        over the classes that occur; missing without rows) and `zero_shot/rows`.
    """
    metrics = topk_accuracy(count_hits(before), "zero_shot", num_classes)
    if len(label):
        totals = label.bincount(minlength=num_classes)
        hits_of_class = label[before == 0].bincount(minlength=num_classes).double()
        mean = (hits_of_class / totals)[totals > 0].mean()
        metrics["zero_shot/mean_per_class_recall"] = float(mean)
    return metrics


def topk_accuracy(
    hits: Tensor, name: str, num_classes: int, unit: str = "rows"
) -> dict[str, float]:
    """Return the top-1 and top-5 accuracy from numbers of correct predictions.

    Args:
        hits: Number of rows in the top 1, in the top 5, and with a valid label, int64 [3].
        num_classes: Number of classes; with at most 5 there is no top 5.

    Returns:
        `NAME/top_1` and `NAME/top_5` (0 to 1; missing if nothing was counted), and `NAME/UNIT` (the
        count).
    """
    *hits_at_k, total = hits.tolist()
    pairs = zip(TOP_K, hits_at_k, strict=True)
    metrics = {
        f"{name}/top_{k}": hit / total for k, hit in pairs if total and (k == 1 or k < num_classes)
    }
    return metrics | {f"{name}/{unit}": float(total)}


def compute_retrieval_ranks(embedded: EmbeddingSet, group: Group) -> dict[str, Tensor]:
    """Return the retrieval rank of each image among the captions, and of each caption among the
    images.

    A collective call; each rank of the process group computes a part.

    Returns:
        `image_to_text` int64 [N] and `text_to_image` int64 [C]; 1 is the top.
    """
    text_id = embedded.text_id
    text = embedded.text
    positives = torch.stack([embedded.image_index, text_id])
    images = compute_ranks_in_parallel(embedded.image, text, positives, group, text_id.bincount())
    texts = compute_ranks_in_parallel(text, embedded.image, positives.flip(0), group)
    return {"image_to_text": images, "text_to_image": texts[text_id]}


def compute_ranks_in_parallel(
    queries: Tensor,
    gallery: Tensor,
    positives: Tensor,
    group: Group,
    gallery_counts: Tensor | None = None,
) -> Tensor:
    """Return the retrieval rank of the best correct result of each query, of which each process of
    the group computes a part.

    A collective call, with equal arguments on all ranks.

    Args:
        queries: L2-normalized embeddings [Q, D].
        gallery: L2-normalized embeddings [G, D].
        positives: Index of the query and of the gallery embedding of each correct pair, int64 [2,
            P]; at least one pair per query.
        gallery_counts: How many equal items of the gallery each embedding represents, int64 [G];
            None: one each.

    Returns:
        Rank of the best correct result of each query, int64 [Q] on the CPU; 1 is the top.
    """
    part = torch.arange(len(queries)).tensor_split(group.world_size)[group.rank]
    first, end = (int(part[0]), int(part[-1]) + 1) if len(part) else (0, 0)
    pairs = positives[:, (positives[0] >= first) & (positives[0] < end)] - torch.tensor(
        [[first], [0]]
    )
    retrieval_ranks = retrieval.compute_ranks(
        queries[first:end], gallery, pairs, group.device, gallery_counts
    )
    return group.all_gather_variable(retrieval_ranks).cpu()


def retrieval_scores(
    embedded: EmbeddingSet,
    retrieval_ranks: dict[str, Tensor],
    group: Group,
    objective: Objective,
    global_batch_size: int,
) -> dict[str, float]:
    """Return recall and median rank, and `loss` if the objective reads only the embeddings.

    A collective call.

    Args:
        retrieval_ranks: Rank of each image among the captions, `image_to_text` int64 [N], and of
            each caption among the images, `text_to_image` int64 [C]; 1 is the top.
        global_batch_size: The loss is computed within groups of this many rows.

    Returns:
        `recall_at_K/DIRECTION` (K 1, 5, 10) and `median_rank/DIRECTION` (DIRECTION `image_to_text`
        or `text_to_image`), `recall_at_1/mean`, and `loss`, the mean over the rows, if the
        objective reads no outputs of the model but the two embeddings.
    """
    metrics: dict[str, float] = {}
    for direction, values in retrieval_ranks.items():
        metrics |= retrieval.retrieval_metrics(values, direction)
    metrics["recall_at_1/mean"] = (
        sum(metrics[f"recall_at_1/{direction}"] for direction in retrieval_ranks) / 2
    )
    global_loss = split_objective(objective).global_loss
    if global_loss is not None and set(global_loss.gathered_outputs) <= {
        "image_embed",
        "text_embed",
    }:
        metrics["loss"] = _loss(embedded, group, global_loss, global_batch_size)
    return metrics


@torch.no_grad()
def _loss(
    embedded: EmbeddingSet, group: Group, objective: Objective, global_batch_size: int
) -> float:
    """Mean loss over consecutive batches of `global_batch_size` rows with their first captions; the
    last may be smaller.
    """
    first_text = embedded.text_id[torch.searchsorted(embedded.caption_row, embedded.row)]
    columns = (
        column.split(global_batch_size) for column in (embedded.image, first_text, embedded.label)
    )
    global_batches = list(zip(*columns, strict=True))
    num_losses = objective.count(
        {"valid": torch.ones(1, dtype=torch.bool), "label": embedded.label[:1]}
    ).numel()
    # loss sums and counts
    sums = torch.zeros(len(global_batches), 2, num_losses, dtype=torch.float64)
    for index in range(group.rank, len(global_batches), group.world_size):
        image, text_index, label = global_batches[index]
        image = image.to(group.device)
        text = embedded.text[text_index].to(group.device)
        label = label.to(group.device)
        valid = torch.ones(len(image), dtype=torch.bool, device=group.device)
        # as in training, the loss is computed in float32
        with retrieval.full_precision(group.device):
            for start in range(0, len(image), retrieval.CHUNK):
                rows = slice(start, start + retrieval.CHUNK)
                gathered = {
                    "image_embed": image,
                    "text_embed": text,
                    "valid": valid,
                    "offset": start,
                }
                outputs = {
                    "image_embed": image[rows],
                    "text_embed": text[rows],
                    **embedded.scalar_outputs,
                }
                batch = {"valid": valid[rows], "label": label[rows]}
                loss_sum, count, _ = objective.compute_loss(outputs, batch, gathered)
                sums[index] += torch.stack(
                    [loss_sum.double().reshape(-1), count.double().reshape(-1)]
                ).cpu()
    # exact over the ranks
    totals, counts = group.all_gather_variable(sums[None]).sum(0).sum(0).cpu()
    return float((totals / counts).sum())
