"""Check, clean and pack image-text rows on the cluster's CPU nodes: done once, used by every run.

    ray job submit --working-dir . -- python jobs/prepare.py /shared/my.jsonl /shared/prepared/my --holdout 0.05

Source and target are on a file system that every node sees. The same line after a kill goes on where it was.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])
