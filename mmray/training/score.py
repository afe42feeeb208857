"""`mmray score`: similarity of image and caption of each row of a prepared set by a model, or by a
vision-language model the log-probabilities of its chosen and rejected answers, for objective dpo.

Tasks embed rows with the functions of the evaluation; the scores are a column of the set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import torch

from mmray.builtin import COLUMNS, is_column_name
from mmray.cluster.connect import data_session
from mmray.config import Cluster, Config, Vlm
from mmray.data.prepare.map_shards import map_shards, row_batches
from mmray.data.prepare.pipeline import PrepareProgress
from mmray.data.prepare.tasks import RESUME_HINT
from mmray.data.store.manifest import Manifest, read_manifest, write_manifest
from mmray.data.store.mixture import read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import KEPT, separate_columns
from mmray.data.store.row_values import COLUMNS_DIR, RowValues
from mmray.data.store.stored_row import Row
from mmray.data.vlm.encoder import EncodedRow
from mmray.data.vlm.reader import ADAPTERS_OFF, ConversationReader, ReferenceLogProbs
from mmray.engine import precision
from mmray.engine.collectives import Group
from mmray.errors import DataError, ResourceError, UsageError, suggest
from mmray.evaluation.batches import EvalDataset
from mmray.evaluation.embeddings import embed_texts, eval_mode
from mmray.models import lora
from mmray.models.protocol import can_embed
from mmray.models.synthetic import synthetic_batch
from mmray.models.vlm.model import Vlm as VlmModel
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, list_names, to_path, write_atomic
from mmray.training import RunReporter
from mmray.training.references import IDENTITY, embedding_columns
from mmray.training.saved_model import (
    SavedModel,
    cached_model,
    open_model,
    pretrained_config,
)

MIN_BATCH_TOKENS = 8192  # of answers in a forward pass, unless a row has more
DEFAULT_NAMES = {False: "clip_score", True: "reference"}  # by whether the model generates text


@dataclass(frozen=True)
class ScoreJob:
    """Inputs of a task that scores a shard.

    Attributes:
        saved: The model.
        name: Name of the column of scores.
        with_embeddings: Whether to write the embeddings of images and captions too.
        captions: Column of the captions to score; None: the set has one column.
        digest: Hash of the model, by which a process finds it if it has loaded it before.
        width: Dimensions of its embeddings.
        logit_scale: Factor of its cosines in its own loss; None: it has none.
    """

    saved: SavedModel
    name: str
    with_embeddings: bool
    captions: str | None
    digest: str
    width: int
    logit_scale: float | None = None

    @property
    def types(self) -> dict[str, str]:
        """Types of the columns that are written: {"clip_score": "double"} and, with embeddings of
        the width 512, {"clip_score_captions": "list<float16[512]>", "clip_score_embedding":
        "float16[512]"}.
        """
        if not self.with_embeddings:
            return {self.name: "double"}
        captions, image = embedding_columns(self.name)
        kind = f"float16[{self.width}]"
        return {self.name: "double", captions: f"list<{kind}>", image: kind}

    @property
    def group(self) -> str:
        """Folder in `columns/` with the file IDENTITY."""
        return self.name

    @property
    def identity(self) -> dict[str, Any]:
        """Further entries of the file IDENTITY."""
        return {"logit_scale": self.logit_scale}

    @torch.no_grad()
    def compute(self, prepared: PreparedSet) -> dict[str, pa.Array]:
        """Return the columns of the rows of a shard: the mean cosine of a row's image and its
        captions, null for a row without captions or that cannot be read; and the embeddings.
        """
        model, device = cached_model(self.saved, self.digest)
        if self.captions is not None:
            prepared = prepared.with_captions({self.captions: 1.0})
        assert can_embed(model)
        config = self.saved.config
        data = EvalDataset(
            prepared,
            config.model.inputs,
            self.saved.tokenizer_json,
            config.evaluate,
            max(config.prepare.max_pixels, prepared.max_pixels),
        )
        scores = np.full(prepared.num_rows, np.nan)
        images = np.zeros((prepared.num_rows, self.width), np.float32)  # zeros: not read
        texts = [np.zeros((0, self.width), np.float32)]
        num_texts = np.zeros(prepared.num_rows, np.int64)
        autocast = precision.select_precision(config.train.precision, device).autocast()
        with eval_mode(model), autocast:
            for batch in data.batches():
                image = model.embed_image(batch["image"].to(device)).float().cpu()
                text = embed_texts(model, batch, config.evaluate.batch, Group(device=device))
                rows = batch["row"]
                owner = torch.searchsorted(rows, batch["caption_row"])
                text = text.reshape(len(owner), self.width)
                cosines = (image[owner] * text).sum(dim=1).double()
                sums = torch.zeros(len(rows), dtype=torch.float64).index_add(0, owner, cosines)
                counts = torch.bincount(owner, minlength=len(rows))
                scores[rows.numpy()] = (sums / counts).numpy()
                images[rows.numpy()] = image.numpy()
                texts.append(text.numpy())
                num_texts[rows.numpy()] = counts.numpy()
        columns = {self.name: pa.array(scores, mask=np.isnan(scores))}
        if self.with_embeddings:
            of_captions, of_image = embedding_columns(self.name)
            ends = pa.array(np.concatenate([[0], np.cumsum(num_texts)]).astype(np.int32))
            flat = self._to_arrow(np.concatenate(texts))
            columns[of_captions] = pa.ListArray.from_arrays(ends, flat)
            columns[of_image] = self._to_arrow(images, pa.array(~images.any(axis=1)))
        return columns

    def _to_arrow(self, embeddings: np.ndarray, mask: pa.Array | None = None) -> pa.Array:
        flat = pa.array(embeddings.astype(np.float16).ravel())
        return pa.FixedSizeListArray.from_arrays(flat, self.width, mask=mask)


@dataclass(frozen=True)
class ReferenceJob:
    """Inputs of a task that computes the log-probabilities of the answers of a shard.

    Attributes:
        saved: The reference model.
        name: Name of the columns, NAME_chosen and NAME_rejected.
        weights_digest: `hash_weights` of the model.
        processor_digest: `ProcessorEncoder.digest` of its processor.
    """

    saved: SavedModel
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
        model, device = cached_model(self.saved, self.digest)
        assert isinstance(model, VlmModel)
        config = self.saved.config
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
            for numbers, rows in _answer_batches(prepared, reader, max_tokens):
                batch = {name: each.to(device) for name, each in collate(rows).items()}
                values[numbers] = model(batch)["log_probs"].double().cpu().numpy()
        return {
            name: pa.array(column, mask=np.isnan(column))
            for name, column in zip(self.types, values.T.copy(), strict=True)
        }


def score_set(
    address: str,
    weights: str,
    name: str | None,
    with_embeddings: bool,
    captions: str | None,
    batch: int,
    settings: Config | None,
    cluster: Cluster,
    reporter: RunReporter,
) -> Manifest:
    """Write what `api.score` describes.

    Args:
        address: Folder or URI of the prepared set.
        name: Name of the column; None: one of DEFAULT_NAMES.
        settings: Config with the section `model.inputs` to use, of a vision-language model; None:
            that of the weights.
        cluster: The `cluster` section: which Ray cluster and devices to use.

    Returns:
        The manifest with the new columns, which are the last in `columns`.

    Raises:
        UsageError: The weights cannot be loaded or embed no images and texts, or the set has
            another column of this name.
        DataError: The set cannot be opened, or no row has one image.
        ResourceError: Storage or cluster failed, maybe temporarily.
    """
    prepared = PreparedSet.open(address)
    saved = _open_weights(weights, settings, reporter)
    config = saved.config
    name = DEFAULT_NAMES[config.model.generates_text] if name is None else name
    job: ScoreJob | ReferenceJob
    if config.model.generates_text:
        if with_embeddings or captions is not None:
            raise UsageError("--embeddings and --captions: a vision-language model has neither")
        job = _plan_references(prepared, saved, name)
    else:
        config = config.replace(evaluate=config.evaluate.replace(batch=batch))
        saved = saved._replace(config=config)
        job = _plan(prepared, weights, saved, name, captions, with_embeddings)
    if job.captions is not None:
        reporter.log(f"column {job.captions} of {prepared.folder}", "captions")
    try:
        _check_identity(prepared.folder, job, weights)
        with (
            data_session(cluster, reporter.log),
            Lease(prepared.folder, activity="being written", advice="wait for its end") as lease,
        ):
            _score_shards(prepared, job, reporter)
            lease.check()
            manifest = read_manifest(prepared.folder) or prepared.manifest
            others = {key: each for key, each in manifest.columns.items() if key not in job.types}
            manifest = replace(manifest, columns=others | separate_columns(job.types))
            write_manifest(prepared.folder, manifest)
    except OSError as error:
        raise ResourceError(f"score failed at {address}: {error}. {RESUME_HINT}") from error
    written = " and ".join(job.types)
    reporter.log(f"{written} of {manifest.num_rows:,} rows in {address}", "scored")
    return manifest


def _open_weights(weights: str, settings: Config | None, reporter: RunReporter) -> SavedModel:
    """Return the model that `--weights` names, with the inputs of `settings`."""
    path = to_path(weights)
    if "/" in weights and not path.exists() and path.parent.exists():  # no name of the hub
        hint = suggest(path.name, list_names(path.parent))
        raise UsageError(f"--weights {weights}: there is no such run or file; {hint}")
    source = path if (path / "config.yaml").exists() else pretrained_config(weights)
    saved = open_model(source, None, reporter.log)
    if settings is not None:
        config = saved.config
        if not config.model.generates_text or settings.model.kind != config.model.kind:
            raise UsageError("--config: both it and --weights must be of a vision-language model")
        model = config.model.replace(inputs=settings.model.inputs)
        config = config.replace(model=model, prepare=settings.prepare)
        saved = saved._replace(config=config)
    return saved


def _check_name(name: str, suffixes: Sequence[str], prepared: PreparedSet) -> None:
    kept = prepared.manifest.columns.get(KEPT, {})
    if not is_column_name(name) or name in (*COLUMNS, KEPT):
        raise UsageError(
            f"--name {name}: must be a name of letters, digits and _ that no column has"
        )
    for column in (name, *(f"{name}_{suffix}" for suffix in suffixes)):
        if column in kept:
            raise UsageError(f"--name {name}: the set keeps a column `{column}` of its source")


def _plan_references(prepared: PreparedSet, saved: SavedModel, name: str) -> ReferenceJob:
    _check_name(name, ("chosen", "rejected"), prepared)
    model = lora.merge_adapters(saved.load())
    assert isinstance(model, VlmModel)
    return ReferenceJob(saved, name, lora.hash_weights(model), model.encoder.digest)


def _plan(
    prepared: PreparedSet,
    weights: str,
    saved: SavedModel,
    name: str,
    captions: str | None,
    with_embeddings: bool,
) -> ScoreJob:
    """Load the model once, before Ray starts, and check that it can score the set."""
    if not prepared.rows_by_num_images.get(1):
        raise DataError(
            f"{prepared.folder} has no row of one image, and score compares an image with its "
            "captions"
        )
    columns = prepared.manifest.text_columns
    if captions is not None and captions not in columns:
        hint = suggest(captions, columns) if columns else "its captions are of one column"
        raise UsageError(
            f"--captions {captions}: {prepared.folder} has no such column of captions; {hint}"
        )
    scored = columns[:1] if captions is None else (captions,)
    _check_name(name, ("captions", "embedding"), prepared)
    config = saved.config
    model = saved.load()
    if not can_embed(model) or config.model.takes_clips:
        raise UsageError(
            f"--weights {weights}: a model of kind {config.model.kind} does not embed one image "
            "and its caption; use weights of clip, siglip, naflex, two_tower or towers of images"
        )
    batch = synthetic_batch(config.model.inputs, vocab_size=1, rows=2, device="cpu")
    with torch.no_grad(), eval_mode(model):
        embeds = model.embed_image(batch["image"])
        logit_scale = model(batch).get("logit_scale")
    if not embeds.isfinite().all():
        raise UsageError(
            f"--weights {weights}: its embeddings are not finite, so it gives no scores; the "
            "training diverged, or the file is corrupt"
        )
    digest = hashlib.sha256(repr((config.model, scored)).encode())
    digest.update(saved.tokenizer_json.encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return ScoreJob(
        saved,
        name,
        with_embeddings,
        scored[0] if scored else None,
        digest.hexdigest(),
        embeds.shape[1],
        None if logit_scale is None else float(logit_scale),
    )


def _check_identity(folder: AnyPath, job: ScoreJob | ReferenceJob, weights: str) -> None:
    """Raise UsageError if the column was written by another model; otherwise write which it is."""
    (folder / COLUMNS_DIR / job.group).mkdir(parents=True, exist_ok=True)
    file = folder / COLUMNS_DIR / job.group / IDENTITY
    identity = {"digest": job.digest, "weights": weights, "captions": job.captions} | job.identity
    before = orjson.loads(file.read_bytes()) if file.exists() else identity
    if before["digest"] != job.digest:
        reason = f"{weights} is another model, or another version of mmray wrote it"
        if before.get("weights_digest") == job.identity.get("weights_digest", ""):
            reason = "its chat template, tokenizer, limits of images or version were others"
        if before["captions"] != job.captions:
            reason = f"it is of the captions `{before['captions']}`, not `{job.captions}`"
        raise UsageError(
            f"--name {job.name}: {folder} has this column of {before['weights']}, and {reason}; "
            f"choose another --name, or delete {file.parent}"
        )
    write_atomic(file, orjson.dumps(identity))


def _score_shards(
    prepared: PreparedSet, job: ScoreJob | ReferenceJob, reporter: RunReporter
) -> None:
    before = RowValues(prepared.folder, separate_columns(job.types))
    shards = prepared.shards
    total = sum(shard.num_rows for shard in shards)
    done = sum(shard.num_rows for shard in shards if before.has(shard.key))
    if done:
        reporter.log(f"{done:,} of {total:,} rows have scores already", "resumed")
    values = map_shards(
        prepared,
        job.types,
        job.compute,
        lambda *rows: reporter.prepare_progress(PrepareProgress("score", *rows)),
        runs_model=True,
    )
    reason = "cannot be read"
    if isinstance(job, ReferenceJob):
        reason += ", have too many tokens, or have no rejected answer,"
    if job.captions is not None:
        reason += f", or have no caption of {job.captions},"
    if missing := values.num_missing([shard.key for shard in shards], job.group):
        reporter.log(f"{missing:,} rows {reason} and have no score", "unreadable")


def _answer_batches(
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
