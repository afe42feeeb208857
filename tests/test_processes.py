"""The ordered map over child processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from multiprocessing.connection import Connection

import psutil
import pytest

from mmray.ordered_map import OrderedMap
from mmray.processes import SPAWN, ChildDied, ChildPool, ChildProcess


def make_map(work, items, *pool_args):
    return OrderedMap(ChildPool(work, *pool_args), items)


def run_map(*args):
    """The results of a map over child processes."""
    with closing(make_map(*args)) as results:
        yield from results


def square(number, after_crash):
    if number == 5 and not after_crash:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2, after_crash


def fail(number, after_crash):
    raise KeyError(number)


def test_results_are_in_order_and_survive_a_killed_process():
    crashes = []
    results = list(run_map(square, range(12), 2, 4, crashes.append))
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
    assert list(run_map(die_while_sending, range(4), 1, 2, crashes.append)) == [0, 1, 2, 3]
    assert crashes == [1]


def test_script_without_a_guard_is_not_run_again_by_its_children(tmp_path):
    """In a spawned child it would start children too."""
    script = tmp_path / "mine.py"
    lines = [
        "from mmray.ordered_map import OrderedMap",
        "from mmray.processes import ChildPool",
        "results = OrderedMap(ChildPool(max, 1, 2, print), [1, 2])",
        "print(list(results))",
        "results.close()",
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
        list(run_map(fail, range(3), 1, 2, print))


def test_crash_handler_can_end_the_map():
    def give_up(_):
        raise MemoryError

    with pytest.raises(MemoryError):
        list(run_map(square, [5], 1, 1, give_up))


def sleep(number, after_crash):
    if number:
        time.sleep(600)
    return number


def test_interrupt_ends_a_map_whose_work_stalls():
    results = make_map(sleep, range(4), 2, 4, print)
    ends = []
    thread = threading.Thread(target=lambda: ends.append(list(results)))
    thread.start()
    time.sleep(1)
    results.interrupt()
    thread.join(30)
    results.close()
    assert not thread.is_alive() and ends in ([[0]], [[]])


def talk(channel, name):
    channel.send(f"{name} starts")
    answer = channel.call("how many?")
    if answer == 0:
        raise KeyError(name)
    if answer < 0:
        os.kill(os.getpid(), -answer)
    return answer * 2


@pytest.mark.parametrize("answer", [21, 0, -signal.SIGSEGV])
def test_child_calls_its_parent_and_returns_raises_or_dies(answer):
    child, messages = ChildProcess("talking", talk, "child"), []

    def on_message(message):
        messages.append(message)
        return answer

    if answer > 0:
        assert child.result(on_message) == 42
    elif answer == 0:
        with pytest.raises(KeyError, match="child") as raised:
            child.result(on_message)
        assert "in talk" in raised.value.__notes__[0]
    else:
        with pytest.raises(ChildDied, match="the talking process was ended by SIGSEGV") as died:
            child.result(on_message)
        assert died.value.exit_code == answer
    assert messages == ["child starts", "how many?"]
    child.close()


def start_data_process(channel):
    """A worker with a process that computes for it."""
    pool = ChildPool(square, 1, 1, fail)
    channel.send([os.getpid(), *(child.process.process.pid for child in pool.workers)])
    threading.Event().wait()


def start_worker(connection):
    """A driver that waits for its worker."""
    ChildProcess("worker", start_data_process).result(connection.send)


def test_worker_and_its_data_process_end_with_a_killed_driver():
    ours, theirs = SPAWN.Pipe()
    driver = SPAWN.Process(target=start_worker, args=(theirs,))
    driver.start()
    children = [psutil.Process(pid) for pid in ours.recv()]
    driver.kill()
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=30)[1]
