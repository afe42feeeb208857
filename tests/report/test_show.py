"""The page of a prepared set: rows, media with times, histograms, and quarantined rows."""

import base64
import hashlib
import io
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import mmray
from mmray import cli
from mmray.config import Prepare
from mmray.console.reporter import ConsoleReporter
from mmray.data.media.decode import read_audio
from mmray.data.prepare import pipeline
from mmray.data.store.manifest import read_manifest, write_manifest
from mmray.data.store.stored_row import Media, Row
from mmray.errors import DataError, UsageError
from mmray.report import prepared as prepared_module
from tests.data.media.synthetic import encode_video, read_clock, time_of_sweep
from tests.made import encode, image_media, make_set, noisy, row
from tests.report.test_write import MAX_BYTES, plots

HOSTILE = "<script>alert(1)<"


def text_of(page):
    """A page without the bundled library, which is most of it."""
    return re.sub(r'id="plotly">[^<]*<', 'id="plotly"><', page.read_text())


def decoded(uri):
    return base64.b64decode(uri.partition(",")[2])


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Six rows of images of two sizes, a truncated one, a duplicate, and a missing file."""
    monkeypatch.setattr(pipeline, "map_tasks", lambda work, items: (work(item) for item in items))
    folder = tmp_path / "source"
    folder.mkdir()
    names = [f"{number}.jpg" for number in range(6)]
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 60 + 20 * (number % 2), 3))
        data = encode(Image.fromarray(pixels.astype(np.uint8)), "JPEG")
        (folder / name).write_bytes(data)
    whole = (folder / "0.jpg").read_bytes()
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    names += ["truncated.jpg", "0.jpg", "missing.jpg"]
    lines = [
        {
            "id": f"row-{number}",
            "image": name,
            "text": f"caption {number} {HOSTILE}",
            "similarity": number / 8,
            "source_url": HOSTILE if number == 1 else None,
        }
        for number, name in enumerate(names)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_page_has_rows_histograms_and_quarantined_rows(tmp_path, source):
    out = tmp_path / "set"
    settings = Prepare(max_bad_fraction=1.0, vocab_size=60, keep=("similarity", "source_url"))
    pipeline.prepare(str(source / "rows.jsonl"), str(out), settings)
    shown = mmray.show(out)
    page = text_of(shown.page)
    assert shown.page == out / "show.html" and shown.page.stat().st_size < MAX_BYTES
    assert plots(page) == ["sizes", "lengths", "tokens"]
    assert page.count('class="card example sampled"') == len(shown.rows) == 6
    assert HOSTILE not in page and "&lt;script&gt;alert(1)" in page and "60 × 40" in page
    assert re.search(r"\d+ tokens", page) and "Based on all 6 rows." in page
    assert {name["key"]: name["media"] for name in shown.table}["row-1"] == "image 80 × 40"
    facts = {each["key"]: dict(each["facts"]) for each in shown.rows}
    assert facts["row-1"]["similarity"] == "0.125" and facts["row-1"]["source_url"] == HOSTILE
    assert facts["row-4"]["similarity"] == "0.5" and "source_url" not in facts["row-4"]
    assert sorted(shown.statistics.widths) == [60, 60, 60, 80, 80, 80]
    assert {"truncated", "missing-image"} <= {each["reason"] for each in shown.quarantine["shown"]}
    shutil.rmtree(out / "columns")
    with pytest.raises(DataError, match="columns"):
        mmray.show(out, rows=2)


@pytest.mark.parametrize("root", [None, "elsewhere", "private"])
def test_images_of_a_foreign_set_are_read_from_named_folders_only(tmp_path, root):
    """Its manifest and shards name a file of the user."""
    private, folder = tmp_path / "private", tmp_path / "set"
    private.mkdir()
    (tmp_path / "elsewhere").mkdir()
    data = noisy(1)
    (private / "passport.png").write_bytes(data)
    reference = {"file": "passport.png", "offset": 0, "length": None}
    rows = [row(0), Row("row-1", [Media("image", b"", reference)], ["text"], source="a:1")]
    make_set(folder, rows)
    (folder / "link").symlink_to(private)
    for source in (private, folder / "link", folder):
        manifest = read_manifest(folder)
        places = {"folder": str(source), "address": str(source)}
        write_manifest(folder, replace(manifest, source=places))
        shown = mmray.show(folder, root=[] if root is None else [str(tmp_path / root)])
        images = [image for each in shown.rows for image in each.get("images", [])]
        if root != "private":
            assert sum(image is not None for image in images) == 1, "that in the set"
        elif source == private:
            assert None not in images


def test_frames_and_sound_of_a_text_are_from_its_span(tmp_path):
    data = encode_video(audio="aac", b_frames=2)
    video = clip_media(data, "video", width=64, height=64)
    spans = [[0.2, 0.9], [1.0, 2.6]]
    rows = [Row("a", [video], ["first", "second"], source="a:1", spans=spans)]
    broken = clip_media(data[:99], "audio")
    rows.append(Row("b", [broken], ["third"], source="a:2", spans=[[0.0, 1.0]]))
    make_set(tmp_path / "set", rows)
    first, second = mmray.show(tmp_path / "set").rows
    for text, (start, end) in zip(first["texts"], spans, strict=True):
        frames = text["clip"]["frames"]
        times = [frame["time_s"] for frame in frames]
        assert len(times) == 6 and times == sorted(times)
        assert start - 0.05 < times[0] and times[-1] < end
        for frame in frames:
            pixels = np.asarray(Image.open(io.BytesIO(decoded(frame["image"]))).convert("RGB"))
            assert abs(read_clock(pixels) / 1000 - frame["time_s"]) < 0.002
        samples = read_audio(decoded(text["clip"]["sound"]), 0.0, end - start, 24_000)
        middle = samples[len(samples) // 2 - 1200 : len(samples) // 2 + 1200]
        assert abs(time_of_sweep(middle, 24_000) - (start + end) / 2) < 0.05
    page = text_of(tmp_path / "set" / "show.html")
    assert page.count("<audio controls") == 2 and "0.20 to 0.90 s" in page
    assert "cannot be decoded" in page and "clip" not in second["texts"][0]


def test_conversations_and_classes_are_shown(tmp_path):
    messages = [
        {"role": "user", "content": [part("image"), part("video"), part("text", "Which color?")]},
        {"role": "assistant", "content": [part("text", "gray")]}
        | {"weight": 0.5, "reasoning_content": "It is.", "tool_calls": [{"function": {}}]},
    ]
    same = [image_media(noisy(3)), clip_media(encode_video(), "video")]
    rows = [Row(f"chat-{n}", same, [], source=f"a:{n}", messages=messages) for n in range(3)]
    rows += [row(0), row(1)]
    make_set(tmp_path / "set", rows)
    shown = mmray.show(tmp_path / "set", tmp_path / "page.html")
    chat = next(each for each in shown.rows if each["key"] == "chat-0")
    first, second, _ = chat["turns"][0]["parts"]
    assert first["image"] and len(second["clip"]["frames"]) == 6 and not second["clip"]["sound"]
    texts = ["weight: 0.5", "reasoning_content: It is.", 'tool_calls: [{"function":{}}]', "gray"]
    assert chat["turns"][1] == {"role": "assistant", "parts": [{"text": each} for each in texts]}
    assert dict(chat["facts"])["text tokens"]


def part(kind, words=None):
    """A content part of a message."""
    return {"type": kind, "text": words}


def clip_media(data, kind, **header):
    """Audio or video of a row."""
    return Media(kind, data, sha256=hashlib.sha256(data).hexdigest(), **header)


def test_large_set_is_read_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_module, "MAX_ROWS", 16)
    made = make_set(tmp_path / "set", [row(number, noisy(number)) for number in range(90)])
    numbers = []
    for name in ("read", "read_without_references"):
        read = getattr(type(made), name)
        monkeypatch.setattr(
            type(made),
            name,
            lambda self, rows, *rest, read=read: numbers.extend(rows) or read(self, rows, *rest),
        )
    shown = mmray.show(tmp_path / "set", rows=5)
    assert len(numbers) == 5 + 16
    assert "Based on 16 of 90 rows: random groups of 8 adjacent rows." in text_of(shown.page)
    keys = [each["key"] for each in shown.rows]
    assert keys == [each["key"] for each in mmray.show(tmp_path / "set", rows=5).rows]
    assert keys != [each["key"] for each in mmray.show(tmp_path / "set", rows=5, seed=1).rows]


def test_set_on_an_object_store_is_shown_by_the_command(s3, capsys):
    make_set(f"{s3.address}/set", [row(number, noisy(number)) for number in range(20)])
    console = ConsoleReporter()
    assert cli.run(["show", f"{s3.address}/set", "--rows", "3"], console) == 0
    printed = capsys.readouterr().out
    assert "Based on all 20 rows." in printed and "show.html" in printed
    assert len(re.findall(r"row-\d+ +image 24 × 20 ", printed)) == 3


def test_set_with_a_damaged_shard_is_refused_with_its_name(tmp_path):
    make_set(tmp_path / "set", [row(number, noisy(number)) for number in range(20)])
    shard = next((tmp_path / "set").glob("*/*.arrow"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match=rf"{shard.name}.* another folder"):
        mmray.show(tmp_path / "set")


def test_wrong_arguments_are_explained(tmp_path, capsys):
    make_set(tmp_path / "set", [row(0)])
    console = ConsoleReporter()
    assert cli.run(["show", str(tmp_path)], console) == 5
    assert "is not a prepared set" in capsys.readouterr().err
    assert cli.run(["show", str(tmp_path / "set"), "--rows", "0"], console) == 2
    with pytest.raises(UsageError, match="--rows: must be above 0"):
        mmray.show(tmp_path / "set", rows=0)
    with pytest.raises(UsageError, match="choose another --out"):
        mmray.show(tmp_path / "set", tmp_path / "set")
