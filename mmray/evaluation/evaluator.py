"""Evaluation of embedding models on held-out rows; every rank gets the same metrics, for any number
of ranks.

Each rank embeds its part of the rows (batches.py), embeddings are gathered, and each rank scores
its part of the queries against all rows (retrieval.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.data.stream.blocks import NO_LABEL
from mmray.data.stream.collate import token_columns
from mmray.errors import DataError
from mmray.evaluation import retrieval
from mmray.evaluation.batches import EvalDataset, SaveExamples
from mmray.evaluation.captions import PERPLEXITY, caption_examples
from mmray.evaluation.classification import classes_before, zero_shot_metrics
from mmray.evaluation.embeddings import (
    EmbeddingSet,
    embed_dataset,
    embed_texts,
    eval_mode,
    in_lockstep,
)
from mmray.evaluation.examples import RetrievalExamples
from mmray.models.protocol import ImageTextModel, as_model, can_embed
from mmray.objectives.protocol import Objective, split_objective

if TYPE_CHECKING:
    from mmray.engine.collectives import Group


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
        save_examples: SaveExamples | None = None,
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
            rows) and `loss_rows` (of a batch of `loss`, if it has other negatives than a step).
            With class names, unless the task is `retrieval`, `zero_shot/top_1`,
            `zero_shot/top_5`, `zero_shot/mean_per_class_recall` and `zero_shot/rows`. With a
            classification head `classification/top_1`, `classification/top_5` and
            `classification/rows`, with a decoder of captions `caption_perplexity`. Recall and
            accuracy are 0 to 1; there is no `top_5` with at most 5 classes. And those of
            `evaluate.metrics`. `other_label_rows` counts labeled rows whose image has an earlier
            row with another label, which is used in place of theirs except by heads.

        Raises:
            DataError: No row is readable, or a label has no class name.
        """
        settings = self.settings
        retrieves = self.task != "zero_shot"
        assert can_embed(model)  # check_evaluable
        embedded = embed_dataset(model, self, group, objective, with_texts=retrieves)
        bad_rows = self.count_bad_rows(len(embedded.row), group)
        metrics = {"rows": float(len(embedded.row))}
        if retrieves:
            loss_batch = settings.loss_batch or global_batch_size
            metrics |= self._retrieval(model, embedded, group, save_examples)
            loss = embedding_loss(embedded, group, objective, loss_batch)
            loss_rows = min(loss_batch, len(embedded.row))
            if loss and loss_rows != global_batch_size:
                loss["loss_rows"] = float(loss_rows)
            metrics |= loss
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
        metrics |= embedded.head_metrics | {"bad_rows": float(bad_rows)}
        return self.add_own_metrics(metrics, group, embeds, label)

    def _retrieval(
        self,
        model: nn.Module,
        embedded: EmbeddingSet,
        group: Group,
        save_examples: SaveExamples | None,
    ) -> dict[str, float]:
        """Return recall and median rank in both directions, and save examples."""
        examples = RetrievalExamples(self.prepared, self.max_pixels)
        metrics: dict[str, float] = {}
        ranks = embedded.rank(group)
        for direction, ranked in ranks.items():
            metrics |= retrieval.retrieval_metrics(ranked.ranks, direction)
            if save_examples is not None:
                examples.add(direction, ranked)
        # The ranks of a sharded model generate together.
        generates = save_examples is not None or in_lockstep(model, group)
        if generates and PERPLEXITY in embedded.head_metrics:
            with eval_mode(model):
                examples.generated = caption_examples(
                    as_model(model), self, ranks["image_to_text"], group.device
                )
        if save_examples is not None:
            save_examples(examples.values(len(embedded.row)))
        return metrics | retrieval.mean_recall(metrics)

    def _own_labels(self, labels: Tensor) -> Tensor:
        """Return the labels as the set numbers its classes, from those that rows have in a run."""
        if self.prepared.label_numbers is None:
            return labels
        own = {in_run: label for label, in_run in self.prepared.label_numbers.items()}
        return torch.tensor([own.get(label, NO_LABEL) for label in labels.tolist()])

    @torch.no_grad()
    def _zero_shot(
        self, images: Tensor, labels: Tensor, group: Group, classes: Tensor
    ) -> dict[str, float]:
        """Accuracy of the nearest class embedding, and the mean recall of the classes."""
        labeled = (labels >= 0).nonzero().flatten()
        before = []
        with retrieval.full_precision("cpu"):
            for rows in labeled.tensor_split(group.world_size)[group.rank].split(retrieval.CHUNK):
                scores = images[rows] @ classes.T
                before.append(classes_before(scores, labels[rows], retrieval.TIE))
        all_before = group.all_gather_variable(torch.cat(before)).cpu()
        return zero_shot_metrics(all_before, labels[labeled], len(classes))

    def _class_embeddings(
        self, model: ImageTextModel, group: Group, classes: Sequence[str]
    ) -> Tensor:
        """Embed the classes: the normalized mean of the embeddings of their prompts (Radford et al.
        2021, section 3.1.4). Each rank embeds a part of them.

        Returns:
            Float32 [number of classes, D] on the CPU.
        """
        prompts = self.settings.prompts
        most = -(-len(classes) // group.world_size)  # classes of a rank
        own = classes[group.rank * most : (group.rank + 1) * most]
        kept = {} if self.class_embeddings is None else self.class_embeddings
        key = (*classes,), (*prompts,)
        if key in kept:  # of another set
            self.on_progress("prompts", len(own) * len(prompts))
            return kept[key]
        texts = [prompt.replace("{}", name) for name in own for prompt in prompts]
        # Without a class a rank embeds one, because it needs the width.
        captions = [self.encoder.format_caption(text) for text in texts or [""]]
        tokens = token_columns(*self.encoder.encode(captions))
        with eval_mode(model):
            on_texts = partial(self.on_progress, "prompts") if texts else None
            text = embed_texts(model, tokens, self.settings.batch, group, on_texts)[: len(texts)]
        mean = text.unflatten(0, (len(own), len(prompts))).mean(dim=1)
        kept[key] = group.all_gather_variable(F.normalize(mean, dim=1)).cpu()
        return kept[key]


@torch.no_grad()
def embedding_loss(
    embedded: EmbeddingSet, group: Group, objective: Objective, global_batch_size: int
) -> dict[str, float]:
    """Return `loss`, if the objective reads no outputs of the model but the two embeddings; a
    collective call.

    It is the mean over consecutive batches of `global_batch_size` rows with their first captions;
    the last may be smaller.
    """
    loss = split_objective(objective).global_loss
    if loss is None or not {"image_embed", "text_embed"}.issuperset(loss.gathered_outputs):
        return {}
    index = torch.arange(len(embedded.row))
    first_text = embedded.text_id[torch.searchsorted(embedded.image_index, index)]
    global_batches = index.split(global_batch_size)
    one_row = {"valid": torch.ones(1, dtype=torch.bool), "label": embedded.label[:1]}
    # loss sums and counts
    sums = torch.zeros(len(global_batches), 2, loss.count(one_row).numel(), dtype=torch.float64)
    for number in range(group.rank, len(global_batches), group.world_size):
        rows = global_batches[number]
        embeds = {
            "image_embed": embedded.image[rows],
            "text_embed": embedded.text[first_text[rows]],
        }
        gathered: dict[str, Any] = {name: each.to(group.device) for name, each in embeds.items()}
        label = embedded.label[rows].to(group.device)
        valid = torch.ones_like(label, dtype=torch.bool)
        # as in training, the loss is computed in float32
        with retrieval.full_precision(group.device):
            for start in range(0, len(rows), retrieval.CHUNK):
                part = slice(start, start + retrieval.CHUNK)
                outputs = {name: gathered[name][part] for name in embeds} | embedded.scalar_outputs
                loss_sum, count, _ = loss.compute_loss(
                    outputs,
                    {"valid": valid[part], "label": label[part]},
                    gathered | {"valid": valid, "offset": start},
                )
                sums[number] += (
                    torch.stack([loss_sum.double(), count.double()]).reshape(2, -1).cpu()
                )
    # exact over the ranks
    totals, counts = group.all_gather_variable(sums[None]).sum(0).sum(0).cpu()
    return {"loss": float((totals / counts).sum())}
