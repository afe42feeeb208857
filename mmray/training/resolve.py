"""Resolve a config before its run folder is created: open the sets, load the tokenizer, compute
batch and steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmray.config import Config, Prepare, Towers, Vlm
from mmray.config.data import FULL_SHUFFLE, Mixture, parse_captions
from mmray.config.model import AnyModel
from mmray.data.images.sample import write_once
from mmray.data.media.decode import require_decoder
from mmray.data.prepare.pipeline import PrepareProgress, ensure_prepared
from mmray.data.prepare.token_counts import NOT_COUNTED, token_counts
from mmray.data.rows import HELD_OUT_SPLITS, MAX_OVERHANG_S
from mmray.data.store.cache import AUTO
from mmray.data.store.class_names import match_classes, with_class_names
from mmray.data.store.mixture import PreparedMixture, read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import caption_flag
from mmray.data.store.selection import SELECTIONS_DIR, select_rows
from mmray.data.store.shard_table import MappedArray, MappedFile
from mmray.data.store.stored_row import Row
from mmray.data.stream.order import ORDER_VERSION, BlockShuffle
from mmray.data.stream.shuffle import resolve_block_shuffle, with_local_cache
from mmray.data.text.tokenizer import TextEncoder, declared_pad_id
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.data.vlm.encoder import encoder_arguments
from mmray.data.vlm.families import MODEL_CONFIG, find_family, is_packable, read_config
from mmray.data.vlm.reader import ReferenceLogProbs
from mmray.data.vlm.sample import generate_model
from mmray.data.vlm.token_counter import ProcessorCounter, UnusedTextSearch
from mmray.engine.bad_rows import MAX_BAD_ROWS
from mmray.engine.batch import BatchShape, resolve_batch_shape, total_steps
from mmray.errors import DataError, Log, ResourceError, UsageError
from mmray.evaluation.build import check_eval_sets, describe_code_names
from mmray.report.run import format_setting
from mmray.storage.paths import AnyPath, RemotePath, to_path
from mmray.training import RunReporter
from mmray.training.references import check_held_out, open_references

TrainSet = PreparedSet | PreparedMixture
# Settings of `prepare` that are what it may read and how; the rows do not depend on them.
_READING_SETTINGS = {"max_bad_fraction", "format", "root", "rows_per_shard"}
# Settings of `prepare` in which an evaluation set may differ from the training set.
_TRAINING_SETTINGS = {"holdout", "split", "vocab_size", "check_contamination", "drop_overlap"}
# Objectives in which the texts of other rows are negatives.
_TEXT_CONTRASTS = {"contrastive", "sigmoid", "audio_text", "video_text"}
MIN_EQUAL_CAPTIONS = 0.01  # mean number of them in a step for each row, from which it is logged
MAX_SAMPLED_ROWS = 64  # of a set, whose texts are compared with the length of clips
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
            the sample order), and with dpo `reference` (column and hash of the reference model).
        token_lengths: Tokens of each row of the training set, if `batch.tokens` divides the rows
            of a step; otherwise None.
        is_packed: Whether the rows of a micro-batch are packed, not padded.
        references: Log-probabilities of the reference model, of objective dpo; otherwise None.
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
    sets = _open_sets(config, reporter)
    config = config.replace(prepare=sets.prepare)
    shape = resolve_batch_shape(
        config.batch,
        config.cluster.max_workers,
        config.max_row_tokens,
        # Statistics of BatchNorm that are synchronized have collectives in each forward.
        may_search=config.cluster.accelerator == "gpu"
        and getattr(config.model, "batch_norm", "frozen") != "synced",
    )
    shuffle = resolve_block_shuffle(
        config.data, sets.train, shape.global_batch_size, config.cluster.max_workers
    )
    model, sets = _match_sets(config, sets, shuffle, reporter)
    train_set: TrainSet = sets.train[0]
    if not sets.mixture.is_single:
        train_set = PreparedMixture(sets.train, sets.mixture.weights, sets.mixture.are_shares)
    num_rows = _rows_of_epoch(config, train_set, shape)
    if line := describe_equal_captions(config, train_set, shape.global_batch_size):
        reporter.log(line, "captions")
    if line := describe_long_texts(config, sets.train):
        reporter.log(line, "clips")
    steps = total_steps(config.train, num_rows, shape.global_batch_size)
    tokenizer_json = ""
    if not isinstance(model, Vlm):  # its processor is in its weights
        tokenizer_json = load_tokenizer(config.model.inputs.tokenizer, train_set.tokenizer_json)
        vocab_size = TextEncoder(tokenizer_json, model.inputs.max_tokens).vocab_size
        model = model.with_vocab(vocab_size, declared_pad_id(tokenizer_json))
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
    return resolved


def _resolve_conversations(resolved: ResolvedRun, reporter: RunReporter) -> ResolvedRun:
    """Return the run of a vision-language model with what it needs to know of each row: its tokens
    and, of dpo, the log-probabilities of the reference model.
    """
    config = resolved.config
    spec: Any = config.model
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
    for line in describe_unused_texts(resolved.train_set, counter.search):
        reporter.log(line, "notice")
    return resolved


class _Sets(NamedTuple):
    """The prepared sets of a run."""

    mixture: Mixture  # folders of the training sets, with their weights
    train: list[PreparedSet]
    eval: dict[str, PreparedSet]  # evaluation sets by name
    prepare: Prepare  # settings of the (first) training set


def _open_sets(config: Config, reporter: RunReporter) -> _Sets:
    """Open the sets of a run; raw sources are prepared first."""

    prepared_here: list[str] = []

    def prepare(source: str, settings: Prepare = config.prepare) -> str:
        folder = ensure_prepared(
            source, config.data.cache, settings, reporter.log, reporter.prepare_progress
        )
        if folder != to_path(source):
            prepared_here.append(str(folder))
        return str(folder)

    mixture = Mixture.parse(config.data.train).rename(prepare)
    train_sets = [PreparedSet.open(folder, "train") for folder in mixture.addresses]
    first_folder = mixture.addresses[0]
    splits = train_sets[0].manifest.splits
    split = config.data.eval_split
    held_out = sorted(set(HELD_OUT_SPLITS) & splits.keys())
    eval_sets: dict[str, PreparedSet] = {}
    if config.data.eval is not None:
        for name, source, *_ in config.data.eval_sets:
            settings = eval_prepare_settings(config, source)
            eval_sets[name] = PreparedSet.open(prepare(source, settings), split)
    elif split in splits:
        eval_sets[""] = PreparedSet.open(first_folder, split)
    elif held_out:
        reporter.log(
            f"{first_folder} has no split {split}: nothing is evaluated. To evaluate on its split "
            f"{held_out[0]}: --data.eval-split {held_out[0]}",
            "evaluate",
        )
    # A split may be of the training set.
    by_folder = {str(each.folder): each.manifest for each in [*train_sets, *eval_sets.values()]}
    for folder, manifest in by_folder.items():
        for line in manifest.notice_lines:
            reporter.log(f"{folder}: {line}", "notice")
    settings = _compare_settings(config, prepared_here, train_sets, [*eval_sets.values()], reporter)
    storage = to_path(config.run.storage)
    train_sets = [training_rows(each, config, storage, reporter) for each in train_sets]
    eval_sets = {
        name: held_out_rows(each, config, storage, reporter) for name, each in eval_sets.items()
    }
    sets = [*train_sets, *eval_sets.values()]
    _check_rows(config.model, config.data.train, sets, reporter)
    _check_branches(config.model, config.data.train, train_sets)
    check_eval_sets(config, eval_sets)
    for text in describe_code_names(config, eval_sets):
        reporter.log(text, "warning")
    return _Sets(mixture, train_sets, eval_sets, settings)


def _match_sets(
    config: Config, sets: _Sets, shuffle: BlockShuffle | None, reporter: RunReporter
) -> tuple[AnyModel, _Sets]:
    """Return the section `model` with the names of classes, and the sets with labels in its
    numbers and their local caches.
    """
    train_sets = [with_local_cache(config.data, each, shuffle) for each in sets.train]
    eval_sets = {
        name: with_local_cache(config.data, each, shuffle) for name, each in sets.eval.items()
    }
    if config.data.local_cache not in (None, AUTO) and not any(
        isinstance(each.folder, RemotePath) for each in [*train_sets, *eval_sets.values()]
    ):
        reporter.log("data.local_cache has no effect: every set is on a local disk", "cache")
    model = with_class_names(config.model, train_sets)
    train_sets = [match_classes(model, each, reporter.log) for each in train_sets]
    eval_sets = {name: match_classes(model, each, reporter.log) for name, each in eval_sets.items()}
    return model, sets._replace(train=train_sets, eval=eval_sets)


def _compare_settings(
    config: Config,
    prepared_here: Sequence[str],
    train_sets: Sequence[PreparedSet],
    eval_sets: Sequence[PreparedSet],
    reporter: RunReporter,
) -> Prepare:
    """Return the section `prepare` with the settings of the first training set, and log the chosen
    settings with which a set was not prepared.

    If the run has prepared a source (`prepared_here`), the section is that of the source.
    """
    settings = config.prepare
    defaults = Prepare()
    names = [name for name in Prepare.model_fields if name not in _READING_SETTINGS]
    sets = {str(each.folder): each for each in [*eval_sets, *train_sets]}
    for folder in dict.fromkeys(str(each.folder) for each in [*train_sets, *eval_sets]):
        is_trained_on = sets[folder] in train_sets
        stored = sets[folder].manifest.settings
        of_set = settings.replace(**{name: stored[name] for name in names if name in stored})
        differences = [
            f"{name} {format_setting(new)}, not {format_setting(old)}"
            for name in names
            if (new := getattr(of_set, name)) != (old := getattr(settings, name))
            # Defaults were not chosen for the run, but sets of a mixture are compared in all.
            and (settings is not config.prepare or old != getattr(defaults, name))
            and (is_trained_on or name not in _TRAINING_SETTINGS)
        ]
        if differences:
            text = f"{folder} was prepared with {'; '.join(differences)}. It is used as it is"
            reporter.log(text, "settings")
        if not prepared_here and sets[folder] is train_sets[0]:
            settings = of_set
    return settings


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


def describe_long_texts(config: Config, sets: Sequence[PreparedSet]) -> str | None:
    """Describe how many texts are about more than `clip_s` seconds of audio or video, counted in
    MAX_SAMPLED_ROWS rows at equal distances; None without such a text.
    """
    clip_s = getattr(config.model.inputs, "clip_s", 0)
    if not clip_s:
        return None
    lengths = []
    for each in sets:
        count = min(each.num_rows, MAX_SAMPLED_ROWS)
        for row in read_each(each, np.arange(count) * each.num_rows // max(1, count)):
            if isinstance(row, Row):
                recorded = max((media.duration or 0.0 for media in row.media), default=0.0)
                spans = row.spans or [None] * len(row.texts)
                lengths += [span[1] - span[0] if span else recorded for span in spans]
    longer = sum(length > clip_s + MAX_OVERHANG_S for length in lengths)
    return (
        f"{longer:,} of {len(lengths):,} texts are about more than model.inputs.clip_s {clip_s:g} "
        f"s (up to {max(lengths):,.0f} s), of which each clip is a random part (in evaluation the "
        "middle). Remedies: a larger clip_s, or texts with t0_s and t1_s"
        if longer
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
    model: Any = resolved.config.model
    lengths = token_counts(
        resolved.train_set,
        counter,
        lambda done, total: reporter.prepare_progress(
            PrepareProgress("count tokens of", done, total)
        ),
    )
    most = resolved.config.max_row_tokens
    used = lengths[(lengths != NOT_COUNTED) & (lengths <= most)]
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
    config = read_config(model.weights)
    packed = is_packable(config, find_family(config, model.weights))
    folder = to_path(resolved.config.run.storage) / SELECTIONS_DIR
    folder.mkdir(parents=True, exist_ok=True)
    file = MappedFile.write(folder, "tokens-{}.uint32", lengths)
    return replace(resolved, token_lengths=MappedArray(file), is_packed=packed)


def describe_unused_texts(train_set: TrainSet, search: UnusedTextSearch) -> Iterator[str]:
    """Yield a line for each kind of texts that the processor does not use: rows, and one of them.

    Searching stores a column in the set; a line names a set to which it cannot be written.
    """
    try:
        values = token_counts(train_set, search)
    except ResourceError as error:
        yield f"tokens that are removed from texts are not counted: {error}"
        return
    for text, numbers in search.describe(values):
        [row] = train_set.read(numbers[:1])
        rows = f"{len(numbers):,} row{'s' * (len(numbers) > 1)}"
        yield f"{rows}: {text}, for example {row.source}"


def with_written_weights(config: Config, log: Log = lambda text, label: None) -> Config:
    """Write the model that the run starts with to `data.cache`, unless it is there, and return the
    config with its folder as `model.weights`: `sample-vlm`, or the LLaVA of `model.vision` and
    `model.language`.

    Args:
        log: Called with a line about a LLaVA, and a label.

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
        cache / f"llava-{digest}" / MODEL_CONFIG, lambda folder: assemble(*parts, folder)
    )
    log(f"{file.parent} is a LLaVA of {' and '.join(parts)}", "model")
    own = {"weights": str(file.parent), "vision": "none", "language": "none"}
    return config.replace(model=model.replace(**own))


