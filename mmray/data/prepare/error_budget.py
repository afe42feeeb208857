"""The error budget of a prepare: how many rows may be quarantined."""

from __future__ import annotations

import io
from collections import Counter

import orjson

from mmray.data.store.manifest import QUARANTINE
from mmray.errors import DataError
from mmray.storage.storage import Storage

LEAKED = "overlap"  # the reason of rows that --drop-overlap quarantines; they do not count against the budget


def max_bad_rows(budget: float, total: int) -> int:
    """Return the number of rows that may be bad. Tolerates float rounding: 0.29 of 100 is 29."""
    return int(budget * total + 1e-6)


def check_budget(source: str, out: Storage, num_read: int, total: int, reasons: Counter[str], budget: float) -> None:
    """Raise DataError if more rows are bad than the budget allows, or if all are."""
    bad = reasons.total() - reasons[LEAKED]
    if reasons[LEAKED] and reasons.total() == num_read:
        raise DataError(
            f"{source}: no row of {num_read:,} is left; {reasons[LEAKED]:,} leak from other sets or splits "
            f"(prepare.drop_overlap). {out.address}/{QUARANTINE} lists them; compare with other sets"
        )
    if bad < num_read and bad <= max_bad_rows(budget, total):
        return
    first = f"{source}: {bad:,} of {num_read:,} rows are bad ({100 * bad / num_read:.3g} %)"
    if bad == num_read:
        first += ", none is good"
        advice = (
            "Correct the source: each row needs `image` (a path relative to its folder) and `text`. Map other column "
            "names with --columns image=NAME text=NAME."
        )
    else:
        unread = "" if num_read == total else f" of {total:,} rows (stopped early)"
        first += f", the budget is {100 * budget:.3g} %{unread} (prepare.max_bad_fraction)"
        repeated = {"duplicate", "duplicate-text"} & reasons.keys()
        keep = ", keep duplicates with prepare.duplicates keep" if repeated else ""
        advice = (
            f"Correct them{keep}, or raise prepare.max_bad_fraction to {-(-1000 * bad // total) / 1000:g}. Then rerun "
            "the same command to resume."
        )
    examples = [
        f"  {count:,} {reason}, for example {_example(out, reason)}" for reason, count in reasons.most_common(5)
    ]
    raise DataError("\n".join([first, *examples, f"All of them are in {out.address}/{QUARANTINE}.", advice]))


def _example(out: Storage, reason: str) -> str:
    """Return the first quarantined row with this reason, as `file:line: detail`."""
    with io.BufferedReader(out.open(QUARANTINE)) as file:
        for line in file:
            fault = orjson.loads(line)
            if fault["reason"] == reason:
                return f"{fault['source']}: {fault['detail'][:160]}"
    return "none"
