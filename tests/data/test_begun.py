"""Items on their way before anyone asks: which thread takes which, errors, and an item that never comes."""

import subprocess
import sys
import threading

import pytest

from mmray.data.begun import begun


def test_the_first_item_comes_by_itself_and_the_caller_takes_the_rest():
    taken, there = [], threading.Event()

    def made():
        for number in range(3):
            taken.append((number, threading.get_ident()))
            there.set()
            yield number

    items = begun(made)
    assert there.wait(10), "nobody has asked for it, and it is on its way"
    assert [next(items), len(taken)] == [0, 1]
    assert list(items) == [1, 2]
    here = threading.get_ident()
    assert [ident == here for _, ident in taken] == [False, True, True]


def test_nothing_to_take_is_an_end_like_any_other():
    assert list(begun(list)) == []


def test_what_is_raised_in_the_thread_is_met_at_the_first_item():
    def made():
        raise KeyError("no such stream")

    items = begun(made)
    with pytest.raises(KeyError, match="no such stream"):
        next(items)


def test_what_is_raised_later_is_met_where_it_is_raised():
    def made():
        yield 1
        raise OSError("the decoders are gone")

    items = begun(made)
    assert next(items) == 1
    with pytest.raises(OSError, match="the decoders are gone"):
        next(items)


def test_a_process_that_fails_does_not_wait_for_an_item_that_never_comes():
    code = (
        "import threading; from mmray.data.begun import begun; begun(threading.Event().wait); "
        "raise SystemExit('the rehearsal has failed')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.strip()) == (1, "the rehearsal has failed")
