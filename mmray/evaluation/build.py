"""Choose the evaluator of a model: by embeddings, or by generated text.

The driver imports this without torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError
from mmray.evaluation import ROWS_IN_SET
from mmray.plugins import merge_metrics

if TYPE_CHECKING:
    from torch import nn

    from mmray.config import Config
    from mmray.config.sets import EvalSet
    from mmray.engine.collectives import Group
    from mmray.evaluation.batches import OnProgress, SaveExamples
    from mmray.objectives.protocol import Objective


# a name of digits, maybe with a prefix, and without a word
_CODE = re.compile(r"([^\W\d]{0,2}|class|label|id)[\W_]*\d+", re.I)


@dataclass(frozen=True)
class SetsEvaluator:
    """Evaluates a model on several sets, one after the other.

    `score(model, group, objective, global_batch_size)` returns metrics by name, such as `loss`;
    those of a set with a name have the prefix `NAME/`.

    Args:
        evaluators: The evaluator of each set by its name, "" for the only set without a name; its
            `score` is called with the arguments of this class's `score`.
    """

    evaluators: dict[str, Any]

    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Objective,
        global_batch_size: int,
        save_examples: SaveExamples | None = None,
    ) -> dict[str, float]:
        """Return the metrics of all sets; a collective call of all ranks.

        Args:
            model: The unwrapped model.
            group: The Group of all ranks, with which they exchange embeddings.
            objective: Objective of the run, with `count` and `compute_loss`, for the metric `loss`.
            global_batch_size: Number of rows of a step.
            save_examples: Called at most once, with the content of examples.json: hits and misses
                of the first set that has some, as JSON values. Given on one rank or none; None: not
                called.

        Returns:
            Equal on all ranks: the metrics of each evaluator, of a set with a name under
            `NAME/METRIC`; and `rows_in_set` if `evaluate.limit` leaves out rows.
        """
        examples: list[dict[str, Any]] = []
        save = None if save_examples is None else examples.append
        metrics: dict[str, float] = {}
        class_embeddings: dict[tuple[Any, ...], Any] = {}  # of these weights
        for name, evaluator in self.evaluators.items():
            evaluator.class_embeddings = class_embeddings
            scores = evaluator.score(model, group, objective, global_batch_size, save)
            in_set = evaluator.prepared.num_rows
            if in_set > (evaluator.settings.limit or in_set):
                scores = merge_metrics({ROWS_IN_SET: float(in_set)}, scores, "evaluate.metrics")
            prefix = f"{name}/" if name else ""
            metrics |= {f"{prefix}{metric}": value for metric, value in scores.items()}
        if save_examples is not None and examples:
            save_examples(examples[0])
        return metrics


def build_evaluator(
    config: Config,
    eval_sets: Mapping[str, PreparedSet],
    tokenizer_json: str,
    on_progress: OnProgress | None = None,
) -> SetsEvaluator:
    """Build the evaluators for the kind of model of a run, one for each set.

    They compute loss and scores of generated answers for `vlm`, otherwise retrieval and
    classification metrics.

    Args:
        config: The config of the run; `data.eval` has the task of each set.
        eval_sets: The sets with the held-out rows by name, "" for the only set without a name.
        tokenizer_json: Content of tokenizer.json of the run; unused for `vlm`, which has a
            processor.
        on_progress: Called with (unit, number) when a batch of `rows` or `prompts` is done; None:
            not called.

    Returns:
        A SetsEvaluator, whose `score(model, group, objective, global_batch_size)` returns the
        metrics of all sets by name.

    Raises:
        UsageError: The names in `evaluate.classes` do not fit the labels of the set.
        DataError: A set whose task is `zero_shot` has no class names.
    """
    from mmray.evaluation.clips import ClipEvaluator
    from mmray.evaluation.conversations import ConversationEvaluator
    from mmray.evaluation.evaluator import Evaluator

    check_eval_sets(config, eval_sets)

    def build(eval_set: EvalSet) -> Any:
        prepared = eval_sets[eval_set.name]
        max_pixels = max(config.prepare.max_pixels, prepared.max_pixels)
        if config.model.generates_text:
            return ConversationEvaluator(config, prepared, max_pixels, on_progress)
        settings = config.evaluate.with_prompts(eval_set.prompts)
        evaluator = ClipEvaluator if config.model.takes_clips else Evaluator
        return evaluator(
            prepared,
            config.model.inputs,
            tokenizer_json,
            settings,
            max_pixels,
            on_progress,
            eval_set.task,
        )

    return SetsEvaluator({each.name: build(each) for each in config.data.eval_sets})


def check_eval_sets(config: Config, eval_sets: Mapping[str, PreparedSet]) -> None:
    """Check that each set has what its task needs.

    Args:
        config: The config of the run; `data.eval` has the task of each set.
        eval_sets: The sets with the held-out rows by name; empty: nothing is evaluated.

    Raises:
        UsageError: The names in `evaluate.classes` do not fit the labels of the set.
        DataError: A set whose task is `zero_shot` has no class names.
    """
    for eval_set in config.data.eval_sets if eval_sets else ():
        prepared = eval_sets[eval_set.name]
        classes = config.evaluate.classes
        check_classes(classes, prepared)
        if eval_set.task == "zero_shot" and not (classes or prepared.manifest.class_names):
            raise DataError(
                f"data.eval: {eval_set.name} has the task zero_shot, and {prepared.folder} has no "
                "class names; prepare it from a source with classes, or name them in "
                "--evaluate.classes"
            )


def describe_code_names(config: Config, eval_sets: Mapping[str, PreparedSet]) -> list[str]:
    """Return a warning for each set whose prompts of zero-shot classification would have codes,
    such as `n01440764`, in place of words.
    """
    warnings: list[str] = []
    if config.model.generates_text or config.model.takes_clips or config.evaluate.classes:
        return warnings
    for eval_set in config.data.eval_sets if eval_sets else ():
        prepared = eval_sets[eval_set.name]
        names = prepared.manifest.class_names
        codes = [name for name in names if _CODE.fullmatch(name)]
        if eval_set.task == "retrieval" or 2 * len(codes) <= len(names):
            continue
        prompt = config.evaluate.with_prompts(eval_set.prompts).prompts[0]
        examples = ", ".join(f"`{prompt.replace('{}', name)}`" for name in codes[:3])
        warnings.append(
            f"{len(codes):,} of the {len(names):,} class names of {prepared.folder} are codes, so "
            f"prompts of zero-shot classification are {examples}: name the classes in "
            "--evaluate.classes"
        )
    return warnings


def check_classes(classes: Sequence[str], prepared: PreparedSet) -> None:
    """Check that the class names in `evaluate.classes` fit the labels of a set.

    A name that is a synonym of the set's name is accepted. Another number of classes is an error,
    and so is the name of one label at the index of another.

    Args:
        classes: Names of the labels 0, 1, ... in the config; empty: the names of the set are used.
        prepared: The set. Without class names it is not checked.

    Raises:
        UsageError: The names do not fit the labels.
    """
    names = prepared.manifest.class_names
    if not classes or not names:
        return
    # a name may have other words next to the set's: `a red fox`
    padded_classes = [f" {re.sub('[-_ ]+', ' ', name).strip()} ".casefold() for name in classes]
    padded_labels = [f" {name.replace('-', ' ')} ".casefold() for name in names]
    mismatches = [
        label
        for label, name in enumerate(padded_classes[: len(names)])
        if padded_labels[label] not in name
    ]
    swaps = [
        f"label {label} is {names[label]!r}, given is {classes[label]!r}"
        for label in mismatches
        if any(padded_labels[other] in padded_classes[label] for other in mismatches)
        or padded_classes[label] in padded_labels
    ]
    if swaps or len(padded_classes) != len(padded_labels):
        raise UsageError(
            f"evaluate.classes: {len(classes)} names, and {prepared.folder} has {len(names)} labels"
            f"{''.join(f'; {each}' for each in swaps[:3])}. Leave it out to use the names of the "
            f"set in their order: {', '.join(names)[:200]}"
        )


def num_evaluated_rows(config: Config, eval_sets: Mapping[str, PreparedSet]) -> int:
    """Return how many rows an evaluation reads, for the total of a progress bar.

    Rows for which an answer is generated are read twice.
    """
    total = 0
    for prepared in eval_sets.values():
        rows = min(prepared.num_rows, config.evaluate.limit or prepared.num_rows)
        total += rows
        total += min(rows, config.evaluate.num_generations) if config.model.generates_text else 0
    return total


def num_zero_shot_prompts(config: Config, eval_sets: Mapping[str, PreparedSet]) -> int:
    """Return how many prompts an evaluation of the sets embeds, for the total of a progress bar.

    Args:
        config: The config of the run, with the task of each set, `evaluate.classes` and
            `evaluate.prompts`.
    """
    if config.model.generates_text or config.model.takes_clips:
        return 0
    total = 0
    for eval_set in config.data.eval_sets if eval_sets else ():
        if eval_set.task != "retrieval":
            classes = config.evaluate.classes or eval_sets[eval_set.name].manifest.class_names
            total += len(classes) * len(config.evaluate.with_prompts(eval_set.prompts).prompts)
    return total


def check_evaluable(config: Config, model: nn.Module) -> None:
    """Raise UsageError if a model lacks a method of its evaluation, such as `embed_image`."""
    from mmray.models.protocol import missing_methods

    missing = missing_methods(model)
    if missing and not config.model.generates_text and not config.model.takes_clips:
        raise UsageError(
            f"model.kind: `{config.model.kind}` has no {' and no '.join(missing)}, which "
            "evaluation calls. Add the methods (see mmray/models/protocol.py). A run is not "
            "evaluated if its set has no split of the name data.eval_split"
        )


def best_metric(config: Config) -> str:
    """Return the metric that selects the best checkpoint of a run, of the first of several sets.

    It is the loss of a model that generates text, otherwise recall@1, or top-1 of zero-shot.
    """
    first = config.data.eval_sets[0]
    metric = "zero_shot/top_1" if first.task == "zero_shot" else "recall_at_1/mean"
    if config.model.generates_text:
        metric = "loss"
    return "/".join(filter(None, ("evaluate", first.name, metric)))
