"""Evaluate or export a run's checkpoint or pretrained weights.

Workers evaluate, so the driver needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from mmray import objectives
from mmray.cluster.connect import needs_ray, ray_session
from mmray.config import Config, EvalSettings, Lora, Prepare, Vlm
from mmray.config.sets import Mixture
from mmray.data.prepare.pipeline import PrepareProgress, ensure_prepared
from mmray.data.store.class_names import match_classes
from mmray.data.store.manifest import MANIFEST
from mmray.data.store.prepared_set import PreparedSet
from mmray.engine import precision
from mmray.engine.collectives import Group
from mmray.errors import Log, ResourceError, UsageError
from mmray.evaluation.build import (
    build_evaluator,
    check_evaluable,
    describe_code_names,
    num_evaluated_rows,
    num_zero_shot_prompts,
)
from mmray.models import lora
from mmray.models.export import open_clip
from mmray.models.export.export import ExportFormat, export
from mmray.models.export.vlm import export_vlm
from mmray.storage.paths import AnyPath, to_path
from mmray.training import RunReporter, validate
from mmray.training.run_dir import RunDir
from mmray.training.saved_model import (
    SavedModel,
    Step,
    check_interpolation,
    check_start,
    open_model,
)
from mmray.training.sets import held_out_rows, open_eval_sets
from mmray.training.workers.local import count_gpus, resolve_on_this_machine

Scores = dict[str, float]  # metrics by name


def export_model(
    source: AnyPath | Config,
    out: str | AnyPath,
    step: Step = None,
    interpolate: float = 1.0,
    adapters_only: bool = False,
    format: ExportFormat = "transformers",
    log: Log = lambda text, label: None,
) -> AnyPath:
    """Export the model of a run's checkpoint, or pretrained weights, to a folder, which
    `mmray.load` loads.

    Args:
        source: Folder or URI of the run; or a config of `pretrained_config`.
        interpolate: Share of the checkpoint's weights, 0 to 1; the rest is of `model.weights`, from
            which the run started.
        format: Library that opens the folder, besides mmray.

    Raises:
        UsageError: There is no such checkpoint, the weights or the tokenizer cannot be loaded, the
            run did not start from `model.weights`, its adapters cannot be exported alone, or
            open_clip has no such model.
    """
    saved = open_model(source, step, log)
    settings = saved.config.model
    if format == "open_clip" and settings.kind not in open_clip.KINDS:
        raise open_clip.unsupported(settings.kind)
    # Adapters of a quantized model are those of its weights before.
    settings = settings.replace(lora=settings.lora.replace(load_in_4bit=False))
    saved = saved._replace(config=saved.config.replace(model=settings))
    if adapters_only:
        if not settings.lora.rank or interpolate != 1 or format != "transformers":
            raise UsageError(
                "--adapters needs a run with model.lora.rank, and no --interpolate or --format"
            )
        check_start("--adapters", settings)
        model = saved.load()
    else:
        model = lora.merge_adapters(saved.load(interpolate))
        settings = settings.replace(lora=Lora())  # they are merged into the weights
    spec = settings.model_dump(mode="json")
    if isinstance(settings, Vlm):
        from mmray.models.vlm.model import Vlm as VlmModel

        assert isinstance(model, VlmModel)
        return export_vlm(model, spec, out, adapters_only, log)
    return export(model, spec, saved.tokenizer_json, out, adapters_only, format)


def evaluate_model(
    source: AnyPath | Config,
    data: str | None,
    split: str | None,
    step: Step,
    address: str | None,
    reporter: RunReporter,
    settings: EvalSettings | None = None,
    where: str | None = None,
    captions: str | None = None,
    interpolate: float = 1.0,
    **cluster: object,
) -> Scores:
    """Evaluate a checkpoint of a run, or pretrained weights.

    Args:
        source: Folder or URI of the run; or a config of `pretrained_config`, for which Ray Train
            writes its small files to run.storage/ray.
        data: Prepared set or raw source to evaluate on; None: the held-out rows of the run.
        split: Split of the set; None: `data.eval_split` of the run, or `test` if `data` is given.
        settings: Settings of the evaluation; None: those of the run or the config.
        where: None: `data.eval_where` of the run, or all rows if `data` is given.
        captions: None: `data.eval_captions` of the run, or the first column if `data` is given.
        interpolate: Share of the checkpoint's weights, 0 to 1; the rest is of `model.weights`, from
            which the run started.
        cluster: Settings of the `cluster` section, such as `workers`; None keeps the run's value.

    Returns:
        The metrics by name that the evaluator's `score` returns. With several sets each name starts
        with that of its set, such as `flickr/rows`.

    Raises:
        MmrayError: There is no such checkpoint or set, the model cannot be evaluated as configured,
            the cluster cannot provide the workers, or a worker failed.
    """
    saved = open_model(source, step, reporter.log)
    config = saved.config
    folder = to_path(config.run.storage) if isinstance(source, Config) else source
    if interpolate != 1:
        check_interpolation(config.model, interpolate)
    if settings is not None:
        config = config.replace(evaluate=config.evaluate.replace(**dict(settings)))
    selection = {"eval_where": where, "eval_captions": captions}
    if data is None:
        selection = {name: value for name, value in selection.items() if value is not None}
    config = config.replace(data=config.data.replace(**selection))
    changes = {name: value for name, value in cluster.items() if value is not None}
    config = config.with_cluster(address=address, **changes)
    if "workers" not in changes and not needs_ray(config.with_cluster(workers=1).cluster):
        # On one machine the workers of a training cluster would only share its devices.
        config = config.with_cluster(workers=max(1, min(config.cluster.max_workers, count_gpus())))
    saved = saved._replace(config=config)
    return _evaluate(saved, folder, data, split, reporter, interpolate)


def _evaluate(
    saved: SavedModel,
    folder: AnyPath,
    data: str | None,
    split: str | None,
    reporter: RunReporter,
    share: float,
) -> Scores:
    config = saved.config
    split = split or (config.data.eval_split if data is None else "test")
    if data is not None:
        config = config.replace(data=config.data.replace(eval=data))
    validate.check_eval_selections(config)
    if reasons := validate.evaluation_reasons(config):
        raise UsageError("\n".join(reasons))
    # one device per worker, also of `branches`
    config = config.replace(train=config.train.replace(parallel="single"))
    on_ray = needs_ray(config.cluster)
    with ray_session(config.cluster, log=reporter.log) if on_ray else nullcontext():
        if on_ray:
            from mmray.cluster.run_resources import check_capacity

            try:
                check_capacity(config, with_data=False)
            except ResourceError as error:  # names the settings of a run
                raise ResourceError(str(error).replace("--cluster.", "--")) from None
        held_out = {
            name: match_classes(
                config.model, held_out_rows(each, config, folder, reporter), reporter.log
            )
            for name, each in _open_held_out(config, folder, split, reporter).items()
        }
        for text in describe_code_names(config, held_out):
            reporter.log(text, "warning")
        totals = {
            "rows": num_evaluated_rows(config, held_out),
            "prompts": num_zero_shot_prompts(config, held_out),
        }
        names = ", ".join(str(each.folder) for each in held_out.values())
        part = f"{share:g} x " if share != 1 else ""
        of_weights = f"{part}{saved.checkpoint or config.model.initial_weights}"
        without_answers = config.replace(evaluate=config.evaluate.replace(num_generations=0))
        num_rows = num_evaluated_rows(without_answers, held_out)
        reporter.log(f"{of_weights} on {num_rows:,} rows of {names}", "evaluate")
        on_message = _show_progress(totals, reporter)
        score = partial(score_model, saved=saved, held_out=held_out, share=share)
        if on_ray:
            return _score_on_ray(config, score, to_path(folder), reporter, on_message)
        config = resolve_on_this_machine(config)
        on_gpu = config.cluster.accelerator == "gpu"
        _log_idle_gpus(on_gpu, count_gpus(), reporter)
        group = Group(device=torch.device("cuda" if on_gpu else "cpu"))
        return score(config, group, on_message)


def _show_progress(
    totals: Mapping[str, int], reporter: RunReporter
) -> Callable[[dict[str, int]], None]:
    """Return a function that adds the numbers of a finished batch, by unit, and shows the sum."""
    done = dict.fromkeys(totals, 0)

    def on_message(message: dict[str, int]) -> None:
        for unit, number in message.items():
            done[unit] += number
            progress = PrepareProgress("evaluate", done[unit], totals[unit], unit=unit)
            reporter.prepare_progress(progress)

    return on_message


def _log_idle_gpus(on_gpu: bool, num_gpus: float, reporter: RunReporter) -> None:
    if num_gpus and not on_gpu:
        reporter.log(
            f"evaluating on the CPU; --accelerator gpu uses a GPU ({num_gpus:g} found)", "warning"
        )


def _score_on_ray(
    config: Config,
    score: Callable[..., Scores],
    folder: AnyPath,
    reporter: RunReporter,
    on_message: Callable[[dict[str, int]], None],
) -> Scores:
    from mmray.cluster.placement import alive_nodes
    from mmray.cluster.run_resources import num_free_workers, resource_demand
    from mmray.training.workers.ray_backend import run_group

    config = config.with_cluster(workers=num_free_workers(config))
    on_gpu = "GPU" in resource_demand(config, with_data=False).per_worker
    _log_idle_gpus(on_gpu, sum(node.resources.get("GPU", 0) for node in alive_nodes()), reporter)
    workers = config.cluster.max_workers
    reporter.status(f"starting {workers} worker{'s' * (workers > 1)}")
    return run_group(score, config, folder, reporter.log, on_message)


def _open_held_out(
    config: Config, folder: AnyPath, split: str, reporter: RunReporter
) -> dict[str, PreparedSet]:
    """Open the sets of `data.eval` by name, or without them the split of the run's training set.

    A raw source is prepared first.
    """
    if config.data.eval is None:
        trained_on = RunDir(folder).read_json("data.json")
        address = Mixture.parse(trained_on["train"]).addresses[0]
        if not (to_path(address) / MANIFEST).exists():
            raise UsageError(
                f"{folder} was trained on {address}, which does not exist now: evaluate on its new "
                "address with --data SET --split SPLIT"
            )
        held_out = PreparedSet.open(address, split)
        if not held_out.manifest.splits:
            raise UsageError(
                f"{address} has no splits, so the run held out no rows: evaluate on another set "
                "with --data SET"
            )
        return {"": held_out}

    def prepare(source: str, settings: Prepare) -> AnyPath:
        if needs_ray(config.cluster) and not (to_path(source) / MANIFEST).exists():
            from mmray.cluster.placement import check_data_capacity

            check_data_capacity(config.cluster)
        return ensure_prepared(
            source, config.data.cache, settings, reporter.log, reporter.prepare_progress
        )

    return open_eval_sets(config, split, prepare)


def score_model(
    config: Config,
    group: Group,
    report: Callable[[dict[str, int]], Any],
    saved: SavedModel,
    held_out: dict[str, PreparedSet],
    share: float = 1.0,
) -> Scores:
    """Return the metrics of a model on held-out sets; a collective call of all ranks of the group.

    Args:
        config: Settings of the evaluation.
        report: Called with the numbers of a finished batch by unit.
        share: Of the trained weights, as in `SavedModel.load`.
    """
    evaluator = build_evaluator(
        config, held_out, saved.tokenizer_json, lambda unit, number: report({unit: number})
    )
    objective = objectives.build(config.objective)
    loss_batch_size = config.batch.global_  # as in training, because the loss depends on it
    assert loss_batch_size is not None, "resolved when the run started"
    model = saved.load(share)
    check_evaluable(config, model)
    with precision.select_precision(config.train.precision, group.device).autocast():
        return dict(evaluator.score(model.to(group.device), group, objective, loss_batch_size))
