"""Batch arithmetic and the length of a run."""

import pytest

from mmray.config import Batch, Train
from mmray.engine.batch import BatchShape, resolve_batch_shape, total_steps
from mmray.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "workers", "summary"),
    [
        ({"micro": 8, "global": 64}, 2, "micro 8 x accumulation 4 x workers 2 = 64 rows per step"),
        (
            {"micro": 8, "accumulation": 4},
            2,
            "micro 8 x accumulation 4 x workers 2 = 64 rows per step",
        ),
        ({"global": 64}, 2, "micro 32 x accumulation 1 x workers 2 = 64 rows per step"),
        (
            {"global": 64, "accumulation": 4},
            2,
            "micro 8 x accumulation 4 x workers 2 = 64 rows per step",
        ),
        (
            {"global": 64, "micro": 64},
            4,
            "micro 16 x accumulation 1 x workers 4 = 64 rows per step",
        ),
        (
            {"global": 10, "micro": 4},
            1,
            "micro 4 x accumulation 3 x workers 1, limited to 10 rows per step",
        ),
        ({"micro": 5}, 3, "micro 5 x accumulation 1 x workers 3 = 15 rows per step"),
        (
            {"global": 48, "micro": "auto"},
            2,
            "48 rows per step over 2 workers, micro-batch: largest that fits",
        ),
    ],
)
def test_batch_shape(settings, workers, summary):
    assert str(resolve_batch_shape(Batch(**settings), workers)).startswith(summary)


@pytest.mark.parametrize(
    ("settings", "workers", "message"),
    [
        ({}, 1, "set `--batch.global`"),
        ({"micro": "auto"}, 2, "auto` needs `--batch.global`"),
        ({"global": 2}, 3, "2 rows are fewer than 3 workers"),
        ({"global": 64, "micro": 8, "accumulation": 3}, 2, "needs accumulation 4, not 3"),
        ({"global": 10, "accumulation": 6}, 1, "not 6; set --batch.accumulation 5"),
        ({"tokens": 4096}, 1, "batch.tokens: it needs `--batch.global`"),
        ({"tokens": 4096, "global": 8, "micro": 2}, 1, "neither `--batch.micro`"),
    ],
)
def test_contradicting_sizes_are_refused(settings, workers, message):
    with pytest.raises(UsageError, match=message):
        resolve_batch_shape(Batch(**settings), workers)


def test_batch_by_tokens_bounds_the_micro_batch():
    batch = Batch(**{"global": 64, "tokens": 10_000})
    with pytest.raises(UsageError, match=r"10,000 tokens are fewer .* set at least 12288"):
        resolve_batch_shape(batch, 2, max_row_tokens=12_288)
    shape = resolve_batch_shape(batch, 2, max_row_tokens=2048)
    assert str(shape) == "64 rows per step over 2 workers, micro-batches of at most 10,000 tokens"
    assert (shape.micro_batch_size, shape.with_world_size(3).micro_tokens) == (4, 10_000)
    # A smaller micro-batch still holds the longest row.
    smaller = shape.halved()
    assert (smaller.micro_batch_size, smaller.micro_tokens) == (2, 5000)
    assert smaller.halved().micro_tokens == 2500 and smaller.halved().halved() is None


def test_halved_micro_batch_at_most_doubles_accumulation():
    halved = [BatchShape(256, micro, 1).halved() for micro in (256, 43, 5, 3, 2)]
    assert [shape.micro_batch_size for shape in halved] == [128, 22, 3, 2, 1]
    assert BatchShape(256, 1, 1).halved() is None
    for rows in (1, 7, 342, 1366):
        for micro in range(2, rows + 1):
            shape = BatchShape(rows, micro, world_size=1)
            assert shape.halved().accumulation <= 2 * shape.accumulation


def test_number_of_workers_changes_the_division_of_the_global_batch():
    shape = BatchShape(64, 8, world_size=4)
    assert [shape.with_world_size(world).accumulation for world in (1, 2, 4)] == [8, 4, 2]
    assert shape.with_world_size(16) == BatchShape(64, 4, world_size=16)
    auto = BatchShape(64, 16, world_size=4, auto=True)
    assert auto.with_world_size(2) == BatchShape(64, 32, world_size=2, auto=True)
    found = auto.with_micro_batch_size(10)
    assert found == BatchShape(64, 10, world_size=4) and found.accumulation == 2


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"steps": 7}, 7),
        ({"samples": 30}, 3),  # the third step has 5 rows of the second epoch
        ({"samples": 31}, 4),
        ({"epochs": 2}, 5),
        ({"epochs": 2.1}, 6),
        ({"epochs": 0.01}, 1),
        ({}, 3),
    ],
)
def test_total_steps(length, steps):
    assert total_steps(Train(**length), num_rows=25, global_batch_size=10) == steps
