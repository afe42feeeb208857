"""An address that holds a login or a key is refused wherever one is taken, before anything is written."""

import pytest

from mmray.errors import UsageError
from mmray.storage.storage import Storage


@pytest.mark.parametrize(
    "address", ["s3://KEY:hush@bucket/set", "s3://bucket/set?access_key=K&secret_key=hush", "https://me:hush@host/x"]
)
def test_credentials_are_refused_and_not_repeated(address):
    with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY") as refused:
        Storage(address)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("address", ["prepared/a@b", "s3://bucket/a@b", "s3://bucket/set?region=eu-west-1"])
def test_what_only_looks_like_it_is_taken(address):
    assert Storage(address).address.endswith(address)


@pytest.mark.parametrize(
    "address", ["http://169.254.169.254/latest", "https://host/x", "ftp://host/x", "nonsense://x/y"]
)
def test_only_storage_schemes_are_opened(address):
    with pytest.raises(UsageError, match=r"cannot be opened: use a local path or an address with file, s3, gs"):
        Storage(address).listdir()
