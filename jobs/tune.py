r"""Search batch shapes or other settings; writes best.yaml, a recipe for jobs/train.py.

    ray job submit --working-dir . -- python jobs/tune.py resnet50-bert \
      --space batch.global=512,1024 --cluster.workers 4 --run.storage /shared/runs

`--goal loss --data.train SET --budget 2h` searches the learning rate instead; `--space` names other
settings. As many trials run concurrently as fit on the cluster; `--concurrency` sets a limit.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])
