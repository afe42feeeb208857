"""Rows of conversations encoded by a data process of mmray, against transformers' own processor.

    python -m tests.benchmarks.encoding MODEL SET

A data process reads, decodes and encodes rows without torch. The other process does so with
AutoProcessor and its torchvision backend, as the collators of other trainers do.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mmray.bench.results import compare, describe_machine
from mmray.cli.bench import print_result
from mmray.console.reporter import ConsoleReporter
from mmray.data.images.decode import MAX_PIXELS
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.data.vlm.reader import ConversationReader
from mmray.processes import Channel, ChildProcess

READ_ROWS = 16  # rows that are read at once


def bench_encoding(
    weights: str, data: str, rounds: int, window_s: float, notify: Callable[[str], None]
) -> dict[str, Any]:
    """Compare the rate at which one process encodes rows of conversations.

    Args:
        weights: Folder saved by transformers with its processor, or a hub name.
        data: A prepared set of conversations.
        rounds: How often each is measured; they take turns.
        window_s: Approximate seconds of each measurement.
        notify: Called with one line of text about the progress.

    Returns:
        `machine` (a dict: `cpu`, `cores`, `device`, `load_1min`, and versions `python` and
        `torch`), `ratios` ({`reader_vs_processor`: rows/s of the reader relative to the processor,
        the median over the rounds}), `spread` (for the same name `min` and `max` over the rounds,
        and `pairs`, their number), and `rows`: a dict each for mmray's reader and for the processor
        alone, with its name as `arm` (`reader` or `processor`), `rows_per_s` (with `lowest` and
        `highest`), `tokens_per_s` and `peak_mib` (memory of its process).

    Raises:
        UsageError: The set or the processor cannot be read.
    """

    def measure(arm: str) -> dict[str, float]:
        child = ChildProcess(arm, _measure, arm, weights, data, window_s)
        values: dict[str, float] = child.result()
        child.close()
        return values

    arms = {arm: partial(measure, arm) for arm in ("reader", "processor")}
    ratios = {"reader_vs_processor": ("reader", "processor")}
    return {"machine": describe_machine()} | compare(arms, rounds, "rows_per_s", ratios, notify)


def _measure(
    _channel: Channel, arm: str, weights: str, data: str, window_s: float
) -> dict[str, float]:
    """Encode rows in turn for some seconds, in a process of its own with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    prepared = PreparedSet.open(data, "train")
    inputs = SimpleNamespace(max_tokens=2**30, max_pixels=None, min_pixels=None, question="")
    spec: Any = SimpleNamespace(weights=weights, inputs=inputs)
    reader = ConversationReader(prepared, spec, MAX_PIXELS)
    encode = _reader(reader) if arm == "reader" else _processor(reader, weights)
    rows = _rows(prepared)
    encode(next(rows))  # loads the processor
    num_rows = num_tokens = 0
    start_s = time.perf_counter()
    while time.perf_counter() < start_s + window_s:
        num_tokens += encode(next(rows))
        num_rows += 1
    took_s = time.perf_counter() - start_s
    return {
        "rows_per_s": num_rows / took_s,
        "tokens_per_s": num_tokens / took_s,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    """Return the peak memory of this process, without that of its parent (as getrusage has)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _rows(prepared: PreparedSet) -> Iterator[Row]:
    """Yield the rows of a set, again and again."""
    while True:
        for first in range(0, prepared.num_rows, READ_ROWS):
            numbers = np.arange(first, min(first + READ_ROWS, prepared.num_rows))
            yield from prepared.read(numbers)


def _reader(reader: ConversationReader) -> Callable[[Row], int]:
    return lambda row: len(reader.encode_row(row).input_ids)


def _processor(reader: ConversationReader, weights: str) -> Callable[[Row], int]:
    """Return a function that encodes a row with transformers; images are decoded as by mmray."""
    import torch
    from transformers import AutoProcessor

    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(weights)

    def encode(row: Row) -> int:
        images = reader.media_of(row)
        text = processor.apply_chat_template(row.conversations(reader.question)[0])
        inputs = processor(
            text=[text],
            images=[images] if images else None,
            return_tensors="pt",
            add_special_tokens=False,
        )
        return int(inputs["input_ids"].shape[1])

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder saved by transformers with its processor")
    parser.add_argument("set", help="prepared set of conversations")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=3.0)
    options = parser.parse_args()
    console = ConsoleReporter()
    result = bench_encoding(
        options.model, options.set, options.rounds, options.window_s, console.log
    )
    print_result(result, console)


if __name__ == "__main__":
    main()
