r"""Train a recipe on the cluster; the same line after a kill, or a stop, goes on at the same row.

    ray job submit --working-dir . -- python jobs/train.py resnet50-bert --data.train /shared/prepared/my \
      --cluster.workers 4 --run.storage /shared/runs

The data and run.storage are on a file system that every node sees. `ray job stop` gives the run 3 s for its
farewell checkpoint (RAY_JOB_STOP_WAIT_TIME_S of the head); where that is too short, the last periodic one stands.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
