"""Write a checkpoint without a run."""

from mmray.engine.checkpoint import state_io


def save_checkpoint(folder, step, state, meta):
    """Write folder/step-N from one process and return it; replace an existing one."""
    path = folder / f"step-{step}"
    with state_io.as_storage_error(path):
        state_io.stage_save(path, state, {"step": step} | meta)()
    return path
