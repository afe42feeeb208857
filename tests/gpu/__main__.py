"""`python -m tests.gpu`."""

from __future__ import annotations

import sys

from tests.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
