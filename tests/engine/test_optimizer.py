"""Parameter groups, learning rates, and gradient clipping."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmray.config import Optimizer
from mmray.engine import optimizer, run_state
from mmray.engine.optimizer import (
    EagerAdamW,
    clip_gradients,
    grad_norm,
    step_on_device,
    steps_on_device,
)
from mmray.errors import UsageError
from tests.engine import toy

SECTION = Optimizer(lr=1.0, warmup_steps=4, final_lr_fraction=0.2, schedule="cosine")


def test_only_trainable_matrices_have_weight_decay():
    model = toy.Toy(batch_norm=True)
    model.image.layers[6].requires_grad_(False)
    groups = optimizer.build_optimizer(model, toy.OPTIMIZER).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay, *others = ({names[p] for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]
    assert decay == {
        "image.layers.2.weight",
        "text.words.weight",
        "text.blocks.0.1.weight",
        "text.blocks.1.weight",
    }
    assert decay.union(*others) == set(names.values()) - {
        "image.layers.6.weight",
        "image.layers.6.bias",
    }


def test_resumed_optimizer_has_the_state_of_the_checkpoint_and_the_settings_of_its_config():
    model = toy.Toy()
    before = optimizer.build_optimizer(
        model, toy.optimizer_settings(weight_decay=0.1, betas=(0.9, 0.98))
    )
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    before.step()
    after = optimizer.build_optimizer(
        model, toy.optimizer_settings(weight_decay=0.2, betas=(0.8, 0.95))
    )
    run_state.load_optimizer_state(model, after, run_state.optimizer_state(model, before))
    assert [group["weight_decay"] for group in after.param_groups][:2] == [0.2, 0.0]
    assert {tuple(group["betas"]) for group in after.param_groups} == {(0.8, 0.95)}
    assert all(
        torch.equal(after.state[weight]["exp_avg"], before.state[weight]["exp_avg"])
        for weight in after.state
    )
    assert after.state.keys() == before.state.keys() != set()


def test_last_matching_pattern_sets_the_learning_rate_also_after_resume():
    model = toy.Toy()
    section = toy.optimizer_settings(lr_multipliers=("image.*=0.1", "*.bias=2", "log_scale=1e-2"))
    adam = optimizer.build_optimizer(model, section)
    adam.load_state_dict(optimizer.build_optimizer(model, section).state_dict())
    optimizer.set_lr(adam, 0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {
        names[weight]: group["lr"] for group in adam.param_groups for weight in group["params"]
    }
    assert rates.keys() == set(names.values())
    assert rates["image.layers.2.weight"] == rates["image.layers.3.weight"] == 0.05
    assert rates["image.layers.2.bias"] == rates["text.blocks.1.bias"] == 1.0
    assert (rates["text.words.weight"], rates["log_scale"]) == (0.5, 0.005)
    with pytest.raises(
        UsageError,
        match=r"optimizer\.lr_multipliers: `vision\.\*` matches no parameter; .* log_scale",
    ):
        optimizer.build_optimizer(model, toy.optimizer_settings(lr_multipliers=("vision.*=0.1",)))


@pytest.mark.parametrize("patterns", [("vision.*",), ("*",)])
def test_invalid_freeze_pattern_is_refused(patterns):
    with pytest.raises(
        UsageError, match=r"optimizer\.freeze: .*(matches no parameter|leaves no trainable)"
    ):
        optimizer.freeze_parameters(toy.Toy(), patterns)


class Towers(nn.Module):
    """Two branches of three and two blocks between an embedding and a projection."""

    def __init__(self):
        super().__init__()
        self.image = self._tower(3)
        self.text = self._tower(2)

    def _tower(self, depth):
        parts = {
            "embed": nn.Linear(2, 2, bias=False),
            "blocks": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(depth)),
            "project": nn.Linear(2, 2, bias=False),
        }
        return nn.ModuleDict(parts)

    def branches(self):
        return {"image": self.image, "text": self.text}


def test_layer_decay_is_that_of_beit_per_branch():
    model = Towers()
    section = toy.optimizer_settings(layer_decay=("image=0.5",), lr_multipliers=("image.*=10",))
    adam = optimizer.build_optimizer(model, section)
    scales = {
        weight: group["lr_scale"] for group in adam.param_groups for weight in group["params"]
    }
    rates = {name: scales[weight] for name, weight in model.named_parameters()}
    assert rates == {
        "image.embed.weight": 10 / 16,
        "image.blocks.0.weight": 10 / 8,
        "image.blocks.1.weight": 10 / 4,
        "image.blocks.2.weight": 10 / 2,
        "image.project.weight": 10,
        **{name: 1.0 for name in rates if name.startswith("text.")},
    }
    with pytest.raises(UsageError, match=r"layer_decay: .*`imag`; did you mean `image`"):
        optimizer.build_optimizer(model, toy.optimizer_settings(layer_decay=("imag=0.5",)))


def test_last_blocks_of_a_locked_branch_train():
    model = Towers()
    optimizer.freeze_parameters(model, ("image[:-1]", "text[:-0]"))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained == ["image.blocks.2.weight", "image.project.weight", "text.project.weight"]
    with pytest.raises(UsageError, match=r"`text\[:-3\]`: the branch has only 2 blocks"):
        optimizer.freeze_parameters(model, ("text[:-3]",))


@pytest.mark.parametrize(
    ("schedule", "half", "last"),
    [("cosine", 0.6, 0.2), ("linear", 0.6, 0.2), ("constant", 1.0, 1.0), ("cooldown", 1.0, 0.2)],
)
def test_learning_rates_of_each_schedule(schedule, half, last):
    section = SECTION.replace(schedule=schedule)
    rates = [optimizer.lr_at(step, section, 12) for step in range(13)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert (rates[8], rates[12], optimizer.lr_at(40, section, 12)) == pytest.approx(
        (half, last, last)
    )
    assert rates[4:] == sorted(rates[4:], reverse=True)
    if schedule == "cooldown":
        # it falls in the last fifth of the eight steps
        assert rates[10:12] == pytest.approx([1.0, 0.7])


def test_schedule_without_warmup_and_run_shorter_than_warmup():
    assert optimizer.lr_at(0, SECTION.replace(warmup_steps=0), 10) == 1.0
    assert all(
        0 < optimizer.lr_at(step, SECTION, total) <= 1
        for total in (1, 4, 5)
        for step in range(total)
    )


def half_cosine(step, steps):
    return math.cos(math.pi * step / steps / 2)


def not_a_number(step, steps):
    return math.nan


def test_own_schedule_scales_the_rate_after_warmup():
    section = SECTION.replace(schedule=f"{__name__}:half_cosine")
    rates = [optimizer.lr_at(step, section, 12) for step in (3, 4, 8, 12)]
    assert rates == pytest.approx(
        [0.8, *(0.2 + 0.8 * half_cosine(step, 12) for step in (4, 8, 12))]
    )
    for name, message in (
        ("not_a_number", "returned nan for step 4 of 12"),
        ("absent", "cannot load `.*:absent`"),
    ):
        with pytest.raises(UsageError, match=rf"optimizer\.schedule: .*{message}"):
            optimizer.lr_at(4, SECTION.replace(schedule=f"{__name__}:{name}"), 12)


def take_steps(model, optimizers, steps=3):
    """Gradients are the weights' cosines, so they depend on earlier steps."""
    for _ in range(steps):
        for weight in model.parameters():
            weight.grad = weight.detach().cos()
        for each in optimizers:
            each.step()
    return toy.flat(model)


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    ours, theirs = toy.Branched(), toy.Branched()
    settings = toy.optimizer_settings(
        kind="muon", settings={"momentum": 0.8}, lr_multipliers=("text.*=0.5",)
    )
    built = optimizer.build_optimizer(ours, settings)
    optimizer.set_lr(built, 0.01)
    names = {parameter: name for name, parameter in ours.named_parameters()}
    groups = [
        (group, {names[weight] for weight in group["params"]}) for group in built.param_groups
    ]
    hidden = {name for group, members in groups if group["is_hidden"] for name in members}
    assert hidden == {
        "image.layers.2.weight",
        "image.layers.6.weight",
        "text.blocks.0.1.weight",
        "text.blocks.1.weight",
    }

    def select(is_hidden):
        return [
            {
                "params": list(
                    map(theirs.get_parameter, sorted(members, key=list(names.values()).index))
                )
            }
            | {name: group[name] for name in ("lr", "weight_decay")}
            for group, members in groups
            if group["is_hidden"] == is_hidden
        ]

    muon = torch.optim.Muon(select(True), momentum=0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(select(False), betas=settings.betas, eps=1e-6, fused=True)
    assert torch.equal(take_steps(ours, [built]), take_steps(theirs, [muon, adamw]))


def test_all_weights_can_be_hidden_or_none():
    """With adapters only, or of a model without hidden matrices."""
    for model in (nn.Linear(4, 3, bias=False), nn.LayerNorm(4)):
        built = optimizer.build_optimizer(model, toy.optimizer_settings(kind="muon"))
        assert not torch.equal(toy.flat(model), take_steps(model, [built]))


def test_heads_and_embeddings_are_not_hidden():
    model = nn.ModuleList(
        [
            nn.Embedding(20, 4),
            nn.Embedding(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 20),
            nn.Conv1d(4, 4, 1),
        ]
    )
    assert optimizer._hidden_matrices(model) == {model[2].weight}


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def test_gradients_are_zeroed_together():
    model = toy.Branched()
    built = optimizer.build_optimizer(model, toy.optimizer_settings())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    with Operators() as operators:
        built.zero_grad(set_to_none=False)
    assert (operators.names["_foreach_zero_"], operators.names["zero_"]) == (1, 0)
    assert not any(weight.grad.any() for weight in model.parameters())


class NoOptimizer:
    def __init__(self, groups, lr):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": f"{__name__}:NoOptimizer"}, "built a NoOptimizer, no torch.optim.Optimizer"),
        (
            {"kind": "torch.optim:SGD", "settings": {"momentun": 1}},
            "cannot build .*momentun.*; see optimizer.settings",
        ),
        ({"kind": "torch.optim:Absent"}, "cannot load `torch.optim:Absent`"),
    ],
)
def test_optimizer_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(UsageError, match=rf"optimizer\.kind: .*{message}"):
        optimizer.build_optimizer(toy.Toy(), toy.optimizer_settings(**changes))


