"""Remote paths and file operations on an object store: pathlib interface, whole objects,
retries.
"""

import socket

import pytest

from mmray import cli
from mmray.cluster import connect
from mmray.config import Prepare, Run
from mmray.console.reporter import ConsoleReporter
from mmray.data.prepare.pipeline import ensure_prepared
from mmray.errors import UsageError
from mmray.storage import requests
from mmray.storage.paths import (
    RemotePath,
    check_kept,
    local_copy,
    move_tree,
    open_for_upload,
    remove_tree,
    staged_upload,
    to_path,
    write_atomic,
)


def test_remote_path_has_the_interface_of_path(s3):
    folder = to_path(s3.address)
    assert isinstance(folder, RemotePath) and not folder.exists()
    with pytest.raises(FileNotFoundError):
        list(folder.iterdir())
    (folder / "a" / "one.json").write_text("{}")
    (folder / "a" / "two").write_bytes(b"12345")
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert [path.name for path in (folder / "a").iterdir()] == ["one.json", "two"]
    assert (
        (folder / "a").is_dir()
        and (folder / "a" / "two").is_file()
        and not (folder / "a" / "three").exists()
    )
    assert (folder / "a" / "two").stat().st_size == 5 and (folder / "a" / "one.json").stem == "one"
    assert str(folder / "a" / "two") == f"{s3.address}/a/two"
    assert (folder / "a" / "two").with_name("one.json").read_text() == "{}"
    (folder / "a" / "two").unlink()
    with pytest.raises(FileNotFoundError):
        (folder / "a" / "two").unlink()
    assert not (folder / "a" / "two").exists()


def test_address_may_have_spaces_and_non_ascii_letters():
    for typed in ("s3://bucket/my set/café#1", "s3://bucket/my%20set/caf%C3%A9%231"):
        assert to_path(f"{typed}?region=us-east-1").fs_path == "bucket/my set/café#1"
    path = to_path("s3://bucket/my set") / "b c"
    assert (path.fs_path, to_path(str(path)).fs_path) == ("bucket/my set/b c",) * 2


def test_file_uri_is_a_local_path(tmp_path):
    assert (
        to_path(f"file://{tmp_path}/a%20b") == to_path(f"file://{tmp_path}/a b") == tmp_path / "a b"
    )
    assert to_path("~backup.jsonl").name == "~backup.jsonl", "no user has this name"


def test_options_stay_at_the_end_of_an_address():
    path = (
        to_path("s3://bucket/runs?endpoint_override=127.0.0.1:9000&scheme=http")
        / "one"
        / "config.yaml"
    )
    assert (
        str(path) == "s3://bucket/runs/one/config.yaml?endpoint_override=127.0.0.1:9000&scheme=http"
    )
    assert (
        path.fs_path == "bucket/runs/one/config.yaml" and to_path(str(path)).fs_path == path.fs_path
    )
    file = to_path("s3://bucket/x/a.jsonl?scheme=http")
    assert (file.parent, file.name) == (to_path("s3://bucket/x?scheme=http"), "a.jsonl")
    bucket = to_path("s3://bucket?scheme=http")
    assert (bucket.parent, bucket.name) == (bucket, "bucket")
    for address in ("prepared/a@b", "s3://bucket/a@b", "s3://bucket/set?region=eu-west-1"):
        assert str(to_path(address)).endswith(address)


def test_name_with_special_characters_is_the_same_file_after_a_round_trip():
    for name in ("50%.jpg", "a%20b", "why?.jpg", "x#1", "a&b=c"):
        path = to_path("s3://bucket/set?region=us-east-1") / name
        assert to_path(str(path)) == path and path.fs_path == f"bucket/set/{name}"


@pytest.mark.parametrize("kind", ["store", "disk"])
def test_file_operations_are_the_same_on_disk_and_store(kind, s3, tmp_path):
    folder = to_path(s3.address if kind == "store" else tmp_path)
    with staged_upload(folder / "step-1", ("a", "SUMS")) as here:
        (here / "a").write_bytes(b"a" * 1000)
        (here / "SUMS").write_text("sums")
    with open_for_upload(folder / "stacks" / "rank-0.txt") as here:
        here.write_text("line")
    move_tree(folder / "step-1", folder / "step-1.damaged")
    with local_copy(folder / "step-1.damaged" / "a") as here:
        assert here.read_bytes() == b"a" * 1000
    assert not (folder / "step-1").exists()
    write_atomic(folder / "result.json", "é")
    assert (folder / "result.json").read_text() == "é"
    if kind == "disk":
        with pytest.raises(IsADirectoryError):
            write_atomic(folder / "stacks", "text")  # leaves no temporary file
    remove_tree(folder / "step-1.damaged")
    remove_tree(folder / "never-there")
    assert sorted(path.name for path in folder.iterdir()) == [
        "result.json",
        "stacks",
    ]


