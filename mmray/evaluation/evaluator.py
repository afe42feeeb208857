"""Evaluation of embedding models on held-out rows; every rank gets the same metrics, for any number
of ranks.

Each rank embeds its part of the rows (batches.py), embeddings are gathered, and each rank scores
its part of the queries against all rows (retrieval.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.data.stream.collate import Batch, token_columns
from mmray.errors import DataError
from mmray.evaluation import retrieval
from mmray.evaluation.batches import EvalBatches, EvalDataset
from mmray.evaluation.retrieval import EmbeddingSet, HeadHits, first_index
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Objective, split_objective

TOP_K = (1, 5)
PART_COLUMNS = ("row", "caption_row", "text_hash", "label", "image_hash")
Group = Any  # engine/collectives.py:Group: rank, world, device and all_gather_variable


class Evaluator(EvalDataset):
    """Computes retrieval and classification metrics of a model that embeds images and texts.

    Its arguments, such as the set of held-out rows, are those of EvalDataset.
    """

    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Objective,
        global_rows: int,
        save_examples: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of an embedding model on the held-out rows.

        A collective call of all ranks, each of which reads its part of the rows.

        Args:
            model: The unwrapped model, with the methods `embed_image` and `embed_text`.
            group: The ranks.
            objective: Objective of the run. `loss` is computed if it reads no outputs of the model
                except the two embeddings.
            global_rows: Rows of a step of the run. The loss is computed within groups of this many
                rows, unless `evaluate.loss_batch` is set.
            save_examples: Called with examples of hits and misses as JSON values, the content of
                examples.json; given on one rank or none.

        Returns:
            Equal on all ranks: `recall_at_K/DIRECTION` (K 1, 5, 10) and `median_rank/DIRECTION`
            (DIRECTION `image_to_text` or `text_to_image`), `recall_at_1/mean`, `rows` (distinct
            images), `bad_rows`, and maybe `loss`. With class names also `zero_shot/top_1`,
            `zero_shot/top_5` and `zero_shot/rows`, and equally for each classification head.

        Raises:
            DataError: No row is readable, or a label has no class name.
        """
        settings = self.settings
        batches = EvalBatches(self, group.rank, group.world_size, settings.limit)
        embedded = embed_dataset(model, batches, group, objective)
        bad_rows = int(group.all_gather_variable(torch.tensor([len(batches.skipped)])).sum())
        if len(embedded.row) == 0:
            raise DataError(
                f"cannot read any of {bad_rows} evaluation rows: {'; '.join(batches.skipped[:1])}"
            )
        retrieval_ranks = compute_retrieval_ranks(embedded, group)
        loss_rows = settings.loss_batch or global_rows
        metrics = retrieval_scores(embedded, retrieval_ranks, group, objective, loss_rows)
        if save_examples is not None:
            data = self.prepared, group.device, self.max_pixels
            save_examples(retrieval.retrieval_examples(embedded, retrieval_ranks, *data))
        if classes := settings.classes or self.prepared.manifest.class_names:
            if (num_labels := int(embedded.label.max()) + 1) > len(classes):
                raise DataError(
                    f"evaluate.classes has {len(classes)} names, and {self.prepared.folder} "
                    f"has the label {num_labels - 1}: give a name for each of the labels 0, 1, ..."
                )
            metrics |= self._zero_shot(model, embedded, group, classes)
        for name, head in embedded.heads.items():
            metrics |= topk_accuracy(head.hits, name, head.num_classes, head.unit)
        return metrics | {"bad_rows": float(bad_rows)}

    @torch.no_grad()
    def _zero_shot(
        self, model: nn.Module, embedded: EmbeddingSet, group: Group, classes: tuple[str, ...]
    ) -> dict[str, float]:
        """Accuracy of the nearest class embedding; prompt ensembling of Radford et al. 2021 (CLIP),
        section 3.1.4.
        """
        prompts = self.settings.prompts
        language = self.settings.language
        texts = [prompt.replace("{}", name) for name in classes for prompt in prompts]
        tokens = token_columns(
            *self.encoder.encode([self.encoder.format_caption(text, language) for text in texts])
        )
        with eval_mode(model):
            text = _embed_texts(model, tokens, self.settings.batch, group.device)
        weights = F.normalize(text.unflatten(0, (len(classes), len(prompts))).mean(dim=1), dim=1)
        hits = torch.zeros(len(TOP_K) + 1, dtype=torch.int64)
        local = slice(group.rank, None, group.world_size)
        columns = (
            column[local].split(retrieval.CHUNK) for column in (embedded.image, embedded.label)
        )
        with retrieval.full_precision("cpu"):
            for image, label in zip(*columns, strict=True):
                hits += topk_hits(image @ weights.T, label, retrieval.TIE)
        hits = group.all_gather_variable(hits[None]).sum(0).cpu()
        return topk_accuracy(hits, "zero_shot", len(classes))


