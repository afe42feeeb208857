"""Entry point of `mmray` and `python -m mmray`; child processes import this module again, so it
imports little.
"""

import sys


def main() -> None:
    """Run the `mmray` command line with the arguments of this process, and exit with its code.

    Exit code 130: Ctrl-C was pressed, also while modules are imported.
    """
    try:
        from mmray.cli import main as run_command_line
    except KeyboardInterrupt:
        sys.exit(130)  # as mmray.errors.INTERRUPTED
    run_command_line()


if __name__ == "__main__":
    main()
