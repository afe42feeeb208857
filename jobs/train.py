r"""Train a recipe on the cluster. After a kill or a stop, the same command resumes at the same row.

    ray job submit --working-dir . -- python jobs/train.py resnet50-bert --data.train /shared/prepared/my \
      --cluster.workers 4 --run.storage /shared/runs

The data and run.storage must be visible to all nodes. `ray job stop` allows RAY_JOB_STOP_WAIT_TIME_S of the
head node for a final checkpoint: 60 s in cluster.yaml, Ray's default is 3 s. Otherwise the run resumes from the last
periodic checkpoint.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
