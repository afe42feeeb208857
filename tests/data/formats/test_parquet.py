"""Parquet and saved datasets: large files are split into row ranges; store failures lose no row."""

import errno
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mmray.data.formats import parquet as columnar
from mmray.data.formats.parquet import HFSavedSource, ParquetSource
from mmray.data.rows import BadRow
from mmray.errors import DataError
from mmray.storage import paths, requests
from mmray.storage.paths import to_path

COUNT = 100
TABLE = pa.table(
    {"image": [f"{n}.png" for n in range(COUNT)], "text": [f"row {n}" for n in range(COUNT)]}
)

STATE = '{"_data_files": [{"filename": "a.arrow"}]}'


def in_parquet(path):
    pq.write_table(TABLE, path / "a.parquet", row_group_size=60)
    return ParquetSource(path, "a.parquet", {})


def in_arrow(path):
    with pa.ipc.new_stream(path / "a.arrow", TABLE.schema) as stream:
        stream.write_table(TABLE, max_chunksize=60)
    (path / "state.json").write_text(STATE)
    return HFSavedSource(path, "", {})


@pytest.mark.parametrize("source_in", [in_parquet, in_arrow])
@pytest.mark.parametrize(
    ("rows_per_chunk", "most_parts", "sizes"),
    [
        (7, 16, [7] * 8 + [4] + [7] * 5 + [5]),
        (7, 2, [30, 30, 20, 20]),
        (60, 16, [60, 40]),
        (200, 16, [100]),
    ],
)
def test_large_file_is_split_into_row_ranges(
    tmp_path, monkeypatch, source_in, rows_per_chunk, most_parts, sizes
):
    monkeypatch.setattr(columnar, "MAX_CHUNKS_PER_ROW_GROUP", most_parts)
    source = source_in(tmp_path)
    chunks = list(source.scan(rows_per_chunk))
    assert [chunk.num_rows for chunk in chunks] == sizes
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    parts = [[*source.read(chunk)] for chunk in reversed(chunks)]
    items = [item for part in reversed(parts) for item in part]
    assert [item.values["text"] for item in items] == TABLE.column("text").to_pylist()
    lines = [int(item.location.rpartition(":")[2]) for item in items]
    assert lines == list(range(1, COUNT + 1))


def test_file_without_row_groups_has_no_chunks(tmp_path):
    pq.write_table(TABLE, tmp_path / "a.parquet")
    pq.ParquetWriter(tmp_path / "b.parquet", TABLE.schema).close()
    assert pq.ParquetFile(tmp_path / "b.parquet").num_row_groups == 0
    chunks = ParquetSource(tmp_path, "", {}).scan(COUNT)
    assert [(chunk.file, chunk.num_rows) for chunk in chunks] == [("a.parquet", COUNT)]


def test_output_of_save_to_disk_has_all_rows_and_splits(tmp_path):
    """The package writes one folder a split, several files, and the rows of an index in order."""
    from datasets import Dataset, DatasetDict

    rows = Dataset(TABLE)
    splits = DatasetDict({"train": rows.shuffle(seed=1), "test": rows.select(range(90, COUNT))})
    splits.save_to_disk(tmp_path, num_shards={"train": 3, "test": 1})
    source = HFSavedSource(tmp_path, "", {})
    values = [item.values for chunk in source.scan(20) for item in source.read(chunk)]
    for split, saved in splits.items():
        texts = [row["text"] for row in values if row["split"] == split]
        assert texts == saved["text"][:]


def test_saved_dataset_on_a_store_is_read_once(monkeypatch):
    """Its scan reads only the schema, and one chunk the complete file, whose record batches may be
    empty.
    """
    file, read_bytes, read_at = io.BytesIO(), [], paths._RetriedFile.readinto
    table = TABLE.append_column("padding", pa.array([bytes(20_000)] * COUNT))
    empty = pa.RecordBatch.from_pylist([], table.schema)
    with pa.ipc.new_stream(file, table.schema) as stream:
        for batch in (empty, *table.to_batches(7), empty):
            stream.write_batch(batch)
    MemoryFileSystem().pipe(
        {"/saved/a.arrow": file.getvalue(), "/saved/state.json": STATE.encode()}
    )

    def readinto(file, buffer):
        read_bytes.append(read_at(file, buffer))
        return read_bytes[-1]

    monkeypatch.setattr(paths._RetriedFile, "readinto", readinto)
    source = HFSavedSource(to_path("memory://saved"), "", {})
    chunks = list(source.scan(21))
    assert sum(read_bytes) < 0.1 * len(file.getvalue()) and len(chunks) == 1
    read_bytes.clear()
    texts = [item.values["text"] for chunk in chunks for item in source.read(chunk)]
    assert texts == TABLE.column("text").to_pylist()
    assert sum(read_bytes) < 1.2 * len(file.getvalue())


def damage_arrow_file(path, damage):
    """Truncate the second record batch, or overwrite its header."""
    data = path.read_bytes()
    second = data.rindex(b"\xff\xff\xff\xff", 0, len(data) - 8)
    overwritten = data[: second + 8] + b"\xf0" * 64 + data[second + 72 :]
    path.write_bytes(data[:-100] if damage == "truncated" else overwritten)


