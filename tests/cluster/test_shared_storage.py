"""run.storage is written, read and cleaned up before the first step; errors name the node."""

import pytest

from mmray.cluster.doctor import check_storage
from mmray.cluster.placement import alive_nodes
from mmray.cluster.shared_storage import check_shared
from mmray.errors import ResourceError
from mmray.storage.paths import list_files, to_path


def test_bucket_passes_and_is_left_unchanged(s3):
    check_shared(s3.address, [])
    assert check_storage(s3.address, []).level == "ok"
    assert list_files(to_path(s3.address).parent) == []


def test_missing_bucket_is_an_error_with_the_fix(s3):
    with pytest.raises(
        ResourceError, match=r"s3://no-such-bucket/runs is not writable: .*AWS_ENDPOINT_URL"
    ):
        check_shared("s3://no-such-bucket/runs", [])
    found = check_storage("s3://no-such-bucket/runs", [])
    assert found.level == "error" and "The bucket must exist" in found.observed


def test_node_with_another_folder_at_the_same_path_is_named(local_ray, tmp_path, monkeypatch):
    """`~` is a different folder for the driver and for the workers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ResourceError,
        match=r"(?s)not the same folder on every training node:\n  node \S+ at [\d.]+: .*Mount",
    ):
        check_shared("~/no-folder-of-anybody", alive_nodes())
    assert list((tmp_path / "no-folder-of-anybody").iterdir()) == []
