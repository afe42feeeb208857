r"""Train a recipe on the cluster. After a kill or a stop, the same command resumes at the same row.

    ray job submit --working-dir . -- python jobs/train.py resnet50-bert \
      --data.train /shared/prepared/my --cluster.workers 4 --run.storage /shared/runs \
      --cluster.start-timeout-s 1800

The data and run.storage must be visible to all nodes. After `ray job stop` the run has
RAY_JOB_STOP_WAIT_TIME_S seconds to write a checkpoint (set on the head: 60 in cluster.yaml; Ray's
default is 3). If that is too short, the run resumes from its previous checkpoint.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
