"""Choose the evaluator of a model: by embeddings, or by generated text.

The driver imports this without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from mmray.config import Config


def build_evaluator(
    config: Config,
    prepared: PreparedSet,
    tokenizer_json: str,
    on_rows: Callable[[int], None] | None = None,
) -> Any:
    """Build the evaluator for the kind of model of a run.

    Args:
        config: The config of the run.
        prepared: The set with the held-out rows.
        tokenizer_json: Content of tokenizer.json of the run; unused for `vlm`, which has a
            processor.
        on_rows: Called with the number of rows of each batch when it is done, to show progress.

    Returns:
        A ConversationEvaluator for `vlm`, otherwise an Evaluator. Each has the method
        `score(model, group, objective, global_rows, save_examples)`, which returns metrics by name.

    Raises:
        UsageError: The names in `evaluate.classes` do not fit the labels of the set.
    """
    from mmray.evaluation.conversations import ConversationEvaluator
    from mmray.evaluation.evaluator import Evaluator

    check_classes(config.evaluate.classes, prepared)
    max_pixels = max(config.prepare.max_pixels, prepared.max_pixels)
    if config.model.generates_text:
        return ConversationEvaluator(config, prepared, max_pixels, on_rows)
    inputs = config.model.inputs
    return Evaluator(prepared, inputs, tokenizer_json, config.evaluate, max_pixels, on_rows)


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
    given = [name.replace("_", " ").strip().casefold() for name in classes]
    expected = [name.casefold() for name in names]
    moved = [
        f"label {label} is {names[label]!r}, given is {classes[label]!r}"
        for label, name in enumerate(given[: len(expected)])
        if name != expected[label] and name in expected
    ]
    if moved or len(given) != len(expected):
        raise UsageError(
            f"evaluate.classes: {len(classes)} names, and {prepared.folder} has {len(names)} labels"
            f"{''.join(f'; {each}' for each in moved[:3])}. Leave it out to use the names of the "
            f"set in their order: {', '.join(names)[:200]}"
        )


def num_evaluated_rows(config: Config, prepared: PreparedSet) -> int:
    """Return how many rows `score` reads, for the total of a progress bar.

    Rows for which an answer is generated are read twice and count twice.

    Args:
        config: The config of the run, with `evaluate.limit` and `evaluate.num_generations`.
        prepared: The set with the held-out rows.
    """
    rows = min(prepared.num_rows, config.evaluate.limit or prepared.num_rows)
    return rows + (min(rows, config.evaluate.num_generations) if config.model.generates_text else 0)


def check_evaluable(config: Config, model: nn.Module) -> None:
    """Check that the model has the methods with which it is evaluated, such as `embed_image`.

    A model that generates text is not checked.

    Args:
        config: The config of the run.
        model: The model that was built from it.

    Raises:
        UsageError: A method is missing.
    """
    from mmray.models.protocol import EMBEDDING_METHODS

    missing = [name for name in EMBEDDING_METHODS if not callable(getattr(model, name, None))]
    if missing and not config.model.generates_text:
        raise UsageError(
            f"model.kind: `{config.model.kind}` has no {' and no '.join(missing)}, which "
            "evaluation calls. Add the "
            "methods (see mmray/models/protocol.py), or disable evaluation with a "
            "--data.eval-split that the set does "
            "not have"
        )


def best_metric(config: Config) -> str:
    """Return the metric of metrics.jsonl that selects the best checkpoint of a run.

    Args:
        config: The config of the run.

    Returns:
        `evaluate/loss` (lower is better) for a model that generates text, otherwise
        `evaluate/recall_at_1/mean` (higher is better).
    """
    return "evaluate/loss" if config.model.generates_text else "evaluate/recall_at_1/mean"