def model_with_gradients():
    model = toy.Branched()
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    return model


def test_clipping_equals_torch():
    ours, theirs = model_with_gradients(), model_with_gradients()
    norm = optimizer.grad_norm(list(ours.parameters()))
    optimizer.clip_gradients(list(ours.parameters()), norm, 1.0)
    assert torch.equal(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0), norm)
    torch.testing.assert_close(toy.flat_gradient(ours), toy.flat_gradient(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_step_on_device_clips_as_the_plain_step(dtype: torch.dtype, max_norm: float) -> None:
    weights = []
    for on_device in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(5, 4).to(dtype)
        adam = EagerAdamW([{"params": list(model.parameters())}], lr=0.1)
        for step in range(4):
            for weight in model.parameters():
                weight.grad = torch.randn_like(weight) * 10**step
            parameters = list(model.parameters())
            norm = grad_norm(parameters)
            if on_device:
                assert steps_on_device(adam, parameters)
                step_on_device(adam, parameters, norm, max_norm)
                continue
            if 0 < max_norm < norm:
                clip_gradients(parameters, norm, max_norm)
            adam.step()
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(*weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_step_on_device_skips_gradients_that_are_not_finite(value: float) -> None:
    model = nn.Linear(5, 4)
    parameters = list(model.parameters())
    adam = EagerAdamW([{"params": parameters}], lr=0.1)
    states = []
    for bad in (1.0, value, 1.0):
        for weight in parameters:
            weight.grad = torch.ones_like(weight)
        parameters[0].grad[0, 0] = bad
        step_on_device(adam, parameters, grad_norm(parameters), 1.0)
        states.append(copy.deepcopy([adam.state_dict()["state"], model.state_dict()]))
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert states[2][0][0]["step"] == 2 and not torch.equal(
        states[2][1]["weight"], states[1][1]["weight"]
    )


def test_only_fused_adamw_steps_on_the_device() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    assert steps_on_device(EagerAdamW([{"params": weights}], lr=0.1), weights)
    assert not steps_on_device(EagerAdamW([{"params": weights}], lr=0.1, fused=False), weights)
    assert not steps_on_device(torch.optim.SGD(weights, lr=0.1), weights)
