"""The `mmray` command line; only this package prints. Each command is a function that returns its
exit code.

Exit codes: 0 success, 1 unexpected error, 2 usage, 3 training failed, 4 resources not available, 5
data missing, unusable or over the bad-row limit, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from mmray.cli.bench import bench
from mmray.cli.console import Terminal
from mmray.cli.doctor import doctor
from mmray.cli.evaluate import evaluate
from mmray.cli.export import export
from mmray.cli.prepare import prepare
from mmray.cli.report import report
from mmray.cli.runs import runs
from mmray.cli.train import train
from mmray.cli.tune import tune
from mmray.errors import INTERRUPTED, ForceExit, MmrayError, ResourceError, UsageError, suggest
from mmray.machine import process_age_s

_FUNCTIONS = (train, prepare, tune, evaluate, export, report, runs, bench, doctor)
COMMANDS: dict[str, Callable[[Sequence[str], Terminal], int]] = {
    each.__name__: each for each in _FUNCTIONS
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    terminal = Terminal(start_s=time.monotonic() - process_age_s())
    # same as Ctrl-C; `ray job stop` sends SIGTERM
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # User classes are imported from the working directory, as on the workers (cluster/connect.py).
    # It is last in sys.path so that files there do not shadow packages.
    try:
        sys.path.append(str(Path.cwd()))
    except FileNotFoundError:
        terminal.error("the working directory was deleted; change to another one")
        sys.exit(UsageError.exit_code)
    try:
        code = run(list(sys.argv[1:] if argv is None else argv), terminal)
    except ForceExit:
        terminal.error("interrupted")
        sys.stdout.flush()
        sys.stderr.flush()
        # a thread may still wait in Ray's C++ code, which does not survive a normal exit
        os._exit(INTERRUPTED)
    sys.exit(code)


def run(argv: list[str], terminal: Terminal) -> int:
    """Run a command line and return its exit code; print an MmrayError without traceback.

    Raises ForceExit.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        terminal.note("mmray trains image-text models on a Ray cluster. Each command has --help.\n")
        for command in COMMANDS.values():
            terminal.note(f"  {command.__doc__}")
        terminal.note("  mmray --version\n  mmray --print-completion bash|zsh")
        return 0
    if argv[0] == "--version":
        terminal.note(f"mmray {version('mmray')}")
        return 0
    try:
        if argv[0] == "--print-completion":
            from mmray.cli.completion import completion_script

            terminal.output(completion_script(argv[1] if argv[1:] else "", COMMANDS).rstrip())
            return 0
        if argv[0] not in COMMANDS:
            raise UsageError(f"unknown command `{argv[0]}`; {suggest(argv[0], COMMANDS)}")
        return COMMANDS[argv[0]](argv[1:], terminal)
    except MmrayError as error:
        terminal.error(str(error))
        return error.exit_code
    except OSError as error:  # of a disk or the network
        terminal.error(str(error))
        return ResourceError.exit_code
    except ForceExit:
        raise
    except KeyboardInterrupt:
        terminal.error("interrupted")
        return INTERRUPTED
