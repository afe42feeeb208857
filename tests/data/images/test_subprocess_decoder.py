"""Decoder crashes and out-of-memory errors are attributed to their image; all other rows are
kept.
"""

import json
import os
import resource
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import ray

from mmray.config import Augment, Inputs, Prepare
from mmray.data.images import subprocess_decoder as decoder_module
from mmray.data.images import transform
from mmray.data.images.decode import BadImage
from mmray.data.images.subprocess_decoder import SubprocessDecoder, serve
from mmray.data.prepare import contamination
from mmray.data.prepare import pipeline as prepare_module
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import hash_key
from mmray.data.stream import actors
from mmray.data.stream.decode_actor import DecodeActor
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.pool_size import DecoderLimits
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from tests.data.images.crashing_images import NEED, deadly, decoder_dies, decoder_finds_no_memory
from tests.made import CAPTIONS, make_set, png, row

_pack_task, _hash_rows = prepare_module.pack_task, contamination._hash_rows


def pack_task(decoder, item, job):
    """The prepare task on a worker with another decoder."""
    with decoder():
        return _pack_task(item, job)


class CrashingActor(DecodeActor):
    """The stream's actor with the crashing decoder."""

    def decode(self, number, careful, slot):
        with decoder_dies():
            return super().decode(number, careful, slot)


def make_source(folder, count, bad):
    """JSONL of `count` rows with one image each; images of the rows `bad` crash the decoder and log
    it in `tries-N`.
    """
    folder.mkdir()
    for number in range(count):
        data = png(number)
        data = deadly(data, folder / f"tries-{number}") if number in bad else data
        (folder / f"{number}.png").write_bytes(data)
    rows = [
        {"id": f"k{number}", "image": f"{number}.png", "text": f"row {number}"}
        for number in range(count)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def tries(source, number):
    return len((source.parent / f"tries-{number}").read_text().splitlines())


def test_crash_kills_only_the_child_and_a_new_one_starts(tmp_path):
    subprocess_decoder = SubprocessDecoder()
    with decoder_dies():
        assert subprocess_decoder.check(png(1), 10**6) == (16, 16)
        with pytest.raises(BadImage, match="crash: the decoder process was ended by SIGSEGV"):
            subprocess_decoder.check(deadly(png(2), tmp_path / "log"), 10**6)
        for data, max_pixels, reason in (
            (b"<html>", 10**6, "format"),
            (png(1), 16 * 16 - 1, "too-large"),
        ):
            with pytest.raises(BadImage, match=reason):
                subprocess_decoder.check(data, max_pixels)
        assert subprocess_decoder.check(png(3, side=9), 10**6) == (9, 9)
    child = subprocess_decoder._child
    subprocess_decoder.close()
    assert subprocess_decoder.num_crashes == 1 and child is not None
    assert child.process.exitcode == 0


def serve_and_die_of_crops(channel):
    with patch.object(transform, "random_crop_box", lambda *_: os.abort()):
        serve(channel)


def test_probe_also_runs_the_augmentation(tmp_path, monkeypatch):
    monkeypatch.setattr(decoder_module, "serve", serve_and_die_of_crops)
    prepared = make_set(tmp_path, [row(0, data=png(0))])
    inputs = Inputs(image_side=8, max_tokens=12)
    augment = Augment(crop_scale=(0.5, 0.5))
    reader = RowReader(prepared, inputs, train_tokenizer(CAPTIONS, 60), 10**6, augment)
    reader.subprocess_decoder = SubprocessDecoder()
    block = reader.read_block(SamplePlan(1, 1, 1, seed=0, steps=1), np.arange(1))
    reader.subprocess_decoder.close()
    assert block["valid"].tolist() == [False]
    assert reader.subprocess_decoder.num_crashes == 1


def serve_with_24_mib(channel):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 24 * 2**20,) * 2)
    serve(channel)


@pytest.mark.skipif(
    sys.platform != "linux", reason="limits of a process's memory as Linux has them"
)
def test_out_of_memory_image_is_not_reported_corrupt(monkeypatch):
    """16 megapixels with 24 MiB left, then a small image."""
    monkeypatch.setattr(decoder_module, "serve", serve_with_24_mib)
    subprocess_decoder = SubprocessDecoder()
    with pytest.raises(BadImage, match="memory: no memory to decode it"):
        subprocess_decoder.check(png(1, side=4000), 25 * 10**6)
    assert subprocess_decoder.check(png(3, side=9), 10**6) == (9, 9)
    subprocess_decoder.close()
    assert subprocess_decoder.num_crashes == 0


