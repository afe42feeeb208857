"""Write a run's model to a folder that `mmray.load` opens: weights, config, tokenizer, preprocessing.

    ray job submit --working-dir . -- python jobs/export.py /shared/runs/resnet50-bert /shared/exported/resnet50-bert

It runs where the job's driver does, on the head, and needs no other node.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
