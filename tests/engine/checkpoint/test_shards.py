"""Sharded checkpoints: each rank writes its shard, any number of ranks loads it, and incomplete
ones are never used.
"""

from __future__ import annotations

import json
import pickle
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from pyarrow import fs

from mmray.engine import run_state
from mmray.engine.checkpoint import files, state_io
from mmray.engine.collectives import Group
from mmray.errors import TrainingError
from mmray.storage.paths import to_path
from mmray.storage.ranges import RangeReader
from mmray.training.workers.backend import COLLECTIVE_ERRORS
from tests.engine import toy
from tests.engine.checkpoint import shard_ranks
from tests.engine.conftest import spawn_ranks
from tests.made import make_set, row


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, s3_server):
    """The folder of all scenarios, the run on an object store, and the results of each rank."""
    folder = tmp_path_factory.mktemp("shards")
    bucket = f"bucket-{time.time_ns()}"
    system, _ = fs.FileSystem.from_uri(f"s3://{bucket}?allow_bucket_creation=true")
    system.create_dir(bucket)
    make_set(
        folder / "set",
        [row(number) for number in range(22)],
        [row(number) for number in range(22, 30)],
    )
    # Of two ranks the first has more rows and more captions.
    captions = [["a", "b", "c", "d"], ["e", "f"], ["g"], ["h"], ["i"]]
    make_set(
        folder / "held-out", [row(number, texts=texts) for number, texts in enumerate(captions)]
    )
    address = f"s3://{bucket}/runs"
    results = spawn_ranks(
        shard_ranks.main, folder, shard_ranks.WORLD, address, others=shard_ranks.OTHERS
    )
    return folder, to_path(address) / "run", results


@pytest.fixture(scope="module")
def expected():
    """The weights of an uninterrupted run in one process."""
    return shard_ranks.train(Group(), "single")


@pytest.fixture
def checkpoint(ranks, tmp_path):
    """A copy of the last checkpoint of two ranks, next to the older ones."""
    return shutil.copytree(ranks[0] / "run" / "checkpoints", tmp_path / "checkpoints") / "step-8"


@pytest.mark.parametrize(
    ("kind", "world"),
    [(kind, world) for world, kinds in shard_ranks.RESUMED.items() for kind in kinds],
)
def test_checkpoint_of_two_ranks_resumes_at_any_number_of_ranks(ranks, expected, kind, world):
    for result in ranks[2][:world]:
        toy.assert_equal_weights(result[f"{kind} at {world}"], expected)


@pytest.mark.parametrize("kind", ["fsdp after hsdp", "hsdp after hsdp"])
def test_checkpoints_of_fsdp_and_hsdp_resume_under_each_other(ranks, expected, kind):
    for result in ranks[2]:
        toy.assert_equal_weights(result[kind], expected)


def test_replicas_of_hsdp_write_each_shard_once(ranks, expected):
    """Together they write as many bytes as fsdp, and one process loads them."""
    sizes = {
        run: sum(
            file.stat().st_size
            for file in (ranks[0] / run / "checkpoints/step-4").glob("*.safetensors")
        )
        for run in ("run", "hybrid")
    }
    assert files.num_tensor_files(ranks[0] / "hybrid" / "checkpoints" / "step-4") == 4
    assert sizes["hybrid"] == pytest.approx(sizes["run"], rel=0.2)  # more headers
    load = partial(state_io.load, ranks[0] / "hybrid" / "checkpoints" / "step-4")
    toy.assert_equal_weights(shard_ranks.train(Group(), "single", load, first=4), expected)


def test_sharded_worker_starts_with_the_weights_of_a_replicated_one(ranks):
    """Within float32 rounding after six steps; other ranks build the model without weights."""
    for result in ranks[2][:2]:
        for name, weight in result["worker, ddp from the start"].items():
            torch.testing.assert_close(weight, result["worker"][name], rtol=1e-4, atol=1e-4)


def test_error_of_the_rank_that_reads_weights_is_raised_on_all(ranks):
    for result in ranks[2][:2]:
        assert "missing.pt" in result["missing weights"]


def test_workers_resume_from_shards_like_an_uninterrupted_run(ranks):
    """Bitwise when sharded again, within float32 rounding as replicas; with dropout."""
    assert files.num_tensor_files(ranks[0] / "worker" / "checkpoints" / "step-3") == 2
    for result in ranks[2][:2]:
        for kind, tolerance in (("fsdp", 0.0), ("ddp", 1e-4)):
            for name, weight in result[f"worker, {kind}"].items():
                torch.testing.assert_close(
                    weight, result["worker"][name], rtol=tolerance, atol=tolerance
                )


@pytest.mark.parametrize("scenario", shard_ranks.PROBED)
def test_memory_probe_of_sharded_model_fits_all_ranks_and_counts_bytes_of_a_shard(
    ranks, expected, scenario
):
    """The shard of each weight and all scalars; activations of the full model, without gathered
    weights.
    """
    for rank, result in enumerate(ranks[2][:2]):
        result = result[scenario]
        assert result["micro"] == result["line"]["batch/micro"] == shard_ranks.PROBED[scenario]
        assert result["unchanged"]
        toy.assert_equal_weights(result["weights"], expected)
        parts = [
            (weight.chunk(2)[rank] if weight.ndim else weight)
            for weight in toy.Branched().parameters()
        ]
        weight_bytes = 8 * sum(part.numel() for part in parts)
        table = {name: size * 2**30 for name, size in result["table"].items()}
        assert table["memory/parameters_gib"] == table["memory/gradients_gib"] == weight_bytes
        # step counts
        assert 2 * weight_bytes < table["memory/optimizer_gib"] <= 2 * weight_bytes + 4 * len(parts)
        assert result["table"]["memory/activations_gib"] == result["full activations"] > 0
        assert (
            result["table"].items() <= result["line"].items()
            and result["line"]["memory/peak_gib"] > 0
        )


