"""What has gone through Ray's object stores, as their own counters tell."""

from __future__ import annotations

from ray._private.internal_api import get_memory_info_reply
from ray._private.state import state


def created_bytes() -> int:
    """Bytes of all objects that the stores of this cluster ever took in: a copy on another node is one more.

    Those of whoever else uses the cluster are among them; what is below 100 KB is not, for Ray sends it with the
    answer. One node is asked, which asks the others: 10 to 40 ms.
    """
    # Internal to Ray 2.60, as `ray memory --stats-only` asks for it; Python has no other word for it.
    return int(get_memory_info_reply(state).store_stats.cumulative_created_bytes)
