"""Synthetic run and sweep folders, written without a run."""

import json

import numpy as np

from mmray.config import recipes, to_yaml
from mmray.data.images.transform import thumbnail

WAYS = ("image_to_text", "text_to_image")


def line(step, **changes):
    """A line of metrics.jsonl."""
    metrics = {"step": step, "throughput/samples_per_s": 1000.0 + step}
    metrics |= {
        "train/loss": 4.0 / step,
        "train/lr": 0.001,
        "train/grad_norm": 1.5,
        "train/skipped_steps": 0,
    }
    metrics |= {
        "time/step_s": 0.1,
        "time/data_wait_s": 0.01,
        "time/data_wait_share": 0.1,
        "memory/peak_gib": 0.5,
    }
    metrics |= {"memory/parameters_gib": 0.0625, "memory/gradients_gib": 0.03125}
    metrics |= {"memory/optimizer_gib": 0.125, "memory/activations_gib": 0.25}
    return metrics | changes


def scores(recall):
    """Metrics that an evaluation adds to a line."""
    both = {f"evaluate/recall_at_{k}/{way}": recall for k in (1, 5, 10) for way in WAYS}
    both |= {f"evaluate/median_rank/{way}": 1.0 for way in WAYS}
    return both | {
        "evaluate/loss": 2.5,
        "evaluate/rows": 20.0,
        "evaluate/bad_rows": 0.0,
        "time/evaluate_s": 1.0,
    }


def examples(caption="a cat"):
    """One hit and one miss in each direction."""

    def item(rank):
        answers = [
            {"row": n, "caption": f"answer {n}", "score": 0.9 - n / 10, "correct": n == rank - 1}
            for n in range(5)
        ]
        return {
            "row": rank - 1,
            "key": f"row-{rank}",
            "caption": caption,
            "rank": rank,
            "answers": answers,
        }

    images = {str(n): thumbnail(np.full((16, 16, 3), (40 * n, 90, 90), np.uint8)) for n in range(5)}
    return {"step": 20, "rows": 20, "images": images} | {way: [item(1), item(7)] for way in WAYS}


def write_lines(file, rows):
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))


