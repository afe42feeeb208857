"""Signals during a sweep while Ray Tune runs in a thread; without Ray."""

import signal
import threading
from types import SimpleNamespace

import pytest

from mmray.errors import ForceExit
from mmray.tune.trainable import _handle_signals
from tests.train.runs import Silent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_ctrl_c_exits_without_interpreter_shutdown(number):
    running = SimpleNamespace(stop=threading.Event(), listener=Silent())
    with _handle_signals(running):
        signal.raise_signal(number)
        assert running.stop.is_set()
        with pytest.raises(ForceExit):
            signal.raise_signal(number)