def test_staged_upload_puts_last_file_only_after_all_others(s3, monkeypatch):
    monkeypatch.setattr(requests, "ATTEMPTS", 1)
    path = to_path(s3.address) / "step-1"
    s3.fail("PUT", "step-1/b", 1000, status=400)
    with (
        pytest.raises(OSError, match="Injected fault"),
        staged_upload(path, ("a", "b", "SUMS")) as here,
    ):
        for name in ("a", "b", "SUMS"):
            (here / name).write_text(name)
    assert (path / "a").exists() and not (path / "SUMS").exists()


def test_transient_errors_are_retried(s3):
    file = to_path(s3.address) / "file"
    # retried by pyarrow, and by with_retries
    for count, status in ((2, 503), (requests.ATTEMPTS - 1, 400)):
        s3.fail("PUT", "/file", count, status)
        file.write_text(f"there {status}")
        assert s3.failures_left() == 0 and file.read_text() == f"there {status}"


def test_permanent_errors_are_not_retried(monkeypatch):
    monkeypatch.setattr(requests, "MAX_WAIT_S", 0.01)
    calls = []

    def refuse(error):
        calls.append(error)
        raise error

    for error in (
        FileNotFoundError("no"),
        OSError("AWS Error ACCESS_DENIED during PutObject"),
        ValueError("odd"),
    ):
        with pytest.raises(type(error)):
            requests.with_retries(lambda error=error: refuse(error))
    assert len(calls) == 3
    with pytest.raises(OSError, match="slow"):
        requests.with_retries(lambda: refuse(OSError("slow down")))
    assert len(calls) == 3 + requests.ATTEMPTS


@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:hush@bucket/set",
        "s3://bucket/set?access_key=K&secret_key=hush",
        "https://me:hush@host/x",
    ],
)
def test_credentials_are_refused_without_repeating_them(address):
    for use in (to_path, lambda address: Run(storage=address)):
        with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY") as refused:
            use(address)
        assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["http://169.254.169.254/latest", "https://host/x", "ftp://host/x", "nonsense://x/y"]
)
def test_only_storage_schemes_are_opened(address):
    with pytest.raises(
        UsageError, match=r"cannot be opened: use a local path or a URI with file, s3, gs"
    ):
        to_path(address)


def test_prepare_of_an_unknown_scheme_connects_to_nothing(capfd, monkeypatch):
    monkeypatch.setattr(connect, "ray_session", lambda *_: pytest.fail("Ray was started"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/rows.jsonl"
        for arguments in ([address, "out"], ["rows.jsonl", address]):
            assert cli.run(["prepare", *arguments], ConsoleReporter()) == 2
            assert (f"{address} cannot be opened: use a local path") in " ".join(
                capfd.readouterr().err.split()
            )
        with pytest.raises(BlockingIOError):
            server.accept()


def test_outputs_in_a_jobs_working_directory_are_refused(tmp_path, monkeypatch):
    job = tmp_path / "working_dir_files" / "_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    for output in ("runs", job / "runs", f"file://{job}/runs"):
        with pytest.raises(UsageError, match=r"run.storage .*runs is in a job's copy"):
            check_kept("run.storage", output)
    check_kept("run.storage", "/shared/runs")
    check_kept("run.storage", "s3://bucket/runs")
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"data.cache prepared is in a job's copy"):
        ensure_prepared(str(tmp_path / "rows.jsonl"), "prepared", Prepare(), print, print)
    monkeypatch.chdir(tmp_path)
    check_kept("run.storage", "runs")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["prepare", "/shared/rows.jsonl", "set"], "OUT set"),
        (["select", "/shared/set", "small", "--where", "width > 9"], "OUT small"),
        (["score", "set", "--weights", "/shared/run"], "the set set"),
        (["show", "set"], "--out set"),
        (["show", "/shared/set", "--out", "set.html"], "--out set.html"),
        (["report", "/shared/run", "--out", "run.html"], "run.html"),
        (["export", "/shared/run", "out"], "OUT out"),
        (["doctor", "--json", "found.json"], "--json found.json"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_of_a_job_refuse_outputs_that_ray_deletes(
    words, named, tmp_path, monkeypatch, capsys
):
    job = tmp_path / "working_dir_files" / "_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    assert cli.run(words, ConsoleReporter()) == UsageError.exit_code
    assert f"{named} is in a job's copy of the working directory" in " ".join(
        capsys.readouterr().err.split()
    )
    assert list(job.iterdir()) == []
