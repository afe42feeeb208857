"""Adapters on encoders of images and on weights in 4 bits, against a loop of peft."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mmray
from mmray.config import Config, Data, Evaluate, Lora, Objective, Train
from mmray.config import Vlm as VlmConfig
from mmray.engine.checkpoint import files, state_io
from mmray.engine.collectives import Group
from mmray.errors import UsageError
from mmray.models import lora
from mmray.models.build import build
from mmray.models.export.vlm import export_vlm
from mmray.training.driver import check_classes
from mmray.training.evaluate_export import export_model
from mmray.training.saved_model import load_model, open_run
from mmray.training.validate import unsupported_reasons
from tests.models.vlm import token_runs
from tests.models.vlm.rows import ROWS, text
from tests.training.runs import lines

STEPS = 3
FAMILIES = pytest.mark.parametrize(
    ("family", "pattern"), [("qwen3_vl", "*.qkv"), ("llava", "*.q_proj"), ("internvl", "*.q_proj")]
)


def steps(parameters: Any, loss_of: Any) -> list[float]:
    """Losses of STEPS steps of SGD."""
    weights = [each for each in parameters if each.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    losses = []
    for _ in range(STEPS):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def own_model(folder: Any, pattern: str, **settings: Any) -> tuple[Any, VlmConfig]:
    """A model with adapters in the language model and the encoder, and a frozen projector."""
    section = Lora(rank=2, targets=("*.v_proj",), encoder_targets=(pattern,), **settings)
    spec = VlmConfig(weights=str(folder), lora=section)
    torch.manual_seed(0)
    model = build(spec, 0)
    for name in model.parameter_parts()["projector"]:
        model.get_parameter(name).requires_grad_(False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B" in name:  # zero, so that lora_A had no gradient in the first step
                weight.normal_(0, 0.1)
    return model.to("cpu").train(), spec


def own_loss(model: Any) -> Any:
    rows = [model.encoder.encode(messages, images) for messages, images in ROWS]
    batch = model.collator()(rows)
    return model(batch)["loss_sum"] / len(batch["targets"])


def peft_steps(model: Any, folder: Any, start: dict[str, torch.Tensor], **options: Any) -> Any:
    """The losses and the model of peft after the same steps: a forward of each row."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    net = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32, **options)
    for layer in net.modules():  # bitsandbytes packs no layers as small as these for AVX-512
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    targets = [name.partition(".lora_A")[0] for name in start if ".lora_A" in name]
    theirs: Any = get_peft_model(net, LoraConfig(r=2, lora_alpha=16, target_modules=targets))
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in start.items():
            weights[f"base_model.model.{name}"].copy_(weight)
    rows = []
    for messages, images in ROWS:
        turns = [
            turn | {"content": [text(turn["content"])]}
            if isinstance(turn["content"], str)
            else turn
            for turn in messages
        ]
        inputs = processor(
            text=[processor.apply_chat_template(turns)],
            images=[images] if images else None,
            return_tensors="pt",
        )
        row = model.encoder.encode(messages, images)
        assert inputs["input_ids"][0].tolist() == row.input_ids.tolist()
        mask = torch.from_numpy(row.loss_weights > 0)
        rows.append((inputs, torch.where(mask, inputs["input_ids"], -100)))
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in rows)

    def loss() -> Any:
        number = torch.tensor(count)
        return sum(
            theirs(**inputs, labels=labels, num_items_in_batch=number).loss
            for inputs, labels in rows
        )

    return steps(theirs.parameters(), loss), theirs


def adapters_of(net: Any) -> dict[str, torch.Tensor]:
    return {
        name: weight.detach().clone() for name, weight in net.named_parameters() if ".lora_" in name
    }


@FAMILIES
@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "4 bits"])
def test_three_steps_equal_those_of_peft(family, pattern, quantized, folder_of, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    folder = folder_of(family)
    if quantized:
        pytest.importorskip("bitsandbytes")
    model, spec = own_model(folder, pattern, load_in_4bit=quantized)
    if quantized:
        kept = [
            name.rpartition(".")[0].removeprefix("net.")
            for name in model.parameter_parts()["projector"]
        ]
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=["lm_head", *kept],
        )
    start = adapters_of(model.net)
    in_encoder = {name for name in start if name in str(model.parameter_parts()["vision"])}
    assert in_encoder and len(in_encoder) < len(start)
    losses = steps(model.parameters(), lambda: own_loss(model))
    expected, theirs = peft_steps(model, folder, start, **options)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    trained = adapters_of(model.net)
    for name, weight in adapters_of(theirs.base_model.model).items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-3, atol=1e-5)
        assert not torch.equal(trained[name], start[name])
    if quantized:
        return
    out = export_vlm(model, spec.model_dump(mode="json"), tmp_path / "out", adapters_only=True)
    theirs.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs" / lora.ADAPTERS)
    torch.testing.assert_close(load_file(out / lora.ADAPTERS), saved, rtol=1e-3, atol=1e-5)
    base = AutoModelForMultimodalLM.from_pretrained(folder)
    opened: Any = PeftModel.from_pretrained(base, str(out))
    assert adapters_of(opened.base_model.model).keys() == trained.keys()
    model.net = opened.base_model.model
    assert own_loss(model).item() == pytest.approx(losses[-1], rel=0.2)


