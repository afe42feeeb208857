"""Check the cluster from inside for problems that stop or slow a run.

    ray job submit --working-dir . -- python jobs/doctor.py --storage /shared/runs

The job fails if there are errors.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["doctor", *sys.argv[1:]])
