"""Entry point of `mmray` and `python -m mmray`; child processes import this module again, so it
imports little.
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from mmray.cli import main as run_command_line
    except KeyboardInterrupt:
        sys.exit(130)  # as mmray.errors.INTERRUPTED
    run_command_line()


if __name__ == "__main__":
    main()
