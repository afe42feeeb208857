"""The error budget of a prepare: how many rows may be bad in all, and how many in a row."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import orjson

from mmray.data.store.manifest import QUARANTINE
from mmray.errors import DataError
from mmray.storage.storage import Storage

LEAKED = "overlap"  # the reason of rows that --drop-overlap sets aside; the budget of bad rows does not count them
Fault = dict[str, Any]


class BadRuns:
    """Finds `limit` bad rows in a row in the records of chunks that come in any order; 0 finds none.

    Of a chunk only the bad rows at its ends are kept, where a run may go on in its neighbour.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ends: dict[int, tuple[list[Fault], list[Fault], bool]] = {}  # at its begin, at its end, all are bad

    def add(self, index: int, record: dict[str, Any]) -> list[Fault] | None:
        """A run of at least `limit` bad rows that this chunk has or completes, in source order; else None."""
        if not self.limit:
            return None
        good = record["rows"]["line"]
        rows = sorted([(line, None) for line in good] + [(each["line"], each) for each in record["faults"]], key=_line)
        runs: list[list[Fault]] = [[]]
        for _, fault in rows:
            if fault is None:
                runs.append([])
            else:
                runs[-1].append(fault)
        self._ends[index] = (runs[0], runs[-1], not good)
        inside = max(runs, key=len)
        reaching = (self._from(index, -1) + self._from(index + 1, 1), self._from(index - 1, -1) + self._from(index, 1))
        return next((run for run in (*reaching, inside) if len(run) >= self.limit), None)

    def _from(self, index: int, step: int) -> list[Fault]:
        """Bad rows without a gap, from the end (`step` -1) or the begin (1) of a chunk into its neighbours."""
        run: list[Fault] = []
        while (ends := self._ends.get(index)) is not None:
            run = ends[1] + run if step < 0 else run + ends[0]
            if not ends[2]:
                break
            index += step
        return run


def check_run(where: str, out: Storage, run: list[Fault] | None, limit: int) -> None:
    """Raises DataError where `run`, which BadRuns found, is one."""
    if run is None:
        return
    lines = [
        f"{where}: {len(run):,} rows in a row are bad, {run[0]['source']} to {run[-1]['source']}, "
        f"the limit is {limit:,} (prepare.max_bad_run)"
    ]
    for reason, count in Counter(fault["reason"] for fault in run).most_common(5):
        first = next(fault for fault in run if fault["reason"] == reason)
        lines.append(f"  {count:,} {reason}, for example {first['source']}: {first['detail'][:160]}")
    lines.append(f"What was set aside is in {out.address}/{QUARANTINE}.")
    lines.append("Correct them, or raise prepare.max_bad_run; the same command then goes on with what is done.")
    raise DataError("\n".join(lines))


def _line(row: tuple[int, Fault | None]) -> int:
    return row[0]


def max_bad_rows(budget: float, total: int) -> int:
    """Rows that may be bad; 0.29 of 100 is 29, though the product of the floats is a little less."""
    return int(budget * total + 1e-6)


def check_budget(where: str, out: Storage, num_read: int, total: int, reasons: Counter[str], budget: float) -> None:
    """Raises DataError where more rows are bad than the budget allows, or none is good."""
    bad = reasons.total() - reasons[LEAKED]
    if reasons[LEAKED] and reasons.total() == num_read:
        raise DataError(
            f"{where}: none of {num_read:,} rows is left, {reasons[LEAKED]:,} leak (prepare.drop_overlap) into the "
            f"sets it is held against: {out.address}/{QUARANTINE} says which into which; hold it against other sets"
        )
    if bad < num_read and bad <= max_bad_rows(budget, total):
        return
    lines = [f"{where}: {bad:,} of {num_read:,} rows are bad ({100 * bad / num_read:.3g} %)"]
    if bad == num_read:
        lines[0] += ", none is good"
    else:
        seen = "" if num_read == total else f" of all {total:,}: the rest was not read"
        lines[0] += f", the budget is {100 * budget:.3g} %{seen} (prepare.max_bad_fraction)"
    for reason, count in reasons.most_common(5):
        lines.append(f"  {count:,} {reason}, for example {_example(out, reason)}")
    lines.append(f"All of them are in {out.address}/{QUARANTINE}.")
    if bad < num_read:
        enough = -(-1000 * bad // total) / 1000
        repeated = {"duplicate", "duplicate-text"} & reasons.keys()
        keep = ", keep duplicates with prepare.duplicates keep" if repeated else ""
        lines.append(
            f"Correct them{keep}, or raise prepare.max_bad_fraction to {enough:g}; "
            "the same command then goes on with what is done."
        )
    else:
        lines.append(
            "Correct the source; each row needs `image` (a path in its folder) and `text`; "
            "columns of other names are mapped with --columns image=NAME text=NAME."
        )
    raise DataError("\n".join(lines))


def _example(out: Storage, reason: str) -> str:
    """The first quarantined row of a reason, as `file:line: detail`."""
    with io.BufferedReader(out.open(QUARANTINE)) as file:
        for line in file:
            fault = orjson.loads(line)
            if fault["reason"] == reason:
                return f"{fault['source']}: {fault['detail'][:160]}"
    return "none"