def topk_hits(scores: Tensor, label: Tensor, tie: float = 0.0) -> Tensor:
    """Count the rows whose correct class is among the 1 and the 5 classes with the highest scores.

    Args:
        scores: Score of each class, float [N, C].
        label: Correct class of each row, int64 [N]; rows with a number outside 0..C-1 are not
            counted.
        tie: A class ranks before the correct one unless its score is lower by more than this. NaN
            of a class ranks before it too; NaN of the correct class is no hit.

    Returns:
        Number of rows in the top 1, in the top 5, and with a valid label, int64 [3]; the counts of
        batches can be added.
    """
    num_classes = scores.shape[1]
    labeled = (label >= 0) & (label < num_classes)
    scores = scores[labeled]
    label = label[labeled]
    target = scores.gather(1, label[:, None])
    before = (~(scores < target - tie)).sum(dim=1) - 1 + target.isnan().squeeze(1) * num_classes
    return torch.stack([*((before < k).sum() for k in TOP_K), labeled.sum()])


def topk_accuracy(
    hits: Tensor, name: str, num_classes: int, unit: str = "rows"
) -> dict[str, float]:
    """Return accuracies from the counts of `topk_hits`.

    Args:
        hits: Number of rows in the top 1, in the top 5, and with a valid label, int64 [3].
        name: Prefix of the metrics, such as `zero_shot`.
        num_classes: Number of classes; with at most 5 there is no top 5.
        unit: What was counted, for the name of the total: `rows` or `boxes`.

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

    Args:
        embedded: The embeddings of all rows, N images and C captions. A query with several correct
            results has the rank of the best one.
        group: The ranks of the process group.

    Returns:
        `image_to_text` int64 [N] and `text_to_image` int64 [C]; 1 is the top.
    """
    text_id = embedded.text_id
    text = embedded.text[first_index(text_id)]
    positives = torch.stack([embedded.image_index, text_id])
    images = _compute_ranks_in_parallel(embedded.image, text, positives, group, text_id.bincount())
    texts = _compute_ranks_in_parallel(text, embedded.image, positives.flip(0), group)
    return {"image_to_text": images, "text_to_image": texts[text_id]}


