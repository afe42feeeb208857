"""The evaluator: a model and held-out rows in, scores out, the same on every rank.

Recall@k, median rank and validation loss always; zero-shot accuracy where the classes are named, in evaluate.classes or
by the set (made of a folder for each class); the accuracy of a classification head, and of one that names boxes, where
the model has it. Each rank embeds its part of the rows (batches.py), the embeddings meet, and each rank then scores its
part of the queries against everyone (retrieval.py, classes.py). All figures are those of one process, whatever the
number of ranks. Whoever asks is given hits and misses with their pictures as well (examples.py), from the same ranks.
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
from mmray.evaluate.retrieval import compute_ranks, exact, retrieval_metrics
from mmray.evaluate.zero_shot import TOP_K, class_embeddings, fill_prompts, topk_accuracy, topk_correct
from mmray.models.fusion import LabelTexts
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Objective, split_objective

CHUNK = 4096  # gallery rows scored at once; memory is CHUNK x CHUNK


class Group(Protocol):
    """What is needed here of the ranks that score together (train/group.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def all_gather_variable(self, rows: Tensor) -> Tensor:
        """Rows of all ranks in rank order; the ranks may bring different numbers of rows."""


class Evaluator(EvalDataset):
    """Scores a model with embeddings of images and texts on one set of held-out rows, as often as wanted."""

    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Objective,
        global_rows: int,
        show: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, float]:
        """The metrics of `score_embedded`, with `bad_rows`; every rank calls it and gets the same.

        `model` is not wrapped; its mode is left as it was. `show`, given on one rank (or none), gets examples of hits
        and misses. Raises DataError, on every rank, when no row could be read.
        """
        settings = self._settings
        batches = self._batches(group.rank, group.world, settings.limit)
        embedded = embed_dataset(model, batches, group, objective, CHUNK)
        bad_rows = int(group.all_gather_variable(torch.tensor([len(batches.faults)])).sum())
        if len(embedded.row) == 0:
            raise DataError(f"none of {bad_rows} evaluation rows can be read, {'; '.join(batches.faults[:1])}")
        found = retrieval_ranks(embedded, group, CHUNK)
        metrics = retrieval_scores(embedded, found, group, objective, global_rows, CHUNK)
        if show is not None:
            show(retrieval_examples(embedded, found, self._prepared, CHUNK, group.device, self._max_pixels))
        if classes := settings.classes or self._prepared.manifest.class_names:
            metrics |= self._zero_shot(model, embedded, group, classes)
        if (head := class_head(model)) is not None:
            metrics |= topk_accuracy(embedded.right, "classification", head.out_features)
        if (labels := region_labels(model)) is not None:
            metrics |= topk_accuracy(embedded.regions, "regions", int(labels.named.sum()), "boxes")
        return metrics | {"bad_rows": float(bad_rows)}

    @torch.no_grad()
    def _zero_shot(
        self, model: nn.Module, embedded: EmbeddingSet, group: Group, classes: tuple[str, ...]
    ) -> dict[str, float]:
        """Accuracy of the nearest class, each rank judging its part of the rows."""
        prompts, language = self._settings.prompts, self._settings.language
        said = [self._encoder.format_caption(text, language) for text in fill_prompts(classes, prompts)]
        ids, num_tokens = self._encoder.encode(said)
        mask = (torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]).long()
        with eval_mode(model):
            text = _embed_texts(model, torch.from_numpy(ids.astype("int64")), mask, self._settings.batch, group.device)
        weights, mine = class_embeddings(text, len(prompts)), slice(group.rank, None, group.world)
        image, label = (
            embedded.image[mine].split(CHUNK),
            embedded.label[mine].split(CHUNK),
        )
        found = [
            topk_correct(exact(rows) @ exact(weights).T, labels) for rows, labels in zip(image, label, strict=True)
        ]
        right = group.all_gather_variable(torch.stack([torch.zeros(3, dtype=torch.int64), *found]).sum(0)[None]).sum(0)
        return topk_accuracy(right.cpu(), "zero_shot", len(classes))


