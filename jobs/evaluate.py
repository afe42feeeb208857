r"""Evaluate a run's newest checkpoint on held-out rows, with as many workers as in training, on the
same device type.

    ray job submit --working-dir . -- python jobs/evaluate.py /shared/runs/resnet50-bert \
      --data /shared/prepared/test

Metrics are in the job's log; `--json FILE` also writes them to a file.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
