"""Resolve a config before its run folder is created: open the sets, load the tokenizer, compute
batch and steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from mmray.config import ClipInputs, Config, Inputs, Model, Vlm
from mmray.config.data import FULL_SHUFFLE
from mmray.data.images.sample import write_once
from mmray.data.prepare.pipeline import PrepareProgress
from mmray.data.prepare.token_counts import NOT_COUNTED, token_counts
from mmray.data.rows import MAX_OVERHANG_S
from mmray.data.store.manifest import RECORD_BATCH_ROWS
from mmray.data.store.mixture import PreparedMixture, read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.selection import SELECTIONS_DIR
from mmray.data.store.shard_table import MappedArray, MappedFile
from mmray.data.store.stored_row import Row
from mmray.data.stream.blocks import NO_LABEL
from mmray.data.stream.order import ORDER_VERSION
from mmray.data.stream.reader import Teacher
from mmray.data.stream.shuffle import resolve_block_shuffle
from mmray.data.text.tokenizer import TextEncoder, declared_pad_id
from mmray.data.text.tokenizer_files import clean_as, load_tokenizer, tokenizer_file
from mmray.data.vlm.encoder import encoder_arguments
from mmray.data.vlm.families import MODEL_CONFIG, find_family, is_packable, read_config
from mmray.data.vlm.reader import ReferenceLogProbs
from mmray.data.vlm.sample import generate_model
from mmray.data.vlm.token_counter import ProcessorCounter, UnusedTextSearch
from mmray.engine.batch import BatchShape, resolve_batch_shape, total_steps
from mmray.errors import DataError, Log, ResourceError, UsageError
from mmray.models.pretrained import normalization, weights_folder
from mmray.storage.paths import RemotePath, to_path
from mmray.training import RunReporter
from mmray.training.references import check_held_out, open_references, open_teacher
from mmray.training.sets import TrainSet, match_sets, open_sets

# Objectives in which the texts of other rows are negatives.
_TEXT_CONTRASTS = {"contrastive", "sigmoid", "audio_text", "video_text"}
MIN_EQUAL_CAPTIONS = 0.01  # mean number of them in a step for each row, from which it is logged
MAX_SAMPLED_ROWS = 64  # of a set, whose texts are compared with the limits of the model
DEFAULT_VOCAB_SIZE = 30522  # BERT's; of a tokenizer that is not known yet


@dataclass(frozen=True)
class ResolvedRun:
    """A run with every `auto` resolved, ready to start.

    Args:
        eval_sets: The rows to evaluate on, by the name of their set, "" for the only set without a
            name; empty: no evaluation.
        tokenizer_json: Content of tokenizer.json; "" for a vision-language model, whose processor
            is in its weights.
        batch_shape: Global batch and micro-batches with the largest number of workers.
        data_identity: Content of data.json, equal whenever the run is resumed: `train` (sets and
            weights as text), `fingerprint` (hex digest of the training rows), `num_rows` (of an
            epoch), `tokenizer` (SHA-256 of tokenizer.json in hexadecimal), `order` (version of
            the sample order), and with dpo `reference` (column and hash of the reference model),
            with distillation `teacher` (alike).
        token_lengths: Tokens of each row of the training set, if `batch.tokens` divides the rows
            of a step; otherwise None.
        is_packed: Whether the rows of a micro-batch are packed, not padded.
        references: Log-probabilities of the reference model, of objective dpo; otherwise None.
        teacher: Embeddings of the teacher, of objective distillation; otherwise None.
    """

    config: Config
    train_set: TrainSet
    eval_sets: dict[str, PreparedSet]
    tokenizer_json: str
    batch_shape: BatchShape
    steps: int
    data_identity: dict[str, Any]
    token_lengths: MappedArray | None = None
    is_packed: bool = True
    references: ReferenceLogProbs | None = None
    teacher: Teacher | None = None


def resolve_run(config: Config, reporter: RunReporter) -> ResolvedRun:
    """Replace each `auto` of a config, and open the sets of the run; raw sources are prepared
    first.

    Args:
        config: Settings of the run, with `gpu` or `cpu` as `cluster.accelerator`.

    Raises:
        MmrayError: A mistake of the user, such as a source that cannot be read, or a batch that is
            larger than an epoch.
    """

    config = with_written_weights(config, reporter.log)
    sets = open_sets(config, reporter)
    config = config.replace(prepare=sets.prepare)
    shape = resolve_batch_shape(
        config.batch,
        config.cluster.max_workers,
        config.max_row_tokens,
        # Statistics of BatchNorm that are synchronized have collectives in each forward.
        may_search=config.cluster.accelerator == "gpu" and not config.model.synced_batch_norm,
    )
    shuffle = resolve_block_shuffle(
        config.data, sets.train, shape.global_batch_size, config.cluster.max_workers
    )
    model, sets = match_sets(config, sets, shuffle, reporter)
    train_set: TrainSet = sets.train[0]
    if not sets.mixture.is_single:
        train_set = PreparedMixture(sets.train, sets.mixture.weights, sets.mixture.are_shares)
    num_rows = _rows_of_epoch(config, train_set, shape)
    if line := describe_equal_captions(config, train_set, shape.global_batch_size):
        reporter.log(line, "captions")
    if line := describe_missing_labels(config, sets.train):
        reporter.log(line, "labels")
    steps = total_steps(config.train, num_rows, shape.global_batch_size)
    tokenizer_json = ""
    if not isinstance(model, Vlm):  # its processor is in its weights
        tokenizer_json = load_tokenizer(config.model.inputs.tokenizer, train_set.tokenizer_json)
        encoder = TextEncoder(tokenizer_json, config.model.inputs.max_tokens)
        texts = list(_sample_texts(sets.train))
        if line := describe_long_texts(config.model.inputs, [length for _, length in texts]):
            reporter.log(line, "clips")
        if line := describe_cut_captions(encoder, [text for text, _ in texts]):
            reporter.log(line, "captions")
        model = _with_vocab_of(encoder, tokenizer_json, model)
        for line in describe_other_inputs(model, tokenizer_json):
            reporter.log(line, "settings")
    resolved_config = config.replace(
        model=model,
        data=config.data.replace(shuffle_blocks=FULL_SHUFFLE if shuffle is None else str(shuffle)),
        batch=shape.to_settings(config.batch),
    )
    data_identity = {
        "train": str(sets.mixture),
        "fingerprint": train_set.fingerprint,
        "num_rows": num_rows,
        "tokenizer": sha256(tokenizer_json.encode()).hexdigest(),
        "order": ORDER_VERSION,
    }
    resolved = ResolvedRun(
        resolved_config, train_set, sets.eval, tokenizer_json, shape, steps, data_identity
    )
    if isinstance(resolved_config.model, Vlm):
        return _resolve_conversations(resolved, reporter)
    if config.objective.has_teacher:
        teacher, digest = open_teacher(config, train_set, reporter)
        data_identity["teacher"] = f"{config.objective.teacher} {digest[:16]}"
        resolved = replace(resolved, teacher=teacher)
    return resolved


def _with_vocab_of(encoder: TextEncoder, tokenizer_json: str, model: Model) -> Model:
    """Return the `model` section with the vocabulary size of a tokenizer.

    Raises:
        UsageError: The tokenizer does not suit the model.
    """
    if model.has_decoder and encoder.end_id is None:
        raise UsageError(
            f"model.decoder: the tokenizer ({model.inputs.tokenizer}) adds no token at the end of "
            "a text, so generated captions would not end; set another --model.inputs.tokenizer"
        )
    return model.with_vocab(encoder.vocab_size, declared_pad_id(tokenizer_json))


def describe_other_inputs(model: Model, tokenizer_json: str) -> Iterator[str]:
    """Describe mean and standard deviation of pixels, and the tokens of texts, if those of the run
    are not those of its weights, or could not be read from the hub.

    Args:
        model: The `model` section.
        tokenizer_json: The tokenizer of the run.
    """
    whole = model.initial_weights
    weights = {"image": whole, "text": whole} | model.part_weights()
    try:
        yield from _describe_other_pixels(model, weights["image"])
        yield from _describe_other_tokens(model, weights["text"], tokenizer_json)
    except UsageError as error:
        yield f"model.inputs are not compared with those of the weights: {error}"


def _describe_other_pixels(model: Model, weights: str) -> Iterator[str]:
    for name, stored in normalization(weights).items() if weights != "none" else ():
        own = getattr(model.inputs, name)
        if any(abs(a - b) > 1e-4 for a, b in zip(own, stored, strict=True)):
            used, trained = (" ".join(map(str, values)) for values in (own, stored))
            yield f"model.inputs.{name} is {used}, but {weights} was trained with {trained}"


def _describe_other_tokens(model: Model, weights: str, tokenizer_json: str) -> Iterator[str]:
    if weights in ("none", model.inputs.tokenizer):
        return
    name = weights_folder(weights)
    folder = Path(name).expanduser()
    if folder.is_dir() and tokenizer_file(folder) is None:
        of_weights = clean_as(folder, tokenizer_json)
    else:
        of_weights = load_tokenizer(name, None)
    # Equal texts, as usual, are not parsed: a vocabulary has up to 20 MB.
    if of_weights != tokenizer_json and _tokens(of_weights) != _tokens(tokenizer_json):
        yield (
            f"model.inputs.tokenizer {model.inputs.tokenizer} encodes texts as other tokens than "
            f"the weights were trained with; --model.inputs.tokenizer {name} encodes them alike, "
            "or a copy of its open_clip_config.json next to the tokenizer"
        )


def _tokens(tokenizer_json: str) -> object:
    """Return the vocabulary of a tokenizer, and the tokens of a text with capitals and
    punctuation.
    """
    encoded = TextEncoder(tokenizer_json, 64).encode(["A Photo, of a  Dog_house."])
    return json.loads(tokenizer_json)["model"]["vocab"], encoded[0].tolist()


def _resolve_conversations(resolved: ResolvedRun, reporter: RunReporter) -> ResolvedRun:
    """Return the run of a vision-language model with what it needs to know of each row: its tokens
    and, of dpo, the log-probabilities of the reference model.
    """
    config = resolved.config
    spec = config.model
    assert isinstance(spec, Vlm)
    arguments = encoder_arguments(spec.inputs)
    is_dpo = config.objective.is_dpo
    counter = ProcessorCounter(spec.weights, arguments, spec.inputs.question, is_dpo)
    if is_dpo:
        digest = counter.encoder_digest
        references = open_references(config, resolved.train_set, digest, reporter)
        check_held_out(config, resolved.eval_sets, digest, reporter)
        identity = {"reference": f"{references.column} {references.digest[:16]}"}
        resolved = replace(
            resolved, references=references, data_identity=resolved.data_identity | identity
        )
    if resolved.batch_shape.micro_tokens is not None:
        resolved = _with_token_lengths(resolved, counter, reporter)
    held_out = list(resolved.eval_sets.values())
    for line in describe_unused_texts(resolved.train_set, counter.search, held_out):
        reporter.log(line, "notice")
    return resolved


def describe_equal_captions(
    config: Config, train_set: TrainSet, global_batch_size: int
) -> str | None:
    """Describe how many negatives of a contrastive step have the captions of the row itself, with
    remedies; None for another objective, or below MIN_EQUAL_CAPTIONS.

    Of two random rows of a step, both are in set i with the square of its share of an epoch, and
    then have equal captions with `Manifest.same_text_share`. Each row has global batch - 1 others.
    """
    if _TEXT_CONTRASTS.isdisjoint(config.objective.terms):
        return None
    if isinstance(train_set, PreparedMixture):
        sizes = [part.per_epoch for part in train_set.components]
        parts = [
            (each, size / sum(sizes)) for each, size in zip(train_set.sets, sizes, strict=True)
        ]
    else:
        parts = [(train_set, 1.0)]
    equal_share = sum(
        share**2 * each.manifest.same_text_share.get(each.split or "", 0.0) for each, share in parts
    )
    mean = (global_batch_size - 1) * equal_share
    if mean < MIN_EQUAL_CAPTIONS:
        return None
    return (
        f"{mean:.3g} of the {global_batch_size - 1:,} negatives of a row have its captions, on "
        f"average: {equal_share:.3g} of all pairs of rows do. Remedies: a smaller --batch.global, "
        "captions that tell the rows apart, or for classes `mmray train fusion --objective.kind "
        "classification`"
    )


def describe_long_texts(inputs: Inputs, lengths: Sequence[float]) -> str | None:
    """Describe how many sampled texts are about more than `clip_s` seconds of audio or video; None
    without such a text.

    Args:
        lengths: What each text is about, in seconds.
    """
    if not isinstance(inputs, ClipInputs) or not inputs.clip_s:
        return None
    clip_s = inputs.clip_s
    longer = sum(length > clip_s + MAX_OVERHANG_S for length in lengths)
    return (
        f"{longer:,} of {len(lengths):,} texts are about more than model.inputs.clip_s {clip_s:g} "
        f"s (up to {max(lengths):,.0f} s), of which each clip is a random part (in evaluation the "
        "middle). Remedies: a larger clip_s, or texts with t0_s and t1_s"
        if longer
        else None
    )


def describe_cut_captions(encoder: TextEncoder, captions: Sequence[str]) -> str | None:
    """Describe how many sampled captions have more tokens than a model reads; None without such a
    caption.
    """
    texts = [encoder.format_caption(caption) for caption in captions]
    cut = sum(bool(each.overflowing) for each in encoder.tokenizer.encode_batch_fast(texts))
    return (
        f"{cut:,} of {len(texts):,} sampled captions have more than model.inputs.max_tokens "
        f"{encoder.max_tokens} tokens, and are cut there. Remedies: a larger max_tokens (of "
        "pretrained weights at most their positions), or shorter captions"
        if cut
        else None
    )


def _sample_texts(sets: Sequence[PreparedSet]) -> Iterator[tuple[str, float]]:
    """Yield the texts of up to MAX_SAMPLED_ROWS rows of each set, and how many seconds of audio or
    video each is about. Rows that are stored together are read at a time.
    """
    for each in sets:
        for row in read_each(each, _sample_rows(each), whole_blocks=False):
            if isinstance(row, Row):
                recorded = max((media.duration or 0.0 for media in row.media), default=0.0)
                spans = row.spans or [None] * len(row.texts)
                for text, span in zip(row.texts, spans, strict=True):
                    yield text, span[1] - span[0] if span else recorded


def _sample_rows(prepared: PreparedSet) -> np.ndarray:
    indices = np.arange(min(prepared.num_rows, MAX_SAMPLED_ROWS))
    groups = indices // RECORD_BATCH_ROWS * RECORD_BATCH_ROWS
    starts: np.ndarray = groups * prepared.num_rows // max(1, len(indices))
    return starts + indices % RECORD_BATCH_ROWS


def describe_missing_labels(config: Config, sets: Sequence[PreparedSet]) -> str | None:
    """Describe how many sampled rows have no label for the objective `classification`; None without
    such a row, or with another objective.
    """
    if "classification" not in config.objective.terms:
        return None
    labels = [label for each in sets for label in each.stored_labels(_sample_rows(each))]
    missing = sum(label is None or label == NO_LABEL for label in labels)
    return (
        f"{missing:,} of {len(labels):,} sampled rows have no label (-1 is none, too), and the "
        "objective `classification` does not train on such rows"
        if missing
        else None
    )


def _rows_of_epoch(config: Config, train_set: TrainSet, shape: BatchShape) -> int:
    """Return the rows of an epoch. Raises UsageError if they are fewer than the rows of a step."""
    num_rows = min(train_set.num_rows, config.data.limit or train_set.num_rows)
    if isinstance(train_set, PreparedMixture):
        num_rows = sum(part.per_epoch for part in train_set.components)
    if shape.global_batch_size > num_rows:  # rows would be negatives of themselves
        where = f" with `{config.data.where}`" if config.data.where else ""
        raise UsageError(
            f"batch.global: {shape.global_batch_size:,} rows per step are more than the "
            f"{num_rows:,} rows of an epoch of {config.data.train}{where}, so rows would repeat "
            f"within each step; set --batch.global to at most {num_rows}"
        )
    return num_rows


def _with_token_lengths(
    resolved: ResolvedRun, counter: ProcessorCounter, reporter: RunReporter
) -> ResolvedRun:
    """Return the run with the token counts of its rows, which are computed unless they exist."""
    model = resolved.config.model
    lengths = token_counts(
        resolved.train_set,
        counter,
        lambda done, total: reporter.prepare_progress(
            PrepareProgress("count tokens of", done, total)
        ),
    )
    most = resolved.config.max_row_tokens
    used = lengths[(lengths != NOT_COUNTED) & (lengths <= most)]
    if bool((lengths == NOT_COUNTED).all()):
        [row] = read_each(resolved.train_set, np.zeros(1, np.int64))
        reason = counter.explain(row) if isinstance(row, Row) else str(row)
        raise DataError(f"no row of {resolved.config.data.train} can be used: {reason}")
    if not used.size:
        raise DataError(
            f"no row of {resolved.config.data.train} has up to {most:,} tokens: raise "
            "--model.inputs.max-tokens"
        )
    longer = int((lengths > most).sum())
    text = f"{used.mean():,.0f} tokens a row, at most {used.max():,}"
    if longer:
        text += (
            f"; {longer:,} of {len(lengths):,} rows are not used, because they have more than "
            f"model.inputs.max_tokens {model.inputs.max_tokens:,} allows (up to {lengths.max():,})"
        )
    if unknown := int((lengths == NOT_COUNTED).sum()):
        text += f"; {unknown:,} rows cannot be used, for reasons that quarantine.jsonl will state"
    reporter.log(text, "tokens")
    config = read_config(model.initial_weights)
    packed = is_packable(config, find_family(config, model.initial_weights))
    folder = to_path(resolved.config.run.storage) / SELECTIONS_DIR
    folder.mkdir(parents=True, exist_ok=True)
    file = MappedFile.write(folder, "tokens-{}.uint32", lengths)
    return replace(resolved, token_lengths=MappedArray(file), is_packed=packed)


def describe_unused_texts(
    train_set: TrainSet, search: UnusedTextSearch, held_out: Sequence[PreparedSet] = ()
) -> Iterator[str]:
    """Yield a line for each kind of texts that the processor does not use: rows, and one of them.

    Searching stores a column in each set; a line names a set to which it cannot be written.
    """
    if not search.ends_turns:
        yield (
            "the chat template of model.weights writes no token at the end of an answer, so the "
            "model does not learn where to stop: add its end token there in a copy of the folder"
        )
    for prepared in (train_set, *held_out):
        try:
            values = token_counts(prepared, search)
        except ResourceError as error:
            yield f"tokens that are removed from texts are not counted: {error}"
            continue
        name = "row" if prepared is train_set else "held-out row"
        for text, numbers in search.describe(values):
            [row] = prepared.read(numbers[:1])
            rows = f"{len(numbers):,} {name}{'s' * (len(numbers) > 1)}"
            yield f"{rows}: {text}, for example {row.source}"


def with_written_weights(config: Config, log: Log = lambda text, label: None) -> Config:
    """Write the model that the run starts with to `data.cache`, unless it is there, and return the
    config with its folder as `model.weights`: `sample-vlm`, or the new model of `model.vision` and
    `model.language`.

    Args:
        log: Called with a line about a new model, and a label.

    Raises:
        UsageError: `data.cache` is on an object store, or not writable; or a part does not fit.
    """
    model = config.model
    if not isinstance(model, Vlm) or not model.is_written_by_run:
        return config
    if isinstance(to_path(config.data.cache), RemotePath):
        raise UsageError(
            "the model that the run starts with is written to a local disk, and data.cache is "
            f"{config.data.cache}: set data.cache to a local folder, shared by all nodes"
        )
    cache = Path(config.data.cache)
    if model.vision == "none":
        folder = generate_model(cache / "sample-vlm-model")
        return config.replace(model=model.replace(weights=str(folder)))
    from mmray.models.vlm.assemble import assemble

    parts = (model.vision, model.language)
    digest = sha256(repr([_files_of(part) for part in parts]).encode()).hexdigest()[:12]
    file = write_once(
        cache / f"vlm-{model.projector}-{digest}" / MODEL_CONFIG,
        lambda folder: assemble(*parts, folder, model.projector),
    )
    log(f"{file.parent} is a new model of {' and '.join(parts)}", "model")
    own = {"vision": "none", "language": "none", "projector": "mlp"}
    return config.replace(model=model.replace(weights=str(file.parent), **own))


def _files_of(weights: str) -> list[Any]:
    """Return what identifies a model in a folder (or on the hub): sizes and times of its files."""
    folder = Path(weights)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [weights, *((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files)]


def with_default_vocab(config: Config) -> Config:
    """Return the config with the embedding rows that its data would set, for a run on synthetic
    rows.
    """
    trained = config.prepare.vocab_size if config.model.inputs.tokenizer == "trained" else 0
    vocab_size = config.model.vocab_size or trained or DEFAULT_VOCAB_SIZE
    return config.replace(model=config.model.with_vocab(vocab_size, None))
