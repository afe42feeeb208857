"""A sweep in the report: trials, ranks within each global batch, heat maps, bar charts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from mmray.report.figures import BLUE, GREY, ORANGE, ROSE, TEAL, Figure, figure
from mmray.report.run import read_json, read_lines

SWEEP, TRIALS = "sweep.json", "trials.jsonl"
AXES = ("batch.micro", "batch.accumulation", "batch.global")
OUT_OF_MEMORY = "out_of_memory"
# Goal: (field of a trial, title, whether larger is better).
GOALS = {
    "throughput": ("samples_per_s", "samples/s", True),
    "loss": ("loss", "loss", False),
    "recall": ("recall_at_1", "recall@1", True),
    "memory": ("peak_gib", "peak GiB", False),
}


@dataclass(frozen=True)
class TrialSummary:
    """One line of trials.jsonl; missing values are None."""

    name: str
    status: str
    values: dict[str, Any] = field(repr=False)
    rank: int | None = None  # among measured trials of the same global batch; 1 is best
    page: str | None = None  # report of the trial, relative to the sweep's

    def figure(self, name: str) -> float | None:
        value = self.values.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def shape(self) -> str:
        """Format as `micro × accumulation × workers`."""
        return " × ".join(str(self.values.get(name, "?")) for name in ("micro", "accumulation", "workers"))

    @property
    def others(self) -> str:
        """The searched settings that are not a heat map axis."""
        settings = (self.values.get("settings") or {}).items()
        return ", ".join(f"{name} {value}" for name, value in settings if name not in (*AXES, "cluster.workers"))

    @property
    def details(self) -> str:
        """Details below the row: other searched settings, and the error."""
        return "; ".join(part for part in (self.others, self.values.get("error")) if part)


@dataclass(frozen=True)
class HeatMapGrid:
    """A heat map: trials that differ only in micro-batch and accumulation."""

    title: str
    micro: list[int]
    accumulation: list[int]
    cells: dict[tuple[int, int], TrialSummary]  # (micro, accumulation) -> its best trial


@dataclass(frozen=True)
class Sweep:
    """A sweep and its trials in order."""

    folder: Path
    about: dict[str, Any]
    trials: list[TrialSummary]

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Read the sweep in `folder`; the last row of each trial is used."""
        about = read_json(folder / SWEEP)
        lines = {str(line["trial"]): line for line in read_lines(folder / TRIALS) if "trial" in line}
        trials = [
            TrialSummary(name, str(line.get("status", "")), line, page=_page(folder, line.get("run")))
            for name, line in lines.items()
        ]
        return cls(folder, about, _ranked(trials, *_goal(about)))

    @property
    def goal(self) -> tuple[str, str, bool]:
        """The compared field, its title, and whether larger is better."""
        name, more = _goal(self.about)
        return name, next((title for field, title, _ in GOALS.values() if field == name), name), more

    @property
    def recommendation(self) -> dict[str, Any]:
        return self.about.get("recommendation") or {}

    @cached_property
    def best(self) -> TrialSummary | None:
        return self.trial(self.recommendation.get("best"))

    def trial(self, name: Any) -> TrialSummary | None:
        return next((trial for trial in self.trials if trial.name == name), None)

    @property
    def per_global(self) -> list[tuple[str, TrialSummary]]:
        """(global batch, best trial) in ascending order of the batch."""
        found = [(size, self.trial(name)) for size, name in (self.recommendation.get("per_global") or {}).items()]
        return sorted(((size, trial) for size, trial in found if trial), key=lambda item: (len(item[0]), item[0]))

    def count(self, status: str) -> int:
        return sum(trial.status == status for trial in self.trials)

    def grids(self) -> list[HeatMapGrid]:
        """Return a grid per combination of workers and other settings; none if all have a single cell."""
        groups: dict[str, list[TrialSummary]] = defaultdict(list)
        for trial in self.trials:
            if isinstance(trial.values.get("micro"), int) and isinstance(trial.values.get("accumulation"), int):
                workers = f"workers {trial.values.get('workers')}"
                groups[f"{workers}, {trial.others}" if trial.others else workers].append(trial)
        grids = [_grid(title, trials, self.goal) for title, trials in groups.items()]
        return [grid for grid in grids if len(grid.cells) > 1]


def _goal(about: dict[str, Any]) -> tuple[str, bool]:
    name, _, more = GOALS.get(str(about.get("goal")), GOALS["throughput"])
    return name, more


def _page(folder: Path, run: Any) -> str | None:
    """Return the relative path of a trial's report if it is inside the sweep folder."""
    page = folder / str(run or "") / "report.html"
    inside = page.resolve().is_relative_to(folder.resolve())
    return page.resolve().relative_to(folder.resolve()).as_posix() if run and inside and page.is_file() else None


