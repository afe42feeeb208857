"""mmray from Python, for notebooks and scripts; most commands of these names call them.

Each function takes a `reporter` that receives messages and progress. By default these are shown as
on the command line: a live bar in a terminal and in Jupyter with ipywidgets, lines elsewhere. An
object with the methods of `mmray.training.RunReporter` receives them instead. Results are
returned, not printed.

Errors are MmrayError. Ctrl-C (interrupting the kernel) stops a run at a checkpoint, as on the
command line. The functions import Ray and torch when they are called, because that takes seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, Unpack, get_args

from tyro.conf import Positional, UseAppendAction, arg

from mmray.config import (
    LENGTHS,
    Cluster,
    Config,
    EvalSettings,
    Prepare,
    from_yaml,
    override,
)
from mmray.config.base import Section
from mmray.config.search_space import build_space
from mmray.console.outcomes import log_manifest, log_outcome, log_sweep
from mmray.console.reporter import ConsoleReporter
from mmray.errors import TrainingError, UsageError, require_positive, suggest
from mmray.machine import torchrun_rank
from mmray.report.sweep import SweepRecord
from mmray.run import Run
from mmray.storage.paths import AnyPath, check_kept, remove_tree, to_path
from mmray.training.recipe import load_recipe

if TYPE_CHECKING:
    from mmray.data.store.manifest import Manifest
    from mmray.report.prepared import SetRecord
    from mmray.training import RunReporter
    from mmray.tuning.sweep import SweepReporter
    from mmray.tuning.trials import SweepRequest

Settings = Mapping[str, Any] | Section  # {field: value}, or an object of mmray.config
# A ray.data.Dataset, a pandas or pyarrow table, a Hugging Face Dataset or DatasetDict, or dicts.
Rows = Any
# Arguments of commands that are given by place, not by name.
SetPath = Positional[Annotated[str | Path, arg(metavar="SET")]]
SourcePath = Positional[Annotated[str | Path | Rows, arg(metavar="SOURCE")]]
ModelPath = Positional[Annotated[Run | str | AnyPath | Config, arg(metavar="RUN")]]
OutPath = Positional[Annotated[str | AnyPath, arg(metavar="OUT")]]
Accelerator = Literal["auto", "gpu", "cpu"]
Goal = Literal["throughput", "loss", "recall"]
Reporter = TypeVar("Reporter", bound="RunReporter")


class Sections(TypedDict, total=False):
    """Sections of the config, as in a recipe file; all are optional.

    A section is a dict {field: value}, such as {"train": {"steps": 100}}, or an object of its class
    in mmray.config, such as Train for `train`; the fields of the class are the legal names.

    `data` may be the training set alone (data.train): an address, or rows that `prepare` takes.
    """

    model: Settings
    objective: Settings
    prepare: Settings
    data: Settings | str | Path | Rows
    augment: Settings
    batch: Settings
    optimizer: Settings
    train: Settings
    evaluate: Settings
    cluster: Settings
    run: Settings


def train(
    recipe: str | Path | Config = "sample",
    *,
    reporter: RunReporter | None = None,
    start_s: float | None = None,
    **sections: Unpack[Sections],
) -> Run:
    """Train a recipe, or resume its run.

    An unfinished run of the same recipe and settings in the folder `run.storage` is resumed.
    Otherwise a new run is started; another `run.name` always starts one.

    Under torchrun each of its processes has one worker. The call returns in the process of rank 0;
    the others exit with the run.

    Args:
        recipe: name of a recipe, YAML file, or config.
        reporter: receives messages and progress by its methods, those of
            `mmray.training.RunReporter`, such as `log(text, label)`; None: they are shown.
        start_s: time.monotonic() at which the start-up times of result.json begin; None: now.
        **sections: settings that differ from the recipe, such as `batch={"micro": 64}`.

    Returns:
        The run, which finished or was stopped: a Run, whose `result` is the content of result.json
        (such as `status`, which is `finished` or `stopped`), `metrics` the last metrics by name and
        `path` its folder.

    Raises:
        UsageError: a setting is unknown or invalid.
        TrainingError: training failed.
        ResourceError: the cluster cannot provide the resources.
        DataError: the data cannot be used.
    """
    if torchrun_rank() > 0:
        from mmray.training.workers.local import run_rank

        run_rank()
        sys.exit()
    config = _override(_load(recipe, sections), sections)
    with _shown(reporter, "importing") as shown:
        from mmray.training import driver

        outcome = driver.train(config, shown, start_s)
        log_outcome(outcome, shown)
    return Run(outcome.path)


def prepare(
    source: SourcePath,
    out: OutPath,
    *,
    retry_quarantined: bool = False,
    address: str | None = None,
    wait_for_nodes: bool = False,
    queue_timeout_s: float = 3600.0,
    reporter: RunReporter | None = None,
    **settings: object,
) -> Manifest:
    """Validate, deduplicate and pack a source into a prepared set.

    The same call again resumes an interrupted one, or adds new rows.

    In Python the source may be rows in memory: a ray.data.Dataset, a pandas or pyarrow table, a
    Hugging Face Dataset or DatasetDict, or an iterable of dicts, with the columns of
    mmray.builtin.COLUMNS that they have, such as `text` and `image` (a path, bytes of a file, a PIL
    image, or a uint8 array [H, W, C]). Until the set is complete, such rows are stored as Parquet
    files in the folder OUT.rows.

    Args:
        source: file or folder, or its address: JSON lines, CSV, TSV, Parquet, WebDataset tars,
            COCO, class folders, pairs of image and text files, or a saved Hugging Face dataset; or
            rows.
        out: folder of the set, or its address.
        retry_quarantined: retry rows that could not be read or decoded.
        address: Ray address; None: RAY_ADDRESS if set, otherwise this machine.
        wait_for_nodes: skip the capacity check and wait for nodes to be added.
        queue_timeout_s: limit in seconds for the wait for a free CPU.
        reporter: receives messages and progress by its methods, those of
            `mmray.training.RunReporter`, such as `log(text, label)`; None: they are shown.
        **settings: fields of `mmray.config.Prepare`, such as `holdout=0.1`.

    Returns:
        The manifest of the set: a Manifest with `num_rows`, `num_quarantined`, `reasons` (number of
        quarantined rows by reason), `splits` (number of rows by split) and others.

    Raises:
        UsageError: a setting or an address is invalid.
        DataError: the source is invalid, or has more bad rows than the settings allow.
        ResourceError: storage or cluster failed, maybe temporarily.
    """
    checked = Prepare.model_validate(_plain(settings))
    check_kept("OUT", out)
    cluster = Cluster(
        address=address, wait_for_nodes=wait_for_nodes, queue_timeout_s=queue_timeout_s
    )
    start_s = time.monotonic()
    with _shown(reporter, "starting") as shown:
        from mmray.cluster.connect import data_session
        from mmray.data.formats.in_memory import is_dataset, store_rows
        from mmray.data.prepare import pipeline

        in_memory = is_dataset(source)
        for place in (out,) if in_memory else (source, out):
            to_path(place)  # raises UsageError for an invalid address before Ray starts
        with data_session(cluster, shown.log):
            if in_memory:
                source = store_rows(source, f"{out}.rows", checked.column_names, checked.keep)
            manifest = pipeline.prepare(
                str(source),
                str(out),
                checked,
                shown.prepare_progress,
                shown.log,
                retry_quarantined,
            )
            if in_memory and not checked.index_only:  # such a set reads its images from the source
                remove_tree(to_path(f"{out}.rows"))
        took = f"{manifest.num_read:,} rows in {time.monotonic() - start_s:.0f} s"
        shown.log(took, "read")
        log_manifest(manifest, str(out), shown)
    return manifest


def score(
    data: SetPath,
    weights: Run | str | Path,
    *,
    name: str | None = None,
    embeddings: bool = False,
    captions: str | None = None,
    batch: int = 128,
    config: str | Path | None = None,
    address: str | None = None,
    reporter: RunReporter | None = None,
) -> Manifest:
    """Write the cosine of the embeddings of image and caption of each row of a set (the mean over
    its captions) as a column of the set. A vision-language model writes the log-probabilities of
    chosen and rejected answers, as the reference model of objective dpo.

    The column can be used in `data.where` and by `select`. An interrupted call resumes, and after
    the set grew, only new rows are scored.

    Args:
        data: folder of the prepared set, or its address.
        weights: a run, or a folder saved by transformers, a hub name, or an open_clip checkpoint.
        name: name of the column, for data.where; None: clip_score, or `reference` of a
            vision-language model, whose columns are NAME_chosen and NAME_rejected.
        embeddings: also write the embeddings of the images, as a column NAME_embedding, for
            `mmray select --deduplicate semantic=0.95`, and of the captions, as NAME_captions; both
            for objective distillation.
        captions: column of the captions to use, if the set has several; None: the first.
        batch: rows that are embedded at a time.
        config: file that `mmray train ... --print-config` wrote for the run of dpo, with its limits
            of tokens, images and videos; None: those of the weights.
        address: Ray address; None: RAY_ADDRESS if set, otherwise this machine.
        reporter: receives messages and progress by its methods, those of
            `mmray.training.RunReporter`, such as `log(text, label)`; None: they are shown.

    Returns:
        The manifest of the set with the new columns in `columns`: a Manifest with `num_rows`,
        `num_quarantined`, `reasons` (number of quarantined rows by reason), `splits` (number of
        rows by split) and others.

    Raises:
        UsageError: the weights cannot be loaded or do not embed images and texts, or the set has
            another column of this name.
        DataError: the folder is not a prepared set.
        ResourceError: storage or cluster failed, maybe temporarily.
    """
    require_positive(batch=batch)
    check_kept("the set", data)
    with _shown(reporter, "loading the weights") as shown:
        from mmray.training.score import score_set
        from mmray.training.workers.local import count_gpus

        cluster = Cluster(address=address, workers=max(1, count_gpus()))
        settings = None
        if config is not None:
            settings = from_yaml(to_path(str(config)).read_bytes(), str(config))
        return score_set(
            str(data), _folder(weights), name, embeddings, captions, batch, settings, cluster, shown
        )


def select(
    source: SetPath,
    out: OutPath,
    *,
    where: str | None = None,
    deduplicate: str | None = None,
    address: str | None = None,
    reporter: RunReporter | None = None,
) -> Manifest:
    """Write a smaller prepared set of some rows of a set, without decoding images.

    Args:
        source: folder of the prepared set, or its address.
        out: folder of the smaller set, which must be empty or not exist.
        where: condition on columns of the set in Python, with comparisons, `and`, `or`, `not` and
            `in`, such as `clip_score > 0.25 and width >= 200`; None: all rows.
        deduplicate: `semantic=0.95` leaves out rows whose image has an embedding with at least this
            cosine to that of a kept row. `score` with `embeddings` writes the embeddings. If a set
            has several columns of embeddings, name one instead of `semantic`. None: no row is left
            out.
        address: Ray address; None: RAY_ADDRESS if set, otherwise this machine.
        reporter: receives messages and progress by its methods, those of
            `mmray.training.RunReporter`, such as `log(text, label)`; None: they are shown.

    Returns:
        The manifest of the smaller set: a Manifest with `num_rows`, `num_quarantined`, `reasons`
        (number of quarantined rows by reason), `splits` (number of rows by split) and others.

    Raises:
        UsageError: the condition is invalid, selects no row, or `out` is not empty.
        DataError: the source is not a prepared set, or a column is missing in a shard.
        ResourceError: storage or cluster failed, maybe temporarily.
    """
    if where is None and deduplicate is None:
        raise UsageError("select needs --where or --deduplicate: which rows to leave out")
    check_kept("OUT", out)
    with _shown(reporter, "selecting") as shown:
        from mmray.cluster.connect import data_session
        from mmray.data.prepare.select import check_selection, select_set

        prepared = check_selection(str(source), where, deduplicate)
        with data_session(Cluster(address=address), shown.log):
            manifest = select_set(
                prepared, str(out), where, deduplicate, shown.prepare_progress, shown.log
            )
        shown.log(f"{manifest.num_rows:,} rows in {out}", "written")
    return manifest


def show(
    prepared: SetPath,
    out: str | AnyPath | None = None,
    *,
    split: str | None = None,
    rows: int = 24,
    seed: int = 0,
    tokenizer: str | None = None,
    root: UseAppendAction[Sequence[str]] = (),
    reporter: RunReporter | None = None,
) -> SetRecord:
    """Write an HTML page about a prepared set: random rows, histograms and quarantine.

    At most 10,000 rows (512 MiB of shards) are read for histograms; the page states on how many
    rows they are based.

    Args:
        prepared: folder of the set, or its address.
        out: file to write; None: show.html in the folder of the set.
        split: split of the set; None: all rows.
        rows: number of random rows to show.
        seed: seed of the choice of rows.
        tokenizer: file, folder or hub name of the tokenizer that counts tokens; None: the one that
            was trained on the set, if there is one. Of conversations it counts the texts, without
            chat template and media.
        root: folders whose images are read if the set refers to them, such as the folder of its
            source; otherwise only images in the set are shown.
        reporter: receives messages by its method `log(text, label)`; None: they are shown.

    Returns:
        A SetRecord: `page` (path of the HTML file), `table` (the random rows as dicts with `key`,
        `media`, `tokens` and `text`), `rows` (the same rows with images), `statistics` (such as
        `widths` and `token_counts`) and `quarantine` (`num_rows`, `reasons` and examples).

    Raises:
        UsageError: an argument is invalid, or the page cannot be written.
        DataError: the folder is not a prepared set, has no such split, or a shard is damaged.
    """
    require_positive(rows=rows)
    check_kept("--out", prepared if out is None else out)
    with _shown(reporter, "reading") as shown:
        from mmray.data.store.prepared_set import PreparedSet
        from mmray.report.write import write_set_page

        opened = PreparedSet.open(str(prepared), split)
        tokenizer_json = opened.tokenizer_json
        if tokenizer is not None:
            from mmray.data.text.tokenizer_files import load_tokenizer

            tokenizer_json = load_tokenizer(tokenizer, tokenizer_json)
        file = None if out is None else to_path(out)
        record = write_set_page(opened, file, rows, seed, tokenizer_json, root)
        if record.unread_text:
            shown.log(record.unread_text, "images")
        shown.log(record.basis, "charts")
        shown.log(f"{record.page} (self-contained)", "page")
        return record


def evaluate(
    run: ModelPath,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    where: str | None = None,
    captions: str | None = None,
    step: int | Literal["best"] | None = None,
    address: str | None = None,
    workers: int | None = None,
    accelerator: Accelerator | None = None,
    interpolate: float = 1.0,
    reporter: RunReporter | None = None,
    **settings: object,
) -> dict[str, float]:
    """Evaluate a checkpoint of a run, or pretrained weights, on held-out rows.

    Args:
        run: the run or its folder, or its address. For pretrained weights, which need `data`, what
            `mmray.pretrained_config(weights)` returns, maybe changed.
        data: prepared set or raw source; None: the held-out rows of the run.
        split: split of the set; None: data.eval_split of the run, or `test` of another set.
        where: evaluate on the rows for which this holds, such as `similarity > 0.3`; None:
            data.eval_where of the run, or all rows of another set.
        captions: column of the captions to use, if the set has several; None: data.eval_captions of
            the run, or the first.
        step: step of the checkpoint, or `best` (highest held-out recall@1, or zero-shot accuracy if
            that is the task of `data.eval`; of a vision-language model lowest loss); None: the
            newest valid one.
        address: Ray address; None: RAY_ADDRESS if set, otherwise this machine.
        workers: number of workers; None: as in training, or as this machine has GPUs.
        accelerator: device of the workers, `gpu`, `cpu`, or `auto` (GPUs if there are any); None:
            as in training.
        interpolate: factor of the trained weights, 0 to 1; the weights that the run started with
            have 1 minus the factor (WiSE-FT).
        reporter: receives messages and progress by its methods, those of
            `mmray.training.RunReporter`, such as `log(text, label)`; None: they are shown.
        **settings: settings of the evaluation that differ from the run's, fields of
            `mmray.config.EvalSettings` such as `batch=64`; `limit` of the run is not used if `data`
            is given.

    Returns:
        Metrics by name, such as `recall_at_1/image_to_text` (0 to 1), `loss` and `rows`; those of a
        set with a name as `NAME/METRIC`. The evaluators in mmray.evaluation list them:
        `Evaluator.score`, `ConversationEvaluator.score` for kind `vlm`, and `ClipEvaluator.score`
        for kind `towers`.

    Raises:
        UsageError: the folder is not a run, has no such checkpoint, or a setting is invalid.
        TrainingError: the evaluation failed.
        ResourceError: the cluster cannot provide the resources.
    """
    with _shown(reporter, "evaluating") as shown:
        from mmray.training import evaluate_export, saved_model

        source = run if isinstance(run, Config) else to_path(_folder(run))
        other = None if data is None else str(data)
        if isinstance(source, Config):
            saved = source.evaluate
            if other is None or step is not None or interpolate != 1:
                raise UsageError(
                    "pretrained weights have no held-out rows, steps or interpolation: give `data`,"
                    " a prepared set or a raw source, and no `step` or `interpolate`"
                )
        else:
            saved = saved_model.load_run_config(source).evaluate
        return evaluate_export.evaluate_model(
            source,
            other,
            split=split,
            step=step,
            address=address,
            reporter=shown,
            settings=EvalSettings.model_validate(dict(saved.outside_run(other)) | settings),
            where=where,
            captions=captions,
            interpolate=interpolate,
            workers=workers,
            accelerator=accelerator,
        )


def export(
    run: ModelPath,
    out: OutPath,
    *,
    step: int | Literal["best"] | None = None,
    interpolate: float = 1.0,
    adapters_only: Annotated[bool, arg(name="adapters")] = False,
    format: Literal["transformers", "open_clip"] = "transformers",
    reporter: RunReporter | None = None,
) -> AnyPath:
    """Write the model of a run, or pretrained weights, to a folder for `mmray.load` and
    transformers or open_clip.

    Args:
        run: the run or its folder, or its address; for pretrained weights what
            `mmray.pretrained_config(weights)` returns, maybe changed.
        out: folder to write, or its address.
        step: step of the checkpoint, or `best` (highest held-out recall@1, or zero-shot accuracy if
            that is the task of `data.eval`; of a vision-language model lowest loss); None: the
            newest valid one.
        interpolate: factor of the trained weights, 0 to 1; the weights that the run started with
            have 1 minus the factor (WiSE-FT).
        adapters_only: write only the LoRA adapters and the projector of a vision-language model, as
            peft does.
        format: library that opens the folder, besides mmray; `open_clip`: of a model of kind `clip`
            or `siglip`, for `open_clip.create_model_from_pretrained("local-dir:OUT")`.
        reporter: receives messages and progress by its methods, those of
            `mmray.training.RunReporter`, such as `log(text, label)`; None: they are shown.

    Returns:
        The folder.

    Raises:
        UsageError: the folder is not a run, has no such checkpoint, or `out` has other files;
            weights are interpolated of a run that started from random ones; or open_clip has no
            such model.
    """
    check_kept("OUT", out)
    with _shown(reporter, "exporting") as shown:
        from mmray.training import evaluate_export

        source = run if isinstance(run, Config) else to_path(_folder(run))
        return evaluate_export.export_model(
            source, str(out), step, interpolate, adapters_only, format, shown.log
        )


def tune(
    recipe: str | Path | Config = "sample",
    *,
    space: Mapping[str, str | Sequence[Any]] | None = None,
    goal: Goal = "throughput",
    samples: int | None = None,
    budget: str | None = None,
    concurrency: int | None = None,
    reporter: SweepReporter | None = None,
    **sections: Unpack[Sections],
) -> SweepRecord:
    """Find the fastest micro-batch, or compare settings in runs.

    Goal `throughput` without `space` measures batch shapes on synthetic batches; of a
    vision-language model it compares values of `batch.tokens` in short runs. Otherwise trials train
    with the settings of `space`.

    Args:
        recipe: name of a recipe, YAML file, or config.
        space: setting -> values to compare, such as `{"batch.micro": [8, 16]}`, or a range,
            `uniform(LOW,HIGH)` or `loguniform(LOW,HIGH)`, such as `{"optimizer.lr":
            "loguniform(1e-5,1e-3)"}`; None: the learning rate, for goals `loss` and `recall`.
        goal: `throughput` (samples/s), `loss` (held-out) or `recall` (recall@1).
        samples: configurations to sample; None: 32 if there is a range, otherwise all.
        budget: time after which trials stop, as `2h` or `30m`; None: no limit.
        concurrency: trials at a time; None: one on a single machine, as many as fit on a cluster.
        reporter: receives messages and progress; None: they are shown.
        **sections: settings of all trials that differ from the recipe. `train={"steps": N}` or
            `{"samples": N}` is the length of a full trial.

    Returns:
        A SweepRecord: `folder`, `trials`, `best` (the recommended one) and `status`: `stopped` or
        `budget` if the same call continues it. `best.yaml` in the folder is a recipe.

    Raises:
        UsageError: an argument is unknown, invalid or without effect.
        TrainingError: no trial could be ranked.
        ResourceError: the cluster cannot provide the resources.
    """
    from mmray.tuning import trials

    if goal not in get_args(Goal):
        raise UsageError(f"goal: unknown goal `{goal}`; {suggest(goal, get_args(Goal))}")
    require_positive(samples=samples, concurrency=concurrency)
    own = _load(recipe, sections)
    # Without the length of the recipe, so that what is left is the length of a trial.
    settings = _override(own.without_overridden_length_and_batch(LENGTHS), sections)
    base = settings.replace(train=settings.train.with_length_of(own.train))
    if space is None:
        space = trials.default_axes(base, goal)
    if space is None:
        _refuse_options_of_trials(samples=samples, budget=budget, concurrency=concurrency)
        sweep = _measure_shapes(base, reporter)
    else:
        request = trials.SweepRequest(
            base=base,
            length=settings.train,
            space=build_space(space, samples, base.train.seed),
            goal=goal,
            concurrency=concurrency,
            budget_s=trials.parse_budget(budget),
        )
        sweep = _run_trials(request, reporter)
    _check_recommendation(sweep)
    return sweep


def _refuse_options_of_trials(**given: object) -> None:
    """Raise UsageError for options that measuring batch shapes, without trials, does not have."""
    options = ", ".join(f"--{name}" for name, value in given.items() if value is not None)
    if options:
        raise UsageError(
            f"{options}: no effect on --goal throughput without --space, which runs no trials; "
            "list what to measure, as in --space batch.micro=8,16,32, or use --goal loss"
        )


def _measure_shapes(base: Config, reporter: SweepReporter | None) -> SweepRecord:
    """Find the fastest batch shape on synthetic batches."""
    with _shown(reporter, "starting") as shown:
        from mmray.tuning.shape_probe import probe_shapes

        return probe_shapes(base, shown)


def _run_trials(request: SweepRequest, reporter: SweepReporter | None) -> SweepRecord:
    """Train the trials of a sweep, and log how many were measured."""
    from mmray.cluster.connect import session_title
    from mmray.tuning import trials

    # Report invalid values before Ray and torch are imported.
    trials.corner_trials(request.base, request.space, request.goal)
    with _shown(reporter, session_title(request.base.cluster)) as shown:
        from mmray.tuning.search import search

        sweep = search(request, shown)
        log_sweep(sweep, shown)
    return sweep


def _check_recommendation(sweep: SweepRecord) -> None:
    """Raise TrainingError with the reason of each trial if none could be ranked."""
    if sweep.recommendation is not None or sweep.status in ("stopped", "budget"):
        return
    reasons = [
        f"  {row.trial} {row.status.replace('_', ' ')}: {row.error}"
        for row in sweep.trials
        if row.error
    ]
    listed = "\n".join(reasons) or f"  no trial reported a finite {sweep.goal_name}"
    raise TrainingError(f"no trial of {sweep.folder} could be ranked:\n{listed}")


@contextmanager
def _shown(reporter: Reporter | None, title: str) -> Iterator[Reporter | ConsoleReporter]:
    """Yield a reporter; the default, of the console, shows a bar or lines meanwhile."""
    active = ConsoleReporter() if reporter is None else reporter
    if isinstance(active, ConsoleReporter):
        with active.show_progress(title):
            yield active
    else:
        yield active


def _load(recipe: str | Path | Config, sections: Mapping[str, Any]) -> Config:
    """Return a recipe with the inputs that the weights in the section `model` define."""
    if isinstance(recipe, Config):
        return recipe
    model = _plain(sections.get("model", {}))
    given = model if isinstance(model, dict) else {}  # another value is an error of `override`
    return load_recipe(str(recipe), given.get("kind"), given.get("weights"))


def _override(recipe: Config, sections: Mapping[str, Any]) -> Config:
    overrides = {name: _plain(value) for name, value in sections.items()}
    data = overrides.get("data")
    if data is not None and not isinstance(data, Mapping):
        overrides["data"] = {"train": data}
    config = override(recipe, {name: value for name, value in overrides.items() if name != "data"})
    if data is None:
        return config
    return override(config, {"data": _stored(config, overrides["data"])})


def _stored(config: Config, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `data` with rows in memory stored in `data.cache`, as their address."""
    stored = dict(data)
    in_memory = [
        name for name in ("train", "eval") if not isinstance(data.get(name), (str, type(None)))
    ]
    if in_memory:
        from mmray.data.formats.in_memory import store_rows

        cache = data.get("cache", config.data.cache)
        check_kept("data.cache", cache)
        for name in in_memory:
            stored[name] = store_rows(
                data[name], cache, config.prepare.column_names, config.prepare.keep
            )
    return stored


def _plain(value: Any) -> Any:
    """Return settings as in a recipe file; `global_` is `global`, which is a keyword of Python."""
    if isinstance(value, Section):
        return value.to_json()
    if isinstance(value, Mapping):
        return {
            "global" if name == "global_" else name: _plain(item) for name, item in value.items()
        }
    return str(value) if isinstance(value, Path) else value


def _folder(run: Run | str | AnyPath) -> str:
    return str(run.path if isinstance(run, Run) else run)
