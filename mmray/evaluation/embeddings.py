"""Embeddings of held-out rows, computed by all ranks; memory does not grow with their size.

They are in temporary files that are mapped into memory, so the operating system writes their pages
back when memory is short. A million rows with one caption and 512 dimensions need 4.1 GB of disk on
each rank, and 0.2 GB of memory to find equal images and captions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mmray.data.stream.collate import Batch
from mmray.errors import ResourceError
from mmray.evaluation import retrieval
from mmray.evaluation.batches import EvalDataset, Group
from mmray.evaluation.retrieval import EmbeddingSet, HeadHits, first_index
from mmray.models.protocol import as_model, is_sharded
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Objective

TOP_K = (1, 5)
ROW_COLUMNS = ("row", "label", "image_hash")
CAPTION_COLUMNS = ("caption_row", "text_hash")


class RowFile:
    """Rows of numbers in a temporary file, which is deleted with its last tensor.

    `write` appends or replaces rows [N, D], and `tensor` returns all rows as one tensor that is
    mapped from the file.

    Args:
        width: Numbers D of a row.
        dtype: Type of the numbers, as numpy takes it, such as np.float32 or np.int64.

    Attributes:
        num_rows: Number of rows that were written.
    """

    def __init__(self, width: int, dtype: Any = np.float32) -> None:
        self.width = width
        self.num_rows = 0
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(prefix="mmray-evaluate-")  # noqa: SIM115 - for tensors

    def write(self, rows: Tensor, first: int | None = None) -> None:
        """Write rows, in place of those that were written at the same indices.

        Args:
            rows: Tensor [N, D] on the CPU, of the dtype with which the file was created (float32 by
                default); it is not converted.
            first: Index of the first of them in the file; None: after the last row.

        Raises:
            ResourceError: The disk is full.
        """
        first = self.num_rows if first is None else first
        try:
            self._file.seek(first * self.width * self._dtype.itemsize)
            self._file.write(rows.contiguous().numpy().tobytes())
        except OSError as error:
            raise ResourceError(
                f"cannot write the embeddings of the evaluation to {tempfile.gettempdir()}: "
                f"{error.strerror or error}. Set TMPDIR to a larger disk, or lower --evaluate.limit"
            ) from error
        self.num_rows = max(self.num_rows, first + len(rows))

    def empty(self) -> RowFile:
        """Return a new file without rows, for rows of the same width and type."""
        return RowFile(self.width, self._dtype)

    def tensor(self) -> Tensor:
        """Return all rows, [N, D], without reading them into memory."""
        shape = (self.num_rows, self.width)
        if not self.num_rows:
            return torch.from_numpy(np.zeros(shape, self._dtype))
        self._file.flush()
        return torch.from_numpy(np.memmap(self._file, self._dtype, "r+", shape=shape))


class Step(NamedTuple):
    """One of the steps that all ranks take together to embed their batches.

    Attributes:
        batch: Rows of this rank, as its iterator of batches yields them; None: this rank has no
            rows left, but another rank has.
        num_calls: Number of calls of the model in which every rank embeds its captions; None: as
            many as the batch needs.
    """

    batch: Any
    num_calls: int | None


@torch.no_grad()
def embed_dataset(
    model: Any, data: EvalDataset, group: Group, objective: Objective, with_texts: bool = True
) -> EmbeddingSet:
    """Embed the held-out rows of all ranks; a collective call.

    Args:
        model: The unwrapped model, with the methods `embed_image` and `embed_text`. It may be
            sharded by FSDP, whose ranks must make the same calls; ranks with fewer rows then embed
            synthetic ones.
        data: The held-out rows, of which each rank reads a part.
        group: The ranks, which exchange their embeddings.
        objective: The objective of the run; names the scalar outputs to keep, such as the
            temperature.
        with_texts: Embed the captions; False: the result has no captions.

    Returns:
        An EmbeddingSet with the rows of all ranks, on each rank, on the CPU: `image` float32 [N,
        D], `text` float32 [U, D], `caption_row` and `text_id` int64 [C], `label` int64 [N] and
        others.
    """
    text_rows = data.settings.batch

    def text_calls(batch: Batch) -> int:
        return -(-len(batch["input_ids"]) // text_rows) if with_texts else 0

    # In files too: small tensors between large ones would keep freed memory from being returned.
    columns = {name: RowFile(1, np.int64) for name in (*ROW_COLUMNS, *CAPTION_COLUMNS)}
    hits: dict[str, Tensor] = {}
    with eval_mode(model):
        # Synthetic rows: a rank without rows needs the width and the scalar outputs too. Two,
        # because torch.compile makes separate graphs for one.
        synthetic = synthetic_batch(data.inputs, vocab_size=1, rows=2, device=group.device)
        outputs = model(synthetic)
        width = model.embed_image(synthetic["image"]).shape[1]
        heads = as_model(model).head_scores(synthetic)
        hits = {name: torch.zeros(len(TOP_K) + 1, dtype=torch.int64) for name in heads}
        images = RowFile(width)
        texts = RowFile(width)
        batches = data.batches(group.rank, group.world_size, data.settings.limit)
        for batch, num_calls in steps_in_lockstep(model, batches, group, text_calls):
            pixels = (synthetic if batch is None else batch)["image"].to(group.device)
            image = model.embed_image(pixels).float().cpu()
            if with_texts:
                tokens = _no_captions(synthetic) if batch is None else batch
                text = embed_texts(model, tokens, text_rows, group.device, num_calls)
            for name, head in _head_scores(model, batch, synthetic, group.device).items():
                if batch is not None:
                    hits[name] += topk_hits(head.scores.float().cpu(), head.label.cpu())
            if batch is None:
                continue
            images.write(image)
            for name in ROW_COLUMNS:
                columns[name].write(batch[name])
            if with_texts:
                texts.write(text)
                for name in CAPTION_COLUMNS:
                    columns[name].write(batch[name])
    gathered = {name: gather_rows(column, group).flatten() for name, column in columns.items()}
    return _merge_equal(
        gathered,
        gather_rows(images, group),
        gather_rows(texts, group),
        heads={
            name: HeadHits(
                group.all_gather_variable(hits[name][None]).sum(0).cpu(),
                head.num_classes,
                head.unit,
            )
            for name, head in heads.items()
        },
        scalar_outputs={name: outputs[name].detach() for name in objective.scalar_output_names},
    )


def in_lockstep(model: nn.Module, group: Group) -> bool:
    """Return whether all ranks must make the same calls of a model, because FSDP2 shards it and its
    forwards have collectives.
    """
    return group.world_size > 1 and is_sharded(model)


def steps_in_lockstep(
    model: nn.Module,
    batches: Iterable[Any],
    group: Group,
    calls_of: Callable[[Any], int] = lambda _: 1,
) -> Iterator[Step]:
    """Yield the batches of this rank, as many steps on every rank if the model is sharded.

    A rank that has fewer batches than another one then gets None in the last steps.

    Args:
        group: The process group of the ranks (a Group of mmray; of one rank for a single process),
            which make this call together.
        calls_of: Called with a batch; returns how many calls of the model it needs, such as to
            embed its captions.

    Yields:
        A Step: `batch`, or None for a rank that has no batches left, and `num_calls`, the number of
        calls that every rank makes in this step: the largest one that a rank needs; None if the
        model is not sharded.
    """
    if not in_lockstep(model, group):
        for batch in batches:
            yield Step(batch, None)
        return
    remaining = iter(batches)
    while True:
        local = next(remaining, None)
        counts = torch.tensor([[int(local is not None), 0 if local is None else calls_of(local)]])
        has_rows, num_calls = group.all_gather_variable(counts).amax(dim=0).tolist()
        if not has_rows:
            return
        yield Step(local, num_calls)


def _no_captions(synthetic: Batch) -> Batch:
    return {name: synthetic[name][:0] for name in ("input_ids", "attention_mask")}


def _head_scores(
    model: Any, batch: Batch | None, synthetic: Batch, device: torch.device
) -> dict[str, Any]:
    """Scores of the heads for a batch, each image with its first caption."""
    if batch is None:
        return as_model(model).head_scores(synthetic)
    first = torch.searchsorted(batch["caption_row"], batch["row"])
    captions = {name: batch[name][first] for name in ("input_ids", "attention_mask")}
    on_device = {name: column.to(device) for name, column in (batch | captions).items()}
    return as_model(model).head_scores(on_device)


@torch.no_grad()
def embed_texts(
    model: Any, tokens: Batch, rows: int, device: torch.device, num_calls: int | None = None
) -> Tensor:
    """Embed captions, some at a time.

    Args:
        model: The model; its `embed_text(input_ids, attention_mask)` returns embeddings [B, D].
        tokens: `input_ids` and `attention_mask` int64 [C, T].
        rows: Captions per call.
        num_calls: Number of calls, at least as many as needed; the others embed one token, because
            ranks of a sharded model must make the same calls. None: as many as needed.

    Returns:
        Float32 [C, D] on the CPU; without captions [0, 0].
    """
    ids = tokens["input_ids"]
    starts = range(0, len(ids), rows)
    parts = [
        model.embed_text(
            ids[start : start + rows].to(device),
            tokens["attention_mask"][start : start + rows].to(device),
        )
        for start in starts
    ]
    for _ in range((num_calls or 0) - len(starts)):
        token = torch.zeros(2, 1, dtype=torch.int64, device=device)
        parts.append(model.embed_text(token, torch.ones_like(token))[:0])
    return torch.cat([part.float().cpu() for part in parts]) if parts else torch.zeros(0, 0)


def gather_rows(local: RowFile, group: Group) -> Tensor:
    """Gather the rows of all ranks; a collective call.

    Args:
        local: The rows of this rank.

    Returns:
        All rows [N, D] on the CPU, mapped from a file, in rank order, which is that of the rows in
        the set.
    """
    rows = local.tensor()
    if group.world_size == 1:
        return rows
    counts = group.all_gather_variable(torch.tensor([len(rows)])).tolist()
    size = retrieval.CHUNK
    whole = local.empty()
    for start in range(0, max(counts), size):
        gathered = group.all_gather_variable(rows[start : start + size]).cpu()
        parts = gathered.split([min(size, max(0, count - start)) for count in counts])
        for part, offset in zip(parts, accumulate([0, *counts]), strict=False):
            if len(part):
                whole.write(part, offset + start)
    return whole.tensor()


def _merge_equal(
    columns: dict[str, Tensor],
    image: Tensor,
    text: Tensor,
    heads: dict[str, HeadHits],
    scalar_outputs: dict[str, Tensor],
) -> EmbeddingSet:
    """Merge rows with equal images, which get the captions of all, and equal captions.

    Equal captions may have embeddings that differ by rounding; the first is kept.

    Args:
        columns: ROW_COLUMNS int64 [N] and CAPTION_COLUMNS int64 [C], by row.
        image: Float32 [N, D].
        text: Float32 [C, D].
        heads: Of the result.
        scalar_outputs: Of the result.
    """
    row = columns["row"]
    first_of_image = first_index(_dense_ids(columns["image_hash"]))
    first_row = first_of_image[_dense_ids(columns["image_hash"])]
    own_row = columns["caption_row"]
    caption_row = row[first_row[torch.searchsorted(row, own_row)]]
    # captions of one row keep their order
    by_caption = caption_row.argsort(stable=True)
    text_id = _dense_ids(columns["text_hash"][by_caption])
    return EmbeddingSet(
        row=row[first_of_image],
        image=_select(image, first_of_image),
        label=columns["label"][first_of_image],
        caption_row=caption_row[by_caption],
        own_row=own_row[by_caption],
        text=_select(text, by_caption[first_index(text_id)]),
        text_id=text_id,
        heads=heads,
        scalar_outputs=scalar_outputs,
    )


def _dense_ids(values: Tensor) -> Tensor:
    """Number equal values 0, 1, ... in the order in which they first occur."""
    _, by_value = values.unique(return_inverse=True)
    order = first_index(by_value).argsort()
    return order.argsort()[by_value]


def _select(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows[index]`, in a file; `rows` itself if these are all of them in their order."""
    if torch.equal(index, torch.arange(len(rows))):
        return rows
    selected = RowFile(rows.shape[1])
    for part in index.split(retrieval.CHUNK):
        selected.write(rows[part])
    return selected.tensor()


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


