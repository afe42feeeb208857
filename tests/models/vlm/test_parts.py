"""Adapters, frozen parts, activation checkpointing, the check of packed rows, and exports."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch.nn.attention import varlen

import mmray
from mmray.config import Lora
from mmray.config import Vlm as VlmConfig
from mmray.engine.optimizer import build_optimizer, freeze_parameters
from mmray.engine.parallel.transforms import checkpoint_activations
from mmray.errors import DataError, UsageError
from mmray.models import lora
from mmray.models.build import build
from mmray.models.export.vlm import Conversations, export_vlm
from mmray.models.protocol import saved_layers
from mmray.models.vlm import attention
from mmray.models.vlm.model import Vlm
from mmray.training.saved_model import interpolate_from_start
from tests.engine.fake_cuda import DEVICES, fake_gpus
from tests.engine.toy import optimizer_settings
from tests.models.vlm import folders
from tests.models.vlm.rows import ROWS, double_model, encode_rows, settings

FAMILIES = pytest.mark.parametrize("family", folders.FAMILIES)


def gradients(model):
    model.zero_grad()
    model(model.collator()(encode_rows(model.encoder)))["loss_sum"].backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@FAMILIES
def test_adapters_are_in_the_language_model_and_the_projector_is_trained(family, folder_of):
    model = Vlm(settings(folder_of(family)))
    before = model(model.collator()(encode_rows(model.encoder)))["loss_sum"]
    projector = model.parameter_parts()["projector"]
    trainable = {name for name in projector if model.get_parameter(name).requires_grad}
    lora.add_adapters(model, Lora(rank=2))
    trained = set(gradients(model))
    assert {name for name in trained if "lora_" not in name} == trainable
    adapters = {name for name in trained if "lora_" in name}
    assert len(adapters) == 2 * 2 * 2  # layers, targets, matrices
    assert adapters <= set(model.parameter_parts()["language"])
    with torch.no_grad():
        for name in adapters:
            model.get_parameter(name).normal_(0, 0.5)
    adapted = model(model.collator()(encode_rows(model.encoder)))["loss_sum"]
    merged = lora.merge_adapters(model)
    result = merged(model.collator()(encode_rows(model.encoder)))["loss_sum"]
    assert adapted.item() != pytest.approx(before.item(), rel=1e-6)
    assert result.item() == pytest.approx(adapted.item(), rel=1e-5)


@FAMILIES
def test_parts_are_frozen_by_name_and_have_their_own_learning_rate(family, folder_of):
    model = Vlm(settings(folder_of(family)))
    parts = model.parameter_parts()
    assert sorted(name for part in parts.values() for name in part) == sorted(
        name for name, _ in model.named_parameters()
    )
    optimizer = build_optimizer(
        model, optimizer_settings(lr_multipliers=("vision=0.1", "projector=5"))
    )
    scales = {
        id(weight): group["lr_scale"]
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    for part, names in parts.items():
        weights = [model.get_parameter(name) for name in names]
        scale = {"vision": 0.1, "projector": 5.0}.get(part, 1.0)
        assert {scales[id(each)] for each in weights if each.requires_grad} == {scale}
    assert ("audio" in parts) == (family in folders.OMNI)
    freeze_parameters(model, tuple(parts.keys() - {"projector"}))
    expected = {name for name in parts["projector"] if model.get_parameter(name).requires_grad}
    assert set(gradients(model)) == expected


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_omni_moe_thinker"])
def test_recomputed_activations_give_the_same_gradients(family, folder_of):
    model = double_model(folder_of(family))
    expected = gradients(model)
    for branch in model.branches().values():
        checkpoint_activations(branch)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, expected[name]), name


def test_packed_rows_that_attend_to_each_other_are_found(folder_of, monkeypatch):
    model = Vlm(settings(folder_of("internvl")))
    assert not model.differs_if_packed()

    def causal(module, query, key, value, mask, cu_seq_lens_q, max_length_q, **options):
        whole = cu_seq_lens_q[[0, -1]]
        return attention.packed_attention(
            module, query, key, value, mask, whole, max_length_q, **options
        )

    monkeypatch.setitem(
        attention.AttentionInterface._global_mapping, attention.PACKED_ATTENTION, causal
    )
    assert model.differs_if_packed()


@pytest.mark.parametrize("groups_heads", [True, False])
def test_kernel_of_torch_before_2_12_gets_as_many_key_heads_as_heads(monkeypatch, groups_heads):
    """Both kernels, in place of torch's, attend row by row."""

    def attend(query, key, value, cu, _, max_q, max_k, scale=None, window_size=(-1, -1)):
        assert query.shape == key.shape == value.shape
        sizes = cu.diff().tolist()
        parts = [part.transpose(0, 1).float().split(sizes, 1) for part in (query, key, value)]
        rows = [
            F.scaled_dot_product_attention(*row, is_causal=window_size == (-1, 0), scale=scale)
            for row in zip(*parts, strict=True)
        ]
        return torch.cat(rows, 1).transpose(0, 1).to(query.dtype)

    def attend_groups(query, key, value, *sizes, enable_gqa=False, **options):
        assert enable_gqa
        key, value = (part.repeat_interleave(2, 1) for part in (key, value))
        return attend(query, key, value, *sizes, **options)

    shapes = [(1, heads, 7, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    boundaries = torch.tensor([0, 3, 7], dtype=torch.int32)
    expected, _ = attention.packed_attention(None, *inputs, None, boundaries, 4)
    monkeypatch.setattr(attention, "VARLEN_GROUPS_HEADS", groups_heads)
    monkeypatch.setattr(varlen, "varlen_attn", attend_groups if groups_heads else attend)
    with fake_gpus(monkeypatch):
        on_gpu = [each.to(DEVICES[0]) for each in (*inputs, boundaries)]
        result, _ = attention.packed_attention(None, *on_gpu[:3], None, on_gpu[3], 4)
        assert torch.allclose(result.cpu(), expected, atol=0.02)


def test_export_opens_in_transformers_and_answers(folder_of, tmp_path):
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    config = VlmConfig(weights=str(folder_of("qwen3_vl")))
    model = Vlm(config)
    out = export_vlm(model, config.model_dump(mode="json"), tmp_path / "out")
    export_vlm(model, config.model_dump(mode="json"), tmp_path / "out")  # replaces it
    AutoModelForMultimodalLM.from_pretrained(out)
    AutoProcessor.from_pretrained(out)
    messages = ROWS[1][0][:1]
    image = Image.fromarray(ROWS[1][1][0])
    image.save(tmp_path / "a.png")
    expected = model.answer([messages], [[image]], 5)
    loaded = mmray.load(out)
    assert [loaded.answer(messages, [image], 5)] == expected
    assert loaded.answer([messages, ROWS[0][0][:1]], [[tmp_path / "a.png"], []], 5)[:1] == expected
    with pytest.raises(UsageError, match="1 image parts, the row 0 images"):
        loaded.answer(messages, [])
    # As `mmray prepare` reads them.
    asked = ROWS[1][0][0]["content"][1]["text"]
    own = [{"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}}]
    own.append({"type": "text", "text": asked})
    assert [loaded.answer([{"role": "user", "content": own}], [], 5)] == expected
    turns = [{"from": "human", "value": f"<image>\n{asked}"}]
    assert [loaded.answer(turns, [image], 5)] == expected


def adapted_model(folder, base, **settings_of_lora):
    """A model with random adapters and other trained weights on weights that were saved to `base`,
    and its settings.
    """
    Vlm(settings(folder)).save_pretrained(str(base))
    config = VlmConfig(weights=str(base), lora=Lora(rank=2, **settings_of_lora))
    model = build(config, 0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model, config


def loss_of(model, net=None):
    if net is not None:
        model.net = net
    return model(model.collator()(encode_rows(model.encoder)))["loss_sum"].item()


@pytest.mark.parametrize(
    ("family", "train"),
    [
        ("qwen3_vl", ""),
        ("internvl", ""),
        (folders.OMNI[1], ""),
        ("qwen3_vl", "embed_tokens"),  # tied
        ("gemma3", "embed_tokens"),  # tied and scaled
        ("qwen2_5_vl", "embed_tokens|lm_head"),
    ],
)
def test_exported_adapters_open_in_peft_and_answer(family, train, folder_of, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    base = tmp_path / "base"
    model, config = adapted_model(folder_of(family), base, train=train)
    expected = loss_of(model)
    spec = config.model_dump(mode="json")
    out = export_vlm(model, spec, tmp_path / "out", adapters_only=True)
    assert not (out / "model.safetensors").exists()
    loaded = mmray.load(out)
    assert loss_of(loaded.model) == pytest.approx(expected, rel=1e-6)
    messages, images = [ROWS[1][0][:1]], [[Image.fromarray(ROWS[1][1][0])]]
    assert loaded.answer(messages, images, 5) == model.answer(messages, images, 5)
    # peft puts the adapters and what was trained fully on the saved model.
    theirs = PeftModel.from_pretrained(AutoModelForMultimodalLM.from_pretrained(base), str(out))
    plain = Vlm(settings(base))
    assert loss_of(plain, theirs.base_model.model) == pytest.approx(expected, rel=1e-5)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    reopened = AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged")
    assert loss_of(plain, reopened) == pytest.approx(expected, rel=1e-5)
    export_vlm(lora.merge_adapters(model), spec, tmp_path / "export")
    exported = AutoModelForMultimodalLM.from_pretrained(tmp_path / "export")
    assert loss_of(plain, exported) == pytest.approx(expected, rel=1e-5)


@FAMILIES
def test_export_has_the_names_and_shapes_of_its_source(family, folder_of, tmp_path):
    """Programs such as vLLM open it by them."""
    source = folder_of(family)
    out = export_vlm(Vlm(settings(source)), {}, tmp_path / "out")
    shapes = [
        {
            name: tuple(weight.shape)
            for file in folder.glob("*.safetensors")
            for name, weight in load_file(file).items()
        }
        for folder in (source, out)
    ]
    assert shapes[0] == shapes[1] and len(shapes[0]) > 10
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, out)]
    for name in ("model_type", "architectures"):
        assert configs[0][name] == configs[1][name]


def test_bare_parameter_needs_a_merged_export(folder_of, tmp_path):
    model, config = adapted_model(folder_of("llava_next"), tmp_path / "base")
    with pytest.raises(UsageError, match=r"image_newline.*without --adapters"):
        export_vlm(model, config.model_dump(mode="json"), tmp_path / "out", adapters_only=True)
    assert not (tmp_path / "out").exists()


def test_output_layer_gets_no_adapter(folder_of):
    """The loss in chunks reads its weight, so its adapter would never train."""
    base = VlmConfig(weights=str(folder_of("qwen2_5_vl")))
    model = build(base.replace(lora=Lora(rank=2, targets=("*",))), 0)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable == set(gradients(model))
    with pytest.raises(UsageError, match=r"`\*lm_head` matches no linear layer"):
        build(base.replace(lora=Lora(rank=2, targets=("*lm_head",))), 0)


@FAMILIES
def test_interpolated_weights_lie_between_start_and_end(family, folder_of):
    """Each weight once, tied ones too."""
    config = VlmConfig(weights=str(folder_of(family)))
    model = build(config, 0)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    interpolate_from_start(model, config, 0.25)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, start[name] + 0.25)


def test_interpolation_from_a_random_start_is_refused(folder_of, tmp_path):
    config = VlmConfig(weights=str(tmp_path))
    for file in folder_of("internvl").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    with pytest.raises(UsageError, match=r"--interpolate needs .* this run has random ones"):
        interpolate_from_start(build(config, 0), config, 0.5)


def test_export_to_object_store_answers_after_a_failed_upload(folder_of, s3, tmp_path):
    config = VlmConfig(weights=str(folder_of("qwen3_vl")))
    spec = config.model_dump(mode="json")
    model = Vlm(config)
    address = f"{s3.address}/model"
    s3.fail("PUT", "model.safetensors", 1000, status=400)
    with pytest.raises(UsageError, match="cannot write the exported model s3://"):
        export_vlm(model, spec, address)
    s3.fail("PUT", "model.safetensors", 0)
    out = export_vlm(model, spec, address)
    messages = ROWS[0][0][:1]
    assert mmray.load(str(out)).answer(messages, [], 5) == model.answer([messages], [[]], 5)[0]


def transparent():
    pixels = np.full((4, 6, 4), 10, np.uint8)
    pixels[..., 3] = [0, 0, 0, 255, 255, 255]
    return Image.fromarray(pixels), "PNG", np.where(pixels[..., 3:] == 0, 255, 10)


def sixteen_bits():
    return Image.fromarray(np.full((4, 6), 32768, np.uint16)), "PNG", np.full((4, 6, 3), 128)


def rotated():
    image = Image.fromarray(np.repeat([[[255] * 3, [0] * 3]], 4, 0).astype(np.uint8))
    image.getexif()[0x0112] = 6  # turned right by a quarter
    return image, "TIFF", np.repeat([[[255] * 3], [[0] * 3]], 4, 1)


@pytest.mark.parametrize("make", [transparent, sixteen_bits, rotated])
def test_files_are_decoded_as_in_training(make, tmp_path):
    image, suffix, expected = make()
    file = tmp_path / f"a.{suffix.lower()}"
    image.save(file, suffix, exif=image.getexif())
    given = []

    def answer(conversations, media, _):
        given.extend(media[0])
        return [""]

    model = Conversations(SimpleNamespace(answer=answer))
    model.answer([{"role": "user", "content": "what"}], [file, file.read_bytes(), Image.open(file)])
    for pixels in given:
        assert pixels.tolist() == np.broadcast_to(expected, (*expected.shape[:2], 3)).tolist()
    with pytest.raises(DataError, match=r"image 1 \(.*none.png\): No such file"):
        model.answer([{"role": "user", "content": "what"}], [file, str(tmp_path / "none.png")])


def test_fields_of_parts_that_an_answer_does_not_use_are_named(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    part = {"type": "image", "image": str(tmp_path / "a.png"), "max_pixels": 4}
    model = Conversations(SimpleNamespace(answer=lambda *_: [""]))
    with pytest.warns(UserWarning, match="`max_pixels` of a content part is not used"):
        model.answer([{"role": "user", "content": [part]}])


@pytest.mark.parametrize("family", [folders.OMNI[0], "qwen2_5_vl"])
def test_limit_that_a_processor_cannot_keep_is_named(family, folder_of, tmp_path):
    config = VlmConfig(weights=str(folder_of(family)))
    config = config.replace(inputs=config.inputs.replace(frames=4, frame_pixels=5000))
    lines = []
    out = export_vlm(
        Vlm(config),
        config.model_dump(mode="json"),
        tmp_path / "out",
        log=lambda *a: lines.append(a),
    )
    size = "{'videos_kwargs': {'size': {'shortest_edge': 5000, 'longest_edge': 5000}}}"
    assert [label for line, label in lines if size in line] == ["warning"] * (
        family != "qwen2_5_vl"
    )
    assert (size in (out / "README.md").read_text()) == bool(lines)


def test_export_of_a_run_has_the_generation_settings_of_its_weights(folder_of, tmp_path):
    """A run's checkpoint has none, and its model is built without reading the weights."""
    folder = shutil.copytree(folder_of("qwen3_vl"), tmp_path / "base")
    settings = {"eos_token_id": [1, 2], "repetition_penalty": 1.25}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = VlmConfig(weights=str(folder))
    model = build(config, 0, saved_layers(Vlm(config).architecture()))
    out = export_vlm(model, config.model_dump(mode="json"), tmp_path / "out")
    exported = json.loads((out / "generation_config.json").read_text())
    assert exported | settings == exported


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_call_of_the_model_card_gives_the_answer_of_load(family, folder_of, tmp_path, monkeypatch):
    """Processor, chat template and generation settings come from the export alone."""
    config = VlmConfig(weights=str(folder_of(family)))
    out = export_vlm(Vlm(config), config.model_dump(mode="json"), tmp_path / "out")
    files = {file.name for file in out.iterdir()}
    assert {"chat_template.jinja", "generation_config.json"} <= files
    monkeypatch.chdir(tmp_path)
    image = Image.fromarray(ROWS[1][1][0])
    image.save("photo.jpg")
    names = {}
    exec((out / "README.md").read_text().split("```python\n")[1].split("```")[0], names)
    content = [{"type": "image"}, {"type": "text", "text": "What is in the image?"}]
    messages = [{"role": "user", "content": content}]
    answer = mmray.load(out).answer(messages, [Image.open("photo.jpg")], 64)
    assert names["answer"].strip() == answer.strip() and answer


def test_export_refuses_a_folder_of_something_else(folder_of, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an exported model"):
        export_vlm(SimpleNamespace(), {}, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_weights_of_the_hub_format_define_the_model_kind(folder_of):
    from mmray.models.pretrained import pretrained_settings

    found = pretrained_settings(str(folder_of("internvl")))
    assert found["kind"] == "vlm"
    assert json.dumps(found)
