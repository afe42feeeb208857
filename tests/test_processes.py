"""The ordered map over child processes."""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from mmray.processes import SPAWN, map_in_processes


def square(number, after_crash):
    if number == 5 and not after_crash:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2, after_crash


def fail(number, after_crash):
    raise KeyError(number)


def test_results_are_in_order_and_survive_a_killed_process():
    crashes = []
    results = list(map_in_processes(square, range(12), 2, 4, crashes.append))
    assert [value for value, _ in results] == [number**2 for number in range(12)]
    assert crashes == [1] and results[5] == (25, True)


def die_while_sending(number, after_crash):
    def send_half(connection, data):
        os.write(connection.fileno(), data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    if number == 2 and not after_crash:
        Connection._send = send_half
    return number


def test_process_killed_while_it_sends_a_result_is_replaced():
    crashes = []
    assert list(map_in_processes(die_while_sending, range(4), 1, 2, crashes.append)) == [0, 1, 2, 3]
    assert crashes == [1]


def test_script_without_a_guard_is_not_run_again_by_its_children(tmp_path):
    """In a spawned child it would start children too."""
    script = tmp_path / "mine.py"
    lines = [
        "from mmray.processes import map_in_processes",
        "print(list(map_in_processes(max, [1, 2], 1, 2, print)))",
    ]
    script.write_text("\n".join([*lines, "print(__file__)"]))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, f"[1, 2]\n{script}\n"), ended.stderr


def die_with_a_semaphore():
    semaphore = SPAWN.Semaphore()
    os.kill(os.getpid(), signal.SIGKILL)
    semaphore.release()


def test_semaphores_of_a_killed_process_are_not_reported():
    code = (
        f"import {__name__} as t; p = t.SPAWN.Process(target=t.die_with_a_semaphore); "
        "p.start(); p.join()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_error_of_the_work_is_raised():
    with pytest.raises(KeyError, match="0"):
        list(map_in_processes(fail, range(3), 1, 2, print))


def test_crash_handler_can_end_the_map():
    def give_up(_):
        raise MemoryError

    with pytest.raises(MemoryError):
        list(map_in_processes(square, [5], 1, 1, give_up))
