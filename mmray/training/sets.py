"""The sets of a run: open or prepare them, and select the rows and captions that it uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mmray.config import Config, Prepare, Towers, Vlm
from mmray.config.model import AnyModel
from mmray.config.sets import Mixture, parse_captions
from mmray.data.media.decode import require_decoder
from mmray.data.prepare.pipeline import PrepareProgress, ensure_prepared
from mmray.data.rows import HELD_OUT_SPLITS
from mmray.data.store.cache import AUTO
from mmray.data.store.class_names import match_classes, with_class_names
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import caption_flag
from mmray.data.store.selection import select_rows
from mmray.data.stream.order import BlockShuffle
from mmray.data.stream.shuffle import with_local_cache
from mmray.data.vlm.families import find_family, read_config
from mmray.engine.bad_rows import MAX_BAD_ROWS
from mmray.errors import DataError, UsageError
from mmray.evaluation.build import check_eval_sets, describe_code_names
from mmray.report.run import format_setting
from mmray.storage.paths import AnyPath, RemotePath, to_path
from mmray.training import RunReporter

TrainSet = PreparedSet | PreparedMixture
# Settings of `prepare` that are what it may read and how; the rows do not depend on them.
_READING_SETTINGS = {"max_bad_fraction", "format", "root", "rows_per_shard"}
# Settings of `prepare` in which an evaluation set may differ from the training set.
_TRAINING_SETTINGS = {"holdout", "split", "vocab_size", "check_contamination", "drop_overlap"}


class _Sets(NamedTuple):
    """The prepared sets of a run."""

    mixture: Mixture  # folders of the training sets, with their weights
    train: list[PreparedSet]
    eval: dict[str, PreparedSet]  # evaluation sets by name
    prepare: Prepare  # settings of the (first) training set


def open_sets(config: Config, reporter: RunReporter) -> _Sets:
    """Open the sets of a run; raw sources are prepared first."""

    prepared_here: list[str] = []

    def prepare(source: str, settings: Prepare) -> AnyPath:
        folder = ensure_prepared(
            source, config.data.cache, settings, reporter.log, reporter.prepare_progress
        )
        if folder != to_path(source):
            prepared_here.append(str(folder))
        return folder

    mixture = Mixture.parse(config.data.train).rename(
        lambda source: str(prepare(source, config.prepare))
    )
    train_sets = [PreparedSet.open(folder, "train") for folder in mixture.addresses]
    first_folder = mixture.addresses[0]
    splits = train_sets[0].manifest.splits
    split = config.data.eval_split
    held_out = sorted(set(HELD_OUT_SPLITS) & splits.keys())
    eval_sets: dict[str, PreparedSet] = {}
    if config.data.eval is not None:
        eval_sets = open_eval_sets(config, split, prepare)
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


def match_sets(
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
            if (new := dict(of_set)[name]) != (old := dict(settings)[name])
            # Defaults were not chosen for the run, but sets of a mixture are compared in all.
            and (settings is not config.prepare or old != dict(defaults)[name])
            and (is_trained_on or name not in _TRAINING_SETTINGS)
        ]
        if differences:
            text = f"{folder} was prepared with {'; '.join(differences)}. It is used as it is"
            reporter.log(text, "settings")
        if not prepared_here and sets[folder] is train_sets[0]:
            settings = of_set
    return settings


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
        num_unused = sum(unused.values()) - num_not_selected
        if num_unused > MAX_BAD_ROWS or num_unused >= prepared.num_rows:
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


def open_eval_sets(
    config: Config, split: str, prepare: Callable[[str, Prepare], AnyPath]
) -> dict[str, PreparedSet]:
    """Open the sets of `data.eval` by name.

    Args:
        prepare: Called with an address and the settings to prepare it with; returns the folder of
            the prepared set.
    """
    sets = {}
    for name, source, *_ in config.data.eval_sets:
        folder = prepare(source, _eval_prepare_settings(config, source))
        sets[name] = PreparedSet.open(str(folder), split)
    return sets


def _eval_prepare_settings(config: Config, source: str) -> Prepare:
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
    """Return the rows that `data.where` selects, with the captions of `data.captions`."""
    rows = _select(prepared, "data.where", config.data.where, folder, reporter)
    weights = parse_captions(config.data.captions or "")
    return _with_captions(rows, "data.captions", weights, folder, reporter)


def held_out_rows(
    prepared: PreparedSet, config: Config, folder: AnyPath, reporter: RunReporter
) -> PreparedSet:
    """Return the rows that `data.eval_where` selects, with the captions of `data.eval_captions`."""
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