def _ranked(trials: list[TrialSummary], name: str, more: bool) -> list[TrialSummary]:
    """Return the trials with their rank within the global batch."""
    ranks: dict[str, int] = {}
    by_global: dict[Any, list[TrialSummary]] = defaultdict(list)
    for trial in trials:
        if trial.status == "finished" and trial.figure(name) is not None:
            by_global[trial.values.get("global")].append(trial)
    for group in by_global.values():
        best_first = sorted(group, key=lambda trial: trial.figure(name) or 0.0, reverse=more)
        ranks |= {trial.name: place for place, trial in enumerate(best_first, 1)}
    return [TrialSummary(each.name, each.status, each.values, ranks.get(each.name), each.page) for each in trials]


def _grid(title: str, trials: list[TrialSummary], goal: tuple[str, str, bool]) -> HeatMapGrid:
    cells: dict[tuple[int, int], TrialSummary] = {}
    for trial in trials:
        place = trial.values["micro"], trial.values["accumulation"]
        if place not in cells or _is_better(trial, cells[place], goal):
            cells[place] = trial
    micro, accumulation = ({place[axis] for place in cells} for axis in (0, 1))
    return HeatMapGrid(title, sorted(micro), sorted(accumulation), cells)


def _is_better(trial: TrialSummary, other: TrialSummary, goal: tuple[str, str, bool]) -> bool:
    one, two = trial.figure(goal[0]), other.figure(goal[0])
    if one is None or two is None:
        return two is None and one is not None
    return one > two if goal[2] else one < two


MOST_GRIDS = 12
MOST_BARS = 30  # longer lists are only in the table
# Visible on light and dark pages; Plotly derives the text colour of a cell from these.
SCALE = [[0, "#dbe4ff"], [0.35, "#9db4fb"], [0.7, "#5b7cfa"], [1, "#2c3fb1"]]
COLOURS = (BLUE, ORANGE, TEAL, ROSE, "#9b6bdf", "#b98a16", GREY)
STATUS_LABELS = {OUT_OF_MEMORY: "out of<br>memory", "infeasible": "infeasible"}


def sweep_figures(sweep: Sweep) -> dict[str, list[Figure]]:
    """Return heat maps, throughput bars and memory bars of the measured trials."""
    grids = sweep.grids()[:MOST_GRIDS]
    bars = [_throughput(sweep), _memory(sweep)]
    return {
        "grids": [_heat_map(number, grid, sweep) for number, grid in enumerate(grids, 1)],
        "bars": [bar for bar in bars if bar is not None],
    }


def _heat_map(number: int, grid: HeatMapGrid, sweep: Sweep) -> Figure:
    name, title, more = sweep.goal
    everywhere = [value for trial in sweep.trials if (value := _measured(trial, name)) is not None]
    x, y = [str(each) for each in grid.micro], [str(each) for each in grid.accumulation]
    rows = [[grid.cells.get((micro, accumulation)) for micro in grid.micro] for accumulation in grid.accumulation]
    measured = go.Heatmap(
        x=x,
        y=y,
        z=[[_measured(trial, name) for trial in row] for row in rows],
        text=[[_cell(trial, name, sweep.best) for trial in row] for row in rows],
        texttemplate="%{text}",
        textfont={"size": 12},
        hovertemplate=f"micro %{{x}}, accumulation %{{y}}: %{{z:,.4g}} {title}<extra></extra>",
        colorscale=SCALE,
        reversescale=not more,
        zmin=min(everywhere, default=None),  # one scale, so that maps can be compared
        zmax=max(everywhere, default=None),
        showscale=False,
        xgap=3,
        ygap=3,
        showlegend=False,
    )
    failed = go.Heatmap(
        x=x,
        y=y,
        z=[[1 if trial and _measured(trial, name) is None else None for trial in row] for row in rows],
        text=[[_status(trial) if trial and _measured(trial, name) is None else "" for trial in row] for row in rows],
        texttemplate="%{text}",
        textfont={"size": 12},
        hovertemplate="micro %{x}, accumulation %{y}: %{text}<extra></extra>",
        colorscale=[[0, "#b3324f"], [1, "#b3324f"]],
        showscale=False,
        xgap=3,
        ygap=3,
        showlegend=False,
    )
    cells = sorted(grid.cells.items())
    details = [f"micro {m}, accumulation {a}: {_cell_text(trial, name)}" for (m, a), trial in cells]
    drawn = figure(
        f"grid-{number}",
        grid.title or "all trials",
        f"{title} by micro-batch and accumulation. " + "; ".join(details),
        [measured, failed],
        height=110 + 62 * len(y),
        hovermode="closest",
        xaxis={"type": "category", "title": {"text": "micro-batch", "standoff": 6}},
        yaxis={"type": "category", "title": {"text": "accumulation", "standoff": 6}},
    )
    return replace(drawn, wide=len(x) > 6)


