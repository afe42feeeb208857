"""What a chunked order costs in shuffle quality, by counting: python -m mmray.bench.shuffle.

Three figures over the batches of an epoch, beside those of a full shuffle of the same rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tyro

from mmray.data.stream.order import SamplePlan

SOURCES = 10


class Quality(NamedTuple):
    """chunks = distinct chunks in a global batch, on average; distance = between rows of neighbouring positions, in
    epochs (1/3 by chance); deviation = of the share of a tenth of the set in a batch, by what chance would give."""

    chunks: float
    distance: float
    deviation: float


def quality(rows: int, chunk: int, window: int, batch: int = 256, of: int = 0, epochs: int = 2) -> Quality:
    """Figures of an order over `rows` rows that lie source after source; `of`: chunks of so many rows are counted."""
    order = SamplePlan(
        num_rows=rows, global_rows=batch, world=1, micro=batch, seed=0, steps=10**9, chunk=chunk, window=window
    ).rows_at(np.arange(epochs * rows))
    batches = order[: len(order) // batch * batch].reshape(-1, batch)
    chunks = np.sort(batches // (of or chunk), axis=1)
    shares = (batches < rows // SOURCES).mean(axis=1)
    share = rows // SOURCES / rows
    return Quality(
        float(1 + (np.diff(chunks, axis=1) > 0).sum(axis=1).mean()),
        float(np.abs(np.diff(order)).mean() / rows),
        float(shares.std() / np.sqrt(share * (1 - share) / batch)),
    )


def main(rows: int = 1_000_000, chunk: int = 32, windows: tuple[int, ...] = (1, 16, 64, 256), batch: int = 256) -> None:
    """Print the figures of chunks of `chunk` rows in several windows, and of a full shuffle."""
    orders = [(f"{window:,} x {chunk} rows", quality(rows, chunk, window, batch)) for window in windows]
    orders.append(("full shuffle", quality(rows, 1, 1, batch, of=chunk)))
    print(f"{rows:,} rows, batches of {batch}")
    print(f"{'window':>18} {'chunks in a batch':>18} {'distance':>9} {'deviation':>10}")
    for name, (chunks, distance, deviation) in orders:
        print(f"{name:>18} {chunks:>18.1f} {distance:>9.3f} {deviation:>10.2f}")


if __name__ == "__main__":
    tyro.cli(main)