def topk_hits(scores: Tensor, label: Tensor) -> Tensor:
    """Count the rows whose class is in the top 1 and in the top 5; counts of batches can be added.

    Args:
        scores: Score of each class, float [N, C].
        label: Class of each row, int64 [N]; rows with a number outside 0..C-1 are not counted.

    Returns:
        Number of rows in the top 1, in the top 5, and with a valid label, int64 [3].
    """
    return count_hits(classes_before(scores, label))


def count_hits(before: Tensor) -> Tensor:
    """Return the number of rows in the top 1, in the top 5, and of all, int64 [3].

    Args:
        before: Number of classes that rank before the correct one, int64 [N].
    """
    return torch.stack([*((before < k).sum() for k in TOP_K), torch.tensor(len(before))])


def classes_before(scores: Tensor, label: Tensor, tie: float = 0.0) -> Tensor:
    """Return for each row with a valid label how many classes rank before the correct one.

    Args:
        scores: Score of each class, float [N, C].
        label: Class of each row, int64 [N]; rows with a number outside 0..C-1 are omitted.
        tie: A class ranks before the correct one unless its score is lower by more than this. NaN
            of a class ranks before it too; with NaN of the correct class all classes do.

    Returns:
        int64 [M] for the M rows with a valid label; 0: the correct class has the highest score.
    """
    num_classes = scores.shape[1]
    labeled = (label >= 0) & (label < num_classes)
    scores = scores[labeled]
    target = scores.gather(1, label[labeled][:, None])
    before = (~(scores < target - tie)).sum(dim=1) - 1
    return before + target.isnan().squeeze(1) * num_classes
