"""Entry point of `python -m mmray`."""

from mmray.cli import main

if __name__ == "__main__":
    main()
