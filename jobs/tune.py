r"""Search the best batch shape, or the best of any settings; it comes out as a recipe that jobs/train.py takes.

    ray job submit --working-dir . -- python jobs/tune.py resnet50-bert --data.train /shared/prepared/my \
      --run.storage /shared/runs --space batch.micro=16,32,64 --space batch.accumulation=1,2

As many trials run at a time as the cluster holds; `--concurrency` says otherwise.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])
