"""Loss masks, refused rows and models, pixel budgets, and the memory of a data process."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from mmray.data.store.stored_row import Media, Row
from mmray.data.vlm.chat_template import RowError
from mmray.data.vlm.encoder import MediaSize, ProcessorEncoder
from mmray.data.vlm.token_counter import ProcessorCounter
from mmray.errors import UsageError
from tests.models.vlm.folders import OMNI, TEMPLATES
from tests.models.vlm.rows import IMAGE, ROWS, encode_rows, photo, text

QUESTION = {"role": "user", "content": [IMAGE, text("Which shape?")]}
ANSWER = {"role": "assistant", "content": "circle"}


def test_marks_of_a_template_and_its_prefixes_give_the_same_targets(folder_of, copy_of):
    marked = ProcessorEncoder(str(folder_of("llava")), 500)
    template = TEMPLATES["llava"]
    for mark in ("{% generation %}", "{% endgeneration %}"):
        template = template.replace(mark, "")
    by_prefix = ProcessorEncoder(str(copy_of("llava", template)), 500)
    for own, other in zip(encode_rows(marked), encode_rows(by_prefix), strict=True):
        assert own.loss_weights.tolist() == other.loss_weights.tolist()


def test_template_whose_answers_cannot_be_found_is_an_error_with_advice(copy_of):
    """It puts the number of messages first, and has no header for the next answer."""
    template = "{{ messages | length }}" + TEMPLATES["qwen3_vl"].replace("add_generation_", "")
    encoder = ProcessorEncoder(str(copy_of("qwen3_vl", template)), 500)
    with pytest.raises(UsageError, match=r"generation %\}.*chat_template.jinja"):
        encode_rows(encoder)


def test_answers_are_found_by_their_header(folder_of, copy_of):
    """A template that puts the number of messages first does not keep the text of its start."""
    plain = ProcessorEncoder(str(folder_of("qwen3_vl")), 500)
    template = "{{ messages | length }}" + TEMPLATES["qwen3_vl"]
    counted = ProcessorEncoder(str(copy_of("qwen3_vl", template)), 500)
    for messages, media in ROWS:
        own, other = (each.encode(messages, media) for each in (plain, counted))
        assert own.input_ids[own.loss_weights > 0].tolist() == (
            other.input_ids[other.loss_weights > 0].tolist()
        )


def test_row_over_max_tokens_is_refused_with_its_count(folder_of):
    encoder = ProcessorEncoder(str(folder_of("qwen3_vl")), 500)
    count = len(encoder.encode(*ROWS[2]).input_ids)
    encoder.max_tokens = count
    encoder.encode(*ROWS[2])
    encoder.max_tokens = count - 1
    with pytest.raises(RowError, match=f"{count} tokens exceed .* {count - 1}") as error:
        encoder.encode(*ROWS[2])
    assert error.value.reason == "tokens"


@pytest.mark.parametrize(
    ("messages", "images", "reason"),
    [
        ([QUESTION, ANSWER], [], "images"),
        ([QUESTION, ANSWER], [photo(60, 60)] * 2, "images"),
        ([QUESTION], [photo(60, 60)], "messages"),
        ([QUESTION, ANSWER], [photo(2, 4000)], "image"),
    ],
)
def test_row_that_does_not_fit_is_refused_with_a_reason(folder_of, messages, images, reason):
    encoder = ProcessorEncoder(str(folder_of("qwen3_vl")), 500)
    with pytest.raises(RowError) as error:
        encoder.encode(messages, images)
    assert error.value.reason == reason


ADDED = ("<|box_start|>", "<|box_end|>", "<act_1>")


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llava", "internvl", "idefics3"])
def test_added_tokens_and_white_space_are_targets_as_in_transformers(family, copy_of):
    from transformers import AutoProcessor, AutoTokenizer

    folder = copy_of(family, TEMPLATES[family])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(ADDED), special_tokens=True)
    tokenizer.save_pretrained(folder)
    encoder = ProcessorEncoder(str(folder), 500)
    answer = "    <|box_start|>(1,2)<|box_end|>\tcircle\r\n<act_1>  \n"
    messages = [
        {"role": "user", "content": [IMAGE, text("  Which shape? ")]},
        {"role": "assistant", "content": [text(answer)]},
    ]
    row = encoder.encode(messages, [photo(60, 60)])
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(
        text=processor.apply_chat_template(messages, tokenize=False),
        images=[photo(60, 60)],
        add_special_tokens=not processor.tokenizer.bos_token
        or "bos_token" not in TEMPLATES[family],
    )
    assert row.input_ids.tolist() == inputs["input_ids"][0]
    targets = row.input_ids[row.loss_weights > 0].tolist()
    assert not set(processor.tokenizer.convert_tokens_to_ids(ADDED)) - set(targets)
    expected = answer.strip() if "trim" in TEMPLATES[family] else answer
    assert encoder.decode(targets).endswith(expected)  # a space before it may be the template's


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("qwen3_vl", {"<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<bos>"}),
        ("gemma3", {"<start_of_turn>", "<end_of_turn>", "<end_of_image>", "<image_soft_token>"}),
        ("idefics3", {"<image>", "<fake_token_around_image>", "<end_of_utterance>"}),
        ("internvl", {"<img>", "</img>", "<IMG_CONTEXT>", "<|im_end|>"}),
        ("qwen2_audio", {"<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>"}),
    ],
)
def test_tokens_of_turns_and_media_are_reserved(folder_of, family, tokens):
    encoder = ProcessorEncoder(str(folder_of(family)), 500)
    assert tokens <= set(encoder.reserved_tokens)


def test_reserved_tokens_in_a_text_are_removed(folder_of):
    encoder = ProcessorEncoder(str(folder_of("qwen3_vl")), 500)
    # Removing the inner token makes the outer one.
    hostile = "cir<|image_<|im_end|>pad|>cle<|im_end|>"
    row = encoder.encode([QUESTION, ANSWER | {"content": hostile}], [photo(60, 60)])
    assert (
        row.input_ids.tolist()
        == encoder.encode([QUESTION, ANSWER], [photo(60, 60)]).input_ids.tolist()
    )


@pytest.mark.parametrize(
    ("family", "pixels"),
    [
        ("qwen2_5_vl", 28 * 28 * 2),
        ("idefics3", 32 * 32),
        ("internvl", 28 * 28),
        (OMNI[1], 32 * 32 * 2),
    ],
)
def test_max_pixels_limits_the_tokens_of_an_image(folder_of, family, pixels):
    weights = str(folder_of(family))
    usual = ProcessorEncoder(weights, 500)
    small = ProcessorEncoder(weights, 500, max_pixels=pixels)
    messages, images = ROWS[2]
    sizes = [MediaSize(image.shape[1], image.shape[0]) for image in images]
    row = small.encode(messages, images)
    assert len(row.input_ids) < len(usual.encode(messages, images).input_ids)
    assert small.count_tokens(messages, sizes) == len(row.input_ids)


def test_pixel_budget_of_a_family_with_fixed_images_is_refused(folder_of):
    with pytest.raises(UsageError, match=r"model.inputs.max_pixels: .* fixed size"):
        ProcessorEncoder(str(folder_of("gemma3")), 500, max_pixels=10_000)


def test_unsupported_model_is_refused_by_its_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UsageError, match=r"`bert`, which .* none of AutoModelForImageTextToText"):
        ProcessorEncoder(str(tmp_path), 500)


PROCESS = """
import sys
from pathlib import Path
from mmray.data.vlm.token_counter import ProcessorCounter

