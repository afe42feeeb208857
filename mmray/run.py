"""A run in its folder, from Python: its result, metrics, checkpoints and report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from mmray.errors import UsageError
from mmray.report.run import RunRecord
from mmray.storage.paths import AnyPath, RemotePath, to_path

if TYPE_CHECKING:
    from ray.train import Checkpoint as RayCheckpoint


class Run:
    """A run in its folder, which `mmray.train` returns.

    Values are read from the files of the run at each access, so they are current while it trains.

    Args:
        folder: folder of the run, or its address on an object store.

    Attributes:
        path: the folder as a path.

    Raises:
        UsageError: the folder has no config.yaml.
    """

    def __init__(self, folder: str | AnyPath):
        self.path = to_path(folder)
        if not (self.path / "config.yaml").exists():
            raise UsageError(f"{self.path} is not a run: it has no config.yaml")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def result(self) -> dict[str, Any]:
        """Content of result.json; empty before the run ends.

        It has `status` (`finished`, `stopped` or `failed`), `steps`, `rows_consumed`,
        `skipped_steps`, `metrics` (the last ones by name), `scores` (those of the last evaluation),
        and `best` (the dict `step`, `metric` and `score` of the best checkpoint; None: no
        checkpoint was evaluated). Of these a failed run has only `status`, and `error`, the reason;
        a stopped one that could not save a last checkpoint has only `status` and `steps`.
        All have `restarts`, `resizes`, `preemptions`, `wasted_steps` and `elapsed_s` (sums over all
        commands), `batch` (the shape as text) and `starts` (for each start its stages as {"stage",
        "at_s"}).
        """
        return RunRecord(self.path).result

    @property
    def metrics(self) -> dict[str, Any]:
        """The last logged metrics by name, such as `train/loss`, and those of the last evaluation.

        The metrics of the evaluation have no prefix `evaluate/`, such as `recall_at_1/mean`.
        """
        record = RunRecord(self.path)
        last = record.lines[-1] if record.lines else {}
        metrics = {name: value for name, value in last.items() if not name.startswith("evaluate/")}
        return metrics | record.newest("evaluate/")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in the order of steps, for example for pandas.DataFrame.

        Each is a dict with `step` and values by name, such as `train/loss`; after an evaluation
        also its metrics with the prefix `evaluate/`.
        """
        return RunRecord(self.path).lines

    def to_ray_checkpoint(self, step: int | Literal["best"] | None = None) -> RayCheckpoint:
        """Return a checkpoint of the run as a `ray.train.Checkpoint`, without copying it.

        Args:
            step: step of the checkpoint, or `best` (highest held-out recall@1, or zero-shot
                accuracy if that is the task of `data.eval`; of a vision-language model lowest
                loss); None: the newest valid one.

        Returns:
            The checkpoint, whose folder has the files of `checkpoints/step-N`.

        Raises:
            UsageError: the run has no such checkpoint.
        """
        from ray.train import Checkpoint

        from mmray.training.saved_model import open_run

        path = open_run(self.path, step).checkpoint
        assert path is not None, "of a run"
        if isinstance(path, RemotePath):
            return Checkpoint(path.fs_path, path.filesystem)
        return Checkpoint.from_directory(path.absolute())

    def report(self, out: str | AnyPath | None = None) -> AnyPath:
        """Write the HTML page of the run.

        Args:
            out: file to write; None: report.html in the folder of the run.

        Returns:
            The path of the page.
        """
        from mmray.report.write import write_report  # importing Plotly takes a second

        return write_report(self.path, None if out is None else to_path(out))
