"""Evaluate or export a run's checkpoint or pretrained weights.

Workers evaluate, so the driver needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from mmray import objectives
from mmray.cluster.connect import needs_ray, ray_session
from mmray.config import Config, EvalSettings, Lora, Vlm, from_yaml, recipes
from mmray.config.model import AnyModel
from mmray.config.sets import Mixture
from mmray.data.prepare.pipeline import PrepareProgress, ensure_prepared
from mmray.data.store.class_names import match_classes
from mmray.data.store.manifest import MANIFEST
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.text.tokenizer import TextEncoder, declared_pad_id
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.engine import precision
from mmray.engine.checkpoint import files
from mmray.engine.collectives import Group
from mmray.engine.run_state import EMA_KEY
from mmray.errors import Log, ResourceError, UsageError
from mmray.evaluation.build import (
    best_metric,
    build_evaluator,
    check_evaluable,
    describe_code_names,
    num_evaluated_rows,
    num_zero_shot_prompts,
)
from mmray.models import lora
from mmray.models.build import build
from mmray.models.export import open_clip
from mmray.models.export.export import ExportFormat, export
from mmray.models.export.vlm import export_vlm
from mmray.models.pretrained import pretrained_settings
from mmray.models.protocol import PRETRAINED, saved_layers
from mmray.storage.paths import AnyPath, to_path
from mmray.training import RunReporter, validate
from mmray.training.run_dir import (
    RunDir,
    check_processor,
    describe_unstored_processor,
)
from mmray.training.sets import eval_prepare_settings, held_out_rows
from mmray.training.workers.local import count_gpus, resolve_on_this_machine

# A step, the checkpoint with the best metric (`best_metric`), or (None) the newest valid one.
Step = int | Literal["best"] | None
Scores = dict[str, float]  # metrics by name


def load_run_config(folder: AnyPath) -> Config:
    """Return the config of a run; raise UsageError if the folder is not a run."""
    file = to_path(folder) / "config.yaml"
    if not file.exists():
        problem = (
            "is not a run: it has no config.yaml" if file.parent.exists() else ("does not exist")
        )
        raise UsageError(f"{file.parent} {problem}; `mmray runs` lists the runs of a folder")
    return from_yaml(file.read_text(), str(file))


def open_run(folder: AnyPath, step: Step) -> tuple[Config, str, AnyPath]:
    """Return what is needed to evaluate or export a run, which may still be training.

    Returns:
        Config of the run, content of its tokenizer.json ("" for a vision-language model), and
        folder of the checkpoint, whose files were verified.

    Raises:
        UsageError: The folder is not a run, or has no such valid checkpoint.
    """
    run = RunDir(to_path(folder))
    config = load_run_config(folder)
    metric = best_metric(config)
    faults = list[str]()
    if step is None:
        checkpoint = files.latest_valid_checkpoint(run.checkpoints, faults.append, rename=False)
    else:
        checkpoint = (
            files.best_checkpoint(run.checkpoints, metric)
            if step == "best"
            else run.checkpoints / f"step-{step}"
        )
        if checkpoint is None:
            faults = [
                f"none has {metric}: the run holds out no rows, or was never evaluated at a "
                "checkpoint"
            ]
        elif not checkpoint.exists():
            faults = []
            checkpoint = None
        elif (fault := files.verify(checkpoint)) is not None:
            faults = [f"checkpoint {checkpoint} is not valid: {fault}"]
            checkpoint = None
    if checkpoint is None:
        existing = ", ".join(files.list_checkpoint_names(run.checkpoints)) or "none"
        which = "valid checkpoint" if step is None else f"valid checkpoint for --step {step}"
        raise UsageError(
            "\n".join([f"{run.path} has no {which}; checkpoints: {existing}", *faults])
        )
    return config, (run.path / "tokenizer.json").read_text(), checkpoint


def pretrained_config(weights: str) -> Config:
    """Return the config with which pretrained weights are evaluated or exported: the recipe of
    their model kind, with the settings that the weights define, such as image size and tokenizer.

    Raises:
        UsageError: The weights are unknown or cannot be read.
    """
    settings = pretrained_settings(weights)
    kind = settings.pop("kind")
    all_recipes = [make() for make in recipes.RECIPES.values()]
    recipe = next(recipe for recipe in all_recipes if recipe.model.kind == kind)
    inputs = recipe.model.inputs.replace(**settings.pop("inputs"))
    return recipe.replace(model=recipe.model.replace(**settings, inputs=inputs))


def open_model(
    source: AnyPath | Config, step: Step, log: Log
) -> tuple[Config, str, AnyPath | None]:
    """Return what `open_run` returns, for a run or for pretrained weights.

    Args:
        source: Folder or URI of a run; or a config of `pretrained_config`, without a checkpoint.
        log: Called with (warning, label).

    Raises:
        UsageError: The folder is not a run or has no such valid checkpoint, the tokenizer cannot be
            loaded, or the processor of the run has changed.
    """
    if isinstance(source, Config):
        return *with_tokenizer(source, log), None
    opened = open_run(source, step)
    check_processor(to_path(source), opened[0].model)
    if line := describe_unstored_processor(to_path(source), opened[0].model):
        log(line, "warning")
    return opened


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
    config, tokenizer_json, checkpoint = open_model(source, step, log)
    if format == "open_clip" and config.model.kind not in open_clip.KINDS:
        raise open_clip.unsupported(config.model.kind)
    # Adapters of a quantized model are those of its weights before.
    unquantized = config.model.lora.replace(load_in_4bit=False)
    config = config.replace(model=config.model.replace(lora=unquantized))
    settings = config.model
    if adapters_only:
        if not settings.lora.rank or interpolate != 1 or format != "transformers":
            raise UsageError(
                "--adapters needs a run with model.lora.rank, and no --interpolate or --format"
            )
        _check_start("--adapters", settings)
        model = load_model(config, checkpoint)
    else:
        model = lora.merge_adapters(_load_interpolated(config, checkpoint, interpolate))
        settings = settings.replace(lora=Lora())  # they are merged into the weights
    spec = settings.model_dump(mode="json")
    if isinstance(settings, Vlm):
        from mmray.models.vlm.model import Vlm as VlmModel

        assert isinstance(model, VlmModel)
        return export_vlm(model, spec, out, adapters_only, log)
    return export(model, spec, tokenizer_json, out, adapters_only, format)


def interpolate_from_start(model: nn.Module, settings: AnyModel, share: float) -> None:
    """Interpolate between the initial and the trained weights, in place.

    Source: WiSE-FT (Wortsman et al. 2022, arXiv:2109.01903).

    Args:
        share: Factor of the trained weights, 0 to 1; that of the initial ones is 1 - share.
    """
    _check_interpolation(settings, share)
    start = build(settings.replace(lora=Lora()), settings.vocab_size).state_dict()
    # A tied weight has several names.
    weights = {trained.data_ptr(): (name, trained) for name, trained in model.state_dict().items()}
    for name, trained in weights.values():
        if trained.is_floating_point():
            trained.copy_(torch.lerp(start[name].to(trained), trained, share))


def _load_interpolated(config: Config, checkpoint: AnyPath | None, share: float) -> nn.Module:
    """Return the model of a checkpoint; with a share below 1 interpolated, without adapters."""
    model = load_model(config, checkpoint)
    if share == 1:
        return model
    model = lora.merge_adapters(model)
    interpolate_from_start(model, config.model, share)
    return model


def _check_interpolation(settings: AnyModel, share: float) -> None:
    """Raise UsageError if a run has no weights that its trained ones can be interpolated with."""
    if not 0 <= share <= 1:
        raise UsageError(f"--interpolate {share:g}: must be between 0 (the start) and 1 (the end)")
    _check_start("--interpolate", settings)


def _check_start(option: str, settings: AnyModel) -> None:
    """Raise UsageError if `model.weights` lacks weights that a run started with."""
    if not lora.starts_from_files(settings):
        raise UsageError(
            f"{option} needs a run whose initial weights are all in files of `model.weights`; this "
            f"run has random ones (model.weights: {settings.initial_weights}); leave {option} out"
        )


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
    config, tokenizer_json, checkpoint = open_model(source, step, reporter.log)
    folder = to_path(config.run.storage) if isinstance(source, Config) else source
    if interpolate != 1:
        _check_interpolation(config.model, interpolate)
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
    return _evaluate(config, folder, checkpoint, tokenizer_json, data, split, reporter, interpolate)


def _evaluate(
    config: Config,
    folder: AnyPath,
    checkpoint: AnyPath | None,
    tokenizer_json: str,
    data: str | None,
    split: str | None,
    reporter: RunReporter,
    share: float,
) -> Scores:
    split = split or (config.data.eval_split if data is None else "test")
    if data is not None:
        config = config.replace(data=config.data.replace(eval=data))
    validate.check_eval_selections(config)
    if reasons := validate.evaluation_reasons(config):
        raise UsageError("\n".join(reasons))
    # one device per worker, also of `branches`
    config = config.replace(train=config.train.replace(parallel="single"))
    load = partial(_load_interpolated, config, checkpoint, share)
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
        of_weights = f"{part}{checkpoint or config.model.initial_weights}"
        without_answers = config.replace(evaluate=config.evaluate.replace(num_generations=0))
        num_rows = num_evaluated_rows(without_answers, held_out)
        reporter.log(f"{of_weights} on {num_rows:,} rows of {names}", "evaluate")
        on_message = _show_progress(totals, reporter)
        score = partial(_score, tokenizer_json=tokenizer_json, held_out=held_out, load=load)
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


def with_tokenizer(config: Config, log: Log) -> tuple[Config, str]:
    """Load the tokenizer of pretrained weights.

    Args:
        config: A config of `pretrained_config`.
        log: Called with (warning, label) if the weights have more tokens.

    Returns:
        The config with the vocabulary size and the padding token of the tokenizer, and the content
        of tokenizer.json. Of a vision-language model the config unchanged, and "".

    Raises:
        UsageError: The tokenizer cannot be loaded, or only a set defines it.
    """
    if isinstance(config.model, Vlm):  # its processor is in its weights
        return config, ""
    inputs = config.model.inputs
    if inputs.tokenizer == "trained":
        raise UsageError(
            "model.inputs.tokenizer: `trained` is the tokenizer of a prepared set; name the file, "
            "folder or hub name of the tokenizer that the weights were trained with"
        )
    tokenizer_json = load_tokenizer(inputs.tokenizer, None)
    num_tokens = TextEncoder(tokenizer_json, inputs.max_tokens).vocab_size
    rows = config.model.vocab_size
    if num_tokens < rows:
        log(
            f"{inputs.tokenizer} has {num_tokens:,} tokens, the weights {rows:,}: is it their "
            "tokenizer?",
            "warning",
        )
    return config.replace(
        model=config.model.with_vocab(num_tokens, declared_pad_id(tokenizer_json))
    ), tokenizer_json


def load_model(config: Config, checkpoint: AnyPath | None) -> nn.Module:
    """Build the model of a run on the CPU, with the weights of a checkpoint.

    Args:
        config: Config of the run. With `train.ema`, the averaged weights are loaded.
        checkpoint: Folder of the checkpoint; None: the weights of `model.weights`.

    Returns:
        The model, with LoRA adapters if the run trains them.
    """
    if checkpoint is None:
        return build(config.model, config.model.vocab_size)
    meta = files.load_meta(checkpoint)
    saved_base = meta.get("base")
    source = PRETRAINED if saved_base is not None else saved_layers(meta.get("architecture"))
    model = build(config.model, config.model.vocab_size, source)
    from mmray.engine.checkpoint import state_io  # late: DCP takes seconds to import

    if config.train.ema:
        ema_weights = state_io.load_weights(checkpoint, EMA_KEY).items()
        weights = {
            name.removeprefix("module."): each
            for name, each in ema_weights
            if name.startswith("module.")
        }
    else:
        weights = state_io.load_weights(checkpoint)
    if saved_base is not None:
        base = lora.frozen_base(model, config.model.initial_weights)
        base.check(saved_base)
        base.add_to({"model": weights}, model)
    model.load_state_dict(weights)
    return model


# The model of this process by its digest: loading one takes seconds.
_MODELS: dict[str, nn.Module] = {}


def cached_model(
    config: Config, checkpoint: AnyPath | None, digest: str
) -> tuple[nn.Module, torch.device]:
    """Return a model with merged adapters, on the GPU of this process if it has one, and the
    device. The process keeps the model until it loads another one.

    Args:
        digest: Hash of the model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if digest not in _MODELS:
        _MODELS.clear()
        _MODELS[digest] = lora.merge_adapters(load_model(config, checkpoint)).to(device)
    return _MODELS[digest], device


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
    sets = {}
    for name, source, *_ in config.data.eval_sets:
        if needs_ray(config.cluster) and not (to_path(source) / MANIFEST).exists():
            from mmray.cluster.placement import check_data_capacity

            check_data_capacity(config.cluster)
        settings = eval_prepare_settings(config, source)
        prepared = ensure_prepared(
            source, config.data.cache, settings, reporter.log, reporter.prepare_progress
        )
        sets[name] = PreparedSet.open(str(prepared), split)
    return sets


def score_checkpoint(
    config: Config,
    group: Group,
    tokenizer_json: str,
    held_out: dict[str, PreparedSet],
    checkpoint: AnyPath,
) -> Scores:
    """Return the metrics of a checkpoint on held-out sets by name, in this process."""
    load = partial(load_model, config, checkpoint)
    return _score(config, group, lambda message: None, tokenizer_json, held_out, load)


def _score(
    config: Config,
    group: Group,
    report: Callable[[dict[str, int]], Any],
    tokenizer_json: str,
    held_out: dict[str, PreparedSet],
    load: Callable[[], nn.Module],
) -> Scores:
    evaluator = build_evaluator(
        config, held_out, tokenizer_json, lambda unit, number: report({unit: number})
    )
    objective = objectives.build(config.objective)
    loss_batch_size = config.batch.global_  # as in training, because the loss depends on it
    assert loss_batch_size is not None, "resolved when the run started"
    model = load()
    check_evaluable(config, model)
    with precision.select_precision(config.train.precision, group.device).autocast():
        return dict(evaluator.score(model.to(group.device), group, objective, loss_batch_size))
