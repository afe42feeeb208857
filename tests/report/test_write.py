"""The report shows what the folder contains, with files missing, and escapes captions."""

import re
from dataclasses import replace

import pytest

from mmray import cli
from mmray.console.reporter import ConsoleReporter
from mmray.data.store.manifest import write_manifest
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import UsageError
from mmray.report.write import write_report, write_set_page
from mmray.storage.paths import copy_file, list_files, to_path
from mmray.sweep_files import Rung
from tests.made import make_set, row
from tests.report.factories import (
    answers,
    clip_examples,
    examples,
    learned,
    line,
    make_learning_sweep,
    make_run,
    make_run_with_clips,
    make_sweep,
    make_whole_run,
    make_whole_sweep,
    scores,
    trial,
    write_lines,
)

MAX_BYTES = 3_000_000


def without_library(page):
    """The text of a page without the bundled library, which is most of it."""
    return re.sub(r'id="plotly">[^<]*<', 'id="plotly"><', page.read_text())


def page_of(folder):
    return without_library(write_report(folder))


def plots(page):
    return re.findall(r'id="plot-([a-z0-9-]+)"', page)


def test_finished_run_has_all_sections_in_one_small_file(tmp_path):
    page = page_of(make_whole_run(tmp_path / "calm"))
    file = tmp_path / "calm" / "report.html"
    assert file.stat().st_size < MAX_BYTES and not re.search(
        r'(src|href)="(?!data:|#)', file.read_text()
    )
    assert plots(page) == [
        "train-loss",
        "train-lr",
        "train-grad-norm",
        "scores",
        "throughput-samples-per-s",
        "time-step-s",
        "memory-peak-gib",
    ]
    assert (
        '<span class="pill finished">finished</span>' in page
        and ("<title>calm · mmray</title>") in page
    )
    assert "micro 64 x accumulation 1 x workers 2 = 128 rows per step" in page
    assert "100.0%" in page and "1,010" in page and "61 s" in page and "10.0%" in page
    assert (
        "restarted 3 times (2 to add workers, 0 for node preemptions); 3 steps were repeated."
    ) in page
    # a hit in each direction, and the correct image next to a miss
    assert page.count('class="right"') == 2 + 1
    assert "Same as the recipe." in page
    assert "of a worker" in page


@pytest.mark.parametrize("has_recall", [True, False])
def test_every_score_of_the_newest_evaluation_is_shown(tmp_path, has_recall):
    """Vision-language models have no recall."""
    own = {
        "perplexity": 4.5,
        "token_accuracy": 0.5,
        "anls": 0.125,
        "zero_shot/top_1": 0.375,
        "classification/rows": 1234.0,
    }
    metrics = {f"evaluate/{name}": value for name, value in own.items()} | (
        scores(0.5) if has_recall else {}
    )
    page = page_of(make_run(tmp_path / "run", [line(1, **metrics), line(2)]))
    section = re.search(r'<section id="held-out">.*?</section>', page, re.DOTALL)[0]
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", section))
    wanted = {"step": "1", "perplexity": "4.500", "anls": "0.125", "zero shot, top 1": "0.375"}
    assert facts.items() >= (wanted | {"classification, rows": "1,234"}).items()
    assert ("R@1" in section) == has_recall and "bad rows" not in facts
    assert 'href="#held-out"' in page
    assert 'id="held-out"' not in page_of(make_run(tmp_path / "none", [line(1)]))


def test_scores_of_several_sets_are_shown_by_name(tmp_path):
    own = {
        name.replace("evaluate/", "evaluate/flickr/"): value for name, value in scores(0.25).items()
    }
    own |= {"evaluate/in1k/zero_shot/top_1": 0.625, "evaluate/in1k/bad_rows": 0.0}
    page = page_of(make_run(tmp_path / "run", [line(1, **own)]))
    for text in ("Recall@1 image to text, flickr", "Zero-shot top 1, in1k", "62.5%"):
        assert text in page
    assert "flickr image to text" in page and "in1k, zero shot, top 1" in page
    assert "in1k: recall@1 and zero-shot accuracy over the run" in page.lower()


def test_chart_names_a_held_out_loss_with_other_negatives(tmp_path):
    same = make_run(tmp_path / "same", [line(40, **scores(0.5)), line(41)])
    assert "not comparable" not in page_of(same)
    other = make_run(tmp_path / "other", [line(40, **scores(0.5), **{"evaluate/loss_rows": 20.0})])
    assert "held out (batch of 20: not comparable)" in page_of(other)


def test_clips_have_players_and_frames_with_times(tmp_path):
    section = page_of(make_run_with_clips(tmp_path / "run")).partition('id="examples"')[2]
    headings = re.findall(r'class="direction">(.*?)<', section)
    assert headings == ["Text to video", "Video to audio"]
    text_to_video, video_to_audio = section.split('class="direction">')[1:]
    # Two results of the hit, and of the miss two and the correct one.
    assert text_to_video.count('class="frames"') == 2 + 3 and "<audio" not in text_to_video
    assert text_to_video.count("<span>1.00 s</span>") == 5 and "rank 7" in text_to_video
    assert video_to_audio.count("<audio controls") == 3
    assert video_to_audio.count('class="frames"') == 1


