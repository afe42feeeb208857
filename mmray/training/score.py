"""`mmray score`: similarity of image and caption of each row of a prepared set, by a model.

Tasks embed rows with the functions of the evaluation; the scores are a column of the set.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import torch
from torch import nn

from mmray.builtin import COLUMNS, is_column_name
from mmray.cluster.connect import data_session
from mmray.config import Cluster, Config
from mmray.data.prepare.map_shards import map_shards
from mmray.data.prepare.pipeline import PrepareProgress
from mmray.data.prepare.tasks import RESUME_HINT
from mmray.data.store.manifest import Manifest, read_manifest, write_manifest
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import KEPT, Columns
from mmray.data.store.row_values import COLUMNS_DIR, RowValues
from mmray.engine import precision
from mmray.engine.collectives import Group
from mmray.errors import DataError, ResourceError, UsageError, suggest
from mmray.evaluation.batches import EvalDataset
from mmray.evaluation.embeddings import embed_texts, eval_mode
from mmray.models import lora
from mmray.models.protocol import EMBEDDING_METHODS
from mmray.models.synthetic import synthetic_batch
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, list_names, to_path, write_atomic
from mmray.training import RunReporter
from mmray.training.evaluate_export import load_model, open_model, pretrained_config

IDENTITY = "score.json"  # file in the folder of the scores that names the model that wrote them


@dataclass(frozen=True)
class ScoreJob:
    """Inputs of a task that scores a shard.

    Attributes:
        config: Settings of the model.
        tokenizer_json: Content of its tokenizer.json.
        checkpoint: Folder of the checkpoint; None: `model.weights`.
        name: Name of the column of scores.
        with_embeddings: Whether to write the embeddings of the images too.
        captions: Column of the captions to score; None: the set has one column.
        digest: Hash of the model, by which a process finds it if it has loaded it before.
        width: Dimensions of its embeddings.
    """

    config: Config
    tokenizer_json: str
    checkpoint: str | None
    name: str
    with_embeddings: bool
    captions: str | None
    digest: str
    width: int

    @property
    def embedding_name(self) -> str:
        """Name of the column of embeddings, such as `clip_score_embedding`."""
        return f"{self.name}_embedding"

    @property
    def types(self) -> dict[str, str]:
        """Types of the columns that are written: {"clip_score": "double"} and, with embeddings,
        {"clip_score_embedding": "float16[512]"} for the width 512.
        """
        embedding = {self.embedding_name: f"float16[{self.width}]"} if self.with_embeddings else {}
        return {self.name: "double"} | embedding

    @property
    def columns(self) -> Columns:
        """The columns for the manifest: each is in a folder of its own."""
        return {name: {name: kind} for name, kind in self.types.items()}


def score_set(
    address: str,
    weights: str,
    name: str,
    with_embeddings: bool,
    captions: str | None,
    batch: int,
    cluster: Cluster,
    reporter: RunReporter,
) -> Manifest:
    """Write the cosine of the embeddings of image and caption of each row of a set (the mean over
    its captions) as a column of the set.

    Args:
        address: Folder or URI of the prepared set.
        weights: A run, or a folder saved by transformers, a hub name, or an open_clip checkpoint.
        name: Name of the column.
        with_embeddings: Also write the embeddings of the images, as a column NAME_embedding.
        captions: Column of the captions to score, if the set has several; None: the first.
        batch: Rows that are embedded at a time.
        cluster: The `cluster` section: which Ray cluster and devices to use.

    Returns:
        The manifest with the new columns in `columns`: a Manifest with `num_rows`,
        `num_quarantined`, `reasons` (number of quarantined rows by reason), `splits` (number of
        rows by split) and others.

    Raises:
        UsageError: The weights cannot be loaded or embed no images and texts, or the set has
            another column of this name.
        DataError: The set cannot be opened, or no row has one image.
        ResourceError: Storage or cluster failed, maybe temporarily.
    """
    prepared = PreparedSet.open(address)
    if not prepared.rows_by_num_images.get(1):
        raise DataError(
            f"{prepared.folder} has no row of one image, and score compares an image with its "
            "captions"
        )
    job = _plan(prepared, weights, name, with_embeddings, captions, batch, reporter)
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
            manifest = replace(manifest, columns=manifest.columns | job.columns)
            write_manifest(prepared.folder, manifest)
    except OSError as error:
        raise ResourceError(f"score failed at {address}: {error}. {RESUME_HINT}") from error
    return manifest


def _plan(
    prepared: PreparedSet,
    weights: str,
    name: str,
    with_embeddings: bool,
    captions: str | None,
    batch: int,
    reporter: RunReporter,
) -> ScoreJob:
    """Load the model once, before Ray starts, and check that it can score the set."""
    path = to_path(weights)
    if "/" in weights and not path.exists() and path.parent.exists():  # no name of the hub
        hint = suggest(path.name, list_names(path.parent))
        raise UsageError(f"--weights {weights}: there is no such run or file; {hint}")
    source = path if (path / "config.yaml").exists() else pretrained_config(weights)
    config, tokenizer_json, checkpoint = open_model(source, None, reporter.log)
    config = config.replace(evaluate=config.evaluate.replace(batch=batch))
    columns = prepared.manifest.text_columns
    if captions is not None and captions not in columns:
        hint = suggest(captions, columns) if columns else "its captions are of one column"
        raise UsageError(
            f"--captions {captions}: {prepared.folder} has no such column of captions; {hint}"
        )
    scored = columns[:1] if captions is None else (captions,)
    kept = prepared.manifest.columns.get(KEPT, {})
    if not is_column_name(name) or name in (*COLUMNS, KEPT):
        raise UsageError(
            f"--name {name}: must be a name of letters, digits and _ that no column has"
        )
    for column in (name, f"{name}_embedding"):
        if column in kept:
            raise UsageError(f"--name {name}: the set keeps a column `{column}` of its source")
    model: Any = load_model(config, checkpoint)
    missing = [method for method in EMBEDDING_METHODS if not callable(getattr(model, method, None))]
    if missing or config.model.takes_clips:
        raise UsageError(
            f"--weights {weights}: a model of kind {config.model.kind} does not embed one image "
            "and its caption; use weights of clip, siglip, two_tower or towers of images"
        )
    images = synthetic_batch(config.model.inputs, vocab_size=1, rows=2, device="cpu")["image"]
    with torch.no_grad():
        width = model.embed_image(images).shape[1]
    digest = hashlib.sha256(repr((config.model, scored)).encode())
    digest.update(tokenizer_json.encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return ScoreJob(
        config,
        tokenizer_json,
        None if checkpoint is None else str(checkpoint),
        name,
        with_embeddings,
        scored[0] if scored else None,
        digest.hexdigest(),
        width,
    )


def _check_identity(folder: AnyPath, job: ScoreJob, weights: str) -> None:
    """Raise UsageError if the column was written by another model; otherwise write which it is."""
    (folder / COLUMNS_DIR / job.name).mkdir(parents=True, exist_ok=True)
    file = folder / COLUMNS_DIR / job.name / IDENTITY
    identity = {"digest": job.digest, "weights": weights, "captions": job.captions}
    before = orjson.loads(file.read_bytes()) if file.exists() else identity
    if before["digest"] != job.digest:
        reason = f"{weights} is another model"
        if before["captions"] != job.captions:
            reason = f"it is of the captions `{before['captions']}`, not `{job.captions}`"
        raise UsageError(
            f"--name {job.name}: {folder} has this column of {before['weights']}, and {reason}; "
            f"choose another --name, or delete {file.parent}"
        )
    write_atomic(file, orjson.dumps(identity))


def _score_shards(prepared: PreparedSet, job: ScoreJob, reporter: RunReporter) -> None:
    before = RowValues(prepared.folder, job.columns)
    shards = prepared.shards
    total = sum(shard.num_rows for shard in shards)
    done = sum(shard.num_rows for shard in shards if before.has(shard.key))
    if done:
        reporter.log(f"{done:,} of {total:,} rows have scores already", "resumed")
    values = map_shards(
        prepared,
        job.types,
        partial(_score_rows, job=job),
        lambda *rows: reporter.prepare_progress(PrepareProgress("score", *rows)),
        runs_model=True,
    )
    reason = "cannot be read"
    if job.captions is not None:
        reason += f", or have no caption of {job.captions},"
    if missing := values.num_missing([shard.key for shard in shards], job.name):
        reporter.log(f"{missing:,} rows {reason} and have no score", "unreadable")


# The model of this process by its digest: loading one takes seconds.
_MODELS: dict[str, nn.Module] = {}


def _score_rows(prepared: PreparedSet, job: ScoreJob) -> dict[str, pa.Array]:
    """Return the columns of scores of the rows of a shard."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if job.digest not in _MODELS:
        _MODELS.clear()
        checkpoint = None if job.checkpoint is None else to_path(job.checkpoint)
        _MODELS[job.digest] = lora.merge_adapters(load_model(job.config, checkpoint)).to(device)
    if job.captions is not None:
        prepared = prepared.with_captions({job.captions: 1.0})
    scores, embeddings = embed_rows(_MODELS[job.digest], prepared, job, device)
    columns = {job.name: pa.array(scores, mask=np.isnan(scores))}
    if job.with_embeddings:
        flat = pa.array(embeddings.astype(np.float16).ravel())
        mask = pa.array(~embeddings.any(axis=1))
        columns[job.embedding_name] = pa.FixedSizeListArray.from_arrays(flat, job.width, mask=mask)
    return columns


