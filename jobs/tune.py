r"""Search batch shapes or other settings; writes best.yaml, a recipe for jobs/train.py.

    ray job submit --working-dir . -- python jobs/tune.py resnet50-bert --data.train /shared/prepared/my \
      --run.storage /shared/runs --space batch.micro=16,32,64 --space batch.accumulation=1,2

As many trials run concurrently as fit on the cluster; `--concurrency` sets a limit.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])
