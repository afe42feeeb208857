r"""Write a run's model to a folder for `mmray.load`.

    ray job submit --working-dir . -- python jobs/export.py /shared/runs/resnet50-bert \
      /shared/exported/resnet50-bert

The export runs in the job's driver, by default on the head node; it uses no workers.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
