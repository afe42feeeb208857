"""Retrieval between texts, audio and video: every direction that a model embeds."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mmray.data.store.stored_row import Row, hash_key
from mmray.data.stream.blocks import NO_LABEL, Block
from mmray.data.stream.collate import Batch
from mmray.errors import DataError
from mmray.evaluation import retrieval
from mmray.evaluation.batches import EvalDataset, SaveExamples
from mmray.evaluation.classification import HeadHits
from mmray.evaluation.embeddings import eval_mode, gather_rows, steps_in_lockstep
from mmray.evaluation.examples import RetrievalExamples
from mmray.evaluation.retrieval import RetrievalItems, number_equal, rank_direction
from mmray.models.protocol import class_scores
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Objective

if TYPE_CHECKING:
    from mmray.config import ClipInputs
    from mmray.engine.collectives import Group


class _Clip(NamedTuple):
    """A row with one of its texts."""

    columns: Block  # inputs of the model
    text: str
    identity: list[int]  # hash of the text, index of the row, number of the text in the row, label


class ClipEvaluator(EvalDataset):
    """Computes retrieval metrics of a model of audio and video on held-out clips.

    A clip is a row with one of its texts: the middle of the text's span, if it is longer than
    `model.inputs.clip_s`. The constructor is that of EvalDataset; `inputs` are ClipInputs.

    `score(model, group, objective, global_batch_size)` returns metrics by name, such as
    `recall_at_1/audio_to_text`.
    """

    inputs: ClipInputs

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Objective | None,
        global_batch_size: int,
        save_examples: SaveExamples | None = None,
    ) -> dict[str, float]:
        """Return the metrics of the model on the held-out clips.

        A collective call of all ranks, each of which reads its part of the rows.

        Args:
            model: The unwrapped model, whose outputs are embeddings such as `audio_embed`. It may
                be sharded by FSDP, whose ranks must make the same calls; ranks with fewer clips
                then embed synthetic ones.
            save_examples: Called with examples of hits and misses, what `RetrievalExamples.values`
                returns (the content of examples.json). Given on one rank or none; None: not called.

        Returns:
            Equal on all ranks: `recall_at_K/DIRECTION` (K 1, 5, 10) and `median_rank/DIRECTION` for
            each direction A_to_B of two of `text`, `audio` and `video`, such as `audio_to_text`,
            `recall_at_1/mean`, `rows` (number of clips) and `bad_rows`; with a classification head
            `classification/top_1`, `classification/top_5` (more than 5 classes) and
            `classification/rows`. A clip that lacks a modality is left out of its directions.
            Recall and accuracy are 0 to 1. In directions from or to text, all clips with the same
            text are correct results.

        Raises:
            DataError: No clip is readable, or no two modalities have a clip in common.
        """
        parts, identities, hits = self._embed(model, group)
        # After all batches, because the ranks may have different numbers of them.
        embeds = {name: gather_rows(each, group) for name, each in parts.items()}
        identity = gather_rows(identities, group)
        bad_rows = self.count_bad_rows(len(identity), group)
        metrics = hits.metrics(group)
        clip_s = self.inputs.clip_s
        examples = RetrievalExamples(self.prepared, self.max_pixels, clip_s)
        present = {name: embed.any(dim=1) for name, embed in embeds.items()}
        for query, gallery in permutations(embeds, 2):
            clips = (present[query] & present[gallery]).nonzero().flatten()
            if not len(clips):
                continue
            direction = f"{query}_to_{gallery}"
            queries = _items(query, embeds[query][clips], identity[clips])
            results = _items(gallery, embeds[gallery][clips], identity[clips])
            positives = torch.stack([queries.embed_index, results.embed_index])
            ranked = rank_direction(queries, results, positives, group)
            metrics |= retrieval.retrieval_metrics(ranked.ranks, direction)
            if save_examples is not None:
                examples.add(direction, ranked)
        if not any(name.startswith("recall_at_1/") for name in metrics):
            raise DataError(
                f"no clip of {self.prepared.folder} has two of {', '.join(embeds)}, which are "
                "to be compared"
            )
        if save_examples is not None:
            save_examples(examples.values(len(identity)))
        counts = {"rows": float(len(identity)), "bad_rows": float(bad_rows)}
        metrics |= retrieval.mean_recall(metrics) | counts
        return self.add_own_metrics(metrics, group, embeds, identity[:, 3])

    def _embed(
        self, model: nn.Module, group: Group
    ) -> tuple[dict[str, list[Tensor]], list[Tensor], HeadHits]:
        """Embed the clips of this rank's rows.

        Returns parts of the embeddings by modality; parts of the hash of the text, the row, the
        number of the text and the label of each clip; and the correct predictions of the
        classification head.
        """
        with eval_mode(model):
            # A rank without rows needs the names and the widths, too.
            synthetic = synthetic_batch(self.inputs, 1, 2, group.device)
            outputs = model(synthetic)
            parts = {
                name.removesuffix("_embed"): [embed[:0].float().cpu()]
                for name, embed in outputs.items()
                if name.endswith("_embed")
            }
            identities = [torch.zeros(0, 4, dtype=torch.int64)]
            hits = HeadHits(class_scores(outputs, synthetic))
            batches = self.batches(group.rank, group.world_size, self.settings.limit)
            for own in steps_in_lockstep(model, batches, group):
                batch = synthetic if own is None else own
                outputs = model({name: column.to(group.device) for name, column in batch.items()})
                if own is None:
                    continue
                for name, embeds in parts.items():
                    embeds.append(outputs[f"{name}_embed"].float().cpu())
                identities.append(own["identity"])
                hits.add(class_scores(outputs, own))
        return parts, identities, hits

    def _convert(self, number: int, row: Row) -> list[Any]:
        label = NO_LABEL if row.label is None else row.label
        clips = []
        for text_number in range(max(1, len(row.texts))):
            clip = row.with_text(text_number)
            text = self.encoder.format_caption("".join(clip.texts))
            identity = [hash_key(text or row.key), number, text_number, label]
            columns = self.reader.encode_row(row, text_number)
            clips.append(_Clip(columns, text, identity))
        return clips

    def _collate(self, items: list[Any]) -> Batch:
        return self.collate_inputs(items, [clip.text for clip in items]) | {
            "identity": torch.tensor([clip.identity for clip in items]),
            "label": torch.tensor([clip.identity[3] for clip in items]),
            "valid": torch.ones(len(items), dtype=torch.bool),
        }


def _items(modality: str, embeds: Tensor, identity: Tensor) -> RetrievalItems:
    """Return the items of a modality: equal texts are one, which is correct for all their clips."""
    locations = identity[:, 1:3]
    if modality != "text":
        return RetrievalItems(embeds, torch.arange(len(embeds)), locations)
    text_id, first = number_equal(identity[:, 0])
    return RetrievalItems(embeds[first], text_id, locations)
