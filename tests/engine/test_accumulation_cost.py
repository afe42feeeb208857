"""Cost of cached accumulation against one pass: time is bounded, memory is that of one micro-batch."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest
import torch

from mmray.bench.step import build_bench
from mmray.config import recipes
from mmray.engine.collectives import Group
from mmray.engine.prefetch import make_local_batch, split_micro_batches
from mmray.engine.step import accumulate_gradients
from mmray.objectives.contrastive import Contrastive
from tests.engine import toy

SHARE, MICRO = 64, 16


class Held:
    """A saved tensor that counts the bytes held at once."""

    live = peak = 0

    def __init__(self, tensor):
        self.tensor = tensor
        Held.live += tensor.nbytes
        Held.peak = max(Held.peak, Held.live)

    def __del__(self):
        Held.live -= self.tensor.nbytes


@pytest.fixture(scope="module", autouse=True)
def one_thread_in_all():
    """Use one thread, so that CPU time does not depend on other load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bench():
    return bench_of(96, 16 * MICRO)  # at 64 pixels overhead dominates


def bench_of(image_side, rows):
    config = recipes.load("sample")
    inputs = config.model.inputs.model_copy(update={"image_side": image_side})
    return build_bench(
        config.model_copy(update={"model": config.model.model_copy(update={"inputs": inputs})}), Group(), rows
    )


def step_of(bench, rows, micro):
    state = toy.train_state(bench.model, objective=Contrastive())
    batch = {name: column[:rows] for name, column in bench.batches[0].items()}
    share = split_micro_batches(make_local_batch([batch]), micro)

    def step():
        accumulate_gradients(state, share, lambda index: index)
        state.optimizer.zero_grad(set_to_none=True)

    return step


def peak_bytes(step):
    Held.live = Held.peak = 0
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        step()
    return Held.peak


def test_memory_is_flat_in_the_number_of_micro_batches(bench):
    peaks = {k: peak_bytes(step_of(bench, k * MICRO, MICRO)) for k in (1, 16)}
    whole = peak_bytes(step_of(bench, 16 * MICRO, 16 * MICRO))
    assert peaks[16] < 1.10 * peaks[1]  # only the logits of the loss grow
    assert whole > 10 * peaks[16]


def test_time_is_at_most_one_and_a_half_times_one_pass():
    # An additional forward is 4/3 of the work; the fixed cost of a pass (8 ms) is added.
    bench = bench_of(160, SHARE)
    steps = {micro: step_of(bench, SHARE, micro) for micro in (SHARE, MICRO)}
    took_s = {micro: [] for micro in steps}
    for _ in range(8):  # alternating, so that a changing load affects both
        for micro, step in steps.items():
            began_s = time.process_time()
            step()
            took_s[micro].append(time.process_time() - began_s)
    ratios = [cut / whole for cut, whole in zip(took_s[MICRO][1:], took_s[SHARE][1:], strict=True)]
    assert statistics.median(ratios) <= 1.5


def test_smaller_micro_batches_give_the_same_gradient(bench):
    """The cases measured above compute the same gradient."""
    gradients = []
    for micro in (SHARE, MICRO):
        state = toy.train_state(bench.model, objective=Contrastive())
        batch = {name: column[:SHARE] for name, column in bench.batches[0].items()}
        accumulate_gradients(replace(state), split_micro_batches(make_local_batch([batch]), micro), lambda index: index)
        gradients.append(toy.flat_gradient(bench.model))
        state.optimizer.zero_grad(set_to_none=True)
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 1e-4
