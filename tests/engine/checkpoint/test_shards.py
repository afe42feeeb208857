"""Sharded checkpoints: each rank writes its shard, any number of ranks loads it, and incomplete ones are never used."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
from pyarrow import fs

from mmray.engine.checkpoint import files, state_io
from mmray.engine.collectives import Group
from mmray.errors import TrainingError
from mmray.storage.paths import to_path
from mmray.train.recovery import COLLECTIVE_ERRORS
from tests.engine import toy
from tests.engine.checkpoint import shard_ranks
from tests.engine.conftest import spawned
from tests.made import make_set, row

HEADER_BYTES = 8192  # upper limit of a file's header: names, offsets and dtypes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, s3_server):
    """The folder of all scenarios, the run on an object store, and the results of each rank."""
    folder = tmp_path_factory.mktemp("shards")
    bucket = f"bucket-{time.time_ns()}"
    system, _ = fs.FileSystem.from_uri(f"s3://{bucket}?allow_bucket_creation=true")
    system.create_dir(bucket)
    make_set(folder / "set", [row(number) for number in range(22)], [row(number) for number in range(22, 30)])
    results = spawned(shard_ranks.play, folder, shard_ranks.MOST, f"s3://{bucket}/runs", apart=shard_ranks.APART)
    return folder, to_path(f"s3://{bucket}/runs") / "run", results


@pytest.fixture(scope="module")
def plain():
    """The weights of an uninterrupted run in one process."""
    return toy.flat(shard_ranks.train(Group(), None, None, "single", 0))


@pytest.mark.parametrize("world", shard_ranks.WORLDS)
@pytest.mark.parametrize("kind", shard_ranks.KINDS)
def test_checkpoint_of_two_ranks_resumes_at_any_number_of_ranks(ranks, plain, kind, world):
    for result in ranks[2][:world]:
        torch.testing.assert_close(result[f"{kind} at {world}"]["weights"], plain, rtol=0, atol=1e-9)


def test_workers_resume_from_shards_like_an_uninterrupted_run(ranks):
    """Bitwise when sharded again, within float32 rounding as replicas; with dropout."""
    assert files.shards_of(ranks[0] / "worked" / "checkpoints" / "step-3") == 2
    for result in ranks[2][:2]:
        calm = result["worked"]
        for kind, tolerance in (("fsdp", 0.0), ("ddp", 1e-4)):
            for name, weight in result[f"worked on, {kind}"].items():
                torch.testing.assert_close(weight, calm[name], rtol=tolerance, atol=tolerance)


TRIED = {"tried": 6, "tried with little": 3}  # rows; four fit on rank 1


@pytest.mark.parametrize("scene", TRIED)
def test_memory_probe_of_sharded_model_finds_size_that_fits_all_ranks(ranks, plain, scene):
    for result in ranks[2][:2]:
        found = result[scene]
        assert found["micro"] == found["line"]["batch/micro"] == TRIED[scene]
        assert found["model is as it was"]
        torch.testing.assert_close(found["weights"], plain, rtol=0, atol=1e-9)


def test_memory_table_of_sharded_model_counts_bytes_of_a_shard(ranks):
    """The shard of each weight and all scalars; activations of the full model, without gathered weights."""
    for rank, result in enumerate(ranks[2][:2]):
        part = sum(
            (weight.chunk(2)[rank] if weight.ndim else weight).numel() * 8 for weight in toy.Branched().parameters()
        )
        for scene in TRIED:
            found = result[scene]
            table = {name: size * 2**30 for name, size in found["table"].items()}
            assert table["memory/parameters_gib"] == table["memory/gradients_gib"] == part
            assert 2 * part < table["memory/optimizer_gib"] <= 2 * part + 64  # both moments, and counts of steps
            assert found["table"]["memory/activations_gib"] == found["whole activations"] > 0
            assert found["table"].items() <= found["line"].items() and found["line"]["memory/peak_gib"] > 0


def test_oom_of_one_rank_in_the_probe_restarts_with_last_size_that_fit(ranks, plain):
    left, met = (json.loads((ranks[0] / f"cramped-{rank}.json").read_text()) for rank in range(2))
    assert (met["micro"], left["micro"]) == (3, -1)
    assert met["error"] == "out of memory in the dry run with micro-batches of 6 rows (rank 1); restarting with 3 rows"
    assert COLLECTIVE_ERRORS.search(left["error"]), left["error"]  # counts as lost: the other error decides
    for result in ranks[2][:2]:
        assert result["again"]["micro"] == 3
        torch.testing.assert_close(result["again"]["weights"], plain, rtol=0, atol=1e-9)


def test_no_rank_holds_more_than_its_shard(ranks):
    """Weights and both moments: at most one row of each above its share, plus scalars and step counts."""
    folder, _, results = ranks
    path = folder / "run" / "checkpoints" / "step-4"
    whole, weights = shard_ranks.elements(state_io.load(path)), list(toy.Branched().parameters())
    beside = 3 * sum(weight[0].numel() for weight in weights if weight.ndim) + 3 + len(weights)
    for result in results[:2]:
        assert 0 < result["saved"]["elements"] <= whole / 2 + beside
    for world in (2, 3, 4):
        for result in results[:world]:
            assert 0 < result[f"fsdp at {world}"]["elements"] <= whole / world + beside
    sizes = [(path / name).stat().st_size for name in files.shard_names(2)]
    assert max(sizes) < 8 * (whole / 2 + beside) + HEADER_BYTES


def test_folder_describes_its_format(ranks):
    path = ranks[0] / "run" / "checkpoints" / "step-8"
    meta = files.load_meta(path)
    assert (files.shards_of(path), meta["world"], meta["step"], meta["rows_consumed"]) == (2, 2, 8, 96)
    assert sorted(file.name for file in path.iterdir()) == sorted(
        [*files.shard_names(2), "state.json", "meta.json", "SHA256SUMS"]
    )
    assert files.list_names(path.parent) == ["step-4", "step-6", "step-8"]


def test_evaluate_and_export_read_full_weights(ranks, plain):
    for run in (ranks[0] / "run", to_path(str(ranks[0] / "run"))):
        model = toy.Branched().double()
        model.load_state_dict(state_io.load_weights(run / "checkpoints" / "step-8"))
        torch.testing.assert_close(toy.flat(model), plain, rtol=0, atol=1e-9)


def test_object_store_has_the_same_files_as_a_disk(ranks):
    folder, run, _ = ranks
    found = files.latest_valid(run / "checkpoints")
    assert found == run / "checkpoints" / "step-4"
    tensors = [state_io.split(state_io.load(path))[1] for path in (folder / "run" / "checkpoints" / "step-4", found)]
    assert len(tensors[0]) > 20 and tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items())


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


def test_pickles_are_never_loaded(ranks, tmp_path):
    """Neither the metadata file of torch's own storage, nor a pickle in place of a checkpoint file."""
    path = shutil.copytree(ranks[0] / "run" / "checkpoints" / "step-8", tmp_path / "step-8")
    for name in (".metadata", "__0.metadata"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
    state_io.load(path)
    (path / files.shard_names(2)[0]).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(TrainingError, match=r"cannot read .*step-8"):
        state_io.load(path)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def forget(file: Path) -> None:
    """Delete the file and its checksum."""
    file.unlink()
    sums = file.with_name("SHA256SUMS")
    sums.write_text("".join(line for line in sums.open() if file.name not in line))


@pytest.mark.parametrize("damage", [truncate, Path.unlink, forget])
def test_damaged_shard_falls_back_to_previous_checkpoint(ranks, tmp_path, damage):
    shutil.copytree(ranks[0] / "run" / "checkpoints", tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "step-8" / files.shard_names(2)[1])
    said: list[str] = []
    assert files.latest_valid(tmp_path / "checkpoints", said.append) == tmp_path / "checkpoints" / "step-6"
    assert "ignored checkpoint" in said[0] and "it is renamed to step-8.damaged" in said[0]


def test_files_of_another_world_size_are_not_mixed_in(ranks, tmp_path):
    path = shutil.copytree(ranks[0] / "run" / "checkpoints" / "step-8", tmp_path / "step-8")
    shutil.copy(path / files.shard_names(2)[1], path / files.shard_names(4)[3])
    with pytest.raises(TrainingError, match="shard-4-of-4"):
        state_io.load(path)


def test_full_disk_on_one_rank_is_logged_by_all_and_leaves_no_checkpoint(ranks):
    folder, _, results = ranks
    for result in results[:2]:
        assert "step-1: No space left on device (on rank 1)" in result["full"]
    assert files.list_names(folder / "full" / "checkpoints") == []


def test_rank_killed_during_write_leaves_no_checkpoint(ranks):
    dying = ranks[0] / "dying"
    assert (dying / "said").read_text()
    assert files.list_names(dying / "checkpoints") == ["step-1"]
    assert files.latest_valid(dying / "checkpoints") is None
