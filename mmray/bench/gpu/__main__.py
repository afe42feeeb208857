"""`python -m mmray.bench.gpu`."""

from __future__ import annotations

import sys

from mmray.bench.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
