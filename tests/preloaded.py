"""Imports of the ranks and workers, which the fork server makes once (forked.py).

Garbage collections of the server and its children leave these objects out: in a child, each would
visit a million of them and copy their memory.
"""

import gc
from importlib import import_module

# Also lazy imports of torch and transformers, which take many seconds.
MODULES = (
    "tests.engine.ranks",
    "tests.engine.checkpoint.shard_ranks",
    "tests.training.faults",
    "mmray.bench.step",
    "mmray.training.workers.local",
    "mmray.engine.worker",
    "mmray.evaluation.conversations",
    "mmray.evaluation.evaluator",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "transformers.models.clip.modeling_clip",
)

gc.disable()
for module in MODULES:
    import_module(module)
gc.freeze()
gc.enable()
