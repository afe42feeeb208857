"""Cost of cached accumulation against one pass: one forward more, memory of one micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmray.bench.step import build_bench
from mmray.config import recipes
from mmray.engine.collectives import Group
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import accumulate_gradients
from tests.engine import toy

SHARE, MICRO = 64, 16


class SavedTensor:
    """Counts the bytes of saved tensors held at once."""

    live = peak = 0

    def __init__(self, tensor):
        self.tensor = tensor
        SavedTensor.live += tensor.nbytes
        SavedTensor.peak = max(SavedTensor.peak, SavedTensor.live)

    def __del__(self):
        SavedTensor.live -= self.tensor.nbytes


@pytest.fixture(scope="module")
def bench():
    config = recipes.load("sample")
    inputs = config.model.inputs.model_copy(update={"image_side": 96})  # at 64 overhead dominates
    model = config.model.model_copy(update={"inputs": inputs})
    return build_bench(config.model_copy(update={"model": model}), Group(), 16 * MICRO)


def gradient(bench, rows, micro):
    state = toy.train_state(bench.model)
    batch = {name: column[:rows] for name, column in bench.batches[0].items()}
    accumulate_gradients(state, make_local_batch(toy.cut(batch, micro)), lambda index: index)
    flat = toy.flat_gradient(bench.model)
    state.optimizer.zero_grad(set_to_none=True)
    return flat


def test_memory_is_flat_in_the_number_of_micro_batches(bench):
    def peak_bytes(rows, micro):
        SavedTensor.live = SavedTensor.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(SavedTensor, lambda saved: saved.tensor):
            gradient(bench, rows, micro)
        return SavedTensor.peak

    accumulated = peak_bytes(16 * MICRO, MICRO)
    assert accumulated < 1.10 * peak_bytes(MICRO, MICRO)  # only the logits of the loss grow
    assert peak_bytes(16 * MICRO, 16 * MICRO) > 10 * accumulated


def test_work_is_that_of_one_pass_and_one_more_forward(bench):
    flops = {}
    for micro in (SHARE, MICRO):
        with FlopCounterMode(display=False) as counter:
            gradient(bench, SHARE, micro)
        flops[micro] = counter.get_total_flops()
    assert 1.2 < flops[MICRO] / flops[SHARE] < 1.34  # a forward is a third of the work, or more
