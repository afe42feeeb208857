"""A folder for each family, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.models.vlm.folders import make_folder


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("vlm")

    def folder(family: str) -> Path:
        if family == "smolvlm":
            pytest.importorskip("num2words")
        return make_folder(family, root / family)

    return cache(folder)


@pytest.fixture(scope="session")
def copy_of(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Return a copy of the files of a processor, with another chat template."""

    def copy(family: str, template: str) -> Path:
        folder = tmp_path_factory.mktemp("copy")
        for file in folder_of(family).glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return copy


@pytest.fixture(autouse=True)
def one_thread_in_each_test(one_thread):
    pass
