"""Faults, brought in by the callback path that users have; none of this is in the package."""

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist


class KillRankOneOnce:
    """SIGKILL to rank 1 after step 5, once for each folder named in MMRAY_TEST_FAULTS."""

    def on_step(self, step, metrics):
        mark = Path(os.environ["MMRAY_TEST_FAULTS"]) / "killed"
        if step == 5 and dist.get_rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class RaiseAtStepThree:
    """A bug of the user's own."""

    def on_step(self, step, metrics):
        if step == 3:
            raise KeyError("label")


class Slowly:
    """Steps long enough that a wish to stop arrives between them."""

    def on_step(self, step, metrics):
        time.sleep(0.4)
