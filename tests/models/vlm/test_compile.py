"""torch.compile of the layers of vision-language models."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mmray.engine.collectives import Group
from mmray.engine.parallel.transforms import apply_transforms
from mmray.models.vlm.model import Vlm
from tests.engine import toy
from tests.models.vlm import folders, token_runs
from tests.models.vlm.rows import all_media, encode_rows
from tests.training.runs import lines

pytestmark = pytest.mark.compile

CPU = torch.device("cpu")
# Rows of the micro-batches, by their index in `encode_rows`: row 0 has no image, row 2 three.
# A row alone has a graph of its own in padded models; row 0 is never alone, because a blank row
# with an image follows it.
FIRST = ([0, 1, 2], [0], [1], [2, 2, 1])
OTHERS = ([2], [2, 1], [0, 0, 0, 2], [1, 1, 2, 0, 2])


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize(
    ("family", "recomputed"),
    [
        ("qwen3_vl", ()),
        pytest.param("qwen3_vl", ("vision", "language"), marks=pytest.mark.slow),
        *(
            pytest.param(family, (), marks=pytest.mark.slow)
            for family in folders.FAMILIES
            if family != "qwen3_vl"
        ),
    ],
)
def test_layers_share_graphs_for_all_rows_and_give_the_eager_gradients(
    family, recomputed, folder_of
):
    """Layers of a branch share a graph, whatever the numbers of rows, tokens and images are."""
    counter = CompileCounter()
    eager, compiled = (
        apply_transforms(
            Vlm(all_media(folder_of(family))),
            toy.train_settings(compile=backend, activation_checkpointing=recomputed),
            toy.OPTIMIZER,
            Group(),
        )
        for backend in ("none", counter)
    )
    rows = encode_rows(eager.encoder)
    collate = eager.collator()

    def step(model: Vlm, numbers: list[int]) -> torch.Tensor:
        model.zero_grad()
        loss = model(collate([rows[number] for number in numbers]))["loss_sum"]
        loss.backward()
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        return torch.cat([loss.detach()[None], *(grad.flatten() for grad in grads)])

    for numbers in (*FIRST, *OTHERS):
        expected = step(eager, numbers)
        difference = (step(compiled, numbers) - expected).abs().max()
        assert difference < 1e-6 * expected.abs().max(), numbers
        if numbers == FIRST[-1]:
            num_graphs = counter.frame_count
    assert not torch._dynamo.utils.counters["graph_break"]
    # Encoders, projector and language, with images and videos, and once more for a single token.
    assert counter.frame_count == num_graphs <= (10 if family in folders.OMNI else 9)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_run_compiled_with_inductor_has_the_losses_of_an_eager_run(folder_of, tmp_path):
    """Nothing is compiled after the first step."""
    prepared = str(tmp_path / "set")
    token_runs.make_prepared(tmp_path / "set")
    for backend in ("none", "inductor"):
        config = token_runs.config_of(
            folder_of("qwen3_vl"), prepared, tmp_path / backend, compile=backend
        )
        token_runs.run(config, Group())
    eager, compiled = (lines(tmp_path / backend) for backend in ("none", "inductor"))
    losses = [line["train/loss"] for line in compiled]
    assert losses == pytest.approx([line["train/loss"] for line in eager], rel=1e-4)
    graphs = [line["compile/graphs"] for line in compiled]
    # Those of the dry run and of the check of packed rows included.
    assert 0 < graphs[-1] == graphs[0] <= 9
