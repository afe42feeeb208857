"""The report in a real browser: every chart is drawn, no console errors, no horizontal scroll on a
narrow page.
"""

import html
import os
import re
import shutil
import subprocess

import pytest

from mmray.data.store.prepared_set import PreparedSet
from mmray.report.write import write_report, write_set_page
from tests.report.factories import (
    line,
    make_clips,
    make_learning_sweep,
    make_run,
    make_run_with_answers,
    make_run_with_clips,
    make_whole_run,
    make_whole_sweep,
)

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium (or google-chrome) on PATH")
MAKERS = (
    make_whole_run,
    make_run_with_answers,
    make_run_with_clips,
    make_whole_sweep,
    make_learning_sweep,
    make_clips,
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
)
# The title becomes, for each frame: drawn, horizontal overflow in pixels, number of charts in which
# nothing was drawn.
MEASURE = """<script>
const undrawn = ".plot:not(:has(.main-svg :is(.trace, image, .point)))";
const measure = (page) => [page.dataset.drawn, page.scrollWidth - page.clientWidth,
                           page.querySelectorAll(undrawn).length].join(" ");
onload = () => setTimeout(() => {
  document.title = [...document.querySelectorAll("iframe")].map((frame) =>
    measure(frame.contentDocument.documentElement)).join(", ");
}, 5000);
</script>"""


def render(pages, folder):
    """Show pages in frames of 420 pixels; return what is measured of each, and console messages."""
    frames = "".join(
        f'<iframe style="width: 420px; height: 900px" srcdoc="{html.escape(page)}"></iframe>'
        for page in pages
    )
    (folder / "frames.html").write_text("<title>none</title>" + frames + MEASURE)
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    command += [
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=10000",
        "--window-size=1400,1000",
        "--dump-dom",
        f"file://{folder / 'frames.html'}",
    ]
    environment = {**os.environ, "LANG": "C"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=True, env=environment
    )
    messages = [text for text in done.stderr.splitlines() if ":CONSOLE" in text]
    return re.search("<title>(.*)</title>", done.stdout).group(1).split(", "), messages


def page_of(made):
    """The page of a prepared set, or of the folder of a run or a sweep."""
    page = write_set_page(made).page if isinstance(made, PreparedSet) else write_report(made)
    return page.read_text()


def test_every_chart_is_drawn_without_errors_or_horizontal_scroll(tmp_path):
    """A run, a sweep, a set of clips, and a run that was never evaluated; wide tables scroll inside
    their own element.
    """
    folders = [make(tmp_path / make.__name__) for make in MAKERS]
    folders.append(make_run(tmp_path / "bare", [line(1), line(2, **{"train/loss": None})]))
    found, messages = render(map(page_of, folders), tmp_path)
    assert (found, messages) == (["yes 0 0"] * len(folders), [])


def test_broken_page_is_detected(tmp_path):
    page = """<figure><div class="plot"><svg class="main-svg"></svg></div></figure>
    <div style="width: 500px">wide</div><script>throw new Error("bad")</script>"""
    found, messages = render([page], tmp_path)
    overflow_pixels, undrawn = map(int, found[0].split())
    assert overflow_pixels > 0 and undrawn == 1
    assert len(messages) == 1 and "bad" in messages[0]
