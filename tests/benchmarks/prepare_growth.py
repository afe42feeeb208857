"""How the cost of `prepare` grows with the rows: small JPEGs in Parquet, with Ray.

    python -m tests.benchmarks.prepare_growth 10000 100000
    python -m tests.benchmarks.prepare_growth 10000 --s3
    python -m tests.benchmarks.prepare_growth 10000000 --work assembly

Each prepare is a process of its own, whose CPU time and peak memory are those of the driver. After
the first one of a size come the same again, and one with 1 % more rows. `--work` measures one part
of the work with rows that are numbers only, in this process and its tasks (without Ray).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyarrow import fs

from mmray.storage.paths import copy_file, list_files, to_path

if TYPE_CHECKING:
    from mmray.data.store.prepared_set import PreparedSet

ROWS_PER_FILE = 50_000
ROWS_PER_GROUP = 1_000
SIDE = 48
ROWS_PER_CHUNK = 10_000
ROWS_PER_INDEX = 1_000_000
ROWS_PER_COLUMNS = 100_000
EMBEDDING_DIM = 64


def write_rows(file: Path, start: int, count: int) -> None:
    """Write rows with JPEGs that differ in a comment, because encoding a million takes long."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(64):
        pixels = np.kron(rng.integers(0, 255, (6, 6, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
        buffer = io.BytesIO()
        Image.fromarray(pixels[:SIDE, :SIDE]).save(buffer, "JPEG", quality=85)
        images.append(buffer.getvalue())
    schema = pa.schema([("id", pa.string()), ("image", pa.binary()), ("text", pa.string())])
    with pq.ParquetWriter(file, schema) as writer:
        for first in range(start, start + count, ROWS_PER_GROUP):
            numbers = range(first, min(first + ROWS_PER_GROUP, start + count))
            comments = [b"\xff\xfe\x00\x0a" + number.to_bytes(8, "big") for number in numbers]
            data = [
                images[number % 64][:2] + comment + images[number % 64][2:]
                for number, comment in zip(numbers, comments, strict=True)
            ]
            texts = [f"image number {number} of a small set" for number in numbers]
            table = pa.table([[str(n) for n in numbers], data, texts], schema=schema)
            writer.write_table(table)


def write_source(folder: Path, rows: int) -> None:
    """Write the Parquet files of `rows` rows."""
    folder.mkdir()
    for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
        count = min(ROWS_PER_FILE, rows - start)
        write_rows(folder / f"{number:05d}.parquet", start, count)


def prepare_once(source: str, out: str) -> None:
    """Prepare a source in this process, which is the driver, and print its cost as JSON."""
    from mmray.cluster.connect import ray_session
    from mmray.config import Cluster, Prepare
    from mmray.data.prepare.pipeline import prepare

    with ray_session(Cluster()):
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        manifest = prepare(source, out, Prepare(vocab_size=0))
        cost = {
            "rows": manifest.num_rows,
            "s": time.monotonic() - start_s,
            "cpu_s": time.process_time() - start_cpu_s,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    print(f"\n{json.dumps(cost)}")


def _run(name: str, source: str, out: str, log: Path | None) -> dict[str, Any]:
    before = log.stat().st_size if log else 0
    command = [sys.executable, "-m", __spec__.name, "--once", source, out]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    cost = json.loads(output.splitlines()[-1])
    files = list_files(to_path(out))
    row = {
        "rows": cost["rows"],
        "prepare": name,
        "seconds": round(cost["s"], 2),
        "ms_per_row": round(1000 * cost["s"] / cost["rows"], 3),
        "driver_cpu_s": round(cost["cpu_s"], 2),
        "driver_mib": round(cost["peak_mib"]),
        "files": len(files),
        "parts": sum(file.startswith("parts/") for file in files),
    }
    if log:
        with log.open() as lines:
            lines.seek(before)
            methods = Counter(line.split()[0] for line in lines)
        row["requests"] = " ".join(f"{key} {count:,}" for key, count in sorted(methods.items()))
    return row


def bench_growth(rows: int, folder: Path, log: Path | None, bucket: str) -> list[dict[str, Any]]:
    """Measure the first prepare of some rows, the same again, and one with 1 % more rows.

    Args:
        folder: Empty local folder.
        log: File with a line of each request of the S3 server; None: on the local disk.
        bucket: Address of a bucket of the server.
    """
    local = folder / f"source-{rows}"
    write_source(local, rows)
    source, out = str(local), str(folder / f"out-{rows}")
    if log:
        source, out = f"{bucket}/source-{rows}", f"{bucket}/out-{rows}"
        for name in list_files(local):
            copy_file(local / name, to_path(source) / name)
    results = [_run("first", source, out, log), _run("again", source, out, log)]
    write_rows(local / "99999.parquet", rows, max(1, rows // 100))
    if log:
        copy_file(local / "99999.parquet", to_path(source) / "99999.parquet")
    return [*results, _run("1 % more", source, out, log)]


def bench_assembly(rows: int, folder: Path) -> dict[str, Any]:
    """Measure the work after packing with synthetic records, of which 1 % are duplicates."""
    from mmray.data.prepare import assemble
    from mmray.data.prepare.duplicates import Digests, caption_fields, find_duplicates
    from mmray.data.prepare.records import INDEX, PackedRows, read_records

    out = folder / f"assembly-{rows}"
    (out / "parts").mkdir(parents=True)
    for number, start in enumerate(range(0, rows, ROWS_PER_INDEX)):
        _write_records(out, f"{INDEX}{number:06d}-0.arrow", start, rows)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    records = read_records(out, "")
    packed = PackedRows(out, [records[index] for index in sorted(records)])
    digests = Digests(packed, "image")
    dedup = find_duplicates(digests, "image")
    result = assemble.quarantine_rows(packed, dedup, "quarantine.jsonl")
    caption_fields(digests, dedup.rows, result.shards)
    digests.close()
    return _cost(rows, start_s, start_cpu_s) | {"dropped": len(dedup.rows)}


def _cost(rows: int, start_s: float, start_cpu_s: float) -> dict[str, Any]:
    """Return the cost of work that started at these times, also of its tasks."""
    of_driver = resource.getrusage(resource.RUSAGE_SELF)
    of_tasks = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "rows": rows,
        "seconds": round(time.monotonic() - start_s, 1),
        "driver_cpu_s": round(time.process_time() - start_cpu_s, 1),
        "driver_mib": round(of_driver.ru_maxrss / 1024),
        "task_mib": round(of_tasks.ru_maxrss / 1024),
    }


def write_columns(folder: Path, rows: int, seed: int, group: str) -> PreparedSet:
    """Write a set of columns only: those of a group (a score, embeddings or hashes of images)."""
    from mmray.data.prepare.contamination import HASHES
    from mmray.data.store.manifest import Manifest, shard_fields
    from mmray.data.store.prepared_set import PreparedSet
    from mmray.data.store.row_values import write_values
    from mmray.data.store.shard_table import Shard

    rng = np.random.default_rng(seed)
    shards = []
    for first in range(0, rows, ROWS_PER_COLUMNS):
        values: dict[str, pa.RecordBatch] = {}
        for start in range(first, min(first + ROWS_PER_COLUMNS, rows), ROWS_PER_CHUNK):
            count = min(ROWS_PER_CHUNK, rows - start)
            name = f"shards/{seed}-{start}.arrow"
            offsets = np.arange(count // 8 + 1)
            shards.append(Shard(name, None, count, 1, "0" * 64, offsets=offsets))
            column = "similarity" if group == "kept" else group
            array = _random_values(rng, group, count)
            values[shards[-1].key] = pa.RecordBatch.from_pydict({column: array})
        write_values(folder, group, values)
    columns = {
        "kept": {"similarity": "double"},
        "semantic": {"semantic": f"float16[{EMBEDDING_DIM}]"},
        HASHES: {HASHES: "hashes"},
    }
    manifest = Manifest(
        num_read=rows,
        num_quarantined=0,
        reasons={},
        tokenizer=None,
        source={},
        settings={},
        columns={group: columns[group]},
        **shard_fields(shards),
    )
    return PreparedSet(folder, manifest)


def _random_values(rng: np.random.Generator, group: str, count: int) -> pa.Array:
    from mmray.data.prepare.contamination import _STORED_HASH_DTYPE

    if group == "kept":
        return pa.array(rng.random(count))
    if group == "semantic":
        vectors = rng.standard_normal(count * EMBEDDING_DIM, np.float32).astype(np.float16)
        return pa.FixedSizeListArray.from_arrays(pa.array(vectors), EMBEDDING_DIM)
    hashes = rng.bytes(count * _STORED_HASH_DTYPE.itemsize)
    images = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_STORED_HASH_DTYPE.itemsize), count, [None, pa.py_buffer(hashes)]
    )
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), images)


def bench_where(rows: int, folder: Path) -> dict[str, Any]:
    """Measure a condition that selects 70 % of the rows."""
    from mmray.data.store.selection import drop_rows

    prepared = write_columns(folder / f"where-{rows}", rows, 0, "kept")
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    selected = drop_rows(prepared, "similarity > 0.3", "--where")
    return _cost(rows, start_s, start_cpu_s) | {"selected": selected.num_rows}


def bench_contamination(rows: int, folder: Path) -> dict[str, Any]:
    """Measure the search for images that are also in a set of 100,000 rows."""
    from mmray.data.prepare import contamination
    from mmray.data.store.row_columns import separate_columns
    from mmray.data.store.row_values import RowValues

    out = folder / f"contamination-{rows}"
    numbers = ((rows, 0), (100_000, 1))
    sets = [write_columns(out, count, seed, contamination.HASHES) for count, seed in numbers]
    columns = separate_columns({contamination.HASHES: "hashes"})
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    found = contamination._find_contaminated_rows(RowValues(out, columns), sets)
    return _cost(rows, start_s, start_cpu_s) | {"found": len(found)}


def bench_semantic(rows: int, folder: Path) -> dict[str, Any]:
    """Measure the search for rows with similar embeddings."""
    from mmray.data.prepare.select import _without_similar_rows

    out = folder / f"semantic-{rows}"
    prepared = write_columns(out, rows, 0, "semantic")
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    left = _without_similar_rows(prepared, "semantic", 0.6, out, lambda _: None)
    return _cost(rows, start_s, start_cpu_s) | {"dropped": rows - left.num_rows}


def bench_group(rows: int, folder: Path) -> dict[str, Any]:
    """Measure the scan of JSON lines with five captions an image, which are grouped."""
    from mmray.config import Prepare
    from mmray.data.formats.detect import detect_source
    from mmray.data.prepare.job import PrepareJob

    file, out = folder / f"{rows}.jsonl", folder / f"group-{rows}"
    out.mkdir()
    with file.open("w") as lines:
        for number in range(rows):
            image = number * 7919 % (rows // 5)
            lines.write(f'{{"image": "{image:09d}.jpg", "text": "caption number {number}"}}\n')
    settings = Prepare(group="image", rows_per_shard=512)
    job = PrepareJob(detect_source(str(file), settings.format), out, settings, grows=True)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    num_rows = sum(chunk.num_rows or 0 for chunk in job.open().scan(job.rows_per_shard))
    return _cost(rows, start_s, start_cpu_s) | {"images": num_rows}


WORK = {
    "assembly": bench_assembly,
    "where": bench_where,
    "contamination": bench_contamination,
    "semantic": bench_semantic,
    "group": bench_group,
}


def _write_records(out: Path, file: str, first: int, rows: int) -> None:
    from mmray.data.formats.source import SourceChunk
    from mmray.data.prepare.records import SCHEMA, Record, write_records
    from mmray.data.store.shard_table import Shard

    rng = np.random.default_rng(first)
    records, batches = [], []
    for start in range(first, min(first + ROWS_PER_INDEX, rows), ROWS_PER_CHUNK):
        index = start // ROWS_PER_CHUNK
        numbers = np.arange(start, min(start + ROWS_PER_CHUNK, rows))
        images = np.where(rng.random(len(numbers)) < 0.01, numbers // 2, numbers)
        texts = pa.array(numbers).cast(pa.string())
        columns: dict[str, Any] = {
            name: pa.nulls(len(numbers), SCHEMA.field(name).type) for name in SCHEMA.names
        }
        columns |= {"location": texts, "key": texts}
        columns["shard"] = pa.array(np.zeros(len(numbers), np.int32))
        columns["position"] = pa.array(np.arange(len(numbers), dtype=np.int32))
        columns["kinds"] = pa.repeat("image", len(numbers))
        for name in ("key_digest", "image_digest", "row_digest", "text_digest"):
            values = (images if name == "image_digest" else numbers).astype(np.uint64)
            mixed = np.stack([values * np.uint64(0x9E3779B97F4A7C15), values], axis=1)
            columns[name] = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), len(numbers), [None, pa.py_buffer(mixed)]
            )
        batches.append(pa.RecordBatch.from_pydict(columns, SCHEMA))
        offsets = np.arange(len(numbers) // 8 + 1)
        shard = Shard(f"shards/{index}.arrow", None, len(numbers), 1, "0" * 64, offsets=offsets)
        chunk = SourceChunk(index, "rows", start, int(numbers[-1]) + 1, 1, len(numbers), "")
        counts = [(0, "image", len(numbers))]
        records.append(
            Record("", chunk, [], [shard], len(numbers), {}, [], counts, {}, None, {}, False)
        )
    write_records(out, file, records, batches)


def start_s3(log: Path) -> subprocess.Popen[bytes]:
    """Start the S3 server of the tests with a bucket; it writes each request to the log."""
    listener = socket.create_server(("127.0.0.1", 0))
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listener.getsockname()[1]}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    log.touch()
    descriptor = listener.fileno()
    command = [sys.executable, "-m", "tests.storage.s3_server", f"{descriptor}"]
    server = subprocess.Popen(
        [*command, str(log.parent / "faults")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[descriptor],
    )
    system, _ = fs.FileSystem.from_uri("s3://growth?allow_bucket_creation=true")
    system.create_dir("growth")
    return server


def main() -> None:
    """Run the benchmark for each number of rows, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[10_000])
    parser.add_argument("--s3", action="store_true", help="against a local S3 server (moto)")
    parser.add_argument("--work", choices=WORK, help="only this work, with synthetic rows")
    parser.add_argument("--once", nargs=2)
    arguments = parser.parse_args()
    if arguments.once:
        prepare_once(*arguments.once)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        if arguments.work:
            for rows in arguments.rows:
                print(json.dumps(WORK[arguments.work](rows, folder)), flush=True)
            return
        log = server = None
        if arguments.s3:
            log = folder / "requests"
            server = start_s3(log)
        try:
            for rows in arguments.rows:
                for row in bench_growth(rows, folder, log, "s3://growth"):
                    print(json.dumps(row), flush=True)
        finally:
            if server:
                server.kill()
                server.wait()


if __name__ == "__main__":
    main()
