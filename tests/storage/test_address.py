"""Addresses with credentials or a scheme that is not a storage are refused."""

import pytest

from mmray.errors import UsageError
from mmray.storage.storage import Storage


@pytest.mark.parametrize(
    "address", ["s3://KEY:hush@bucket/set", "s3://bucket/set?access_key=K&secret_key=hush", "https://me:hush@host/x"]
)
def test_address_with_credentials_is_refused_without_repeating_them(address):
    with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY") as refused:
        Storage(address)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("address", ["prepared/a@b", "s3://bucket/a@b", "s3://bucket/set?region=eu-west-1"])
def test_address_with_at_sign_or_options_is_accepted(address):
    assert Storage(address).address.endswith(address)


@pytest.mark.parametrize(
    "address", ["http://169.254.169.254/latest", "https://host/x", "ftp://host/x", "nonsense://x/y"]
)
def test_only_storage_schemes_are_opened(address):
    with pytest.raises(UsageError, match=r"cannot be opened: use a local path or an address with file, s3, gs"):
        Storage(address).listdir()