def _files_of(weights: str) -> list[Any]:
    """Return what identifies a model in a folder (or on the hub): sizes and times of its files."""
    folder = Path(weights)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [weights, *((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files)]


def unusable_rows(model: AnyModel, prepared: PreparedSet) -> dict[str, int]:
    """Return the numbers of rows of a set that a model cannot use, by what they have: kinds of
    media such as `audio and video`, `no image`, `several images` or `text alone`.
    """
    taken = _taken_kinds(model)
    unused = {}
    by_kinds = _rows_by_kinds(prepared)
    for text, rows in by_kinds.items():
        kinds = {*text.split()}
        # A model of clips uses what it takes of a row, and masks the rest.
        is_used = bool(taken & kinds) if model.takes_clips else kinds <= taken
        if not is_used:
            unused[text.replace(" ", " and ")] = rows
    by_number = prepared.rows_by_num_images
    without_image = sum(rows for text, rows in by_kinds.items() if "image" not in text.split())
    without_media = by_number.get(0, 0) - without_image
    if model.takes_clips:
        unused["text alone"] = without_media
    if _takes_one_image(model):
        unused["no image"] = without_media
        unused["several images"] = sum(rows for number, rows in by_number.items() if number > 1)
    return {text: rows for text, rows in unused.items() if rows > 0}


def _taken_kinds(model: AnyModel) -> set[str]:
    """Return the kinds of media that a model uses."""
    if isinstance(model, Vlm):
        family = find_family(read_config(model.weights), model.weights)
        return set(family.media_kinds(model.inputs.frames, model.weights))
    return set(model.media_kinds)


def _takes_one_image(model: AnyModel) -> bool:
    return not model.generates_text and not model.takes_clips


def _check_rows(
    model: AnyModel, train: str, sets: Sequence[PreparedSet], reporter: RunReporter
) -> None:
    """Log the rows of each set that the model cannot use because of their media.

    Raises DataError if they are more than the run may quarantine; UsageError if there is no decoder
    for audio and video.
    """
    taken = _taken_kinds(model)
    if taken & {"audio", "video"} and any(prepared.rows_by_media_kinds for prepared in sets):
        require_decoder(train)
    takes = "one image a row" if _takes_one_image(model) else f"{', '.join(sorted(taken))} only"
    name = f"model.kind {model.kind}"
    if isinstance(model, Vlm):
        name = f"model.weights {model.weights}"
    for prepared in sets:
        unused = unusable_rows(model, prepared)
        if not unused:
            continue
        counts = ", ".join(f"{rows:,} rows with {text}" for text, rows in unused.items())
        # Also of rows that are not selected, all of which may be of another kind; if not, the run
        # ends when it has read more than it may quarantine.
        num_counted = sum(prepared.rows_by_num_images.values())
        num_not_selected = num_counted - prepared.num_rows
        text = f"{prepared.folder} has {counts} among {num_counted:,}, and {name} takes {takes}"
        if sum(unused.values()) - num_not_selected > MAX_BAD_ROWS:
            raise DataError(
                f"{text}. Train another kind of model (one of videos needs --model.inputs.frames), "
                "or prepare those rows as a separate set"
            )
        reporter.log(f"{text}: they are not used", "media")


def _check_branches(model: AnyModel, train: str, train_sets: Sequence[PreparedSet]) -> None:
    """Raise DataError if no row would train a branch of a model of audio and video."""
    if not isinstance(model, Towers):
        return
    rows: Counter[str] = Counter()
    for prepared in train_sets:
        for text, count in _rows_by_kinds(prepared).items():
            rows.update(dict.fromkeys(text.split(), count))
    fixes = {
        ("video", "image"): "--model.inputs.frames 0 --objective.kind audio_text",
        ("audio", "video"): "--model.inputs.audio-rate 0 --objective.kind video_text",
    }
    for kinds, fix in fixes.items():
        if kinds[0] in model.modalities and not any(rows[kind] for kind in kinds):
            raise DataError(
                f"{train} has no {' and no '.join(kinds)}, so nothing would train the "
                f"branch {kinds[0]} of the model: set {fix}"
            )


def _rows_by_kinds(prepared: PreparedSet) -> dict[str, int]:
    """Return the number of rows by the kinds of their media: {"image": 5, "audio video": 2}."""
    counts = prepared.rows_by_media_kinds
    with_images = sum(rows for number, rows in prepared.rows_by_num_images.items() if number)
    in_others = sum(rows for kinds, rows in counts.items() if "image" in kinds.split())
    return counts | {"image": with_images - in_others}


def eval_prepare_settings(config: Config, source: str) -> Prepare:
    """Return the section `prepare` with which a source for evaluation is prepared.

    All its rows are held out, and none is compared with benchmarks. A source that the run also
    trains on keeps its settings, so that its training rows are not evaluated.
    """
    trained_on = [str(to_path(address)) for address in Mixture.parse(config.data.train).addresses]
    settings = config.prepare
    if str(to_path(source)) in trained_on:
        return settings
    split = settings.split if settings.split in ("none", *HELD_OUT_SPLITS) else "auto"
    return settings.replace(holdout=0.0, split=split, check_contamination=(), drop_overlap=False)


def training_rows(
    prepared: PreparedSet, config: Config, folder: AnyPath, reporter: RunReporter
) -> PreparedSet:
    """Return the rows of a set that the run trains on, those that `data.where` selects, with the
    captions of `data.captions`; rows without any are left out.

    Raises:
        UsageError: The expression does not fit the columns of the set, or selects no row.
        DataError: A shard has no values of a column.
    """
    rows = _select(prepared, "data.where", config.data.where, folder, reporter)
    weights = parse_captions(config.data.captions or "")
    return _with_captions(rows, "data.captions", weights, folder, reporter)


def held_out_rows(
    prepared: PreparedSet, config: Config, folder: AnyPath, reporter: RunReporter
) -> PreparedSet:
    """Return the rows of a set that a run evaluates, those that `data.eval_where` selects, with the
    captions of `data.eval_captions`; None: of the first column that the set stores.

    Raises:
        UsageError: The expression does not fit the columns of the set, or selects no row.
        DataError: A shard has no values of a column.
    """
    rows = _select(prepared, "data.eval_where", config.data.eval_where, folder, reporter)
    weights = parse_captions(config.data.eval_captions or "")
    weights = weights or dict.fromkeys(prepared.manifest.text_columns[:1], 1.0)
    return _with_captions(rows, "data.eval_captions", weights, folder, reporter)


def _with_captions(
    prepared: PreparedSet,
    setting: str,
    weight_of_column: Mapping[str, float],
    folder: AnyPath,
    reporter: RunReporter,
) -> PreparedSet:
    """Return the rows of a set that have captions of some columns, with only those; without columns
    all rows.
    """
    if not weight_of_column:
        return prepared
    columns = prepared.manifest.text_columns
    names = ", ".join(weight_of_column)
    if not columns:
        text = f"{prepared.folder} has captions of one column, which are used instead of {names}"
        reporter.log(text, "captions")
        return prepared
    weights = {name: weight for name, weight in weight_of_column.items() if name in columns}
    if not weights:
        raise UsageError(
            f"{setting}: {prepared.folder} has no captions of {names}, only of "
            f"{', '.join(columns)}; name one of these too, or leave the set out"
        )
    rows = select_rows(prepared, " or ".join(map(caption_flag, weights)), folder, setting)
    total = sum(weights.values())
    shares = [f"{name} {100 * weight / total:.3g} %" for name, weight in weights.items()]
    text = f"{', '.join(shares)} of {prepared.folder}, {setting}"
    if num_left_out := prepared.num_rows - rows.num_rows:
        text += f"; {num_left_out:,} rows without such a caption are left out"
    reporter.log(text, "captions")
    return rows.with_captions(weights)


def _select(
    prepared: PreparedSet, setting: str, where: str | None, folder: AnyPath, reporter: RunReporter
) -> PreparedSet:
    if where is None:
        return prepared
    selected = select_rows(
        prepared,
        where,
        folder,
        setting,
        lambda done, total: reporter.prepare_progress(PrepareProgress("select", done, total)),
    )
    rows = f"{selected.num_rows:,} of {prepared.num_rows:,} rows of {prepared.folder}"
    reporter.log(f"{rows}: {where}", "selected")
    return selected


def with_default_vocab(config: Config) -> Config:
    """Return the config with the embedding rows that its data would set, for a run on synthetic
    rows.
    """
    trained = config.prepare.vocab_size if config.model.inputs.tokenizer == "trained" else 0
    vocab_size = config.model.vocab_size or trained or DEFAULT_VOCAB_SIZE
    return config.replace(model=config.model.with_vocab(vocab_size, None))
