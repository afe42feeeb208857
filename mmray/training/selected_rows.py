"""Rows and captions of its sets that a run takes: `data.where` and `data.captions`, and for
evaluation `data.eval_where` and `data.eval_captions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmray.builtin import KEEP_ALL
from mmray.config.data import Mixture, parse_captions
from mmray.data.prepare.pipeline import PrepareProgress
from mmray.data.store.manifest import Manifest, read_manifest, text_columns
from mmray.data.store.row_columns import column_types
from mmray.data.store.selection import check_names, check_where, select_rows
from mmray.errors import UsageError, suggest
from mmray.storage.paths import AnyPath, to_path

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.data.store.prepared_set import PreparedSet
    from mmray.training import RunReporter


def check_selections(config: Config) -> None:
    """Check the expressions and the captions of a run against the columns of its sets, before Ray
    starts.

    Of a raw source, which is prepared later, the names in `prepare.keep` and `prepare.columns` are
    checked.

    Args:
        config: Settings of the run.

    Raises:
        UsageError: An expression is invalid, or a set has no column of a name.
        DataError: The manifest of a set is damaged.
    """
    _check("", Mixture.parse(config.data.train).addresses, config)
    check_eval_selections(config)


def check_eval_selections(config: Config) -> None:
    """Check `data.eval_where` and `data.eval_captions`, as `check_selections` does.

    Args:
        config: Settings of the run.

    Raises:
        UsageError: An expression is invalid, or a set has no column of a name.
        DataError: The manifest of a set is damaged.
    """
    trained_on = Mixture.parse(config.data.train).addresses
    evaluated_on = [each.address for each in config.data.eval_sets if each.address]
    _check("eval_", evaluated_on or trained_on[:1], config)


def _check(prefix: str, addresses: Sequence[str], config: Config) -> None:
    """Check `data.where` and `data.captions`, or those with a prefix, of the sets at addresses."""
    where = getattr(config.data, f"{prefix}where")
    captions = getattr(config.data, f"{prefix}captions")
    if where is None and captions is None:
        return
    manifests: dict[str, Manifest | None] = {}  # None: a raw source
    for address in addresses:
        path = to_path(address)
        manifest = read_manifest(path)
        # Opening one that does not exist raises an error, or finds where it was moved.
        if manifest is not None or path.exists():
            manifests[address] = manifest
    if where is not None:
        _check_where(f"data.{prefix}where", where, manifests, config)
    if captions is not None and manifests.keys() == set(addresses):
        _check_captions(f"data.{prefix}captions", captions, manifests, config)


def _check_where(
    setting: str, where: str, manifests: Mapping[str, Manifest | None], config: Config
) -> None:
    for address, manifest in manifests.items():
        if manifest is not None:
            check_where(where, column_types(manifest.columns), address, setting)
        else:
            kept = config.prepare.keep
            check_names(where, None if kept == (KEEP_ALL,) else kept, address, setting)


def _check_captions(
    setting: str, captions: str, manifests: Mapping[str, Manifest | None], config: Config
) -> None:
    """Raise UsageError if no set has a column of `data.captions`."""
    known: list[str] = []
    for manifest in manifests.values():
        known += text_columns(config.prepare.columns) if manifest is None else manifest.text_columns
    for name in parse_captions(captions):
        if name not in known:
            hint = "`mmray prepare --columns text=NAME,NAME` stores several columns of captions"
            raise UsageError(
                f"{setting}: {', '.join(manifests)} has no column of captions `{name}`; "
                f"{suggest(name, known) if known else hint}"
            )


def training_rows(
    prepared: PreparedSet, config: Config, folder: AnyPath, reporter: RunReporter
) -> PreparedSet:
    """Return the rows of a set that the run trains on, with the captions that it uses.

    Args:
        prepared: The set.
        config: Settings of the run: `data.where` and `data.captions`.
        folder: Folder that all nodes can read, for the list of the selected rows.
        reporter: Receives progress, the number of selected rows and the shares of captions.

    Raises:
        UsageError: The expression does not fit the columns of the set, or selects no row.
        DataError: A shard has no values of a column.
    """
    selected = _select(prepared, "data.where", config.data.where, folder, reporter)
    given = parse_captions(config.data.captions or "")
    columns = prepared.manifest.text_columns
    weights = {name: weight for name, weight in given.items() if name in columns}
    if not weights:
        return selected
    total = sum(weights.values())
    shares = [f"{name} {100 * weight / total:.3g} %" for name, weight in weights.items()]
    reporter.log(f"{', '.join(shares)} of {prepared.folder}", "captions")
    return selected.with_captions(weights)


def held_out_rows(
    prepared: PreparedSet, config: Config, folder: AnyPath, reporter: RunReporter
) -> PreparedSet:
    """Return the rows of a set that a run evaluates.

    These are the rows that `data.eval_where` selects; None: all. If the set stores captions from
    several columns of its source, only those of `data.eval_captions` are used; None: of the first
    column.

    Args:
        prepared: The set.
        config: Settings of the run.
        folder: Folder that all nodes can read, into which the list of selected rows is written.
        reporter: Receives progress, the number of selected rows, and the column of the captions.

    Raises:
        UsageError: The expression does not fit the columns of the set, or selects no row.
        DataError: A shard has no values of a column.
    """
    selected = _select(prepared, "data.eval_where", config.data.eval_where, folder, reporter)
    columns = prepared.manifest.text_columns
    if not columns:
        return selected
    given = next(iter(parse_captions(config.data.eval_captions or "")), None)
    column = given if given in columns else columns[0]
    reporter.log(f"column {column} of {prepared.folder}, for evaluation", "captions")
    return selected.with_captions({column: 1.0})


def _select(
    prepared: PreparedSet, setting: str, where: str | None, folder: AnyPath, reporter: RunReporter
) -> PreparedSet:
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
