"""Checks of addresses (paths or URIs of storages) for credentials."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"://[^/?]*@|[?&](access_key|secret_key|session_token)=", re.IGNORECASE)


def has_credentials(address: str) -> bool:
    """Return whether an address has a login or a key, as `s3://bucket/x?secret_key=...`."""
    return _CREDENTIALS.search(address) is not None


CREDENTIALS_REFUSED = (
    "an address must not contain credentials, because it is written to config.yaml, manifests and "
    "logs. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment."
)


def is_url(name: str) -> bool:
    """Return whether a name starts with `http://` or `https://`, in any letter case."""
    return name[:8].lower().startswith(("https://", "http://"))


def redact_url(url: str) -> str:
    """Return at most 200 characters of a URL without login, query (maybe signed) and fragment."""
    redacted = re.split(r"[?#]", re.sub(r"//[^/]*@", "//", url), maxsplit=1)[0][:200]
    # A name in a row may be invalid UTF-8.
    return redacted.encode(errors="backslashreplace").decode()
