"""Tiny synthetic data for tests."""

import hashlib
import io
from collections import Counter
from dataclasses import replace

import numpy as np
from PIL import Image

from mmray.config import recipes
from mmray.data.images.decode import header_size
from mmray.data.images.formats import detect_format
from mmray.data.store.manifest import (
    TOKENIZER,
    Manifest,
    media_fields,
    shard_fields,
    write_manifest,
)
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import pack_rows
from mmray.data.store.shard_writer import open_shard
from mmray.data.store.stored_row import Media, Row
from mmray.data.text.tokenizer import train_tokenizer
from mmray.storage.paths import to_path, write_atomic

CAPTIONS = ["a", "a red one", "a much longer caption of a row"]


def encode(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(gray, side=16):
    return encode(Image.new("RGB", (side, side), (gray % 256,) * 3))


def noisy(number):
    """A PNG of random noise."""
    pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    return encode(Image.fromarray(pixels))


def row(number, data=None, texts=None):
    """Row `number`: an image of that gray level and one of three captions."""
    data = png(number) if data is None else data
    texts = texts or [CAPTIONS[number % 3]]
    return Row(f"row-{number}", [image_media(data)], texts, source=f"made:{number}")


def image_media(data):
    """An image of a row, as `mmray prepare` stores it."""
    sha256 = hashlib.sha256(data).hexdigest()
    size = header_size(data) if detect_format(data) else (0, 0)
    return Media("image", data, sha256=sha256, width=size[0], height=size[1])


def write_shard(rows, storage, name, split=None):
    """Write rows as the file `name`; return its manifest entry."""
    with open_shard(storage, name, split) as shard:
        for each in rows:
            shard.append(each)
    return shard.entry()


def write_set(folder, shards, tokenizer=None):
    """Write a prepared set of shards (rows, split, dropped) and return its address."""
    folder = to_path(folder)
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    entries = []
    counts = Counter()
    for number, (rows, split, dropped) in enumerate(shards):
        entry = write_shard(rows, folder, f"shards/{number}.arrow", split)
        entries.append(replace(entry, dropped=pack_rows(dropped, len(rows))))
        for index, each in enumerate(rows):
            if index not in dropped:
                counts[split or "", each.media_kinds] += 1
    fields = shard_fields(entries)
    if tokenizer:
        write_atomic(folder / TOKENIZER, tokenizer)
    manifest = Manifest(
        num_read=fields["num_rows"],
        num_quarantined=0,
        reasons={},
        tokenizer=TOKENIZER if tokenizer else None,
        source={},
        settings={},
        **fields,
        **media_fields(counts),
    )
    write_manifest(folder, manifest)
    return str(folder)


def make_set(folder, rows, test_rows=()):
    """A prepared set of these rows in two shards, and a test split if it has rows."""
    split = "train" if test_rows else None
    half = max(1, len(rows) // 2)
    shards = [(rows[:half], split, ()), (rows[half:], split, ()), (list(test_rows), "test", ())]
    shards = [shard for shard in shards if shard[0]]
    return PreparedSet.open(write_set(folder, shards, train_tokenizer(CAPTIONS, 60)))


def recipe_in(name, folder):
    """A recipe that keeps its data and its run in a folder.

    Its worker has one thread, because two that share the cores with another test take twice the
    time of the processor.
    """
    config = recipes.load(name)
    return config.replace(
        data=config.data.replace(cache=str(folder / "cache")),
        run=config.run.replace(storage=str(folder), name="run"),
    ).with_cluster(cpus_per_worker=1)


def cache_repository(monkeypatch, cache, files, missing=()):
    """Write the texts of files of the repository a/b to a cache of the hub, which cannot be reached
    otherwise. The cache knows that the files `missing` do not exist.
    """
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, commit = cache / "models--a--b", "0" * 40
    folders = [repository / name for name in ("refs", f"snapshots/{commit}", f".no_exist/{commit}")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "main").write_text(commit)
    for name, text in files.items():
        (folders[1] / name).write_text(text)
    for name in missing:
        (folders[2] / name).touch()
