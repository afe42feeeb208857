"""The mmray command: reads what was typed, calls one composer, prints what came of it. The only part that prints.

Each verb is a small function from the typed arguments to an exit code: 0 good, 2 usage, 3 training failed,
4 resources that cannot be had, 5 data over its error budget, 130 interrupted.
"""

from __future__ import annotations

import difflib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from mmray import recipes
from mmray.config import Cluster, Config, Prepare, to_yaml
from mmray.console import Screen, recall_table, rows_table, training_figures
from mmray.errors import MmrayError, UsageError

INTERRUPTED = 130
STYLE = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)


class Reporter:
    """Tells the screen what a run does; implements mmray.train.trainer.Listener."""

    def __init__(self, screen: Screen):
        self.screen = screen
        self._first: tuple[float, int] | None = None

    def note(self, text: str, label: str = "") -> None:
        self.screen.note(_short(text), label)

    def phase(self, title: str) -> None:
        self.screen.phase(title)

    def preparing(self, progress: Any) -> None:
        if progress.total_rows:  # unknown while the source is being scanned
            figures = f"{progress.bad_rows:,} set aside"
            self.screen.show(progress.done_rows, progress.total_rows, figures, f"{progress.stage} rows")

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        if "evaluate/recall_at_1/image_to_text" in metrics:
            self.note(evaluation_line(metrics), "evaluated")
        done = metrics["step"]
        self.screen.show(done, total_steps, training_figures(metrics, self._seconds_left(done, total_steps)), "step")

    def _seconds_left(self, done: int, total: int) -> float | None:
        """From the pace since the first line: the first steps, which warm up, are left out."""
        now = time.monotonic()
        if self._first is None or done <= self._first[1]:
            self._first = (now, done)
            return None
        began_s, first = self._first
        return (total - done) * (now - began_s) / (done - first)


def evaluation_line(metrics: dict[str, Any]) -> str:
    ways = ("image_to_text", "text_to_image")
    recalls = ", ".join(f"{way.replace('_', ' ')} {metrics[f'evaluate/recall_at_1/{way}']:.3f}" for way in ways)
    return f"step {metrics['step']:,}: recall@1 {recalls}"


def train(argv: Sequence[str], screen: Screen) -> int:
    """mmray train [RECIPE] [--section.field value ...] [--print-config]"""
    config, print_config = parse_run(argv, "train")
    if print_config:
        print(to_yaml(config), end="")
        return 0
    from mmray.train import trainer  # late: `--help` and `--print-config` must not import Ray and torch

    screen.note(f"mmray {version('mmray')}, recipe {config.recipe}")
    with screen.work("starting Ray"):
        outcome = trainer.train(config, Reporter(screen))
    return _say_outcome(outcome, screen)


def _say_outcome(outcome: Any, screen: Screen) -> int:
    result = outcome.result
    if outcome.already_done:
        screen.note(f"{outcome.path} has finished its {result['steps']:,} steps; more with --train.steps", "done")
        return 0
    took = f"{result['steps']:,} steps in {result['elapsed_s']:.0f} s"
    restarts = (
        f", {result['restarts']} restarts, {result['wasted_steps']} steps done twice" if result["restarts"] else ""
    )
    if result["status"] == "stopped":
        screen.note(f"{took}; the same command goes on from step {result['steps']:,}", "stopped")
        return INTERRUPTED
    screen.note(f"{took}{restarts}", "finished")
    if "recall_at_1/image_to_text" in result["metrics"]:
        screen.console.print(recall_table(result["metrics"]))
    name = _short(str(outcome.path))
    screen.note(f"mmray evaluate {name}    mmray export {name} exported/{outcome.path.name}", "next")
    return 0


def _short(text: str) -> str:
    """Paths below the working directory as they would be typed."""
    return text.replace(f"{Path.cwd()}/", "")


def parse_run(argv: Sequence[str], verb: str) -> tuple[Config, bool]:
    """The config that a recipe name and flags mean, and whether it is only to be printed."""
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "sample"
    print_config = "--print-config" in rest
    rest = [word for word in rest if word != "--print-config"]
    recipe = recipes.load(name)
    description = (
        f"Train the recipe `{name}`; each setting below has the recipe's value. "
        f"Recipes: {', '.join(recipes.RECIPES)}, or a YAML file. --print-config prints the settings and ends."
    )
    config = tyro.cli(
        Config, args=rest, default=recipe, prog=f"mmray {verb} {name}", description=description, config=STYLE
    )
    return config, print_config


@dataclass(frozen=True)
class PrepareCommand:
    """Check, clean and pack image-text rows: done once, used by every run."""

    source: Positional[str]
    """JSON lines with `image` (or `image_path`, `images`) and `text` (or `texts`); paths relative to the file."""
    out: Positional[str]
    """Folder of the prepared set; prepared again, it goes on where it was and takes only new rows."""
    settings: OmitArgPrefixes[Prepare] = field(default_factory=Prepare)
    address: str | None = None
    """Ray address; none: RAY_ADDRESS where it is set, else this machine."""


