"""Splits and classes that the names of files and folders define, by one rule for all formats."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from mmray.data.rows import HELD_OUT_SPLITS

_WORDS = {name: name for name in ("train", *HELD_OUT_SPLITS)} | {
    "training": "train",
    "trn": "train",
    "testing": "test",
    "tst": "test",
    "testdev": "test",
    "holdout": "test",
    "heldout": "test",
    "evaluation": "eval",
    "minival": "val",
}
_WORD = "|".join((*sorted(_WORDS, key=len, reverse=True), "h[eo]ld[-_]out"))
_END = r"[-_. ]?(\d+|set|split|data|images|samples|shards?|seen|unseen|[a-d])"
# train, Testing, val2017, train_images, testA; but not train_station
_FOLDER = re.compile(rf"({_WORD})({_END})*", re.I)
# train-00000-of-00002, cc3m_val_0001; but not trainer or contest
_IN_NAME = re.compile(rf"(?<![a-z])({_WORD})(?![a-z])", re.I)
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")  # before the second word in TestSet
_NO_LETTER = re.compile(r"[^a-z]+")
_PARTITION = re.compile(r"split=([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


def split_of_folder(name: str) -> str | None:
    """Return the split that the name of one folder means: `val2017` is val, `split=dev` is dev;
    None for any other name, such as `train_station`.
    """
    if partition := _PARTITION.fullmatch(name):
        return partition[1]
    word = _FOLDER.fullmatch(name.rpartition("=")[2])  # also subset=train
    return _split_of_word(word[1]) if word else None


def splits_of_folders(names: Collection[str]) -> dict[str, str | None]:
    """Return the split that each of several folders next to each other means.

    A name that has the word of a split next to other words means this split only if another name
    differs from it in that word and in numbers: `seg_train` and `seg_test` are splits, and
    `train_station` and `bus` are not.

    Returns:
        Split by name: `train`, `test`, `val`, `valid`, `validation`, `dev`, `eval`, or VALUE of a
        folder `split=VALUE`; None for a folder that is not a split.
    """
    words = {name: _find_word(name) for name in names}
    splits_by_rest: dict[str, set[str]] = defaultdict(set)
    for name, word in words.items():
        if word is not None:
            rest = _NO_LETTER.sub("", name.lower().replace(word.lower(), "", 1))
            splits_by_rest[rest].add(_split_of_word(word))
    if any(len(splits) > 1 for splits in splits_by_rest.values()):
        return {name: _split_of_word(word) if word else None for name, word in words.items()}
    return {name: split_of_folder(name) for name in names}


def split_of_file(path: str) -> str | None:
    """Return the split that a path means, see `splits_of_paths`."""
    return splits_of_paths([path])[path]


def splits_of_paths(paths: Sequence[str]) -> dict[str, str | None]:
    """Return the split that each path means: that of the outermost folder that means one, otherwise
    of the file name. There the word must not be part of a longer one:
    `train-00000-of-00001.parquet` is train, `cc3m_val_0001.tar` is val, and `contest.tar` has no
    split.

    Returns:
        By path `train`, a held-out split (`test`, `val`, `valid`, `validation`, `dev` or `eval`),
        or the value of a folder `split=VALUE`; None without one.
    """
    levels: dict[int, set[str]] = defaultdict(set)
    for path in paths:
        for depth, name in enumerate(path.split("/")[:-1]):
            levels[depth].add(name)
    folders = {depth: splits_of_folders(names) for depth, names in levels.items()}
    splits: dict[str, str | None] = {}
    for path in paths:
        *names, file = path.split("/")
        of_folders = (folders[depth][name] for depth, name in enumerate(names))
        split = next(filter(None, of_folders), None)
        if split is None and (word := _find_word(file)):
            split = _split_of_word(word)
        splits[path] = split
    return splits


def splits_of_files(paths: Sequence[str]) -> dict[str, str | None]:
    """Return the split of each file of a source; None for all if their names define no splits.

    Names define splits if all have one, if there are two different ones, or if one is held out: a
    single folder `train` next to `bus` may be the vehicle, but rows named `test` must not be
    trained on.
    """
    splits = splits_of_paths(paths)
    names = set(splits.values())
    is_vehicle = names == {None, "train"}
    return dict.fromkeys(paths) if is_vehicle else splits


def split_and_class_of(names: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """Return the split and the class that the folders of each image define.

    `train/cat/1.jpg` is class cat of split train, and `cat/1.jpg` is class cat without a split. The
    first folders are splits if two of them have names of splits, although there may be stray images
    next to them. Otherwise test images would become training rows of a class `test`. A folder that
    contains all the class folders, such as `photos`, is not a class.

    Args:
        names: Paths of the images, relative to the folder of the source.

    Returns:
        (split, class) of each image, in order; None for what its folders do not define.
    """
    folders = _skip_common_folder([name.split("/")[:-1] for name in names])
    split_of = splits_of_folders({folder[0] for folder in folders if folder})
    splits = [split_of[folder[0]] if folder else None for folder in folders]
    are_splits = len(set(splits) - {None}) > 1 or all(
        split and len(folder) > 1 for split, folder in zip(splits, folders, strict=True)
    )
    if not are_splits:
        splits = [None] * len(names)
    below = []
    for split, folder in zip(splits, folders, strict=True):
        if split:
            below.append(_skip_repeated(folder))
        else:
            below.append([] if are_splits else folder)
    return [
        (split, folder[0] if folder else None)
        for split, folder in zip(splits, _skip_common_folder(below), strict=True)
    ]


def _skip_common_folder(folders: list[list[str]]) -> list[list[str]]:
    """Leave out a first folder that is the same for all: the one of photos/cat and photos/dog.

    The only folder of a path stays, and one that is a split.
    """
    while all(len(folder) > 1 for folder in folders):
        first = {folder[0] for folder in folders}
        if len(first) != 1 or split_of_folder(*first):
            break
        folders = [folder[1:] for folder in folders]
    return folders


def _skip_repeated(folder: list[str]) -> list[str]:
    """Leave out the folder of a split, also if it is repeated, as in seg_train/seg_train/sea."""
    first = folder[0]
    while folder and folder[0] == first:
        folder = folder[1:]
    return folder


def _find_word(name: str) -> str | None:
    """Return the word of a name that means a split, and that is not a part of a longer word."""
    word = _IN_NAME.search(_CAPITAL.sub("_", name))
    return word[1] if word else None


def _split_of_word(word: str) -> str:
    return _WORDS[_NO_LETTER.sub("", word.lower())]
