"""`python -m mmray`: the mmray command where its script is not on the path."""

from mmray.cli import main

if __name__ == "__main__":
    main()
