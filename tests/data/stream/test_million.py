"""A set of a million rows: cost of opening it, planning a run, and reading the first block."""

import gc
import os
import pickle
import time
from dataclasses import replace

import numpy as np
import psutil

from mmray.config import Inputs
from mmray.data.store.manifest import Manifest, shard_fields, write_manifest
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import hash_key
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from tests.made import CAPTIONS, row, write_shard

ROWS, IN_SHARD = 1_000_000, 512  # default of prepare.rows_per_shard


def make_million(folder):
    """Shards as prepare writes them, but one file hard-linked under many names."""
    whole, last = (
        write_shard([row(number) for number in range(count)], folder, f"{count}.arrow")
        for count in (IN_SHARD, ROWS % IN_SHARD)
    )
    names = [f"{number:05d}.arrow" for number in range(ROWS // IN_SHARD)]
    for name in names:
        os.link(folder / whole.file, folder / name)
    shards = (*(replace(whole, file=name) for name in names), last)
    manifest = Manifest(
        num_read=ROWS,
        num_quarantined=0,
        reasons={},
        tokenizer=None,
        source={},
        settings={},
        **shard_fields(shards),
    )
    write_manifest(folder, manifest)


def test_million_rows_are_opened_and_read_within_bounds(tmp_path):
    """Opening, planning and a block of random rows take 3 s of a CPU and 64 MiB; a reader is less
    than 0.5 MB.
    """
    make_million(tmp_path)
    inputs, tokenizer = (
        Inputs(image_side=8, fit="squash", max_tokens=12),
        train_tokenizer(CAPTIONS, 60),
    )
    gc.collect()
    before, start_s = psutil.Process().memory_info().rss, time.process_time()
    reader = RowReader(PreparedSet.open(str(tmp_path)), inputs, tokenizer, 10**6)
    plan = SamplePlan(ROWS, 256, 2, seed=0, steps=40_000)
    positions = plan.positions(plan.steps - 1, 1)
    block = reader.read_block(plan, positions)
    took_s, held_mib = (
        time.process_time() - start_s,
        (psutil.Process().memory_info().rss - before) / 2**20,
    )
    assert took_s < 3 and held_mib < 64 and len(pickle.dumps(reader)) < 500_000
    rows = plan.row_ids_at(positions)
    assert len(set((rows // IN_SHARD).tolist())) > 100  # rows from the entire set
    assert (
        block["key"].tolist() == [hash_key(f"row-{number % IN_SHARD}") for number in rows]
        and block["valid"].all()
    )
    assert np.array_equal(np.sort(plan.row_ids_at(np.arange(ROWS))), np.arange(ROWS))
