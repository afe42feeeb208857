"""Read a run folder, complete or not, and format its metrics, without importing Ray, torch or
pydantic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from mmray.engine.checkpoint.files import read_evaluations
from mmray.evaluation import DIRECTIONS, EXAMPLES, ROWS_IN_SET
from mmray.storage.paths import AnyPath, read_lines

Line = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """Content of a run folder; what is missing is empty, because a run may end at any time.

    Each file is read when its attribute is first used: `config`, `data`, `environment`, `result`
    and `examples` are dicts, and `lines` are those of metrics.jsonl.

    `series(name)` returns the steps and values of a metric such as `train/loss`.

    Attributes:
        folder: The folder.
    """

    folder: AnyPath

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of config.yaml, {section: {field: value}}."""
        return yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8")) or {}

    @cached_property
    def data(self) -> dict[str, Any]:
        """Content of data.json, which identifies the data; {} if it is missing.

        It has `train` (sets and weights as text, such as `prepared/a + 2 * prepared/b`),
        `fingerprint` (hex digest of the rows), `num_rows` (of an epoch) and `tokenizer` (hex digest
        of its file).
        """
        return read_json(self.folder / "data.json")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Content of environment.json: `python`, `platform`, `cores` and `packages` (version by
        name).

        Empty if the file is missing.
        """
        return read_json(self.folder / "environment.json")

    @cached_property
    def result(self) -> dict[str, Any]:
        """Content of result.json: `status`, `steps`, `metrics` (the last ones by name), `scores`
        (those of the last evaluation), and what `mmray.training.supervisor.Supervisor.train` lists;
        of a failed run `status` and `error`.

        Empty if the file is missing.
        """
        return read_json(self.folder / "result.json")

    @cached_property
    def examples(self) -> dict[str, Any]:
        """Content of examples.json: hits and misses of the newest evaluation, as
        `RetrievalExamples.values` or `answer_examples` of mmray.evaluation returns them.

        Empty if the file is missing.
        """
        return read_json(self.folder / EXAMPLES)

    @cached_property
    def lines(self) -> list[Line]:
        """The lines of metrics.jsonl in the order of the file, each with `step`, and values by name
        such as `train/loss`; NaN and infinity are None. Lines of evaluations.jsonl are added to
        those of their steps.
        """
        lines = read_lines(self.folder / "metrics.jsonl")
        logged = [line for line in lines if isinstance(line.get("step"), int)]
        beside = read_evaluations(self.folder)
        return [line | beside.get(line["step"], {}) for line in logged]

    @property
    def status(self) -> str:
        """`finished`, `stopped` or `failed`; `unfinished` if the run is running or was killed."""
        return str(self.result.get("status", "unfinished"))

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Return a metric over the steps of the run."""
        lines = [line for line in self.lines if name in line]
        return [line["step"] for line in lines], [line[name] for line in lines]

    def values(self, name: str) -> list[float]:
        """Return the finite values of a metric by step, such as of `train/loss`."""
        return [value for value in self.series(name)[1] if value is not None]

    def newest_line(self, prefix: str) -> Line:
        """Return the last line of metrics.jsonl with a metric that starts so; {} if none has."""
        for line in reversed(self.lines):
            if any(name.startswith(prefix) for name in line):
                return line
        return {}

    def newest(self, prefix: str) -> dict[str, float]:
        """Return the metrics with a prefix, such as `evaluate/`, in the last line that has any.

        Returns:
            Values by name without the prefix, such as `{"loss": 1.9}`; empty if no line has any.
        """
        line = self.newest_line(prefix)
        return {
            name.removeprefix(prefix): value
            for name, value in line.items()
            if name.startswith(prefix)
        }


def read_json(file: AnyPath) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or incomplete."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def format_number(value: float | None, digits: int | None = 3) -> str:
    """Format a number for a page."""
    if value is None or not math.isfinite(value):
        return "–"
    return format_compact(value) if digits is None else f"{value:,.{digits}f}"


def format_compact(value: float) -> str:
    """Format a number with about three significant digits: `0.123`, `45.6`, `12,345`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_setting(value: object) -> str:
    """Format the value of a setting, such as `yes` for True, `1, 2` for a list, `none` for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(format_setting(item) for item in value) or "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def scores_by_set(scores: Mapping[str, float | None]) -> dict[str, dict[str, float | None]]:
    """Group the metrics of an evaluation by set.

    Args:
        scores: Metrics by name; those of a set with a name as `NAME/METRIC`. Each set is known by
            its metric `bad_rows`, which every evaluation has; without any all belong to one set
            without a name.

    Returns:
        Metrics without their prefix by the name of the set, "" for a set without one, in the order
        of the evaluation; empty without metrics.
    """
    # Every evaluation of a set counts its bad rows.
    names = [metric.removesuffix("/bad_rows") for metric in scores if metric.endswith("/bad_rows")]
    if not names:
        return {"": dict(scores)} if scores else {}
    return {
        name: {
            metric.removeprefix(f"{name}/"): value
            for metric, value in scores.items()
            if metric.startswith(f"{name}/")
        }
        for name in names
    }


def recall_rows(scores: Mapping[str, float | None]) -> list[dict[str, str]]:
    """Return the table of retrieval metrics.

    Args:
        scores: Metrics by name, of which `recall_at_K/DIRECTION` and `median_rank/DIRECTION` are
            read (DIRECTION one of mmray.evaluation.DIRECTIONS, such as `image_to_text`), maybe of
            several sets.

    Returns:
        A dict of texts per set and measured direction, by column: "" (name of set and direction),
        `R@1`, `R@5`, `R@10` and `median rank`.
    """
    rows = []
    for name, of_set in scores_by_set(scores).items():
        for direction in DIRECTIONS:
            if f"recall_at_1/{direction}" not in of_set:
                continue
            recalls = {
                f"R@{k}": format_number(of_set.get(f"recall_at_{k}/{direction}"))
                for k in (1, 5, 10)
            }
            rank = of_set.get(f"median_rank/{direction}")
            rank_text = format_number(rank) if rank is None else f"{rank:g}"
            title = f"{name} {direction.replace('_', ' ')}".strip()
            rows.append({"": title, **recalls, "median rank": rank_text})
    return rows


def non_retrieval_metrics(scores: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Format the metrics that are neither recall nor a median rank.

    Args:
        scores: Metrics by name, such as `{"zero_shot/top_1": 0.5, "rows": 5000}`.

    Returns:
        Pairs of name and value as texts, such as ("zero shot, top 1", "0.500"). `bad_rows` is
        omitted if it is 0.
    """
    counts = ("rows", "tokens", "answered", ROWS_IN_SET)
    retrieval = {"recall_at_1", "recall_at_5", "recall_at_10", "median_rank"}
    pairs = []
    for name, value in scores.items():
        has_no_bad_rows = name.endswith("bad_rows") and not value
        if has_no_bad_rows or not retrieval.isdisjoint(name.split("/")):
            continue
        digits = 0 if name.endswith(counts) else 3
        title = name.replace("_", " ").replace("/", ", ")
        if name.endswith(ROWS_IN_SET):
            title += " (evaluate.limit)"
        pairs.append((title, format_number(value, digits)))
    return pairs