@pytest.mark.parametrize("where", ["caption", "answer", "conversation", "clip", "name", "trial"])
def test_user_text_is_escaped(tmp_path, where):
    hostile = "<script>alert(1)<"
    shown = examples(hostile if where == "caption" else "a cat")
    if where == "conversation":
        shown = answers(hostile)
    if where == "clip":
        shown = clip_examples(hostile)
    if where == "answer":
        shown["image_to_text"][0]["answers"][1]["caption"] = hostile
    if where == "trial":
        folder = make_sweep(
            tmp_path / "sweep",
            [learned(hostile, 0.1), learned("t002", 0.2)],
            goal="loss",
            rungs=[64],
        )
    else:
        # no flag accepts such a name, but a folder may be renamed
        name = hostile if where == "name" else "run"
        folder = make_run(tmp_path / name, [line(1, **scores(0.5))], shown=shown)
    page = page_of(folder)
    assert hostile not in page and "&lt;script&gt;alert(1)" in page
    assert ("\\u003cscript\\u003e" in page) == (where == "trial")  # in the data of a chart


@pytest.mark.parametrize(
    ("lines", "result", "drawn", "message"),
    [
        ([], None, [], "No step was logged."),
        ([], {"status": "failed", "error": "no <data>"}, [], "The run failed: no &lt;data&gt;"),
        (
            [{"step": 1, "train/loss": 4.0}],
            {"status": "stopped", "elapsed_s": 3.0},
            ["train-loss"],
            "was stopped",
        ),
        (
            [line(1), line(2, **{"train/loss": None})],
            None,
            None,
            "not a number at 1 of 2 logged steps",
        ),
        (
            [{"step": 1, "train/loss": 4.0, "teacher/KL_loss": 2.0}],  # of a callback
            None,
            ["train-loss", "teacher-kl-loss"],
            "still running",
        ),
        ([line(1, **{"train/skipped_steps": 4})], None, None, "4 steps were skipped"),
        ([line(1, **{"time/data_wait_share": 0.6})], None, None, "waited for data 60% of the time"),
        ([line(1, **{"gpu/busy_percent": 50.0})], None, None, "the GPU was busy 50%"),
    ],
)
def test_incomplete_run_has_a_page(tmp_path, lines, result, drawn, message):
    page = page_of(make_run(tmp_path / "run", lines, result))
    assert message in page
    assert drawn is None or plots(page) == drawn
    assert ("The run has no result yet" in page) == (result is None)


def test_changed_settings_are_listed_first(tmp_path):
    page = page_of(make_run(tmp_path / "run", optimizer={"lr": 0.25}))
    changed, everything = page.split("<details>", 1)
    assert "optimizer.lr" in changed and '<td>0.25</td><td class="soft">0.002</td>' in changed
    assert "optimizer.betas" not in changed and "optimizer.betas" in everything
    folder = make_run(tmp_path / "of_another_version")
    (folder / "config.yaml").write_text("recipe: sample\nbatch: {of_old: 3}\n")
    assert "batch.of_old" in page_of(folder)


@pytest.fixture
def quarantined(tmp_path):
    """The page of a set with quarantined rows."""
    prepared = tmp_path / "set"
    made = make_set(prepared, [row(0), row(1)])
    reasons = ("duplicate", "truncated", "missing-image")
    entries = [
        {
            "key": f"k{n}",
            "source": f"rows.jsonl:{n}",
            "stage": "decode",
            "reason": reason,
            "detail": f"about {reason}",
        }
        for n, reason in enumerate(reasons, 1)
    ]
    write_lines(prepared / "quarantine.jsonl", entries * 20)
    leakage = {
        "exact": 1,
        "near": 2,
        "phash_distance": 7,
        "dropped": True,
        "found_in": {"/e": 3, "splits": 0},
    }
    counts = {"num_read": 500, "reasons": dict.fromkeys(reasons, 20), "leakage": leakage}
    write_manifest(prepared, replace(made.manifest, **counts))
    return without_library(write_set_page(PreparedSet.open(str(prepared))).page)


def test_quarantined_rows_are_shown(quarantined, tmp_path):
    assert "Prepare quarantined 60 of 500 rows" in quarantined
    # one of each reason in turn
    assert quarantined.index("duplicate</span><p>") < quarantined.index("truncated</span><p>")
    assert "about truncated" in quarantined
    folder = make_run(tmp_path / "run", [line(1)])
    late = {"key": "k1", "source": "rows.jsonl:1", "row": 7, "stage": "train", "reason": "checksum"}
    late["detail"] = "its images changed"
    write_lines(folder / "quarantine.jsonl", [late])
    page = page_of(folder)
    assert "Training quarantined 1 rows" in page and "its images changed" in page


