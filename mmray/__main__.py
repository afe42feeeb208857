"""Entry point of `mmray` and `python -m mmray`; child processes import this module again, so it imports nothing."""


def main() -> None:
    """Run the command line."""
    from mmray.cli import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
