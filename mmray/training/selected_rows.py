"""Rows of its sets that a run takes: `data.where`, and for evaluation `data.eval_where`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mmray.builtin import KEEP_ALL
from mmray.config.data import Mixture
from mmray.data.prepare.pipeline import PrepareProgress
from mmray.data.store.manifest import read_manifest
from mmray.data.store.row_columns import column_types
from mmray.data.store.selection import check_columns, check_where, select_rows
from mmray.storage.paths import AnyPath, to_path

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.data.store.prepared_set import PreparedSet
    from mmray.training import RunReporter

Setting = Literal["data.where", "data.eval_where"]


def check_selections(config: Config) -> None:
    """Check the expressions of a run against the columns of its sets, before Ray starts.

    Of a raw source, which is prepared later, only the names in `prepare.keep` are checked.

    Args:
        config: Settings of the run.

    Raises:
        UsageError: An expression is invalid, or a set has no column of a name in it.
        DataError: The manifest of a set is damaged.
    """
    data = config.data
    trained_on = Mixture.parse(data.train).addresses
    evaluated_on = [each.address for each in data.eval_sets if each.address] or trained_on[:1]
    places: list[tuple[Setting, str | None, list[str]]] = [
        ("data.where", data.where, trained_on),
        ("data.eval_where", data.eval_where, evaluated_on),
    ]
    for setting, where, addresses in places:
        for address in addresses if where is not None else ():
            path = to_path(address)
            manifest = read_manifest(path)
            if manifest is not None:
                check_where(str(where), column_types(manifest.columns), address, setting)
            elif path.exists():  # otherwise opening it raises an error, or finds the moved set
                kept = config.prepare.keep
                known = None if kept == (KEEP_ALL,) else kept
                check_columns(str(where), known, address, setting)


def select_rows_of_run(
    prepared: PreparedSet, config: Config, folder: AnyPath, setting: Setting, reporter: RunReporter
) -> PreparedSet:
    """Return the rows of a set that an expression of the run selects, and log how many.

    Args:
        prepared: The set.
        config: Settings of the run.
        folder: Folder that all nodes can read, for the list of the selected rows.
        setting: Setting with the expression; without a value the set is returned.
        reporter: Receives progress and messages.

    Raises:
        UsageError: The expression does not fit the columns of the set, or selects no row.
        DataError: A shard has no values of a column.
    """
    where = config.data.where if setting == "data.where" else config.data.eval_where
    if where is None:
        return prepared
    selected = select_rows(
        prepared,
        where,
        folder,
        setting,
        lambda done, total: reporter.prepare_progress(PrepareProgress("select", done, total)),
    )
    rows = f"{selected.num_rows:,} of {prepared.num_rows:,} rows of {prepared.folder}"
    reporter.log(f"{rows}: {where}", "selected")
    return selected
