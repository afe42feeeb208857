r"""Validate, deduplicate and pack image-text rows on the CPU nodes of the cluster.

    ray job submit --working-dir . -- python jobs/prepare.py /shared/my/my.jsonl \
      /shared/prepared/my --holdout 0.05

Source and target must be visible to all nodes. After a kill, the same command resumes.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])
