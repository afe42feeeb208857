"""Metrics of a run in Ray's metrics, which Prometheus scrapes from each node of the cluster.

`jobs/deploy/grafana/mmray_dashboard.json` shows them. Each has the label `run`.
"""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Counter, Gauge

# By the name in metrics.jsonl. Ray adds the prefix `ray_`, and to counters the suffix `_total`.
GAUGES = {
    "step": ("mmray_step", "Number of the last logged step."),
    "train/loss": ("mmray_loss", "Training loss of the last logged step."),
    "throughput/samples_per_s": ("mmray_samples_per_s", "Rows trained per second, all workers."),
    "throughput/mfu": ("mmray_mfu", "Fraction of the peak FLOPS of the GPUs, 0 to 1."),
    "time/data_wait_share": ("mmray_data_wait_share", "Fraction of time waiting for data, 0 to 1."),
    "gpu/busy_percent": ("mmray_gpu_busy_percent", "How busy the GPU of rank 0 is."),
    "gpu/memory_gib": ("mmray_gpu_memory_gib", "Memory in use on the GPU of rank 0."),
    "memory/peak_gib": ("mmray_peak_memory_gib", "Largest memory of a worker so far."),
}
COUNTERS = {
    "run/restarts": ("mmray_restarts", "Restarts of the workers."),
    "run/bad_rows": ("mmray_quarantined_rows", "Rows that training could not read."),
}


class RayMetrics:
    """Metrics of one run in Ray's metrics.

    Args:
        run: Name of the run, the label `run`.
    """

    def __init__(self, run: str) -> None:
        self._label = {"run": run}
        self._gauges = {
            key: Gauge(name, text, tag_keys=("run",)) for key, (name, text) in GAUGES.items()
        }
        self._counters = {
            key: Counter(name, text, tag_keys=("run",)) for key, (name, text) in COUNTERS.items()
        }
        self._counted = dict.fromkeys(COUNTERS, 0)

    def update(self, metrics: dict[str, Any]) -> None:
        """Export a line of metrics.

        Args:
            metrics: Values by name, as in metrics.jsonl, and the totals `run/restarts` and
                `run/bad_rows`; other names are ignored.
        """
        for key, gauge in self._gauges.items():
            if metrics.get(key) is not None:
                gauge.set(float(metrics[key]), self._label)
        for key, counter in self._counters.items():
            new = metrics.get(key, 0) - self._counted[key]
            if new > 0:
                counter.inc(new, self._label)
                self._counted[key] += new
