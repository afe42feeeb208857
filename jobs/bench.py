r"""Benchmark the node on which the job's driver runs, by default the head.

    ray job submit --working-dir . -- python jobs/bench.py step resnet50-bert \
      --json /shared/step.json

To benchmark a GPU of the cluster, add --entrypoint-num-gpus 1 --entrypoint-num-cpus 8 before the
`--`.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
