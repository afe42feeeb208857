"""The quarantine of a run on a disk and on an object store."""

import pytest

from mmray.engine.bad_rows import append_bad_row, load_bad_rows, merge_bad_rows
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
    assert load_bad_rows(folder) == {0, 1, 2, 3}
