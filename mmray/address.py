"""Addresses of folders and files: what may stand in one."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"://[^/?]*@|[?&](access_key|secret_key|session_token)=", re.IGNORECASE)


def holds_credentials(address: str) -> bool:
    """Whether a login or a key stands in it, which would end up in config.yaml, manifests and logs."""
    return _CREDENTIALS.search(address) is not None


NO_CREDENTIALS = (
    "an address may not hold credentials, for it is written into config.yaml, manifests and logs: set "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
)
