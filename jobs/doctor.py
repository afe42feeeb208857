"""Look at the cluster from inside: what would stop or slow a run, and what mends it.

    ray job submit --working-dir . -- python jobs/doctor.py --storage /shared/runs

The job fails where there is something to mend.
"""

import sys

from mmray.cli import main

if __name__ == "__main__":
    main(["doctor", *sys.argv[1:]])