def test_contaminated_rows_are_counted(quarantined):
    page = quarantined
    assert (
        "3 rows are also in another set (1 exact, 2 near-duplicates within 7 of 256 bits): 3 "
        "in /e, 0 in"
    ) in page


def test_page_of_batch_shapes_has_a_table(tmp_path):
    folder = make_whole_sweep(tmp_path / "sweep")
    (folder / "trials" / "t001").mkdir(parents=True)
    (folder / "trials" / "t001" / "report.html").touch()
    page = page_of(folder)
    assert plots(page) == []
    assert "T002 is the fastest." in page and "★" in page
    assert f"mmray train {folder}/best.yaml" in page
    assert "a micro-batch of 16 rows does not fit" in page
    assert '<a href="trials/t001/report.html">' in page and "trials/t002/" not in page
    # By global batch, the fastest first.
    assert re.findall(r'scope="row">(?:<a [^>]*>)?(t\d+)', page) == ["t001", "t002", "t003", "t004"]
    assert "3 measured, 1 out of memory" in page


def test_page_of_a_learning_sweep_has_curves_and_rungs(tmp_path):
    page = page_of(make_learning_sweep(tmp_path / "sweep"))
    assert plots(page) == ["curves"]
    assert "compared after 64 and 256 samples" in page and "6 ended early" in page
    rows = re.findall(r'<th scope="row">(t\d+)', page)
    assert rows[0] == "t001" and rows[-1] == "t002" and len(rows) == 8
    assert '<td class="num">0.9, 0.98</td>' in page


def test_loss_of_exactly_zero_is_a_value(tmp_path):
    rungs = (Rung(64, 0.0),)
    rows = [learned(f"t00{n}", 10.0**-n, rungs=rungs, curve=(Rung(64, 0.0),)) for n in (1, 2)]
    page = page_of(make_sweep(tmp_path / "sweep", rows, goal="loss", rungs=[64]))
    assert plots(page) == ["curves"] and page.count(">0.000</td>") == 2


@pytest.mark.parametrize("status", ["out_of_memory", "failed", "infeasible"])
def test_sweep_without_measured_trial_has_a_page(tmp_path, status):
    nothing = trial("t001", 8, 1, None, status=status, peak_gib=None, step_p50_s=None)
    page = page_of(make_sweep(tmp_path / "sweep", [nothing], recommendation=None, status="failed"))
    assert "no trial has measured" in page and plots(page) == []
    assert ("No trial has finished yet") in page_of(
        make_sweep(tmp_path / "empty", [], recommendation=None)
    )


def test_running_sweep_has_a_page(tmp_path):
    """As written by `mmray tune` before it ends."""
    rows = [
        learned("t001", 1e-3, "paused"),
        learned("t002", 1e-2, "running", rungs=(), curve=()),
    ]
    about = {"status": "running", "recommendation": None}
    page = page_of(make_sweep(tmp_path / "sweep", rows, goal="loss", rungs=[64, 256], **about))
    assert (
        "None yet: the sweep is still running or was killed." in page
        and "1 paused, 1 running" in page
    )


def test_report_command_writes_the_page(tmp_path, capfd):
    folder = make_whole_run(tmp_path / "calm")
    assert (
        cli.run(["report", str(folder), "--out", str(tmp_path / "page.html")], ConsoleReporter())
        == 0
    )
    assert " MB; self-contained)" in capfd.readouterr().out
    assert not (folder / "report.html").exists()


def test_invalid_arguments_are_usage_errors(tmp_path):
    run = make_whole_run(tmp_path / "calm")
    for folder, out, message in (
        (tmp_path / "nowhere", None, "does not exist"),
        (run / "config.yaml", None, "config.yaml is a file; give the folder"),
        (tmp_path, None, "is neither a run"),
        (run, run / "no" / "page.html", "cannot write"),
    ):
        with pytest.raises(UsageError, match=message):
            write_report(folder, out)
    (run / "config.yaml").write_text("train: {steps: 5")
    with pytest.raises(UsageError, match=r"config.yaml is not valid YAML"):
        write_report(run)


def test_report_of_a_run_on_an_object_store_equals_the_local_one(s3, tmp_path):
    make_whole_run(tmp_path / "mine")
    for name in list_files(tmp_path):
        copy_file(tmp_path / name, to_path(s3.address) / name)
    page = write_report(to_path(f"{s3.address}/mine"))
    assert str(page) == f"{s3.address}/mine/report.html"
    local = write_report(tmp_path / "mine").read_text()
    undated = [
        re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "", text) for text in (page.read_text(), local)
    ]
    assert undated[0].replace(s3.address, "") == undated[1].replace(str(tmp_path), "")
