"""Settings and messages without the secrets that may stand in them."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "***"
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # user:password before a host
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SECRET_SETTING = re.compile(r"(^|_)(key|token|secret|password|credential)s?$", re.IGNORECASE)
_SHORTEST = 6  # a shorter value would blank out half a sentence


def redacted(value: Any) -> Any:
    """The value, with each text in it `safe`, and those named as secrets left out."""
    if isinstance(value, dict):
        return {name: HIDDEN if _hides(name, item) else redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return safe(value) if isinstance(value, str) else value


def _hides(name: str, item: Any) -> bool:
    return isinstance(item, str) and item != "" and _SECRET_SETTING.search(name) is not None


def safe(text: str) -> str:
    """The text without logins in addresses and without values of environment variables that are named as secrets."""
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, HIDDEN)
    return text
