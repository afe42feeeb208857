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

    GOALS has the three goals by name: `throughput`, `loss` and `recall`.

    Attributes:
        title: Name of the value, with its unit, such as `samples/s`.
        maximize: Whether a higher value is better.
        eval_metric: Held-out metric of metrics.jsonl by which trials are compared after the same
            number of samples; None: the speed of a trial counts.
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
    """The value of a trial after a number of samples: at which trials are compared, or of an
    evaluation in between.

    Attributes:
        samples: Samples (rows) trained.
        value: Samples/s, held-out loss or mean recall@1, by the goal of the sweep.
    """

    samples: int
    value: float


@dataclass(frozen=True)
class TrialRow:
    """One line of trials.jsonl: a trial, or a batch shape of `--goal throughput`.

    None: not measured, or without meaning for this row.

    Attributes:
        trial: Name of the trial such as `t001`, or of a batch shape such as `s001`.
        status: `waiting`, `running`, `paused` (waits for the decision whether it continues),
            `finished`, `pruned` (ended early, because others were better), `stopped` (by the user
            or the budget), `failed`, `out_of_memory` or `infeasible` (its settings contradict each
            other or need too many resources).
        settings: The searched settings and their values, such as {"optimizer.lr": 0.001}.
        error: A sentence why the trial did not finish; None: it did, or has not ended.
        micro: Rows of a micro-batch.
        accumulation: Micro-batches of a worker in a step.
        workers: Number of workers.
        global_batch_size: Rows of the global batch; `global` in the file.
        samples_per_s: Training speed in rows per second.
        step_p50_s: Median of the seconds of a step.
        peak_gib: Largest peak memory of a worker.
        elapsed_s: Seconds of its run, over all starts.
        run: Folder of the run, relative to the folder of the sweep.
        is_recipe: Whether the searched settings have the values of the recipe that the sweep
            started from.
        rungs: Its values at the rungs that it reached, ascending.
        curve: The held-out values of all evaluations.
    """

    trial: str
    status: Status
    settings: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    micro: int | None = None
    accumulation: int | None = None
    workers: int | None = None
    global_batch_size: int | None = None
    samples_per_s: float | None = None
    step_p50_s: float | None = None
    peak_gib: float | None = None
    elapsed_s: float = 0.0
    run: str | None = None
    is_recipe: bool = False
    rungs: tuple[Rung, ...] = ()
    curve: tuple[Rung, ...] = ()

    @property
    def samples(self) -> int | None:
        """Samples of the last rung; None before the first."""
        return self.rungs[-1].samples if self.rungs else None

    def value(self, goal: str) -> float | None:
        """Return samples/s for `throughput`, otherwise the metric of the last rung; None if not
        measured.
        """
        if goal == "throughput":
            return self.samples_per_s
        return self.rungs[-1].value if self.rungs else None

    @property
    def shape(self) -> str:
        """The batch shape as text, such as `32 x 4 x 2` (micro-batch, accumulation, workers)."""
        return f"{self.micro} x {self.accumulation} x {self.workers}"

    def to_json(self) -> dict[str, Any]:
        """Return this row as the JSON object of a line of trials.jsonl."""
        values = asdict(self)
        values["global"] = values.pop("global_batch_size")
        values["rungs"] = [rung._asdict() for rung in self.rungs]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrialRow:
        """Restore a row from its JSON object in trials.jsonl.

        Args:
            values: Fields of this class by name as `to_json` returns them, with `global` for
                `global_batch_size`. `trial` and `status` are required; unknown keys are ignored.
        """
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        known["global_batch_size"] = values.get("global")
        known["rungs"] = tuple(
            Rung(rung["samples"], rung["value"]) for rung in values.get("rungs", ())
        )
        known["curve"] = tuple(Rung(*point[:2]) for point in values.get("curve", ()))
        return cls(**known)


class Recommendation(NamedTuple):
    """The best trial and the reason, the JSON object `recommendation` of sweep.json.

    Attributes:
        best: Name of the trial.
        why: Sentences for the user.
    """

    best: str
    why: str
