"""`mmray score` by a vision-language model: log-probabilities of the chosen and the rejected answer
of each row, for objective dpo.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from mmray.config import Config, Vlm
from mmray.data.prepare.map_shards import row_batches
from mmray.data.store.mixture import read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.data.vlm.encoder import EncodedRow
from mmray.data.vlm.reader import ADAPTERS_OFF, ConversationReader, ReferenceLogProbs
from mmray.engine import precision
from mmray.evaluation.embeddings import eval_mode
from mmray.models import lora
from mmray.models.vlm.model import Vlm as VlmModel
from mmray.storage.paths import AnyPath
from mmray.training.evaluate_export import cached_model, load_model

MIN_BATCH_TOKENS = 8192  # tokens of a forward pass, unless a row has more


@dataclass(frozen=True)
class ReferenceJob:
    """Inputs of a task that computes the log-probabilities of the answers of a shard.

    Attributes:
        config: Settings of the reference model.
        checkpoint: Folder of its checkpoint; None: `model.weights`.
        name: Name of the columns, NAME_chosen and NAME_rejected.
        weights_digest: `hash_weights` of the model.
        processor_digest: `ProcessorEncoder.digest` of its processor.
    """

    config: Config
    checkpoint: str | None
    name: str
    weights_digest: str
    processor_digest: str
    captions: None = None

    @property
    def group(self) -> str:
        """Folder in `columns/` with the file IDENTITY."""
        return f"{self.name}_chosen"

    @property
    def digest(self) -> str:
        """Hash of the model and of how it reads rows."""
        parts = f"{self.weights_digest} {self.processor_digest}"
        return hashlib.sha256(parts.encode()).hexdigest()

    @property
    def identity(self) -> dict[str, str]:
        """What a run compares with its own weights and processor."""
        return {"weights_digest": self.weights_digest, "processor": self.processor_digest}

    @property
    def types(self) -> dict[str, str]:
        """Types of the columns that are written."""
        return {f"{self.name}_chosen": "double", f"{self.name}_rejected": "double"}

    def compute(self, prepared: PreparedSet) -> dict[str, pa.Array]:
        """Return the columns of the rows of a shard; null for a row that the model cannot read, or
        without a rejected answer.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = cached_model(self.config, self.checkpoint, self.digest, device)
        assert isinstance(model, VlmModel)
        config = self.config
        max_pixels = max(config.prepare.max_pixels, prepared.max_pixels)
        references = ReferenceLogProbs(ADAPTERS_OFF)
        assert isinstance(config.model, Vlm)
        reader = ConversationReader(prepared, config.model, max_pixels, references=references)
        reader.encoder = model.encoder  # otherwise the processor is loaded twice
        values = np.full((prepared.num_rows, 2), np.nan)
        autocast = precision.select_precision(config.train.precision, device).autocast()
        collate = model.collator(pairs=True)
        max_tokens = max(MIN_BATCH_TOKENS, config.max_row_tokens)
        with eval_mode(model), torch.no_grad(), autocast:
            for numbers, rows in _batches(prepared, reader, max_tokens):
                batch = {name: each.to(device) for name, each in collate(rows).items()}
                values[numbers] = model(batch)["log_probs"].double().cpu().numpy()
        return {
            name: pa.array(column, mask=np.isnan(column))
            for name, column in zip(self.types, values.T.copy(), strict=True)
        }


def plan_references(config: Config, checkpoint: AnyPath | None, name: str) -> ReferenceJob:
    """Return the job that computes the log-probabilities by a vision-language model."""
    model = lora.merge_adapters(load_model(config, checkpoint))
    assert isinstance(model, VlmModel)
    path = None if checkpoint is None else str(checkpoint)
    return ReferenceJob(config, path, name, lora.hash_weights(model), model.encoder.digest)


def _batches(
    prepared: PreparedSet, reader: ConversationReader, max_tokens: int
) -> Iterator[tuple[list[int], list[EncodedRow]]]:
    """Yield the numbers of rows that have both answers, and their encoded rows, by tokens."""
    numbers: list[int] = []
    rows: list[EncodedRow] = []
    longest = 0
    for part in row_batches(prepared):
        for number, row in zip(part.tolist(), read_each(prepared, part), strict=True):
            encoded = None
            if isinstance(row, Row) and row.checksum_ok:
                with suppress(*reader.row_errors):
                    encoded = reader.encode_row(row)
            if encoded is None:
                continue
            tokens = max(len(each.input_ids) for each in encoded.conversations)
            if rows and 2 * max(longest, tokens) * (len(rows) + 1) > max_tokens:
                yield numbers, rows
                numbers = []
                rows = []
                longest = 0
            numbers.append(number)
            rows.append(encoded)
            longest = max(longest, tokens)
    if rows:
        yield numbers, rows