def make_run(folder, lines=(), result=None, shown=None, **changes):
    """A run folder; `changes` are sections of the config."""
    folder.mkdir(parents=True)
    config = recipes.sample()
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in changes.items()
    }
    (folder / "config.yaml").write_text(to_yaml(config.model_copy(update=sections)))
    if lines:
        write_lines(folder / "metrics.jsonl", lines)
    for name, content in (("result.json", result), ("examples.json", shown)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def make_whole_run(folder):
    """A finished run with everything a page can show except quarantined rows."""
    lines = [line(step, **(scores(step / 20) if step % 10 == 0 else {})) for step in range(1, 21)]
    result = {
        "status": "finished",
        "steps": 20,
        "elapsed_s": 61.0,
        "restarts": 3,
        "wasted_steps": 3,
    }
    result["resizes"], result["batch"] = (
        2,
        ("micro 64 x accumulation 1 x workers 2 = 128 rows per step"),
    )
    stages = {"importing": 0.0, "starting 1 worker": 1.5, "first step": 4.0, "training": 9.0}
    result["starts"] = [[{"stage": stage, "at_s": at_s} for stage, at_s in stages.items()]]
    result["all_processes_peak_gib"] = 1.75
    return make_run(folder, lines, result, examples())


def trial(name, micro, accumulation, rate, **changes):
    """A row of trials.jsonl."""
    row = {"trial": name, "status": "finished", "error": None, "run": f"trials/{name}"}
    row |= {"settings": {"batch.micro": micro, "batch.accumulation": accumulation}}
    row |= {
        "micro": micro,
        "accumulation": accumulation,
        "workers": 2,
        "global": micro * accumulation * 2,
    }
    row |= {
        "samples_per_s": rate,
        "samples_per_s_min": rate and rate * 0.9,
        "samples_per_s_max": rate and rate * 1.1,
    }
    return (
        row
        | {"step_p50_s": 0.1, "step_p95_s": 0.2, "peak_gib": rate and micro / 16, "loss": 3.0}
        | changes
    )


def make_sweep(folder, trials, **changes):
    folder.mkdir(parents=True)
    about = {
        "kind": "sweep",
        "recipe": "sample",
        "space": {"batch.micro": [8, 16], "batch.accumulation": [1, 2]},
        "goal": "throughput",
        "status": "finished",
        "concurrency": 2,
        "elapsed_s": 100.0,
        "environment": {},
        "recommendation": {
            "best": "t002",
            "per_global": {"16": "t001", "32": "t002"},
            "why": "t002 is the fastest.",
        },
    }
    (folder / "sweep.json").write_text(json.dumps(about | changes))
    write_lines(folder / "trials.jsonl", trials)
    (folder / "best.yaml").write_text("recipe: sample\n")
    return folder


def make_whole_sweep(folder):
    """Four batch shapes, one of them out of memory."""
    rows = [trial("t001", 8, 1, 500.0), trial("t002", 16, 1, 900.0), trial("t003", 8, 2, 450.0)]
    error = "a micro-batch of 16 rows does not fit"
    return make_sweep(
        folder, [*rows, trial("t004", 16, 2, None, status="out_of_memory", loss=None, error=error)]
    )


def learned(name, lr, status="finished", **changes):
    """A row of trials.jsonl of a goal that depends on learning."""
    settings = {"optimizer.lr": lr, "optimizer.betas": [0.9, 0.98]}
    rungs = [{"samples": 64, "value": 3.0 + lr}, {"samples": 256, "value": 2.5}][
        : 1 if status == "pruned" else 2
    ]
    values = {
        "settings": settings,
        "curve": [[64, 3.0, 0.6], [256, 2.5, 2.5]],
        "eval_loss": 2.5,
        "rungs": rungs,
    }
    return trial(name, 8, 1, 100.0) | values | {"status": status} | changes


def make_learning_sweep(folder):
    """Eight learning rates: finished, ended early, and diverged."""
    diverged = {"curve": [], "rungs": [], "eval_loss": None, "error": "evaluate/loss is not finite"}
    rows = [learned("t001", 1e-3), learned("t002", 0.1, "failed", **diverged)]
    rows += [learned(f"t{number:03}", number * 1e-4, "pruned") for number in (4, 3, 5, 6, 7, 8)]
    space = {"optimizer.lr": ["loguniform(1e-05, 0.1)"], "optimizer.betas": [[0.9, 0.98]]}
    best = {
        "best": "t001",
        "per_global": {"16": "t001"},
        "why": "why",
        "cooldown": {"samples": 320, "value": 2.25},
    }
    hours = {"gpu_hours": 0.5, "saved_gpu_hours": 1.5}
    return make_sweep(
        folder, rows, goal="loss", space=space, recommendation=best, rungs=[64, 256], **hours
    )


def make_probe(folder):
    """Three batch shapes: measured, predicted, and out of memory."""
    rows = [
        trial("s001", 8, 2, 500.0, status="predicted", settings={}, **{"global": 32}),
        trial("s002", 16, 1, 900.0, settings={}, predicted_samples_per_s=880.0, **{"global": 32}),
        trial("s003", 32, 1, None, status="out_of_memory", settings={}, error="32 rows do not fit"),
    ]
    sizes = {(8, 1): 0.05, (16, 1): 0.08, (8, 3): 0.15}
    names = ("micro", "accumulation", "step_s", "optimizer_s", "peak_gib")
    samples = [
        dict(zip(names, (*size, step_s, 0.01, 1.0), strict=True)) for size, step_s in sizes.items()
    ]
    fit = {
        "micros": [8, 16],
        "first_s": [0.04, 0.07],
        "further": 1.25,
        "optimizer_s": 0.01,
        "sync_s": {},
    }
    fit |= {"base_gib": 0.9, "row_gib": 0.01, "input_gib": 0.0}
    fit["text"] = "a further micro-batch takes 1.25 x the time of the first"
    probe = {"settings": {}, "workers": 1, "limit_gib": 1.5, "samples": samples}
    best = {"best": "s002", "per_global": {"32": "s002"}, "why": "s002 is the fastest."}
    space = {"batch.global": [32]}
    return make_sweep(
        folder,
        rows,
        measures="shapes",
        space=space,
        recommendation=best,
        probes=[probe],
        fits=[fit],
    )