def _throughput(sweep: Sweep) -> Figure | None:
    """Return throughput bars, fastest first, coloured by global batch; error bars are the range over windows."""
    trials = _top_trials(sweep, "samples_per_s")
    if not trials:
        return None
    traces = []
    for colour, size in zip(_palette(trials), _sizes(trials), strict=False):
        mine = [trial for trial in trials if trial.values.get("global") == size]
        rates = [trial.figure("samples_per_s") or 0.0 for trial in mine]
        most = [trial.figure("samples_per_s_max") for trial in mine]
        least = [trial.figure("samples_per_s_min") for trial in mine]
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, m - r) if m is not None else 0.0 for m, r in zip(most, rates, strict=True)],
            "arrayminus": [max(0.0, r - m) if m is not None else 0.0 for m, r in zip(least, rates, strict=True)],
            "color": GREY,
            "thickness": 1.5,
            "width": 5,
        }
        traces.append(_bar(mine, rates, f"global {size}", colour, ",.0f", error_x=spread))
    summary = f"samples per second of {len(trials)} trials, the fastest {_label(trials[0])}"
    return _bars("throughput", "Samples per second, with the spread of its windows", summary, traces, trials)


def _memory(sweep: Sweep) -> Figure | None:
    trials = _top_trials(sweep, "peak_gib")
    if not trials:
        return None
    bar = _bar(trials, [trial.figure("peak_gib") or 0.0 for trial in trials], "peak GiB", ROSE, ".2f")
    summary = f"peak memory of {len(trials)} trials, the most {trials[0].figure('peak_gib'):.2f} GiB"
    return _bars("memory", "Peak memory of a worker, GiB", summary, [bar], trials)


def _bar(trials: list[TrialSummary], values: list[float], name: str, colour: str, digits: str, **style: Any) -> go.Bar:
    return go.Bar(
        y=[_label(trial) for trial in trials],
        x=values,
        name=name,
        orientation="h",
        marker={"color": colour},
        text=values,
        texttemplate=f"%{{text:{digits}}}",
        textposition="inside",
        insidetextanchor="start",
        insidetextfont={"color": "#10131a"},  # contrast of at least 4.4:1 on every series colour
        **style,
    )


def _bars(name: str, title: str, summary: str, traces: list[go.Bar], trials: list[TrialSummary]) -> Figure:
    return figure(
        name,
        title,
        summary,
        traces,
        height=110 + 27 * len(trials),
        hovermode="closest",
        barmode="overlay",  # each trial is in one trace only
        bargap=0.25,
        yaxis={
            "categoryorder": "array",
            "categoryarray": [_label(trial) for trial in reversed(trials)],
            "nticks": len(trials),
            "showgrid": False,
        },
        xaxis={"rangemode": "tozero", "showgrid": True, "nticks": 6},
    )


def _top_trials(sweep: Sweep, name: str) -> list[TrialSummary]:
    """Return the finished trials with the largest values, in descending order."""
    details = [trial for trial in sweep.trials if trial.status == "finished" and trial.figure(name) is not None]
    return sorted(details, key=lambda trial: -(trial.figure(name) or 0.0))[:MOST_BARS]


def _sizes(trials: list[TrialSummary]) -> list[Any]:
    return sorted({trial.values.get("global") for trial in trials}, key=lambda size: (size is None, size))


def _palette(trials: list[TrialSummary]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(_sizes(trials)))]


def _label(trial: TrialSummary) -> str:
    return f"{trial.name}  {trial.shape}"


def _measured(trial: TrialSummary | None, name: str) -> float | None:
    return trial.figure(name) if trial is not None and trial.status == "finished" else None


def _cell(trial: TrialSummary | None, name: str, best: TrialSummary | None) -> str:
    value = _measured(trial, name)
    if trial is None or value is None:
        return ""
    figure_text = f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
    return f"<b>★ {figure_text}</b>" if best is not None and trial.name == best.name else figure_text


def _status(trial: TrialSummary) -> str:
    """Text of a cell without a value."""
    return STATUS_LABELS.get(trial.status, "not<br>measured" if trial.status == "finished" else "failed")


def _cell_text(trial: TrialSummary, name: str) -> str:
    value = _measured(trial, name)
    return f"{value:.4g}" if value is not None else _status(trial).replace("<br>", " ")
