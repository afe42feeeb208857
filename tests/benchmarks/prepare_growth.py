"""How the cost of `prepare` grows with the rows: small JPEGs in Parquet, with Ray.

    python -m tests.benchmarks.prepare_growth 10000 100000
    python -m tests.benchmarks.prepare_growth 10000 --s3
    python -m tests.benchmarks.prepare_growth 10000000 --assembly

Each prepare is a process of its own, whose CPU time and peak memory are those of the driver. After
the first one of a size come the same again, and one with 1 % more rows.
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
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyarrow import fs

from mmray.storage.paths import copy_file, list_files, to_path

ROWS_PER_FILE = 50_000
ROWS_PER_GROUP = 1_000
SIDE = 48
ROWS_PER_CHUNK = 10_000
ROWS_PER_INDEX = 1_000_000


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
    return {
        "rows": rows,
        "dropped": len(dedup.rows),
        "seconds": round(time.monotonic() - start_s, 1),
        "driver_cpu_s": round(time.process_time() - start_cpu_s, 1),
        "driver_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
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
        columns["kinds"] = pa.repeat("image", len(numbers))
        for name in ("key_digest", "image_digest", "row_digest", "text_digest"):
            values = (images if name == "image_digest" else numbers).astype(np.uint64)
            mixed = np.stack([values * np.uint64(0x9E3779B97F4A7C15), values], axis=1)
            columns[name] = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), len(numbers), [None, pa.py_buffer(mixed)]
            )
        batches.append(pa.RecordBatch.from_pydict(columns, SCHEMA))
        offsets = tuple(range(len(numbers) // 8 + 1))
        shard = Shard(f"shards/{index}.arrow", None, len(numbers), 1, "0" * 64, offsets=offsets)
        chunk = SourceChunk(index, "rows", start, int(numbers[-1]) + 1, 1, len(numbers), "")
        counts = [(0, "image", len(numbers))]
        records.append(
            Record("", chunk, [], None, [shard], len(numbers), {}, [], counts, {}, None, {}, False)
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
    parser.add_argument("--assembly", action="store_true", help="only the work after packing")
    parser.add_argument("--once", nargs=2)
    arguments = parser.parse_args()
    if arguments.once:
        prepare_once(*arguments.once)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        if arguments.assembly:
            for rows in arguments.rows:
                print(json.dumps(bench_assembly(rows, folder)), flush=True)
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