@torch.no_grad()
def embed_rows(
    model: Any, prepared: PreparedSet, job: ScoreJob, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Return the score and the embedding of the image of each row of a set.

    Args:
        model: The model, on `device`, with `embed_image(pixels)` and `embed_text(input_ids,
            attention_mask)`.
        job: Settings of the model.

    Returns:
        The mean cosine of a row's image and its captions, float64 [N], NaN for a row without
        captions or that cannot be read; and L2-normalized embeddings, float32 [N, D], zeros for one
        that cannot be read.
    """
    settings = job.config.evaluate
    max_pixels = max(job.config.prepare.max_pixels, prepared.max_pixels)
    data = EvalDataset(prepared, job.config.model.inputs, job.tokenizer_json, settings, max_pixels)
    scores = np.full(prepared.num_rows, np.nan)
    embeddings = np.zeros((prepared.num_rows, job.width), np.float32)
    autocast = precision.select_precision(job.config.train.precision, device).autocast()
    with eval_mode(model), autocast:
        for batch in data.batches():
            image = model.embed_image(batch["image"].to(device)).float().cpu()
            text = embed_texts(model, batch, settings.batch, Group(device=device))
            rows = batch["row"]
            owner = torch.searchsorted(rows, batch["caption_row"])
            cosines = (image[owner] * text.reshape(len(owner), image.shape[1])).sum(dim=1).double()
            sums = torch.zeros(len(rows), dtype=torch.float64).index_add(0, owner, cosines)
            counts = torch.bincount(owner, minlength=len(rows))
            scores[rows.numpy()] = (sums / counts).numpy()
            embeddings[rows.numpy()] = image.numpy()
    return scores, embeddings