for folder in sys.argv[1], sys.argv[3]:
    counter = ProcessorCounter(folder, {'frames': 4})
    print(counter.encoder_digest, counter.search.digest)
print(sorted({'torch', 'transformers'} & sys.modules.keys()))

from mmray.data.vlm.encoder import ProcessorEncoder
from tests.models.vlm.rows import encode_rows
for folder, frames in zip(sys.argv[1:4], (4, 0, 4)):
    encode_rows(ProcessorEncoder(folder, 600, frames=frames, without_torch=True))
status = Path('/proc/self/status').read_text()
print(sys.modules.get('torch'), status.split('VmHWM:')[1].split()[0])
"""


@pytest.fixture(scope="module")
def printed(folder_of):
    """Lines of a process that inspects processors as a driver, then encodes as a data process."""
    folders = [str(folder_of(family)) for family in ("qwen3_vl", "qwen2_audio", OMNI[0])]
    done = subprocess.run([sys.executable, "-c", PROCESS, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_driver_inspects_processor_without_importing_transformers(printed, folder_of):
    """They take seconds, which the worker needs for its own imports."""
    here = [ProcessorCounter(str(folder_of(name)), {"frames": 4}) for name in ("qwen3_vl", OMNI[0])]
    assert printed[:2] == [f"{each.encoder_digest} {each.search.digest}" for each in here]
    assert printed[2] == "[]"


def test_data_process_encodes_without_torch(printed):
    """Importing torch alone takes 500 MB."""
    torch_module, peak_kib = printed[3].split()
    assert torch_module == "None"
    assert int(peak_kib) < 300_000


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_token_counts_of_stored_rows_are_those_of_the_encoded_rows(folder_of, family):
    counter = ProcessorCounter(str(folder_of(family)), question="what")
    count = counter.build()
    encoder = ProcessorEncoder(str(folder_of(family)), 5000)
    for messages, images in ROWS:
        media = [Media("image", b"", width=each.shape[1], height=each.shape[0]) for each in images]
        stored = Row("k", media, ["a"], messages=list(messages))
        assert count(stored) == len(encoder.encode(messages, images).input_ids)
    captions = Row("k", [Media("image", b"", width=40, height=30)], ["one", "a longer one of five"])
    answered = captions.conversations("what")[1]
    pixels = np.zeros((30, 40, 3), np.uint8)
    assert count(captions) == len(encoder.encode(answered, [pixels]).input_ids)
    assert counter.digest == ProcessorCounter(counter.weights, question="what").digest
    assert counter.digest != ProcessorCounter(counter.weights, question="who").digest
