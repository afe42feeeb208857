"""The result of precision `auto`, which formats need a loss scaler, and the seeds of
micro-batches.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mmray.engine.precision import micro_seed, select_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("setting", "dtype", "scaled"),
    [
        ("auto", None, False),
        ("fp32", None, False),
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, True),
    ],
)
def test_precision_on_cpu(setting, dtype, scaled):
    chosen = select_precision(setting, CPU)
    assert (chosen.dtype, chosen.scaler().is_enabled()) == (dtype, scaled)
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


def test_each_step_rank_and_micro_batch_has_its_own_seed():
    seeds = {
        micro_seed(*numbers)
        for numbers in itertools.product(range(3), range(20), range(4), range(8))
    }
    assert len(seeds) == 3 * 20 * 4 * 8 and all(0 <= seed < 2**63 for seed in seeds)
