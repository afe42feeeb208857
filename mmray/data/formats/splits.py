"""Splits that the names of files and folders define, by one rule for all formats."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmray.data.rows import HELD_OUT_SPLITS

_WORDS = {name: name for name in ("train", *HELD_OUT_SPLITS)} | {
    "training": "train",
    "testing": "test",
    "evaluation": "eval",
}
_WORD = "|".join(sorted(_WORDS, key=len, reverse=True))
# train, Testing, val2017, train_images, test-00; but not train_station
_FOLDER = re.compile(rf"({_WORD})([-_. ]?(\d+|set|split|data|images|samples|shards?))*", re.I)
# train-00000-of-00002, cc3m_val_0001; but not trainer or contest
_FILE = re.compile(rf"(?<![a-z])({_WORD})(?![a-z])", re.I)
_PARTITION = re.compile(r"split=([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


def split_of_folder(name: str) -> str | None:
    """Return the split that the name of one folder means: `val2017` is val, `split=dev` is dev.

    None for any other name, such as `train_station`.
    """
    if partition := _PARTITION.fullmatch(name):
        return partition[1]
    word = _FOLDER.fullmatch(name)
    return _WORDS[word[1].lower()] if word else None


def split_of_file(path: str) -> str | None:
    """Return the split that a path means, by its folders or its file name.

    The outermost folder with the name of a split counts, otherwise the file name. There the word
    must not be part of a longer one: `train-00000-of-00001.parquet` is train, `cc3m_val_0001.tar`
    is val, and `contest.tar` has no split.

    Args:
        path: Relative path, with `/`.

    Returns:
        `train`, a held-out split (`test`, `val`, `valid`, `validation`, `dev` or `eval`), or the
        value of a folder `split=VALUE`; None if the path names no split.
    """
    *folders, name = path.split("/")
    for folder in folders:
        if split := split_of_folder(folder):
            return split
    word = _FILE.search(name)
    return _WORDS[word[1].lower()] if word else None


def splits_of_files(paths: Sequence[str]) -> dict[str, str | None]:
    """Return the split of each file of a source; None for all if their names define no splits.

    Names define splits if all have one, if there are two different ones, or if one is held out: a
    single folder `train` next to `bus` may be the vehicle, but rows named `test` must not be
    trained on. Files without a split next to others with one become `train` when the set is
    assembled.

    Args:
        paths: Relative paths of the files.

    Returns:
        Split by path, such as {"val/0.tar": "val", "0.tar": None}.
    """
    splits = {path: split_of_file(path) for path in paths}
    found = set(splits.values())
    is_vehicle = found == {None, "train"}
    return dict.fromkeys(paths) if is_vehicle else splits
