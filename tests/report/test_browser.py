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
# The title becomes, for each frame: drawn, horizontal overflow in pixels, number of charts that
# were not drawn.
MEASURE = """<script>
const measure = (page) => [page.dataset.drawn, page.scrollWidth - page.clientWidth,
                           page.querySelectorAll(".plot:not(:has(.main-svg))").length].join(" ");
onload = () => setTimeout(() => {
  document.title = [...document.querySelectorAll("iframe")].map((frame) =>
    measure(frame.contentDocument.documentElement)).join(", ");
}, 5000);
</script>"""


def render(file, profile):
    """Return (DOM of the page after drawing, console messages), opened as a file with a separate
    profile.
    """
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0"]
    command += [
        "--virtual-time-budget=10000",
        "--window-size=1400,1000",
        "--dump-dom",
        f"file://{file}",
    ]
    environment = {**os.environ, "LANG": "C"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=True, env=environment
    )
    return done.stdout, [text for text in done.stderr.splitlines() if ":CONSOLE" in text]


def charts_without_trace(dom):
    parts = re.split(r'id="plot-([a-z0-9-]+)"', dom)
    assert len(parts) > 1, "the page has no charts"
    charts = {
        name: part.split("</figure>")[0]
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
    }
    marks = ('class="trace', "<image", 'class="point')
    return [
        n
        for n, part in charts.items()
        if "main-svg" not in part or not any(mark in part for mark in marks)
    ]


def page_of(made):
    """The page of a prepared set, or of the folder of a run or a sweep."""
    return write_set_page(made).page if isinstance(made, PreparedSet) else write_report(made)


@pytest.mark.parametrize("make", MAKERS)
def test_every_chart_is_drawn_without_console_errors(tmp_path, make):
    dom, messages = render(page_of(make(tmp_path / "folder")), tmp_path / "profile")
    assert 'data-drawn="yes"' in dom
    assert (charts_without_trace(dom), messages) == ([], [])


def test_broken_page_is_detected(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<figure><div class="plot" id="plot-loss"></div></figure><script>throw new '
        'Error("bad")</script>'
    )
    dom, messages = render(page, tmp_path / "profile")
    assert charts_without_trace(dom) == ["loss"] and len(messages) == 1 and "bad" in messages[0]


def test_page_fits_420_pixels_without_horizontal_scroll(tmp_path):
    """A run, a sweep, a set of clips, and a one-step run with a NaN loss; wide tables scroll inside
    their own element.
    """
    folders = [make(tmp_path / make.__name__) for make in MAKERS]
    folders.append(make_run(tmp_path / "bare", [line(1), line(2, **{"train/loss": None})]))
    pages = [html.escape(page_of(folder).read_text()) for folder in folders]
    frames = "".join(
        f'<iframe style="width: 420px; height: 900px" srcdoc="{page}"></iframe>' for page in pages
    )
    (tmp_path / "frames.html").write_text("<title>none</title>" + frames + MEASURE)
    dom, messages = render(tmp_path / "frames.html", tmp_path / "profile")
    assert re.search("<title>(.*)</title>", dom).group(1) == ", ".join(["yes 0 0"] * len(folders))
    assert messages == []
