"""Evaluation of checkpoints in tasks of Ray while training continues (`evaluate.where beside`).

Metrics are in evaluations.jsonl of the run, one line for each checkpoint, and in TensorBoard in its
folder `evaluations`, because rank 0 writes the files of the run meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
import torch

from mmray.cluster.placement import alive_nodes, decode_label_selector, free_nodes
from mmray.config import Config
from mmray.engine.checkpoint import files
from mmray.engine.collectives import Group
from mmray.errors import StorageError, first_line
from mmray.evaluation import main_scores
from mmray.storage.paths import AnyPath, write_atomic
from mmray.training import RunReporter
from mmray.training.resolve import ResolvedRun
from mmray.training.run_dir import RunDir

if TYPE_CHECKING:
    from mmray.data.store.prepared_set import PreparedSet

CHECK_INTERVAL_S = 5.0  # between two looks for new checkpoints
WAIT_S = 1.0
EVENTS_DIR = "evaluations"  # folder of TensorBoard events in that of the run


class BesideEvaluator:
    """Evaluates the checkpoints of a run, one at a time, the newest first.

    The driver calls `poll()` while workers train, and `finish(outcome)` after the last step.

    Args:
        resolved: The run, with its settings and evaluation sets.
        run: Its folder.
        should_stop: Returns True if the caller wants the run to stop.
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        run: RunDir,
        reporter: RunReporter,
        should_stop: Callable[[], bool],
    ) -> None:
        self._resolved = resolved
        self._run = run
        self._reporter = reporter
        self._should_stop = should_stop
        self._scores = files.read_evaluations(run.path)
        self._failed: set[int] = set()
        self._task: tuple[int, Any] | None = None
        self._next_check_s = 0.0

    def poll(self) -> None:
        """Collect the metrics of a task that has ended, and start a task for the newest checkpoint
        without metrics; at most every 5 s.
        """
        if time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
            self._advance(0.0)

    def finish(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Evaluate the checkpoints that are left, and return result.json with the last metrics."""
        while self._advance(WAIT_S) and not self._should_stop():
            pass
        scores = self._scores.get(max(self._scores, default=0), {})
        names = {name.removeprefix("evaluate/"): value for name, value in scores.items()}
        return outcome | {"metrics": outcome["metrics"] | names, "scores": names}

    def _advance(self, wait_s: float) -> bool:
        """Return whether a checkpoint is being evaluated."""
        if self._task is not None:
            ready, _ = ray.wait([self._task[1]], timeout=wait_s)
            if not ready:
                return True
            self._collect(*self._task)
            self._task = None
        steps = set(files.complete_steps(self._run.checkpoints)) - self._scores.keys()
        if step := max(steps - self._failed, default=0):
            self._task = (step, self._start(step))
        return self._task is not None

    def _start(self, step: int) -> Any:
        resolved = self._resolved
        config = resolved.config
        return _evaluate.options(**_resources(config)).remote(
            # one device, also of `branches`
            config.replace(train=config.train.replace(parallel="single")),
            resolved.tokenizer_json,
            resolved.eval_sets,
            self._run.checkpoints / f"step-{step}",
        )

    def _collect(self, step: int, task: ray.ObjectRef[dict[str, float]]) -> None:
        """Log and store the metrics of a checkpoint, or why it has none."""
        try:
            scores = ray.get(task)
            self._scores[step] = {f"evaluate/{name}": value for name, value in scores.items()}
            lines = [json.dumps({"step": key} | self._scores[key]) for key in sorted(self._scores)]
            write_atomic(self._run.path / files.EVALUATIONS, "\n".join(lines) + "\n")
            shown = ", ".join(f"{title} {value}" for title, value in main_scores(scores))
            self._reporter.log(f"step {step:,}: {shown}", "evaluate")
        except (ray.exceptions.RayError, OSError, StorageError) as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            text = f"step {step:,} was not evaluated: {first_line(cause)}"
            self._reporter.log(text, "evaluate")
            self._failed.add(step)


def _resources(config: Config) -> dict[str, Any]:
    """Return the resources of a task: a free GPU if workers train on GPUs, otherwise the free CPUs
    of a node for data, at most as many as a worker's and at least one.
    """
    nodes = free_nodes()
    if config.cluster.accelerator == "gpu" and any(
        node.resources.get("GPU", 0) >= 1 for node in nodes
    ):
        return {"num_gpus": 1, "num_cpus": 1}
    selector = decode_label_selector(config.cluster.data_label, alive_nodes())
    matching = [node for node in nodes if node.matches_labels(selector)]
    free = max((node.resources.get("CPU", 0) for node in matching), default=1)
    cpus = max(1, min(config.cluster.num_threads, int(free)))
    return {"num_cpus": cpus, "label_selector": selector if matching else {}}


@ray.remote(max_retries=1)
def _evaluate(
    config: Config,
    tokenizer_json: str,
    held_out: dict[str, PreparedSet],
    checkpoint: AnyPath,
) -> dict[str, float]:
    """Return the metrics of a checkpoint by name."""
    from mmray.training.evaluate_export import score_model
    from mmray.training.saved_model import SavedModel

    if (fault := files.verify(checkpoint)) is not None:
        raise OSError(f"its checkpoint is not valid: {fault}")
    device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    torch.set_num_threads(max(1, int(cpus)))
    saved = SavedModel(config, tokenizer_json, checkpoint)
    scores = score_model(config, Group(device=device), lambda _: None, saved, held_out)
    if isinstance(checkpoint, Path):
        from torch.utils.tensorboard import SummaryWriter

        with suppress(OSError), SummaryWriter(str(checkpoint.parents[1] / EVENTS_DIR)) as events:
            for name, value in scores.items():
                events.add_scalar(f"evaluate/{name}", value, files.step_of(checkpoint))
    return scores
