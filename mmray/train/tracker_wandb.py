"""Weights & Biases as a tracker: online where there is a key, else into the run's folder, for `wandb sync` later.

Of machine, repository and command line nothing is sent: they may hold what is nobody's business.
"""

from __future__ import annotations

import os
import uuid
from typing import Any


class WandbTracker:
    """A run of W&B under one id; WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY and its other variables count."""

    def start(self, about: dict[str, Any], run_id: str | None) -> str:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        run_id = run_id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=about["project"],
            name=about["name"],
            id=run_id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=about["folder"],
            config=about["config"],
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                save_code=False,
                silent=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def finish(self, good: bool) -> None:
        self._run.finish(exit_code=0 if good else 1)
