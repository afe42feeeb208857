"""A call in a thread, watched from this one: its result, its error, and all that it has said by its end."""

import threading

import pytest

from mmray.errors import AtOnce
from mmray.train.background import run_in_thread


def test_the_last_look_comes_after_the_end():
    said, seen = [], []

    def call():
        assert threading.current_thread() is not threading.main_thread()
        said.append("all")
        return 7

    assert run_in_thread(call, lambda: seen.append(list(said))) == 7
    assert seen[-1] == ["all"]


def test_its_error_is_raised_here_after_the_last_look():
    seen = []

    def call():
        raise SystemExit("gone")

    with pytest.raises(SystemExit, match="gone"):
        run_in_thread(call, lambda: seen.append(1))
    assert seen


def test_what_a_look_raises_waits_for_nothing():
    over = threading.Event()

    def look():
        raise AtOnce

    with pytest.raises(AtOnce):
        run_in_thread(over.wait, look)
    over.set()
