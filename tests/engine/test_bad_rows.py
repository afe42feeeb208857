"""The quarantine of a run on a disk and on an object store."""

from types import SimpleNamespace

import numpy as np
import pytest

from mmray.data.stream.blocks import NO_LABEL
from mmray.data.stream.order import SamplePlan
from mmray.data.vlm.encoder import TOO_LONG
from mmray.engine.bad_rows import (
    MAX_BAD_ROWS,
    append_bad_row,
    load_bad_rows,
    merge_bad_rows,
    quarantine_bad_rows,
)
from mmray.errors import DataError
from mmray.storage.paths import to_path


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_rows_of_several_processes_are_merged_once(kind, tmp_path, s3):
    folder = to_path(tmp_path if kind == "disk" else s3.address)
    lines = [b'{"row": %d}' % row for row in range(4)]
    # by a merge that was killed before it deleted the separate objects
    left = lines[1:2] if kind == "store" else []
    for appended in (lines[:1], lines[1:2], [*left, *lines[2:]]):
        for line in appended:
            append_bad_row(folder / "quarantine.jsonl", line)
        merge_bad_rows(folder)
    assert (folder / "quarantine.jsonl").read_bytes().splitlines() == lines
    assert load_bad_rows(folder).keys() == {0, 1, 2, 3}


class Reader:
    """A reader whose rows below 20 are too long for the model, and the others unreadable."""

    def explain_bad_row(self, row, decoder):
        return (None, TOO_LONG if row < 20 else "damaged", f"row {row}")


def test_rows_that_are_too_long_are_not_unreadable_whatever_the_rank_and_attempt(tmp_path):
    """A row with another fault follows after a restart, in a process that saw no long row."""
    plan = SamplePlan(num_rows=60, global_batch_size=60, world_size=1, seed=0, steps=1)
    seen = set()
    config = SimpleNamespace(model=SimpleNamespace(label_problem=lambda label: ""))

    def count_bad_row(row):
        is_new = row not in seen
        seen.add(row)
        return len(seen) if is_new else 0

    def read(rows):
        positions = np.flatnonzero(np.isin(plan.row_ids_at(np.arange(60)), rows))
        labels = np.full(len(positions), NO_LABEL)
        block = {"pos": positions, "valid": np.zeros(len(positions), bool), "label": labels}
        arguments = (config, tmp_path, Reader(), None, plan, count_bad_row)
        return list(quarantine_bad_rows([block], *arguments))

    read(range(20))
    read(range(20, 20 + MAX_BAD_ROWS))
    with pytest.raises(DataError, match="17 rows could not be read, more than 16"):
        read([50])
