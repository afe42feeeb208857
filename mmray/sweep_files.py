"""Files of a sweep folder: their names, the goals, and the rows of trials.jsonl as dataclasses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

SWEEP = "sweep.json"
TRIALS = "trials.jsonl"
# Columns of their own in every table, whether they are searched or not.
BATCH_SETTINGS = ("batch.micro", "batch.accumulation", "batch.global", "cluster.workers")

# `waiting`: not started; `paused`: ended at a rung and may continue; `pruned`: not continued after
# a rung; `stopped`: by the user or the budget.
Status = Literal[
    "waiting",
    "running",
    "paused",
    "finished",
    "pruned",
    "stopped",
    "failed",
    "out_of_memory",
    "infeasible",
]


class Goal(NamedTuple):
    """What a sweep optimizes.

    Attributes:
        title: Name of the value, with its unit.
        maximize: Whether a higher value is better.
        eval_metric: Held-out metric of metrics.jsonl by which trials are compared at rungs; None:
            the speed of a trial counts.
    """

    title: str
    maximize: bool
    eval_metric: str | None


GOALS = {
    "throughput": Goal("samples/s", True, None),
    "loss": Goal("held-out loss", False, "evaluate/loss"),
    "recall": Goal("recall@1", True, "evaluate/recall_at_1/mean"),
}


class Rung(NamedTuple):
    """The value of a trial's goal after a number of samples."""

    samples: int
    value: float
    elapsed_s: float = 0.0  # seconds of the trial so far, over all its starts


class CurvePoint(NamedTuple):
    """The held-out value of an evaluation during training."""

    samples: int
    value: float


@dataclass(frozen=True)
class TrialRow:
    """One line of trials.jsonl: a trial, or a batch shape of `--goal throughput`.

    None: not measured, or without meaning for this row.

    Attributes:
        settings: The searched settings and their values.
        error: Why the trial did not finish.
        micro, accumulation, workers, global_rows: Batch shape in rows; `global` in the file.
        step_p50_s: Median of the seconds of a step.
        peak_gib: Largest peak memory of a worker.
        elapsed_s: Seconds with workers, over all starts of the trial.
        run: Folder of the run, relative to the sweep's.
        is_recipe: Whether the settings are the recipe's own.
    """

    trial: str
    status: Status
    settings: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    micro: int | None = None
    accumulation: int | None = None
    workers: int | None = None
    global_rows: int | None = None
    samples_per_s: float | None = None
    step_p50_s: float | None = None
    peak_gib: float | None = None
    elapsed_s: float = 0.0
    run: str | None = None
    is_recipe: bool = False
    rungs: tuple[Rung, ...] = ()
    curve: tuple[CurvePoint, ...] = ()

    @property
    def samples(self) -> int | None:
        """Samples of the last rung."""
        return self.rungs[-1].samples if self.rungs else None

    def value(self, goal: str) -> float | None:
        """Return what the goal compares: samples/s, or the held-out metric at the last rung."""
        if goal == "throughput":
            return self.samples_per_s
        return self.rungs[-1].value if self.rungs else None

    @property
    def shape(self) -> str:
        """Format the batch shape as `32 x 4 x 2`: micro-batch, accumulation, workers."""
        return f"{self.micro} x {self.accumulation} x {self.workers}"

    def to_json(self) -> dict[str, Any]:
        """Return the object of trials.jsonl."""
        values = asdict(self)
        values["global"] = values.pop("global_rows")
        values["rungs"] = [rung._asdict() for rung in self.rungs]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrialRow:
        """Restore a row from its object in trials.jsonl; unknown keys are ignored."""
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        known["global_rows"] = values.get("global")
        known["rungs"] = tuple(Rung(**rung) for rung in values.get("rungs", ()))
        known["curve"] = tuple(CurvePoint(*point[:2]) for point in values.get("curve", ()))
        return cls(**known)


@dataclass(frozen=True)
class Recommendation:
    """The best trial and the reason; for batch shapes, the best one of each global batch (as text),
    too.
    """

    best: str
    why: str
    per_global: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the object of sweep.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Recommendation:
        """Restore a recommendation from sweep.json."""
        return cls(values["best"], values["why"], values.get("per_global", {}))
