"""Measure where the time goes, on the machine where the job's driver runs.

    ray job submit --working-dir . -- python jobs/bench.py step resnet50-bert --json /shared/step.json

To measure a GPU of the cluster, give the driver one: --entrypoint-num-gpus 1 and --entrypoint-num-cpus 8
before the `--`.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