@pytest.mark.cluster
def test_rows_of_oom_task_are_retried_one_by_one_and_kept(tmp_path, monkeypatch, local_ray):
    source = make_source(tmp_path / "raw", 12, ())
    with (tmp_path / "raw" / "5.png").open("ab") as file:
        file.write(NEED)
    monkeypatch.setattr(prepare_module, "pack_task", partial(pack_task, decoder_finds_no_memory))
    manifest = prepare(str(source), str(tmp_path / "out"), Prepare(rows_per_shard=4, vocab_size=60))
    assert (manifest.num_rows, manifest.reasons) == (12, {})


@pytest.mark.cluster
@pytest.mark.parametrize("image_side", [0, 8])
def test_prepare_quarantines_crashing_image_and_packs_the_rest(
    tmp_path, monkeypatch, local_ray, image_side
):
    bad = (5, 6, 13)  # two in one task, and one that is the first of its task
    source, out = make_source(tmp_path / "raw", 32, bad), str(tmp_path / "out")
    settings = Prepare(
        max_bad_fraction=0.5, rows_per_shard=4, vocab_size=100, image_side=image_side
    )
    monkeypatch.setattr(prepare_module, "pack_task", partial(pack_task, decoder_dies))
    manifest = prepare(str(source), out, settings)
    assert (manifest.num_rows, manifest.reasons) == (29, {"decoder-crash": 3})
    faults = [
        json.loads(line)
        for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    ]
    assert [(fault["key"], fault["source"]) for fault in faults] == [
        (f"k{n}", f"rows.jsonl:{n + 1}") for n in bad
    ]
    assert all("the decoder process was ended by" in fault["detail"] for fault in faults)
    assert PreparedSet.open(out).keys() == [
        f"k{number}" for number in range(32) if number not in bad
    ]
    assert all(1 <= tries(source, number) <= 3 for number in bad)
    assert prepare(str(source), out, settings) == manifest  # not retried
    assert all(tries(source, number) <= 3 for number in bad)


def hash_rows(prepared, **options):
    """The contamination task on a worker with the crashing decoder."""
    with decoder_dies():
        return _hash_rows(prepared, **options)


@pytest.mark.cluster
def test_contamination_check_survives_crashing_images(tmp_path, monkeypatch, local_ray):
    """The crashing image is compared by its bytes."""
    source, out = make_source(tmp_path / "raw", 12, [5]), str(tmp_path / "out")
    unseen = Prepare(rows_per_shard=4, vocab_size=60, check="header", max_bad_fraction=1.0)
    prepare(str(source), str(tmp_path / "other"), unseen)
    monkeypatch.setattr(contamination, "_hash_rows", hash_rows)
    with decoder_dies():
        settings = unseen.model_copy(update={"check_contamination": (str(tmp_path / "other"),)})
        manifest = prepare(str(source), out, settings)
    assert (manifest.num_rows, manifest.leakage["exact"]) == (12, 12)


@ray.remote(num_cpus=0)
def consume(reader, plan):
    # The rank decodes, too, until a lost actor is replaced.
    with decoder_dies(), patch.object(actors, "DecodeActor", CrashingActor):
        start, limits = ResumePoint(plan, 0), DecoderLimits(1, 1, 1)
        blocks = actors.rank_blocks(reader, start, 0, 1, 0.01, limits, print)
        with closing(blocks):
            return list(blocks)


@pytest.mark.cluster
def test_index_only_stream_skips_crashing_row(tmp_path, local_ray):
    source, out = make_source(tmp_path / "raw", 40, [17]), str(tmp_path / "out")
    prepare(
        str(source), out, Prepare(rows_per_shard=16, vocab_size=60, index_only=True, check="header")
    )
    tokenizer = train_tokenizer([f"row {number}" for number in range(40)], 60)
    reader = RowReader(PreparedSet.open(out), Inputs(image_side=8, max_tokens=12), tokenizer, 10**6)
    plan = SamplePlan(40, 4, 1, seed=0, steps=20)  # two epochs
    blocks = ray.get(consume.remote(reader, plan))
    column = {
        name: np.concatenate([block[name] for block in blocks]) for name in ("pos", "key", "valid")
    }
    rows = plan.row_ids_at(np.arange(80))
    assert column["pos"].tolist() == list(range(80))
    assert column["valid"].tolist() == (rows != 17).tolist()
    assert column["key"].tolist() == [0 if row == 17 else hash_key(f"k{row}") for row in rows]
    assert tries(source, 17) == 3  # one crash of the actor, then one of a child per epoch
    with decoder_dies():
        record, reason, _ = reader.explain_bad_row(17, SubprocessDecoder())
    assert (record.key, reason) == ("k17", "decoder-crash")