def prepare(argv: Sequence[str], screen: Screen) -> int:
    """mmray prepare SOURCE OUT [--max-bad-fraction 0.01] [--image-side 256] [--holdout 0.1] ..."""
    command = tyro.cli(PrepareCommand, args=list(argv), prog="mmray prepare", config=STYLE)
    from mmray.cluster.join import joined
    from mmray.data.prepare import prepare as prepare_rows

    began_s = time.monotonic()
    with joined(Cluster(address=command.address)), screen.work("starting Ray"):
        manifest = prepare_rows(command.source, command.out, command.settings, Reporter(screen).preparing)
    splits = ", ".join(f"{name or 'no split'} {rows:,}" for name, rows in sorted(manifest.splits.items()))
    screen.note(f"{manifest.num_read:,} rows read in {time.monotonic() - began_s:.0f} s", "read")
    screen.note(f"{manifest.num_rows:,} rows ({splits}) in {command.out}", "prepared")
    screen.note(
        f"{manifest.num_quarantined:,} rows, each with its reason in {command.out}/quarantine.jsonl", "set aside"
    )
    screen.note(f"mmray train --data.train {command.out}", "next")
    return 0


@dataclass(frozen=True)
class EvaluateCommand:
    """Recall@1/5/10 and median rank, both ways, of a run's newest checkpoint."""

    run: Positional[str]
    """Folder of the run."""
    data: str | None = None
    """Prepared set or source; none: what the run held out."""
    split: str = "test"
    """Split of the set, where it has splits."""
    step: int | None = None
    """Checkpoint of this step; none: the newest good one."""
    json: str | None = None
    """Write the metrics to this file."""
    address: str | None = None
    """Ray address; none: RAY_ADDRESS where it is set, else this machine."""


def evaluate(argv: Sequence[str], screen: Screen) -> int:
    """mmray evaluate RUN [--data SET] [--split test] [--json FILE]"""
    command = tyro.cli(EvaluateCommand, args=list(argv), prog="mmray evaluate", config=STYLE)
    from mmray.train.scoring import score_run

    with screen.work("evaluating"):
        metrics = score_run(
            Path(command.run), command.data, command.split, command.step, command.address, Reporter(screen)
        )
    screen.console.print(recall_table(metrics))
    screen.note(f"{metrics['loss']:.4f} over {metrics['rows']:,.0f} rows", "loss")
    _write_json(command.json, {"metrics": metrics})
    return 0


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's model as a folder that `mmray.load` opens: weights, config, tokenizer, preprocessing."""

    run: Positional[str]
    """Folder of the run."""
    out: Positional[str]
    """Folder to write."""
    step: int | None = None
    """Checkpoint of this step; none: the newest good one."""


def export(argv: Sequence[str], screen: Screen) -> int:
    """mmray export RUN OUT [--step N]"""
    command = tyro.cli(ExportCommand, args=list(argv), prog="mmray export", config=STYLE)
    from mmray.train.scoring import export_run

    out = export_run(Path(command.run), Path(command.out), command.step)
    screen.note(str(out), "exported")
    screen.note(f'import mmray; model = mmray.load("{out}"); model.embed_texts(["a red circle"])', "next")
    return 0


@dataclass(frozen=True)
class BenchCommand:
    """Where the time goes, measured: ratios of pairs run side by side."""

    what: Positional[str]
    """`step`: the training loop against a bare torch loop of the same model, on synthetic batches."""
    recipe: Positional[str] = "sample"
    """The recipe whose model and batch are used."""
    pairs: int = 10
    """Pairs of windows, in ABBA order."""
    window_s: float = 3.0
    """Seconds of one window, about."""
    json: str | None = None
    """Write machine, ratios and rows to this file."""


def bench(argv: Sequence[str], screen: Screen) -> int:
    """mmray bench step [RECIPE] [--pairs 10] [--json FILE]"""
    command = tyro.cli(BenchCommand, args=list(argv), prog="mmray bench", config=STYLE)
    if command.what != "step":
        raise UsageError(f"there is no bench `{command.what}`; known: step")
    from mmray.bench.step import bench_step

    result = bench_step(recipes.load(command.recipe), command.pairs, command.window_s)
    screen.note(result["batch"])
    screen.console.print(rows_table(result["rows"]))
    for name, ratio in result["ratios"].items():
        spread = result["spread"][name]
        screen.note(
            f"{ratio:.3f} (median of {spread['pairs']} pairs, {spread['min']:.3f} to {spread['max']:.3f})", name
        )
    _write_json(command.json, result)
    return 0


def _write_json(file: str | None, value: dict[str, Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(value, indent=2) + "\n")


VERBS: dict[str, Callable[[Sequence[str], Screen], int]] = {
    "train": train,
    "prepare": prepare,
    "evaluate": evaluate,
    "export": export,
    "bench": bench,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: exits with the code of the verb, or of the error it met."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv), Screen()))


def run(argv: list[str], screen: Screen) -> int:
    """Exit code of what was typed; errors made for people are printed without a traceback."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        _usage(screen)
        return 0
    try:
        if argv[0] not in VERBS:
            near = difflib.get_close_matches(argv[0], VERBS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(VERBS)}"
            raise UsageError(f"there is no command `{argv[0]}`; {hint}")
        return VERBS[argv[0]](argv[1:], screen)
    except MmrayError as error:
        screen.error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        screen.error("interrupted")
        return INTERRUPTED


def _usage(screen: Screen) -> None:
    screen.note("mmray trains image-text models on a Ray cluster. Each command answers --help.\n")
    for verb in VERBS.values():
        screen.note(f"  {verb.__doc__}")


if __name__ == "__main__":
    main()