def retrieval_ranks(embedded: EmbeddingSet, group: Group, chunk: int) -> dict[str, Tensor]:
    """Rank of every image among captions and of every caption among images, int64 on the CPU, in their order.

    An image's right answers are its captions and any others of the same text; a caption's are the images with its text.
    """
    said = embedded.said
    text, right = embedded.text[first_index(said)], torch.stack([embedded.of, said])
    images = _ranks(embedded.image, text, right, group, chunk, said.bincount())
    texts = _ranks(text, embedded.image, right.flip(0), group, chunk)
    return {"image_to_text": images, "text_to_image": texts[said]}


def _ranks(
    queries: Tensor, gallery: Tensor, right: Tensor, group: Group, chunk: int, copies: Tensor | None = None
) -> Tensor:
    """As retrieval.py's, each rank of the group ranking its part of the queries."""
    mine = slice(group.rank, None, group.world)
    own = right[:, right[0] % group.world == group.rank]
    own = torch.stack([own[0] // group.world, own[1]])
    found = group.all_gather_variable(compute_ranks(queries[mine], gallery, own, chunk, group.device, copies)).cpu()
    dealt = torch.cat([torch.arange(len(queries))[rank :: group.world] for rank in range(group.world)])
    return torch.empty_like(found).scatter_(0, dealt, found)


def retrieval_scores(
    embedded: EmbeddingSet, found: dict[str, Tensor], group: Group, objective: Objective, global_rows: int, chunk: int
) -> dict[str, float]:
    """recall_at_{1,5,10} and median_rank, each /image_to_text and /text_to_image; recall_at_1/mean; loss; rows.

    Image to text asks for any caption of the image, text to image for the caption's image. `found` is what
    `ranks_both_ways` gave. `loss` is that of what meets in the objective, and there where this reads nothing but the
    two embeddings.
    """
    metrics: dict[str, float] = {}
    for direction, its_ranks in found.items():
        metrics |= retrieval_metrics(its_ranks, direction)
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
    """Embeddings of all ranks' rows, the same on every rank; they travel `chunk` rows of a rank at a time."""
    with eval_mode(model):
        # One row of noise: a rank may have no row of its own, and must know the width and the shared outputs as well.
        outputs = model(synthetic_batch(batches.inputs, 1, 1, group.device))
        none = {"row": torch.zeros(0, dtype=torch.int64), "image": outputs["image_embed"][:0].float().cpu()}
        right = torch.zeros(0, len(TOP_K) + 1, dtype=torch.int64)
        none |= {"label": none["row"], "owner": none["row"], "said": none["row"], "text": none["image"]}
        parts = [none | {"right": right, "regions": right}]
        parts += [_embed_batch(model, batch, batches.batch, group.device) for batch in batches]
    mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    everyone = {name: _gather(mine[name], group, chunk) for name in mine}
    by_row, by_owner = everyone["row"].argsort(), everyone["owner"].argsort(stable=True)
    text, said = dedupe_texts(everyone["text"][by_owner], everyone["said"][by_owner])
    return EmbeddingSet(
        row=everyone["row"][by_row],
        image=everyone["image"][by_row],
        owner=everyone["owner"][by_owner],
        text=text,
        said=said,
        label=everyone["label"][by_row],
        right=everyone["right"].sum(dim=0),
        regions=everyone["regions"].sum(dim=0),
        scalar_outputs={name: outputs[name].detach() for name in objective.scalar_outputs},
    )


def _embed_batch(model: Any, batch: Batch, text_rows: int, device: torch.device) -> dict[str, Tensor]:
    """Embeddings of a batch, on the CPU; captions, of which there may be many to an image, `text_rows` at once."""
    text = _embed_texts(model, batch["input_ids"], batch["attention_mask"], text_rows, device)
    image = model.embed_image(batch["image"].to(device)).float().cpu()
    embedded = {"row": batch["row"], "image": image, "owner": batch["owner"], "said": batch["said"], "text": text}
    judged = {"right": _class_correct(model, batch, device), "regions": _region_correct(model, batch, device)}
    return embedded | judged | {"label": batch["label"]}


def _embed_texts(model: Any, input_ids: Tensor, attention_mask: Tensor, rows: int, device: torch.device) -> Tensor:
    """Embeddings of captions, on the CPU, `rows` of them at once."""
    pairs = zip(input_ids.split(rows), attention_mask.split(rows), strict=True)
    return torch.cat([model.embed_text(ids.to(device), mask.to(device)).float().cpu() for ids, mask in pairs])


def class_head(model: Any) -> nn.Linear | None:
    """The model's classification head, if it has one."""
    head: nn.Linear | None = getattr(model, "class_head", None)
    return head


def _class_correct(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """What the head judges rightly, each image with its first caption: a row of `right_at`, int64 [1, 3]."""
    head = class_head(model)
    if head is None:
        return torch.zeros(1, len(TOP_K) + 1, dtype=torch.int64)
    first = torch.searchsorted(batch["owner"], batch["row"])
    ids, mask = batch["input_ids"][first].to(device), batch["attention_mask"][first].to(device)
    logits = head(model.embed_pair(batch["image"].to(device), ids, mask))
    return topk_correct(logits.float().cpu(), batch["label"])[None]


def region_labels(model: Any) -> LabelTexts | None:
    """The texts that the model names boxes by, if it does."""
    labels = getattr(model, "labels", None)
    return labels if isinstance(labels, LabelTexts) else None


def _region_correct(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """What the model names rightly of the labelled boxes: a row of `right_at`, int64 [1, 3]."""
    if region_labels(model) is None or "boxes" not in batch:
        return torch.zeros(1, len(TOP_K) + 1, dtype=torch.int64)
    logits = model.classify_regions(batch["image"].to(device), batch["boxes"].to(device)).float().cpu()
    label = torch.where(batch["box_mask"], batch["box_labels"], NO_LABEL)
    return topk_correct(logits.flatten(0, 1), label.flatten())[None]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards it is as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _gather(rows: Tensor, group: Group, chunk: int) -> Tensor:
    """Rows of all ranks, on the CPU; the captions of one row stay in their order."""
    if group.world == 1:
        return rows
    longest = int(group.all_gather_variable(torch.tensor([len(rows)])).max())
    starts = range(0, max(1, longest), chunk)
    return torch.cat([group.all_gather_variable(rows[start : start + chunk]).cpu() for start in starts])


@torch.no_grad()
def _loss(embedded: EmbeddingSet, group: Group, objective: Objective, global_rows: int, chunk: int) -> float:
    """Mean loss over consecutive groups of `global_rows` rows with their first captions; the last may be smaller.

    The groups, not the ranks, say which rows meet, and the sums are added in one order: the world size leaves no trace.
    """
    first_caption = torch.searchsorted(embedded.owner, embedded.row)
    pairs = [(start, min(start + global_rows, len(embedded.row))) for start in range(0, len(embedded.row), global_rows)]
    sums = [torch.zeros(0, 3, dtype=torch.float64)]
    for index in range(group.rank, len(pairs), group.world):
        rows = slice(*pairs[index])
        image, text = embedded.image[rows], embedded.text[first_caption[rows]]
        total, count = _loss_of_group(image, text, embedded.scalar_outputs, group.device, objective, chunk)
        sums.append(torch.tensor([[index, total, count]], dtype=torch.float64))
    everyone = group.all_gather_variable(torch.cat(sums)).cpu()
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
            loss_sum, rows_counted, _ = objective.compute_loss(outputs, {"valid": valid[rows]}, everyone)
            total, count = total + float(loss_sum.sum()), count + float(rows_counted.reshape(-1)[0])
    return total, count
