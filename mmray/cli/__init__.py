"""The `mmray` command line: each command parses its arguments, calls a function of `mmray.api` or
another package, prints the result, and returns its exit code.

Exit codes: 0 success, 1 unexpected error, 2 usage, 3 training failed, 4 resources not available, 5
data missing, unusable or over the bad-row limit, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from select import poll

from mmray.cli.args import first_sentence
from mmray.cli.bench import bench
from mmray.cli.doctor import doctor
from mmray.cli.runs import evaluate, export, report, runs
from mmray.cli.sets import prepare, score, select, show
from mmray.cli.submit import logs, status, submit
from mmray.cli.train import train
from mmray.cli.tune import tune
from mmray.console.reporter import ConsoleReporter
from mmray.errors import INTERRUPTED, ForceExit, MmrayError, ResourceError, UsageError, suggest
from mmray.machine import process_age_s, torchrun_world_size
from mmray.version import VERSION

COMMANDS: dict[str, Callable[[Sequence[str], ConsoleReporter], int]] = {
    each.__name__: each
    for each in (
        train,
        prepare,
        score,
        select,
        show,
        tune,
        evaluate,
        export,
        report,
        runs,
        bench,
        doctor,
        submit,
        status,
        logs,
    )
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    Args:
        argv: the arguments; None: the arguments of this process.
    """
    # A name of a file that the console cannot encode must not end a finished command.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    console = ConsoleReporter(start_s=time.monotonic() - process_age_s())
    # The same as Ctrl-C, because `ray job stop` sends SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # User classes are imported from the working directory, as on the workers (cluster/connect.py).
    # It is last in sys.path so that files there do not shadow packages.
    try:
        sys.path.append(str(Path.cwd()))
    except FileNotFoundError:
        console.print_error("the working directory was deleted; change to another one")
        sys.exit(UsageError.exit_code)
    try:
        code = run(list(sys.argv[1:] if argv is None else argv), console)
    except ForceExit:
        console.print_error("interrupted")
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread may still wait in Ray's C++ code, which does not survive a normal exit.
        os._exit(INTERRUPTED)
    sys.exit(code)


def run(argv: list[str], console: ConsoleReporter) -> int:
    """Run a command line; an MmrayError is printed without a traceback.

    Args:
        argv: the command and its arguments.
        console: where to print.

    Returns:
        The exit code.

    Raises:
        ForceExit: a second Ctrl-C.
    """
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help", "help"):
        console.log("mmray trains image-text models on a Ray cluster. Each command has --help.\n")
        for name, command in COMMANDS.items():
            console.log(f"  mmray {name:<9} {first_sentence(command)}")
        console.log("  mmray --version\n  mmray --tyro-print-completion bash|zsh|tcsh")
        return 0
    if first == "--version":
        console.log(f"mmray {VERSION}")
        return 0
    try:
        if first.startswith("--tyro-"):
            from mmray.cli.completion import print_completion

            print_completion(argv)
        if first not in COMMANDS:
            raise UsageError(f"unknown command `{first}`; {suggest(first, COMMANDS)}")
        if torchrun_world_size() > 1 and first != "train":
            raise UsageError(
                f"torchrun starts each process of `mmray train`; start `mmray {first}` without it"
            )
        return COMMANDS[first](argv[1:], console)
    except MmrayError as error:
        console.print_error(str(error))
        return error.exit_code
    except OSError as error:  # a disk or the network failed
        if isinstance(error, BrokenPipeError) and _is_stdout_closed():
            return 1  # as rich exits: the reader, such as `head`, needs no more
        from mmray.storage.requests import REFUSED_HINT, is_refused

        console.print_error(f"{error}{REFUSED_HINT if is_refused(error) else ''}")
        return ResourceError.exit_code
    except ForceExit:
        raise
    except KeyboardInterrupt:
        console.print_error("interrupted")
        return INTERRUPTED


def _is_stdout_closed() -> bool:
    """Return whether the process that read the output has ended."""
    pipe = poll()
    pipe.register(sys.stdout.fileno(), 0)
    is_closed = bool(pipe.poll(0))
    if is_closed:
        # The rest of the buffer, which Python writes at exit, has no reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed
