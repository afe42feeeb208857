"""The mmray command: reads what was typed, calls one composer, prints what came of it. The only part that prints.

Each verb is a small function, in a file of its name, from the typed arguments to an exit code: 0 good, 2 usage,
3 training failed, 4 resources that cannot be had, 5 data over its error budget, 130 interrupted.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from mmray.cli.bench import bench
from mmray.cli.console import Screen
from mmray.cli.doctor import doctor
from mmray.cli.evaluate import evaluate
from mmray.cli.export import export
from mmray.cli.prepare import prepare
from mmray.cli.report import report
from mmray.cli.train import train
from mmray.cli.tune import tune
from mmray.errors import INTERRUPTED, AtOnce, MmrayError, UsageError

VERBS: dict[str, Callable[[Sequence[str], Screen], int]] = {
    "train": train,
    "prepare": prepare,
    "tune": tune,
    "evaluate": evaluate,
    "export": export,
    "report": report,
    "bench": bench,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: exits with the code of the verb, or of the error it met."""
    screen = Screen()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: `ray job stop` sends it
    # A user's own classes are looked for in the working directory, as on the workers (cluster/join.py); an installed
    # script has its own folder on the path instead. Last, so that a file there hides no package.
    sys.path.append(str(Path.cwd()))
    try:
        code = run(list(sys.argv[1:] if argv is None else argv), screen)
    except AtOnce:
        screen.error("interrupted")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)  # a thread still waits in Ray's C++, which does not survive the interpreter's own end
    sys.exit(code)


def run(argv: list[str], screen: Screen) -> int:
    """Exit code of what was typed; errors made for people are printed without a traceback. Raises AtOnce."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        _usage(screen)
        return 0
    if argv[0] == "--version":
        screen.note(f"mmray {version('mmray')}")
        return 0
    try:
        if argv[0] not in VERBS:
            near = difflib.get_close_matches(argv[0], VERBS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(VERBS)}"
            raise UsageError(f"there is no command `{argv[0]}`; {hint}")
        return VERBS[argv[0]](argv[1:], screen)
    except MmrayError as error:
        screen.error(str(error))
        return error.exit_code
    except AtOnce:
        raise
    except KeyboardInterrupt:
        screen.error("interrupted")
        return INTERRUPTED


def _usage(screen: Screen) -> None:
    screen.note("mmray trains image-text models on a Ray cluster. Each command answers --help.\n")
    for verb in VERBS.values():
        screen.note(f"  {verb.__doc__}")