def _compute_ranks_in_parallel(
    queries: Tensor,
    gallery: Tensor,
    positives: Tensor,
    group: Group,
    gallery_counts: Tensor | None = None,
) -> Tensor:
    """`compute_ranks`; each process of the group ranks for its part of the queries."""
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
    global_rows: int,
) -> dict[str, float]:
    """Return recall and median rank, and `loss` if the objective reads only the embeddings.

    A collective call.

    Args:
        embedded: The image and text embeddings of all rows.
        retrieval_ranks: Rank of each image among the captions, `image_to_text` int64 [N], and of
            each caption among the images, `text_to_image` int64 [C]; 1 is the top.
        group: The ranks of the process group.
        objective: The objective of the run.
        global_rows: The loss is computed within groups of this many rows.

    Returns:
        `recall_at_K/DIRECTION` (K 1, 5, 10) and `median_rank/DIRECTION` (DIRECTION `image_to_text`
        or `text_to_image`), `recall_at_1/mean`, `rows` (number of images), and maybe `loss`.
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
        metrics["loss"] = _loss(embedded, group, global_loss, global_rows)
    return metrics | {"rows": float(len(embedded.row))}


@torch.no_grad()
def embed_dataset(
    model: Any, batches: EvalBatches, group: Group, objective: Objective
) -> EmbeddingSet:
    """Embed the held-out rows of all ranks; a collective call.

    Args:
        model: The unwrapped model, with the methods `embed_image` and `embed_text`.
        batches: Batches of the held-out rows of this rank.
        group: The ranks, which exchange their embeddings.
        objective: The objective of the run; names the scalar outputs to keep, such as the
            temperature.

    Returns:
        The image and text embeddings of all rows, with captions and labels, on each rank, on the
        CPU.
    """
    with eval_mode(model):
        # Synthetic rows: a rank without rows needs the width and the scalar outputs too. Two,
        # because torch.compile makes separate graphs for one.
        synthetic = synthetic_batch(batches.data.inputs, vocab_size=1, rows=2, device=group.device)
        outputs = model(synthetic)
        no_rows = model.embed_image(synthetic["image"])[:0].float().cpu()
        none = torch.zeros(0, dtype=torch.int64)
        no_hits = torch.zeros(0, len(TOP_K) + 1, dtype=torch.int64)
        empty = {
            "row": none,
            "image": no_rows,
            "caption_row": none,
            "text_hash": none,
            "text": no_rows,
            "label": none,
            "image_hash": none,
        }
        heads = model.head_scores(synthetic) if hasattr(model, "head_scores") else {}
        parts = [empty | {_hits_name(name): no_hits for name in heads}]
        parts += [
            _embed_batch(model, batch, batches.data.settings.batch, group.device)
            for batch in batches
        ]
    local = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    gathered = {name: _gather(local[name], group) for name in local}
    by_row = gathered["row"].argsort()
    rows = {name: gathered[name][by_row] for name in ("row", "image", "label")}
    # The first row of each image gets the captions of the others.
    _, image_id = gathered["image_hash"][by_row].unique(return_inverse=True)
    first_row = first_index(image_id)[image_id]
    own_row = gathered["caption_row"]
    caption_row = rows["row"][first_row[torch.searchsorted(rows["row"], own_row)]]
    # captions of one row keep their order
    by_own_row = own_row.argsort(stable=True)
    by_caption = by_own_row[caption_row[by_own_row].argsort(stable=True)]
    _, text_id = gathered["text_hash"][by_caption].unique(return_inverse=True)
    is_first = first_row == torch.arange(len(first_row))
    return EmbeddingSet(
        **{name: values[is_first] for name, values in rows.items()},
        heads={
            name: HeadHits(gathered[_hits_name(name)].sum(dim=0), head.num_classes, head.unit)
            for name, head in heads.items()
        },
        caption_row=caption_row[by_caption],
        own_row=own_row[by_caption],
        # equal captions differ by rounding
        text=gathered["text"][by_caption][first_index(text_id)][text_id],
        text_id=text_id,
        scalar_outputs={name: outputs[name].detach() for name in objective.scalar_output_names},
    )


def _embed_batch(
    model: Any, batch: Batch, text_rows: int, device: torch.device
) -> dict[str, Tensor]:
    """Embeddings of a batch and `topk_hits` [1, 3] of the heads, on the CPU;

    `text_rows` captions at a time.
    """
    pixels = batch["image"].to(device)
    text = _embed_texts(model, batch, text_rows, device)
    part = {name: batch[name] for name in PART_COLUMNS}
    part |= {"image": model.embed_image(pixels).float().cpu(), "text": text}
    if hasattr(model, "head_scores"):  # each image with its first caption
        first = torch.searchsorted(batch["caption_row"], batch["row"])
        captions = {name: batch[name][first] for name in ("input_ids", "attention_mask")}
        on_device = {name: column.to(device) for name, column in (batch | captions).items()}
        for name, head in model.head_scores(on_device).items():
            hits = topk_hits(head.scores.float().cpu(), head.label.cpu())
            part[_hits_name(name)] = hits[None]
    return part


def _hits_name(head: str) -> str:
    return f"hits of {head}"


def _embed_texts(model: Any, tokens: Batch, rows: int, device: torch.device) -> Tensor:
    """Embeddings of captions on the CPU, `rows` at a time."""
    pairs = zip(tokens["input_ids"].split(rows), tokens["attention_mask"].split(rows), strict=True)
    return torch.cat(
        [model.embed_text(ids.to(device), mask.to(device)).float().cpu() for ids, mask in pairs]
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Return a context manager that sets the model to evaluation mode and restores the previous
    mode.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _gather(rows: Tensor, group: Group) -> Tensor:
    """Gather rows of all ranks to the CPU, a chunk at a time; captions of one row keep their
    order.
    """
    longest = int(group.all_gather_variable(torch.tensor([len(rows)])).max())
    size = retrieval.CHUNK
    starts = range(0, max(1, longest), size)
    return torch.cat(
        [group.all_gather_variable(rows[start : start + size]).cpu() for start in starts]
    )


@torch.no_grad()
def _loss(embedded: EmbeddingSet, group: Group, objective: Objective, global_rows: int) -> float:
    """Mean loss over consecutive batches of `global_rows` rows with their first captions; the last
    may be smaller.
    """
    texts = embedded.text[torch.searchsorted(embedded.caption_row, embedded.row)]
    columns = (column.split(global_rows) for column in (embedded.image, texts, embedded.label))
    global_batches = list(zip(*columns, strict=True))
    num_losses = objective.count(
        {"valid": torch.ones(1, dtype=torch.bool), "label": embedded.label[:1]}
    ).numel()
    # loss sums and counts
    sums = torch.zeros(len(global_batches), 2, num_losses, dtype=torch.float64)
    for index in range(group.rank, len(global_batches), group.world_size):
        image, text, label = (column.to(group.device) for column in global_batches[index])
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
