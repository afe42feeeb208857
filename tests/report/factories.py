"""Synthetic run and sweep folders, written without a run."""

import hashlib
import json
from dataclasses import replace

import numpy as np

from mmray.config import recipes, to_yaml
from mmray.data.images.transform import thumbnail
from mmray.data.store.stored_row import Media, Row
from mmray.sweep_files import Rung, TrialRow
from tests.data.media.synthetic import encode_video
from tests.made import make_set, row

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


def clip_examples(caption="a cat"):
    """A hit and a miss from text to video, and a miss from video to audio."""
    frames = [
        {"time_s": 0.5 * n, "image": thumbnail(np.full((8, 8, 3), (90 * n, 9, 9), np.uint8))}
        for n in range(3)
    ]
    clip = {"start_s": 0.0, "end_s": 1.5, "frames": frames, "sound": "data:audio/mpeg;base64,AAAA"}

    def item(rank):
        found = [
            {"row": n, "key": f"k{n}", "caption": "other", "score": 0.5, "correct": n == rank - 1}
            for n in range(2)
        ]
        row_number = min(rank - 1, 2)
        return {
            "row": row_number,
            "key": f"k{row_number}",
            "caption": caption,
            "rank": rank,
            "answers": found,
        }

    shown = {"text_to_video": [item(1), item(7)], "video_to_audio": [item(7)]}
    return {"step": 20, "rows": 20, "clips": dict.fromkeys(("0", "1", "2"), clip), **shown}


def answers(text="a red circle"):
    """A correct and a wrong answer of a vision-language model, about one image and about three."""
    images = [thumbnail(np.full((16, 16, 3), (40 * n, 90, 90), np.uint8)) for n in range(3)]
    asked = {"role": "user", "parts": [{"image": images[0]}, {"text": "What is in the image?"}]}
    said = {"role": "assistant", "parts": [{"text": "a shape"}]}
    again = {"role": "user", "parts": [*({"image": image} for image in images), {"text": text}]}
    shown = [
        {"key": "row-1", "turns": [asked], "references": [text], "answer": text, "correct": True},
        {
            "key": "row-2",
            "turns": [asked, said, again],
            "references": ["blue", "a blue square"],
            "answer": "",
            "correct": False,
        },
    ]
    return {"step": 20, "rows": 20, "answers": shown}


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


def make_clips(folder):
    """A prepared set of a video with sound and two texts with spans, and of images."""
    data = encode_video(audio="aac", b_frames=2)
    sha256 = hashlib.sha256(data).hexdigest()
    video = Media("video", data, sha256=sha256, width=64, height=64, duration=3.0)
    spans = [[0.2, 0.9], [1.0, 2.6]]
    clips = [Row("a", [video], ["first", "second"], source="a:1", spans=spans)]
    return make_set(folder, clips + [row(number) for number in range(4)])


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
    return make_run(folder, lines, result, examples())


def make_run_with_clips(folder):
    """A run of a model of audio and video, with hits and misses, and a NaN loss."""
    lines = [line(1, **scores(0.5)), line(2, **{"train/loss": None})]
    return make_run(folder, lines, shown=clip_examples())


def make_run_with_answers(folder):
    """A run of a vision-language model."""
    scores = {"exact_match": 0.5, "perplexity": 2.5, "token_accuracy": 0.75, "answered": 9.0}
    scores = {f"evaluate/{name}": value for name, value in scores.items()}
    return make_run(folder, [line(1), line(2, **scores)], shown=answers())


def trial(name, micro, accumulation, rate, **changes):
    """A row of trials.jsonl."""
    row = TrialRow(
        name,
        "finished",
        {"batch.micro": micro, "batch.accumulation": accumulation},
        micro=micro,
        accumulation=accumulation,
        workers=2,
        global_batch_size=micro * accumulation * 2,
        samples_per_s=rate,
        step_p50_s=0.1,
        peak_gib=rate and micro / 16,
        run=f"trials/{name}",
    )
    return replace(row, **changes)


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
            "why": "t002 is the fastest.",
        },
    }
    (folder / "sweep.json").write_text(json.dumps(about | changes))
    write_lines(folder / "trials.jsonl", [row.to_json() for row in trials])
    (folder / "best.yaml").write_text("recipe: sample\n")
    return folder


def make_whole_sweep(folder):
    """Four batch shapes, one of them out of memory."""
    rows = [trial("t001", 8, 1, 500.0), trial("t002", 16, 1, 900.0), trial("t003", 8, 2, 450.0)]
    error = "a micro-batch of 16 rows does not fit"
    return make_sweep(
        folder, [*rows, trial("t004", 16, 2, None, status="out_of_memory", error=error)]
    )


def learned(name, lr, status="finished", **changes):
    """A row of trials.jsonl of a goal that depends on learning."""
    rungs = (Rung(64, 3.0 + lr), Rung(256, 2.5))
    row = trial(
        name,
        8,
        1,
        100.0,
        status=status,
        settings={"optimizer.lr": lr, "optimizer.betas": [0.9, 0.98]},
        curve=(Rung(64, 3.0), Rung(256, 2.5)),
        rungs=rungs[:1] if status == "pruned" else rungs,
    )
    return replace(row, **changes)


def make_learning_sweep(folder):
    """Eight learning rates: finished, ended early, and diverged."""
    diverged = {"curve": (), "rungs": (), "error": "evaluate/loss is not finite"}
    rows = [learned("t001", 1e-3), learned("t002", 0.1, "failed", **diverged)]
    rows += [learned(f"t{number:03}", number * 1e-4, "pruned") for number in (4, 3, 5, 6, 7, 8)]
    space = {"optimizer.lr": ["loguniform(1e-05, 0.1)"], "optimizer.betas": [[0.9, 0.98]]}
    best = {"best": "t001", "why": "why"}
    return make_sweep(
        folder,
        rows,
        goal="loss",
        space=space,
        recommendation=best,
        rungs=[64, 256],
    )
