"""Each supported family against transformers: inputs, loss, and gradients for any batching of rows.

In float64 with random weights and a tokenizer trained on the spot.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmray.data.vlm.collate import join_media
from mmray.data.vlm.encoder import EncodedRow, MediaSize, ProcessorEncoder
from mmray.data.vlm.families import FAMILIES
from mmray.data.vlm.video import Clip
from mmray.engine.optimizer import freeze_parameters
from mmray.models.pretrained import pretrained_settings
from mmray.models.vlm.model import Vlm
from mmray.objectives.cross_entropy import IGNORE_INDEX
from tests.models.vlm import folders
from tests.models.vlm.rows import (
    FRAME_PIXELS,
    all_media,
    double_model,
    encode_rows,
    rows_of,
    settings,
    text,
)

AUDIO_COLUMNS = ("input_features", "feature_attention_mask")
# The tests of a family follow each other, and share its model.
ALL = pytest.mark.parametrize("family", folders.FAMILIES, scope="module")


@pytest.fixture(scope="module")
def model_of(folder_of):
    models: dict[str, Vlm] = {}

    def build(family: str) -> Vlm:
        if family not in models:
            models.clear()
            models[family] = double_model(folder_of(family))
        model = models[family]
        model.packed = model.family.packable
        model.zero_grad()
        return model

    return build


def gradients(model: Vlm, batches: list[Any], packed: bool) -> tuple[float, int, torch.Tensor]:
    """Loss sum, number of targets and the gradient of all weights of these micro-batches."""
    model.packed = packed
    model.zero_grad()
    collator = model.collator()
    loss = 0.0
    num_targets = 0
    for rows in batches:
        batch = collator(rows)
        output = model(batch)["loss_sum"]
        output.backward()
        loss += output.item()
        num_targets += len(batch["targets"])
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    assert all(weight.grad is not None for weight in weights)
    return loss, num_targets, torch.cat([weight.grad.flatten() for weight in weights])


def test_every_family_is_tested():
    assert set(folders.FAMILIES) == set(FAMILIES)


@ALL
def test_gradients_do_not_depend_on_how_rows_are_batched(family, model_of):
    model = model_of(family)
    rows = encode_rows(model.encoder)
    loss, num_targets, alone = gradients(model, [[row] for row in rows], packed=False)
    # Norms of Gemma are float32, and its masks change the order of sums before them.
    tolerance = 1e-7 if family == "gemma3" else 1e-9
    ways = {"padded": ([rows], False), "reordered": ([rows[::-1]], False)}
    if model.family.packable:
        ways |= {"packed": ([rows], True), "accumulated": ([rows[:2], rows[2:]], True)}
        # The first micro-batch is the dummy row.
        ways |= {"without rows": ([[], rows], True)}
    for name, (batches, packed) in ways.items():
        result = gradients(model, batches, packed)
        assert result[0] == pytest.approx(loss, rel=tolerance), name
        assert result[1] == num_targets, name
        assert (result[2] - alone).abs().max() < tolerance * alone.abs().max(), name


@ALL
def test_answers_of_a_pair_share_the_features_of_their_media(family, model_of):
    model = model_of(family)
    pairs = []
    for messages, media in rows_of(model.encoder):
        other = [*messages[:-1], messages[-1] | {"content": [text("There are three shapes.")]}]
        chosen, rejected = model.encoder.encode_all([messages, other], media)
        for each, turns in ((chosen, messages), (rejected, other)):
            alone = model.encoder.encode(turns, media)
            assert each.input_ids.tolist() == alone.input_ids.tolist()
            assert each.loss_weights.tolist() == alone.loss_weights.tolist()
        pairs.append(replace(chosen, rejected=rejected, reference=np.zeros(2)))
    factors = (1.0, -0.5)
    model.zero_grad()
    expected = []
    for row in pairs:
        for each, factor in zip(row.conversations, factors, strict=True):
            loss = model(model.collator()([each]))["loss_sum"]
            (factor * loss).backward()
            expected.append(-loss.item())
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    alone = torch.cat([weight.grad.flatten() for weight in weights])
    media = {name: len(each) for name, each in join_media(pairs).items()}
    times = 1 if model.family.shares_media else 2
    tolerance = 1e-7 if family == "gemma3" else 1e-9
    for packed in {False, model.family.packable}:
        for parts in ([pairs], [[], pairs[:1], pairs[1:]]):
            model.packed = packed
            model.zero_grad()
            collate = model.collator(pairs=True)
            found = []
            for part in parts:
                batch = collate(part)
                log_probs = model(batch)["log_probs"]
                assert log_probs.shape == (len(part), 2)
                (log_probs @ -torch.tensor(factors).double()).sum().backward()
                found += log_probs.flatten().tolist()
            if parts == [pairs]:
                assert media == {name: len(batch[name]) / times for name in media}
            assert found == pytest.approx(expected, rel=tolerance)
            gradient = torch.cat([weight.grad.flatten() for weight in weights])
            assert (gradient - alone).abs().max() < tolerance * alone.abs().max()


@ALL
def test_inputs_and_loss_equal_those_of_transformers(family, model_of):
    from transformers import AutoProcessor

    model = model_of(family)
    model.packed = False
    rows = encode_rows(model.encoder)
    loss, num_targets, _ = gradients(model, [rows], packed=False)
    processor = AutoProcessor.from_pretrained(model.encoder.weights)
    size = {"shortest_edge": FRAME_PIXELS, "longest_edge": FRAME_PIXELS}
    videos = {"size": size} if family in folders.OMNI else {}
    expected = 0.0
    for row, (messages, media) in zip(rows, rows_of(model.encoder), strict=True):
        inputs, columns = equal_inputs(model, processor, row, messages, media, videos)
        labels = torch.where(
            torch.from_numpy(row.loss_weights > 0), inputs["input_ids"], IGNORE_INDEX
        )
        num_items = torch.tensor(num_targets)
        if "audio" in model.encoder.kinds:  # its loss is the mean of a row
            output = model.net(**inputs | columns, labels=labels)
            expected += output.loss.item() * row.loss_weights.sum() / num_targets
            continue
        output = model.net(**inputs | columns, labels=labels, num_items_in_batch=num_items)
        expected += output.loss.item()
    # Losses of transformers are float32.
    assert loss / num_targets == pytest.approx(expected, rel=1e-6)


def equal_inputs(
    model: Vlm,
    processor: Any,
    row: EncodedRow,
    messages: list[Any],
    media: list[Any],
    videos_kwargs: dict[str, Any],
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The inputs of a row by a processor of transformers, and those of its encoders by mmray, which
    are equal up to rounding.
    """
    conversation = [
        message | {"content": [text(message["content"])]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
    prompt = processor.apply_chat_template(conversation)
    inputs = processor(
        text=[prompt],
        **media_arguments(media, videos_kwargs),
        return_tensors="pt",
        add_special_tokens=not prompt.startswith(processor.tokenizer.bos_token),
    )
    assert inputs["input_ids"][0].tolist() == row.input_ids.tolist()
    columns = {name: torch.from_numpy(column) for name, column in row.images.items()}
    assert set(columns) <= set(inputs)
    columns |= model._image_inputs(columns) if columns else {}
    if "video_second_per_grid" in columns:  # transformers has one frame rate for all videos
        clips = [each for each in media if isinstance(each, Clip)]
        inputs["video_second_per_grid"] = torch.tensor(
            [2 * (clip.times_s[1] - clip.times_s[0]) for clip in clips], dtype=torch.double
        )
    for name in columns:
        own = columns[name].double()
        # float16 of a log-mel spectrogram below 4.
        levels = 1e-3 if name == "input_features" else 0
        if name.startswith("pixel_values"):
            levels = 2 / 255 / 0.22
        if model.family.audio == "own" and name in AUDIO_COLUMNS:
            # transformers pads them with silence.
            assert not inputs["feature_attention_mask"][..., own.shape[-1] :].any()
            inputs[name] = inputs[name][..., : own.shape[-1]]
        assert own.shape == inputs[name].shape, name
        # Tiles of zeros are padding, which the model does not read.
        difference = (own - inputs[name]).where(inputs[name] != 0, 0)
        assert difference.abs().max() <= levels + 1e-6, name
    return inputs, columns


def media_arguments(media: list[Any], videos_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Media as arguments of transformers' processor."""
    clips = [each for each in media if isinstance(each, Clip)]
    arrays = [each for each in media if not isinstance(each, Clip)]
    audio = [each / 32768 for each in arrays if each.ndim == 1]
    images = [each for each in arrays if each.ndim == 3]
    arguments: dict[str, Any] = {"images": [images]} if images else {}
    if audio:
        arguments |= {"audio": audio, "audio_kwargs": {"sampling_rate": 16000}}
    if clips:
        steps = [clip.times_s[1] - clip.times_s[0] for clip in clips]
        metadata = [
            {
                "total_num_frames": len(clip.frames),
                "fps": 1 / step,
                "frames_indices": [time / step for time in clip.times_s],
            }
            for clip, step in zip(clips, steps, strict=True)
        ]
        arguments["videos"] = [clip.frames for clip in clips]
        arguments["videos_kwargs"] = {
            "video_metadata": metadata,
            "do_sample_frames": False,
        } | videos_kwargs
    return arguments


@pytest.mark.parametrize(
    "family", [name for name, each in FAMILIES.items() if each.mrope], scope="module"
)
def test_positions_are_those_that_transformers_computes(family, model_of):
    model = model_of(family)
    model.packed = False
    seen: list[Any] = []
    decoder = model.net.get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda _, args, inputs: seen.append(inputs["position_ids"]), with_kwargs=True
    )
    encoder = model.encoder
    rows = encode_rows(encoder)
    for number in range(1, len(encoder.kinds) + 1):
        for kinds in permutations(encoder.kinds, number):
            parts = [{"type": kind} for kind in kinds]
            media = [encoder.blank(kind, side=60, length_s=1.3) for kind in kinds]
            rows.append(encoder.encode_prompt([{"role": "user", "content": parts}], media))
    for row in rows:
        length = len(row.input_ids)
        batch = model.collator()([row])
        own = batch["position_ids"][:, 0, :length]
        inputs = join_media([row])
        inputs |= model._image_inputs(inputs)
        ids = batch["input_ids"][:1, :length]
        if model.family.token_types:
            inputs[model.family.token_types] = batch[model.family.token_types][:1, :length]
        model.net(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
        text = torch.arange(length)
        expected = seen[-1][-3:, 0] if seen[-1] is not None else text.expand(3, -1)
        assert torch.equal(own[0], text.to(own.dtype))
        assert torch.equal(own[1:], expected)
    hook.remove()


@ALL
def test_targets_are_the_answers_with_their_end(family, model_of):
    encoder = model_of(family).encoder
    tokens = [
        encoder.tokenizer.decode(row.input_ids[row.loss_weights > 0])
        for row in encode_rows(encoder)
    ]
    end = encoder.tokenizer.eos_token
    answers = ["two red", "a circle and a triangle", f"circle{end}blue"]
    if "video" in encoder.kinds:
        answers += ["circle", f"red{end}blue"]
    if "audio" in encoder.kinds and "video" in encoder.kinds:
        answers.append("blue")
    assert [each.replace(" ", "") for each in tokens] == [
        f"{answer}{end}".replace(" ", "") for answer in answers
    ]


@ALL
def test_tokens_are_counted_without_pixels(family, model_of):
    encoder = model_of(family).encoder
    for row, (messages, media) in zip(encode_rows(encoder), rows_of(encoder), strict=True):
        sizes = [
            MediaSize(*each.frames.shape[2:0:-1], each.times_s)
            if isinstance(each, Clip)
            else MediaSize(samples=len(each))
            if each.ndim == 1
            else MediaSize(each.shape[1], each.shape[0])
            for each in media
        ]
        assert encoder.count_tokens(messages, sizes) == len(row.input_ids)


@ALL
def test_answers_of_a_batch_equal_those_of_single_rows(family, model_of):
    model = model_of(family)
    rows = rows_of(model.encoder)
    prompts = [messages[:1] for messages, _ in rows]
    images = [[], rows[1][1], *(media[:2] for _, media in rows[2:])]
    together = model.answer(prompts, images, 4)
    alone = [model.answer([row], [each], 4)[0] for row, each in zip(prompts, images, strict=True)]
    assert together == alone
    assert model.packed == model.family.packable


@pytest.mark.parametrize("family", folders.OMNI, scope="module")
def test_thinker_of_a_whole_model_is_trained_and_saved(family, model_of, folder_of, tmp_path):
    from transformers import AutoConfig, AutoModelForMultimodalLM

    whole = tmp_path / "whole"
    shutil.copytree(folder_of(family), whole)
    config = json.loads((whole / "config.json").read_text())
    config = {"model_type": family.removesuffix("_thinker"), "thinker_config": config}
    (whole / "config.json").write_text(json.dumps(config))
    weights = load_file(whole / "model.safetensors")
    weights = {f"thinker.{name}": weight for name, weight in weights.items()}
    weights["talker.model.norm.weight"] = torch.ones(8)
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    assert AutoConfig.from_pretrained(whole).model_type == config["model_type"]

    expected = model_of(family).net.state_dict()
    Vlm(all_media(whole)).save_pretrained(str(tmp_path / "saved"))
    saved = AutoModelForMultimodalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.model_type == family
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight.double(), expected[name]), name
    assert pretrained_settings(str(whole))["kind"] == "vlm"
    freeze_parameters(Vlm(all_media(whole)), ("audio", "*.audio_tower.layers.*"))


@ALL
def test_saved_processor_has_the_limits_of_the_run(family, folder_of, tmp_path):
    """Also for weights whose files limit pixels by the names of earlier versions."""
    from transformers import AutoProcessor

    folder = folder_of(family)
    names = {"idefics3": "edge", "smolvlm": "edge", "internvl": "tiles"}
    budget = names.get(family, "size" if FAMILIES[family].mrope else "")
    limits: dict[str, Any] = {"frame_pixels": 3000, "frames": 4} if FAMILIES[family].video else {}
    limits |= {"max_pixels": 32 * 32 if budget == "edge" else 2 * 28 * 28} if budget else {}
    if family == "qwen2_5_vl":
        folder = shutil.copytree(folder, tmp_path / "old")
        config = json.loads((folder / "processor_config.json").read_text())
        size = config["image_processor"].pop("size")
        config["image_processor"] |= {"min_pixels": 1, "max_pixels": size["longest_edge"]}
        (folder / "processor_config.json").write_text(json.dumps(config))
    model = Vlm(settings(folder, **limits))
    arguments = model.save_pretrained(str(tmp_path / "out")).get("videos_kwargs", {})
    assert bool(arguments) == (family in folders.OMNI)
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    encoder = ProcessorEncoder(str(tmp_path / "out"), 500, **limits)
    sizes = []
    for messages, media in rows_of(model.encoder):
        row = model.encoder.encode(messages, media)
        equal_inputs(model, processor, row, messages, media, arguments)
        again = encoder.encode(messages, media)
        assert again.input_ids.tolist() == row.input_ids.tolist()
        for name, column in row.images.items():
            assert (again.images[name] == column).all()
        sizes.append(len(row.input_ids))
    unlimited = encode_rows(Vlm(all_media(folder)).encoder)
    assert (sizes != [len(row.input_ids) for row in unlimited]) == bool(limits)


@ALL
def test_saved_model_opens_in_transformers(family, model_of, tmp_path):
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    model = model_of(family)
    model.save_pretrained(str(tmp_path))
    saved = AutoModelForMultimodalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in model.net.state_dict().items():
        assert torch.equal(saved[name].double(), weight), name
    processor = AutoProcessor.from_pretrained(tmp_path)
    assert processor.chat_template == folders.TEMPLATES[family]
