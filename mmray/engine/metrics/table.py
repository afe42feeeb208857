"""Every metric of a line of metrics.jsonl: its meaning, its reduction over ranks, and where the
console and the report show it.

Names are `area/name_unit`. Other names are allowed, such as those of a callback: their mean over
the ranks is logged, and each has a chart in the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MetricInfo:
    """A metric.

    Attributes:
        meaning: What is measured, for people.
        reduction: How the values of the ranks become one.
        chart: Title of the chart of the report that shows it; "" if none does.
        line: Its name in the legend of this chart.
        console: Format of its value in the line of a step, with `value` and `compact` (about three
            significant digits); "" if the line does not have it.
    """

    meaning: str
    reduction: Literal["mean", "max"] = "mean"
    chart: str = ""
    line: str = ""
    console: str = ""


LOSS_CHART = "Loss"
_STEP_CHART = "Where a step's time goes"

METRICS = {
    "step": MetricInfo("Number of the last logged step."),
    "epoch": MetricInfo("Epoch of the first row of the step, from 0."),
    "rows_start": MetricInfo("First position of the step in the sample order."),
    "rows_stop": MetricInfo("Position after the last one of the step."),
    "rows_sha": MetricInfo("16 hex digits of the SHA-256 of the step's sorted row keys."),
    "train/loss": MetricInfo(
        "Training loss of the last logged step, mean over the global batch.",
        chart=LOSS_CHART,
        line="training",
        console="loss {value:.3f}",
    ),
    "train/lr": MetricInfo("Learning rate.", chart="Learning rate", line="rate"),
    "train/grad_norm": MetricInfo(
        "Gradient norm before clipping.", chart="Gradient norm", line="before clipping"
    ),
    "train/skipped_steps": MetricInfo(
        "Updates of the run that were not applied, because the gradient was not finite."
    ),
    "batch/micro": MetricInfo("Rows of a micro-batch, without batch.tokens."),
    "batch/tokens": MetricInfo("Most tokens of a micro-batch, with batch.tokens."),
    "batch/padding": MetricInfo("Fraction of text tokens that are padding."),
    "batch/padding_audio": MetricInfo("Fraction of samples of audio that are padding."),
    "batch/padding_video": MetricInfo("Fraction of frames of video that are padding."),
    "throughput/samples_per_s": MetricInfo(
        "Rows trained per second of `time/wall_s` without evaluation, all workers.",
        chart="Samples per second",
        line="samples/s",
        console="{compact} samples/s",
    ),
    "throughput/tokens_per_s": MetricInfo("Tokens trained per second, all workers."),
    "throughput/tflops_per_device": MetricInfo(
        "Model FLOPs of a device per second, counted at the first step."
    ),
    "throughput/mfu": MetricInfo(
        "Fraction of the peak FLOPS of the GPUs, 0 to 1; NaN for an unknown GPU.",
    ),
    "time/wall_s": MetricInfo(
        "Since the last line or the first step: steps, checkpoint, log, callbacks, evaluate."
    ),
    "time/checkpoint_s": MetricInfo("Stall of training by the checkpoint of the last line's step."),
    "time/log_s": MetricInfo("Measuring and logging."),
    "time/callbacks_s": MetricInfo("Callbacks, also those that report progress."),
    "time/evaluate_s": MetricInfo("Evaluation, in lines of evaluated steps."),
    "time/step_s": MetricInfo(
        "Step, mean since the last line.", chart=_STEP_CHART, line="whole step"
    ),
    "time/step_p50_s": MetricInfo("Median of the last 500 steps."),
    "time/step_p95_s": MetricInfo("95th percentile of the last 500 steps.", "max"),
    "time/first_step_s": MetricInfo("The first step.", "max"),
    "time/data_wait_s": MetricInfo(
        "Wait for rows in a step.", chart=_STEP_CHART, line="waiting for data"
    ),
    "time/data_wait_share": MetricInfo(
        "Fraction of time waiting for data, 0 to 1.",
        console="data wait {value:.0%}",
    ),
    "memory/peak_gib": MetricInfo(
        "Largest memory of a worker so far.",
        "max",
        chart="Peak memory of a worker",
        line="peak",
        console="worker peak {value:.2f} GiB",
    ),
    "memory/parameters_gib": MetricInfo("Memory of the parameters in the dry run.", "max"),
    "memory/gradients_gib": MetricInfo("Memory of the gradients in the dry run.", "max"),
    "memory/optimizer_gib": MetricInfo("Memory of the optimizer in the dry run.", "max"),
    "memory/activations_gib": MetricInfo("Memory of the activations in the dry run.", "max"),
    "host/cpu_percent": MetricInfo("Load of all cores, 0 to 100."),
    "host/memory_gib": MetricInfo("Memory in use on the node.", "max"),
    "gpu/busy_percent": MetricInfo("How busy the GPU of rank 0 is; needs nvidia-ml-py."),
    "gpu/memory_gib": MetricInfo("Memory in use on the GPU of rank 0.", "max"),
    "compile/graphs": MetricInfo("Graphs compiled so far, with those of the dry run.", "max"),
}
SOURCE = "source/"  # prefix of `loss` and `gradient_share` of each set of a mixture
EVALUATE = "evaluate/"  # prefix of the scores of an evaluation, which sets and tasks name


def is_own(name: str) -> bool:
    """Return whether a metric is neither in METRICS nor a score of an evaluation."""
    return name not in METRICS and not name.startswith(EVALUATE)