def test_oom_of_one_rank_in_the_probe_restarts_with_last_size_that_fit(ranks, expected):
    other, own = (json.loads((ranks[0] / f"oom-{rank}.json").read_text()) for rank in range(2))
    assert (own["micro"], other["micro"]) == (2, -1)
    assert own["error"] == (
        "out of memory in the dry run with micro-batches of 4 rows (rank 1); continuing with 2 at "
        "a time"
    )
    assert COLLECTIVE_ERRORS.search(other["error"]), other["error"]  # counts as a lost worker
    for result in ranks[2][:2]:
        assert result["reused"]["micro"] == 3
        toy.assert_equal_weights(result["reused"]["weights"], expected)


def test_folder_describes_its_format_and_has_full_weights(ranks, expected):
    """Each rank writes about half of the bytes."""
    path = ranks[0] / "run" / "checkpoints" / "step-8"
    meta = files.load_meta(path)
    assert (files.num_tensor_files(path), meta["world"], meta["step"], meta["rows_consumed"]) == (
        2,
        2,
        8,
        96,
    )
    names = [*files.tensor_file_names(2), "state.json", "meta.json", "SHA256SUMS"]
    assert sorted(file.name for file in path.iterdir()) == sorted(names)
    assert files.list_checkpoint_names(path.parent) == ["step-4", "step-6", "step-8"]
    sizes = [(path / name).stat().st_size for name in files.tensor_file_names(2)]
    assert max(sizes) < 0.75 * sum(sizes)
    model = toy.Branched().double()
    model.load_state_dict(state_io.load_weights(path))
    toy.assert_equal_weights(toy.flat(model), expected)


def test_object_store_has_the_same_files_as_a_disk(ranks):
    folder, run, _ = ranks
    latest = files.latest_valid_checkpoint(run / "checkpoints")
    assert latest == run / "checkpoints" / "step-4"
    tensors = [
        run_state.separate_tensors(state_io.load(path))[1]
        for path in (folder / "run" / "checkpoints" / "step-4", latest)
    ]
    assert len(tensors[0]) > 20 and tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items())


def test_headers_are_read_in_parallel(checkpoint, monkeypatch):
    """Each waits for the other."""
    names, both, read = files.tensor_file_names(2), threading.Barrier(2), RangeReader.read

    def wait_and_read(reader, file, start, stop):
        if start == 0:
            both.wait(timeout=60)
        return read(reader, file, start, stop)

    monkeypatch.setattr(RangeReader, "read", wait_and_read)
    metadata = state_io.CheckpointReader(checkpoint, lambda: None).read_metadata()
    assert {chunk.file for chunk in metadata.storage_data.values()} == set(names)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


def test_pickles_are_never_loaded(checkpoint):
    """Neither the metadata file of torch's own storage, nor a pickle in place of a checkpoint
    file.
    """
    for name in (".metadata", "__0.metadata"):
        (checkpoint / name).write_bytes(pickle.dumps(Bomb()))
    state_io.load(checkpoint)
    (checkpoint / files.tensor_file_names(2)[0]).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(TrainingError, match=r"cannot read .*step-8"):
        state_io.load(checkpoint)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def remove_with_checksum(file: Path) -> None:
    file.unlink()
    sums = file.with_name("SHA256SUMS")
    sums.write_text("".join(line for line in sums.open() if file.name not in line))


@pytest.mark.parametrize("damage", [truncate, Path.unlink, remove_with_checksum])
def test_damaged_shard_falls_back_to_previous_checkpoint(checkpoint, damage):
    damage(checkpoint / files.tensor_file_names(2)[1])
    messages: list[str] = []
    assert files.latest_valid_checkpoint(
        checkpoint.parent, messages.append
    ) == checkpoint.with_name("step-6")
    assert "ignored checkpoint" in messages[0] and "it is renamed to step-8.damaged" in messages[0]


def test_files_of_another_world_size_are_not_mixed_in(checkpoint):
    expected = state_io.load_weights(checkpoint)
    shutil.copy(
        checkpoint.with_name("step-6") / files.tensor_file_names(2)[1],
        checkpoint / files.tensor_file_names(4)[3],
    )
    weights = state_io.load_weights(checkpoint)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_rank_that_fails_or_dies_during_write_leaves_no_checkpoint(ranks):
    folder, _, results = ranks
    assert all(
        "step-1: No space left on device (on rank 1)" in result["full disk"]
        for result in results[:2]
    )
    assert files.list_checkpoint_names(folder / "full" / "checkpoints") == []
    assert (folder / "dying" / "error").read_text()
    assert files.list_checkpoint_names(folder / "dying" / "checkpoints") == ["step-1"]
    assert files.latest_valid_checkpoint(folder / "dying" / "checkpoints") is None