@pytest.mark.parametrize("damage", ["truncated", "header"])
def test_damaged_saved_dataset_is_a_data_error(tmp_path, damage):
    source = in_arrow(tmp_path)
    damage_arrow_file(tmp_path / "a.arrow", damage)
    with pytest.raises(DataError, match=r"a\.arrow cannot be read as Hugging Face datasets"):
        list(source.scan(60))


@pytest.mark.parametrize("damage", ["truncated", "header"])
def test_damaged_saved_dataset_on_a_store_keeps_the_rows_before(tmp_path, damage):
    in_arrow(tmp_path)
    damage_arrow_file(tmp_path / "a.arrow", damage)
    data = (tmp_path / "a.arrow").read_bytes()
    MemoryFileSystem().pipe({"/damaged/a.arrow": data, "/damaged/state.json": STATE.encode()})
    source = HFSavedSource(to_path("memory://damaged"), "", {})
    *rows, bad = [item.values for chunk in source.scan(60) for item in source.read(chunk)]
    assert [row["text"] for row in rows] == TABLE.column("text").to_pylist()[:60]
    assert (bad.stage, bad.reason) == ("read", "damaged")


@pytest.fixture
def on_store(monkeypatch):
    monkeypatch.setattr(requests, "MAX_WAIT_S", 0.01)
    out = io.BytesIO()
    pq.write_table(TABLE, out, row_group_size=60)
    MemoryFileSystem().pipe("/columnar/a.parquet", out.getvalue())
    yield ParquetSource(to_path("memory://columnar"), "a.parquet", {})
    MemoryFileSystem().rm("/columnar", recursive=True)


def failing(monkeypatch, times, error):
    """Fail the second batch of a row group this many times."""
    left, whole = [times], pq.ParquetFile.iter_batches

    def iter_batches(*given, **named):
        for number, batch in enumerate(whole(*given, **named)):
            if number == 1 and left[0]:
                left[0] -= 1
                raise error
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)


def read(source):
    return [item.values for chunk in source.scan(200) for item in source.read(chunk)]


@pytest.mark.parametrize("failures", [requests.ATTEMPTS - 1, requests.ATTEMPTS])
def test_failed_reads_of_a_store_are_retried_and_lose_no_row(on_store, monkeypatch, failures):
    [chunk], left, open_file = on_store.scan(200), [failures], paths.open_input

    class Failing:
        def __init__(self, file):
            self.size, self.close, self._file = file.size, file.close, file

        def read_at(self, count, offset):
            if offset and left[0]:  # the footer of this file is read from byte 0
                left[0] -= 1
                raise OSError("AWS Error NETWORK_CONNECTION")
            return self._file.read_at(count, offset)

    monkeypatch.setattr(paths, "open_input", lambda *given: Failing(open_file(*given)))
    if failures < requests.ATTEMPTS:
        assert [item.values["text"] for item in on_store.read(chunk)] == TABLE.column(
            "text"
        ).to_pylist()
    else:
        with pytest.raises(requests.TransientStorageError, match="NETWORK_CONNECTION"):
            list(on_store.read(chunk))
    assert left == [0]


def test_damaged_file_on_a_store_is_quarantined(on_store, monkeypatch):
    failing(monkeypatch, 1, OSError("end of stream"))
    assert {row.reason for row in read(on_store)[32:]} == {"damaged"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EIO, "x"), "unreadable"),
        (OSError("end of stream"), "damaged"),
        (pa.ArrowInvalid("x"), "damaged"),
    ],
)
def test_os_error_of_a_disk_is_unreadable_and_other_errors_are_damaged(
    tmp_path, monkeypatch, error, reason
):
    failing(monkeypatch, 1, error)
    assert {row.reason for row in read(in_parquet(tmp_path)) if isinstance(row, BadRow)} == {reason}


def test_fields_that_structs_have_for_other_rows_are_left_out(tmp_path):
    """Arrow gives each call the arguments of all tools, and each tool all of its parameters."""
    chats = []
    for arguments in ({"city": "X"}, {"number": 5}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        properties = {name: {"type": "string"} for name in arguments}
        turns = [{"role": "user", "content": "what"}, {"role": "assistant", "tool_calls": [call]}]
        chats.append({"messages": turns, "tools": [{"name": "f", "parameters": properties}]})
    pq.write_table(pa.Table.from_pylist(chats), tmp_path / "a.parquet")
    source = ParquetSource(tmp_path, "a.parquet", {})
    rows = [row.values for chunk in source.scan(10) for row in source.read(chunk)]
    assert [{name: row[name] for name in ("messages", "tools")} for row in rows] == chats


@pytest.mark.parametrize("source_in", [in_parquet, in_arrow])
def test_file_without_labels_has_none(tmp_path, source_in):
    source = source_in(tmp_path)
    assert not [label for chunk in source.scan(60) for label in source.labels(chunk)]