def test_pattern_of_encoders_without_a_match_is_refused(folder_of):
    section = Lora(rank=2, encoder_targets=("*.query",))
    with pytest.raises(
        UsageError, match=r"model.lora.encoder_targets: `\*.query` matches no .*qkv"
    ):
        build(VlmConfig(weights=str(folder_of("qwen3_vl")), lora=section), 0)


def test_quantized_run_resumes_evaluates_and_exports_with_names_of_the_start(folder_of, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForMultimodalLM

    base = folder_of("internvl")
    token_runs.make_prepared(tmp_path / "set")

    def train(name: str, checkpoint: Any = None) -> Any:
        config = token_runs.config_of(base, str(tmp_path / "set"), tmp_path / name, log_every=1)
        section = Lora(rank=2, load_in_4bit=True)
        config = config.replace(model=config.model.replace(lora=section))
        token_runs.run(config, Group(), checkpoint)
        return tmp_path / name

    whole = train("whole")
    saved = state_io.load(whole / "checkpoints" / "step-6")["model"]
    assert all(".lora_" in name or "projector" in name for name in saved)
    resumed = train("resumed", whole / "checkpoints" / "step-3")
    for name, weight in state_io.load(resumed / "checkpoints" / "step-6")["model"].items():
        assert torch.equal(weight, saved[name]), name
    losses = [line["train/loss"] for line in lines(whole)]
    assert losses[-1] < losses[0]
    config, _, checkpoint = open_run(whole, None)
    assert files.step_of(checkpoint) == token_runs.STEPS
    quantized = load_model(config, checkpoint).to("cpu").eval()
    weight = quantized.net.get_decoder().layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.uint8 and weight.numel() * 2 == 96 * 64
    plain = AutoModelForMultimodalLM.from_pretrained(base)
    out = export_model(whole, tmp_path / "export")
    exported = AutoModelForMultimodalLM.from_pretrained(str(out))
    shapes = {name: each.shape for name, each in plain.state_dict().items()}
    assert {name: each.shape for name, each in exported.state_dict().items()} == shapes
    changed = {
        name
        for name, each in exported.state_dict().items()
        if not torch.equal(each, plain.state_dict()[name])
    }
    assert all("q_proj" in name or "v_proj" in name or "projector" in name for name in changed)
    adapters = mmray.load(export_model(whole, tmp_path / "adapters", adapters_only=True))
    turns = [{"role": "user", "content": "How many?"}]
    assert adapters.answer(turns, [], 5) == mmray.load(out).answer(turns, [], 5)


def test_quantized_layer_computes_in_the_precision_of_autocast():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from mmray.models.four_bits import FourBitLinear

    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 32)
    layer = FourBitLinear(plain).to("cpu")
    inputs = torch.randn(8, 64)
    expected = torch.nn.functional.linear(
        inputs,
        bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state),
        plain.bias,
    )
    torch.testing.assert_close(layer(inputs), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(inputs)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=0.05)


def test_settings_that_four_bits_do_not_suit_are_refused(folder_of, monkeypatch, tmp_path):
    def config(model: dict[str, Any], **train: Any) -> Config:
        objective = Objective(kind="dpo" if "tokens" in train else "language_modelling")
        train.pop("tokens", None)
        return Config(
            model=VlmConfig(**{"weights": str(folder_of("internvl"))} | model),
            objective=objective,
            data=Data(train=str(tmp_path)),
            train=Train(**{"steps": 1} | train),
            evaluate=Evaluate(),
        )

    adapted = {"lora": Lora(rank=2, load_in_4bit=True)}
    cases = [
        (config({"lora": Lora(load_in_4bit=True)}), "set --model.lora.rank"),
        (config(adapted, ema=0.9), "needs --train.ema 0"),
        (config(adapted, compile="inductor"), "needs --train.compile none"),
        (config(adapted, parallel="fsdp"), "needs --train.parallel ddp"),
        (config(adapted, tokens=1), "needs --objective.reference adapters_off"),
    ]
    for wrong, expected in cases:
        [reason] = [each for each in unsupported_reasons(wrong) if "4bit" in each]
        assert expected in reason
    assert not [each for each in unsupported_reasons(config(adapted)) if "4bit" in each]
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("mmray.plugins.find_spec", lambda name: None if "bits" in name else name)
    with pytest.raises(
        UsageError, match=r"load_in_4bit: needs bitsandbytes.*mmray\[bitsandbytes\]"
    ):
        check_classes(config(adapted))
    with pytest.raises(UsageError, match="load_in_4bit: needs bitsandbytes"):
        build(config(adapted).model, 0)
