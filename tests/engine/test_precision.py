"""The result of precision `auto`, which formats need a loss scaler, and the seeds of
micro-batches.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.precision import micro_seed, select_precision
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import accumulate_gradients, optimizer_step
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from tests.engine import recipe_models, toy

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("setting", "dtype", "scaled"),
    [
        ("auto", None, False),
        ("fp32", None, False),
        ("bf16", torch.bfloat16, False),
        ("bf16-true", torch.bfloat16, False),
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


@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_each_model_kind_trains_with_bf16_weights(kind):
    """The gradient is close to that of float32; matrices are bf16, all else float32."""
    gradients, (spec, objective) = {}, recipe_models.MODELS[kind]
    for name in ("fp32", "bf16-true"):
        torch.manual_seed(3)
        model = build(spec, recipe_models.VOCAB).train()
        model = apply_transforms(model, toy.train_settings(precision=name), toy.OPTIMIZER, CPU)
        assert all(
            (w.dtype == torch.bfloat16) == (name == "bf16-true" and w.ndim >= 2)
            for w in model.parameters()
        )
        state = toy.train_state(
            model, objective=toy.objective(objective), precision=select_precision(name, CPU)
        )
        batch = synthetic_batch(spec.inputs, recipe_models.VOCAB, 6, CPU)
        accumulate_gradients(state, make_local_batch(toy.cut(batch, 4)), lambda index: index)
        gradients[name] = torch.cat(
            [w.grad.float().flatten() for w in model.parameters() if w.grad is not None]
        )
        assert optimizer_step(
            state, make_local_batch(toy.cut(batch, 4)), lambda index: index
        ).is_finite
    assert torch.cosine_similarity(gradients["fp32"], gradients["bf16-true"], dim=0) > 0.995
