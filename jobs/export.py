"""Write a run's model to a folder for `mmray.load`.

    ray job submit --working-dir . -- python jobs/export.py /shared/runs/resnet50-bert /shared/exported/resnet50-bert

The export runs on the head node only.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
