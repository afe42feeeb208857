"""torch.compile by block: what shares a graph, which sizes are dynamic, and what compiled blocks
leave unchanged.
"""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from mmray.config import Batch, ImageTower, TextTower, recipes
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import SamplePlan
from mmray.engine.collectives import Group
from mmray.engine.metrics.meters import model_flops_of_row
from mmray.engine.parallel.transforms import (
    TOKEN_MULTIPLE,
    apply_transforms,
    num_compiled_graphs,
)
from mmray.engine.precision import fork_seeded_rng
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.models.build import build
from mmray.models.protocol import RANDOM_WEIGHTS, saved_layers
from mmray.models.synthetic import synthetic_batch
from tests.engine import recipe_models, toy
from tests.engine.recipe_models import MODELS, VOCAB, WITH_DROPOUT
from tests.engine.single_worker import make_prepared, run_config
from tests.training.runs import lines

pytestmark = pytest.mark.compile

CPU = torch.device("cpu")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler"
)
TWO_STAGES = WITH_DROPOUT.model_copy(update={"image": ImageTower(name="convnet", width=8, depth=2)})


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def model_of(spec: Any, backend: Any = "none", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return apply_transforms(
        build(spec, VOCAB, RANDOM_WEIGHTS),
        toy.train_settings(compile=backend, **settings),
        toy.OPTIMIZER,
        Group(),
    )


def rows(spec: Any, count: int = 3, tokens: int | None = None) -> dict[str, Tensor]:
    batch, text = synthetic_batch(spec.inputs, VOCAB, count, CPU), ("input_ids", "attention_mask")
    return {name: value[:, :tokens] if name in text else value for name, value in batch.items()}


def with_depth(kind: str, depth: int) -> Any:
    spec = MODELS[kind][0]
    parts = {
        name: getattr(spec, name).model_copy(update={"depth": depth}) for name in ("image", "text")
    }
    return spec.model_copy(update=parts)


@pytest.mark.parametrize("kind", ["clip", "siglip", "naflex"])
def test_blocks_of_equal_structure_share_a_graph(kind: str) -> None:
    counter = CompileCounter()
    spec = with_depth(kind, 4)
    model_of(spec, counter).train()(rows(spec))
    # one of the patch embeddings, and one an encoder
    assert counter.frame_count == 3


def test_resnet50_bert_has_few_graphs_and_its_accumulated_steps_equal_eager_ones() -> None:
    """Several micro-batches double them, because the pass without gradients has its own."""
    small = {"inputs": WITH_DROPOUT.inputs, "text": WITH_DROPOUT.text, "embed_dim": 8}
    image = ImageTower(name="resnet50", weights="none")
    spec = recipes.load("resnet50-bert").model.model_copy(update=small | {"image": image})
    weights, graphs = {}, []
    for backend in ("none", "eager"):
        model = model_of(spec, backend).double().train()
        start = toy.flat(model)
        state = toy.train_state(model, objective=toy.objective("contrastive"))
        for count in (2, 4):
            micro_batches = toy.cut(synthetic_batch(spec.inputs, VOCAB, count, CPU), 2)
            optimizer_step(state, make_local_batch(micro_batches), lambda index: index)
            graphs.append(num_compiled_graphs())
        weights[backend] = toy.flat(model)
    assert graphs[1] == 0 < graphs[2] <= 12 and graphs[3] <= 2 * graphs[2]
    toy.assert_equal_weights(weights["eager"], weights["none"], start)


def test_only_rows_and_text_lengths_become_dynamic() -> None:
    """Stages of a convolutional network differ in channels, height and width, which stay constants
    of their graphs.
    """
    sizes: list[list[Any]] = []

    def compiler(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        sizes.append([value.shape for value in values if isinstance(value, Tensor)])
        return graph.forward

    model = model_of(TWO_STAGES, compiler).train()
    for count, tokens in ((3, 6), (4, 5), (5, 3), (4, 4)):
        model(rows(TWO_STAGES, count, tokens))["image_embed"].sum().backward()
    # no masks
    images = [shape for graph in sizes for shape in graph if len(shape) == 4 and shape[1] != 1]
    assert len(images) >= 12
    assert all(isinstance(size, int) for shape in images for size in shape[1:])
    before = len(sizes)
    for count, tokens in ((6, 2), (7, 6)):
        model(rows(TWO_STAGES, count, tokens))
    assert len(sizes) == before


@pytest.mark.parametrize(
    ("name", "batch_norm", "backend"),
    [
        ("resnet18", "frozen", "aot_eager"),
        ("resnet18", "local", "aot_eager"),
        ("transformers", "local", "aot_eager"),
        pytest.param(*("resnet18", "local", "inductor"), marks=NEEDS_COMPILER),
    ],
)
def test_pixels_and_first_layers_of_a_resnet_are_one_graph(
    name: str, batch_norm: str, backend: str
) -> None:
    """Its outputs, gradients and running statistics equal those of a copy (EMA), which is eager."""
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    tower = ImageTower(name=name, weights="none" if name == "resnet18" else "resnet")
    spec = WITH_DROPOUT.model_copy(update={"image": tower, "batch_norm": batch_norm})
    layers = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    source = saved_layers({"image": {"model_type": "resnet"} | layers})
    model = build(spec, VOCAB, source).double()
    model = model.to(memory_format=torch.channels_last).train()
    settings = toy.train_settings(compile=compiler)
    compiled: Any = apply_transforms(model, settings, toy.OPTIMIZER, Group()).image
    eager: Any = copy.deepcopy(compiled)
    results = []
    for branch in (compiled, eager):
        hidden = branch.pixels(rows(spec)["image"])
        hidden.square().sum().backward()
        gradients = [weight.grad for weight in branch.parameters() if weight.grad is not None]
        results.append([hidden, *gradients, *branch.buffers()])
    [graph] = graphs
    assert "conv2d" in graph.code and "max_pool2d" in graph.code
    assert results[0][0].stride() == results[1][0].stride() and len(gradients) == 3
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_copy_of_a_compiled_model_is_eager_and_equal() -> None:
    spec, counter = MODELS["clip"][0], CompileCounter()
    model = model_of(spec, counter, activation_checkpointing=("text",)).eval()
    expected = model(rows(spec))
    compiled = counter.frame_count
    outputs = copy.deepcopy(model)(rows(spec))
    assert all(torch.equal(outputs[name], expected[name]) for name in expected)
    assert counter.frame_count == compiled > 0


def test_flops_of_compiled_blocks_are_those_of_eager_ones() -> None:
    """They are counted in eager code, because an operator of inductor is not counted."""
    spec = MODELS["clip"][0]
    calls: list[int] = []

    def compiler(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    compiled = model_of(spec, compiler).train()
    compiled(rows(spec))
    assert calls
    calls.clear()
    assert (
        model_flops_of_row(compiled, rows(spec), toy.FP32)
        == model_flops_of_row(model_of(spec), rows(spec), toy.FP32)
        > 0
    )
    assert not calls


@pytest.mark.parametrize("kind", MODELS)
def test_captions_padded_to_a_multiple_change_no_step(kind: str) -> None:
    spec, objective = MODELS[kind]
    spec = spec.model_copy(update={"inputs": spec.inputs.model_copy(update={"max_tokens": 40})})
    plan = SamplePlan(num_rows=6, global_batch_size=6, world_size=1, seed=1, steps=1)
    block, weights = next(recipe_models.caption_blocks(plan, 0)), []
    block["image"] = synthetic_batch(spec.inputs, VOCAB, 6, CPU)["image"].numpy()
    for multiple in (1, TOKEN_MULTIPLE):
        model = model_of(spec).double().eval()  # dropout masks depend on the length
        state = toy.train_state(model, objective=toy.objective(objective))
        [step] = iter_micro_batches([block], plan.rank_rows, 3, False, multiple, 40)
        assert all((batch["input_ids"].shape[1] == 16) == (multiple > 1) for batch in step)
        optimizer_step(state, make_local_batch(step), lambda index: index)
        weights.append(toy.flat(model))
    toy.assert_equal_weights(weights[1], weights[0])


@NEEDS_COMPILER
@pytest.mark.parametrize("branches", [(), ("image", "text")])
def test_inductor_draws_equal_dropout_with_and_without_gradients(branches: tuple[str, ...]) -> None:
    """Also if activations are recomputed in the backward."""
    model = model_of(WITH_DROPOUT, "inductor", activation_checkpointing=branches).train()
    with fork_seeded_rng(5, CPU), torch.no_grad():
        first = model(rows(WITH_DROPOUT))
    with fork_seeded_rng(5, CPU):
        second = model(rows(WITH_DROPOUT))
    with fork_seeded_rng(6, CPU):
        other = model(rows(WITH_DROPOUT))
    assert torch.allclose(first["text_embed"], second["text_embed"], rtol=0, atol=1e-5)
    assert not torch.allclose(other["text_embed"], second["text_embed"], rtol=0, atol=1e-2)


@NEEDS_COMPILER
def test_sample_recipe_compiles_nothing_after_the_first_epoch(tmp_path) -> None:
    """With captions of different lengths, a smaller last micro-batch and an evaluation in each
    epoch, which compiles nothing.
    """
    prepared = make_prepared(tmp_path / "set")
    recipe = recipes.load("sample")
    small = {
        "image": ImageTower(name="convnet", width=8, depth=1),
        "text": TextTower(width=16, depth=1, heads=4),
    }
    inputs = recipe.model.inputs.replace(image_side=16)
    config = recipe.replace(
        model=recipe.model.replace(**small, inputs=inputs, embed_dim=16),
        batch=Batch(micro=4, global_=11),  # two steps an epoch
        train=recipe.train.replace(steps=6, log_every=1, checkpoint_every=0, compile="inductor"),
        evaluate=recipe.evaluate.replace(every=2),
    )
    run_config(config, prepared, tmp_path / "run", prepared)
    graphs = [line["compile/graphs"] for line in lines(tmp_path / "run")]
    assert len(graphs) == 6 and graphs[-1] == graphs[1] >= graphs[0] > 0
