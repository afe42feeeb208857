"""Which tokens of a conversation are targets of the loss, against plain transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmray.data.images.decode import decode
from mmray.data.source_row import parse_row
from mmray.data.vlm.chat_template import RowError, Targets
from mmray.data.vlm.encoder import ProcessorEncoder
from mmray.objectives.cross_entropy import IGNORE_INDEX
from mmray.objectives.language_modelling import LanguageModelling
from tests.made import make_set
from tests.models.vlm.folders import TEMPLATES
from tests.models.vlm.rows import AUDIO, IMAGE, double_model, photo, text, tone

ANSWERED_WITH_IMAGE = [
    {"role": "user", "content": [IMAGE, text("Crop it.")]},
    {"role": "assistant", "content": [text("Here: "), IMAGE, text(" It is red.")]},
]


def targets(encoder, messages, media=(), **settings):
    """The text of the tokens that the model learns to predict."""
    row = encoder.encode(messages, media, Targets(**settings))
    return encoder.tokenizer.decode(row.input_ids[row.loss_weights > 0])


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_vl", "Here:  It is red.<|im_end|>"),
        ("internvl", "Here:  It is red.<|im_end|>"),
        ("idefics3", " Here:  It is red.<end_of_utterance>"),
        ("gemma3", "Here:It is red.<end_of_turn>"),
        ("qwen2_audio", "Here:  It is red.<|im_end|>"),
    ],
)
def test_targets_of_an_answer_with_media_are_its_texts_and_the_end(folder_of, family, expected):
    encoder = ProcessorEncoder(str(folder_of(family)), 500)
    messages = ANSWERED_WITH_IMAGE
    media = [photo(60, 60), photo(30, 50)]
    if family == "qwen2_audio":
        media = [tone(0.7, 440), tone(1.0, 300)]
        messages = [
            each | {"content": [AUDIO if part is IMAGE else part for part in each["content"]]}
            for each in messages
        ]
    assert targets(encoder, messages, media) == expected


MARKED = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}{% if message['role'] == 'assistant' %}{% generation %}
{{- part['text'] }}{% endgeneration %}{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # as that of LLaVA-OneVision: the end is not in the marks


def test_end_of_a_turn_is_a_target_also_outside_the_marks(copy_of):
    encoder = ProcessorEncoder(str(copy_of("qwen3_vl", MARKED)), 500)
    turns = [("user", "a?"), ("assistant", "One."), ("user", "b?"), ("assistant", "Two.")]
    messages = [{"role": role, "content": [text(words)]} for role, words in turns]
    assert targets(encoder, messages) == "One.<|im_end|>Two.<|im_end|>"
    assert targets(encoder, messages, last_only=True) == "Two.<|im_end|>"


def test_medium_that_the_template_does_not_render_is_a_bad_row(copy_of):
    """Published templates of Qwen3-VL write only the texts of an answer."""
    template = TEMPLATES["qwen3_vl"].replace(
        "{% if part['type'] == 'image' %}",
        "{% if part['type'] == 'image' and message['role'] != 'assistant' %}",
    )
    encoder = ProcessorEncoder(str(copy_of("qwen3_vl", template)), 500)
    with pytest.raises(RowError, match=r"total 1 .* and 2 images"):
        encoder.encode(ANSWERED_WITH_IMAGE, [photo(60, 60), photo(30, 50)])


def test_loss_of_an_answer_with_an_image_is_that_of_transformers(folder_of):
    images = [photo(60, 60), photo(30, 50)]
    assert_loss_of_last_answer(folder_of("qwen3_vl"), [(ANSWERED_WITH_IMAGE, images)])


def test_loss_of_the_case_with_images_in_answers(folder_of, shared_cases):
    folder = shared_cases / "chat-doors"
    lines = (folder / "image-in-answer.jsonl").read_text().splitlines()
    rows = [parse_row(json.loads(line), f"{number}") for number, line in enumerate(lines)]
    assert_loss_of_last_answer(
        folder_of("qwen3_vl"),
        [
            (
                row.messages,
                [decode((folder / each.file).read_bytes(), 10**6) for each in row.images],
            )
            for row in rows
        ],
    )


def assert_loss_of_last_answer(weights, rows):
    """Compare the loss of conversations that end with their only answer to that of transformers,
    whose targets are the tokens after the prompt except those that stand for images.
    """
    from transformers import AutoProcessor

    model = double_model(weights)
    encoded = [model.encoder.encode(*row) for row in rows]
    batch = model.collator()(encoded)
    with torch.no_grad():
        packed_loss = model(batch)["loss_sum"].item()
        # a row that is not valid has no conversation
        valid = torch.tensor([False] + [True] * len(rows))
        by_row = model(batch | {"valid": valid, "source": torch.zeros(len(valid))})
        alone = [model(model.collator()([row]))["loss_sum"].item() for row in encoded]
        assert by_row["row_losses"][1:].tolist() == pytest.approx(alone, rel=1e-5)
        counts = [int((row.loss_weights[1:] != 0).sum()) for row in encoded]
        assert by_row["row_counts"][1:].tolist() == counts
    model.packed = False
    processor = AutoProcessor.from_pretrained(weights)
    of_images = processor.tokenizer.convert_tokens_to_ids(
        ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    )
    num_targets = 0
    loss_sum = 0.0
    for (messages, images), row in zip(rows, encoded, strict=True):
        prompt = processor.apply_chat_template(messages[:-1], add_generation_prompt=True)
        whole = processor.apply_chat_template(messages).rstrip()
        num_asked = sum(part["type"] == "image" for part in messages[0]["content"])
        prompt_ids = processor(text=[prompt], images=[images[:num_asked]])["input_ids"][0]
        inputs = processor(text=[whole], images=[images], return_tensors="pt")
        pixels = torch.from_numpy(row.images["pixel_values"])
        inputs |= model._image_inputs({"pixel_values": pixels})  # of another backend
        labels = inputs["input_ids"].clone()
        labels[:, : len(prompt_ids)] = IGNORE_INDEX
        labels[torch.isin(labels, torch.tensor(of_images))] = IGNORE_INDEX
        with torch.no_grad():
            output = model.net(**inputs, labels=labels, use_cache=False)
        count = int((labels != IGNORE_INDEX).sum())
        loss_sum += output.loss.item() * count
        num_targets += count
    assert len(batch["targets"]) == num_targets
    # Losses of transformers are float32.
    assert packed_loss == pytest.approx(loss_sum, rel=1e-6)


# As templates of models with tools and reasoning: both in the text of a message.
TOOLS = """{% if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['reasoning_content'] and loop.last %}<think>
{{ message['reasoning_content'] }}
</think>

{% endif %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}
{%- for call in message['tool_calls'] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TWO_TURNS = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "BAD", "weight": 0},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": "good"},
]
REASONED = [
    {"role": "user", "content": "6*7?"},
    {"role": "assistant", "content": "42", "reasoning_content": "six times seven"},
]
FUNCTION = {"name": "weather", "arguments": {"city": "X"}}
CALLED = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": FUNCTION}]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
]
SHAREGPT = [
    {"from": "human", "value": "weather?"},
    {"from": "function_call", "value": json.dumps(FUNCTION)},
    {"from": "observation", "value": "sunny"},
    {"from": "gpt", "value": "Sunny."},
]
CALL = '<call>{"name": "weather", "arguments": {"city": "X"}}</call><|im_end|>Sunny.<|im_end|>'


def stored(tmp_path, *rows):
    """The rows of a set that has these conversations, as a run reads them."""
    parsed = [parse_row({"id": str(n)} | row, str(n)) for n, row in enumerate(rows)]
    return make_set(tmp_path / "set", parsed).read(np.arange(len(parsed)))


@pytest.mark.parametrize(
    ("messages", "which", "expected"),
    [
        (TWO_TURNS, Targets(), "good<|im_end|>"),
        (
            [*TWO_TURNS[:1], {"role": "assistant", "content": "x", "train": True}, *TWO_TURNS[2:]],
            Targets(),
            "x<|im_end|>good<|im_end|>",
        ),
        (
            [*TWO_TURNS[:1], {"role": "assistant", "content": "x"}, *TWO_TURNS[2:]],
            Targets(last_only=True),
            "good<|im_end|>",
        ),
        (REASONED, Targets(), "<think>\nsix times seven\n</think>\n\n42<|im_end|>"),
        (REASONED, Targets(without_reasoning=True), "42<|im_end|>"),
        (CALLED, Targets(), CALL),
        (SHAREGPT, Targets(), CALL),
    ],
)
def test_fields_of_messages_reach_the_targets(tmp_path, copy_of, messages, which, expected):
    encoder = ProcessorEncoder(str(copy_of("qwen3_vl", TOOLS)), 500)
    [row] = stored(tmp_path, {"messages": messages})
    encoded = encoder.encode(row.messages, [], which)
    assert encoder.tokenizer.decode(encoded.input_ids[encoded.loss_weights > 0]) == expected


def test_tools_are_rendered_and_what_a_template_lacks_is_a_bad_row(tmp_path, copy_of):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    [row] = stored(tmp_path, {"messages": CALLED, "tools": json.dumps(tools)})
    encoder = ProcessorEncoder(str(copy_of("qwen3_vl", TOOLS)), 500)
    encoded = encoder.encode(row.messages, [])
    assert encoder.tokenizer.decode(encoded.input_ids).startswith("<|im_start|>tools\n[{")
    plain = ProcessorEncoder(str(copy_of("qwen3_vl", TEMPLATES["qwen3_vl"])), 500)
    for messages, field in ((row.messages, "tool"), (REASONED, "reasoning_content")):
        with pytest.raises(RowError, match=f"the chat template does not render .*{field}"):
            plain.encode(messages, [])


def test_weights_multiply_the_loss_of_their_messages(tmp_path, folder_of):
    """The count is that of the targets, so that a weight scales the gradient of its message."""
    model = double_model(folder_of("qwen3_vl"))
    halved = [*TWO_TURNS[:1], TWO_TURNS[1] | {"weight": 0.5}, *TWO_TURNS[2:]]
    rows = stored(tmp_path, *({"messages": each} for each in (TWO_TURNS, halved)))
    only_first = [*TWO_TURNS[:1], TWO_TURNS[1] | {"weight": 1}, TWO_TURNS[2]]
    only_first.append(TWO_TURNS[3] | {"weight": 0})
    rows.extend(stored(tmp_path / "first", {"messages": only_first}))
    batches = [model.collator()([model.encoder.encode(row.messages, [])]) for row in rows]
    with torch.no_grad():
        last, both, first = (model(batch)["loss_sum"].item() for batch in batches)
    assert both == pytest.approx(last + first / 2, rel=1e-6)
    assert len(batches[1]["targets"]) == len(batches[0]["targets"]) + len(batches[2]["targets"])


def test_loss_of_turns_of_the_case(tmp_path, copy_of, shared_cases):
    lines = (shared_cases / "chat-doors" / "loss-of-turns.jsonl").read_text().splitlines()
    encoder = ProcessorEncoder(str(copy_of("qwen3_vl", TOOLS)), 500)
    for row in stored(tmp_path, *map(json.loads, lines)):
        encoded = encoder.encode(row.messages, [])
        assert "BAD" not in encoder.tokenizer.decode(encoded.input_ids[encoded.loss_weights > 0])
        whole = encoder.tokenizer.decode(encoded.input_ids)
        assert row.key != "r" or "six times seven" in whole
        assert row.key != "t" or ("sunny" in whole and '{"city": "X"}' in whole)


# As Qwen's: tools, and the reasoning of answers after the last question.
AGENT = (
    "{% set ns = namespace(asked=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'teacher' %}{{ raise_exception('no teacher') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and message.reasoning_content and loop.index0 > ns.asked %}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"city": "X"}}}
SCHEMAS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def turn(role, content, **fields):
    return {"role": role, "content": [text(content)] if content else []} | fields


@pytest.fixture(scope="module")
def agent(copy_of):
    return ProcessorEncoder(str(copy_of("qwen3_vl", AGENT)), 500)


CHAT = [turn("user", "a?"), turn("assistant", "BAD", weight=0.0), turn("user", "b?")]


def test_calls_tools_and_reasoning_are_rendered_as_by_transformers(agent):
    from transformers import AutoProcessor

    messages = [
        turn("system", "Be brief."),
        turn("user", "weather?"),
        turn("assistant", "", tool_calls=[WEATHER], reasoning_content="six"),
        turn("tool", "sunny", name="weather"),
        turn("assistant", "Sunny.", reasoning_content="seven"),
    ]
    processor = AutoProcessor.from_pretrained(agent.weights)
    prompt = processor.apply_chat_template(messages, tools=SCHEMAS)
    with_tools = [messages[0] | {"tools": SCHEMAS}, *messages[1:]]
    row = agent.encode(with_tools, [])
    assert row.input_ids.tolist() == processor.tokenizer(prompt)["input_ids"]
    assert agent.count_tokens(with_tools, []) == len(row.input_ids)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "X"}}</tool_call><|im_end|>'
    reasoned = ["<think>\nsix\n</think>\n\n", "<think>\nseven\n</think>\n\n"]
    assert targets(agent, with_tools) == f"{reasoned[0]}{call}{reasoned[1]}Sunny.<|im_end|>"
    assert targets(agent, with_tools, without_reasoning=True) == f"{call}Sunny.<|im_end|>"
    prompt = processor.apply_chat_template(messages[:4], tools=SCHEMAS, add_generation_prompt=True)
    own = agent.encode_prompt(with_tools[:4], []).input_ids.tolist()
    assert own == processor.tokenizer(prompt)["input_ids"]


def test_reasoning_of_earlier_answers_is_omitted_as_the_template_does(agent):
    messages = [
        turn("user", "a?"),
        turn("assistant", "one", reasoning_content="red"),
        turn("user", "b?"),
        turn("assistant", "two", reasoning_content="blue"),
    ]
    expected = "one<|im_end|><think>\nblue\n</think>\n\ntwo<|im_end|>"
    assert targets(agent, messages) == expected
    called = [
        messages[0],
        turn("assistant", "", tool_calls=[WEATHER], reasoning_content="green"),
        turn("tool", "sunny"),
        *messages[1:],
    ]
    call = '<tool_call>{"name": "weather", "arguments": {"city": "X"}}</tool_call><|im_end|>'
    assert targets(agent, called) == call + expected


@pytest.mark.parametrize(
    ("messages", "detail"),
    [
        ([turn("user", "a?"), turn("teacher", "b"), turn("assistant", "c")], "no teacher"),
        ([turn("user", "a?"), turn("tool", "sunny"), turn("assistant", "c")], "of the tool"),
        ([turn("user", "a?"), turn("assistant", "", tool_calls=[WEATHER])], "`tool_calls`"),
        (
            [*CHAT[:1], turn("assistant", "b", reasoning_content="c"), *CHAT],
            "`reasoning_content`",
        ),
    ],
)
def test_what_the_template_does_not_render_is_a_bad_row(copy_of, messages, detail):
    template = AGENT
    if detail != "no teacher":
        for rendered, other in (
            ("message.reasoning_content", "''"),
            ("message.tool_calls or []", "[]"),
            ("message.content %}", "message.content if message.role != 'tool' %}"),
        ):
            template = template.replace(rendered, other)
    encoder = ProcessorEncoder(str(copy_of("qwen3_vl", template)), 500)
    with pytest.raises(RowError, match=detail) as error:
        encoder.encode(messages, [])
    assert error.value.reason == "messages"


def test_developer_is_the_system_of_templates_that_do_not_name_it(agent):
    rows = [
        agent.encode([turn(role, "x"), turn("user", "a?"), turn("assistant", "b")], [])
        for role in ("developer", "system")
    ]
    assert rows[0].input_ids.tolist() == rows[1].input_ids.tolist()


def test_reserved_tokens_in_fields_are_removed(agent):
    call = {"type": "function", "function": {"name": "a<|im_end|>", "arguments": "b<|im_end|>"}}
    messages = [turn("user", "a?"), turn("assistant", "c", tool_calls=[call])]
    assert targets(agent, messages).count("<|im_end|>") == 1


def test_weights_multiply_the_loss_which_is_divided_by_the_number_of_targets(folder_of):
    """For any packing and accumulation."""
    model = double_model(folder_of("qwen3_vl"))
    rows = [
        model.encoder.encode([turn("user", "a?"), turn("assistant", each, weight=weight)], [])
        for each, weight in (("one two", 0.25), ("circle", 1.0), ("three blue", 3.0))
    ]
    loss = LanguageModelling()
    expected = torch.zeros((), dtype=torch.double)
    for row, weight in zip(rows, (0.25, 1.0, 3.0), strict=True):
        batch = model.collator()([row])
        logits = model.net.get_output_embeddings()(model.hidden_states(batch)).flatten(0, 1)
        logits = logits[batch["target_index"]]
        expected += weight * F.cross_entropy(logits, batch["targets"], reduction="sum")
    gradient = torch.autograd.grad(expected, model.net.get_input_embeddings().weight)[0]
    count = sum(int((row.loss_weights > 0).sum()) for row in rows)
    for batches in ([rows], [rows[:1], rows[1:]]):
        model.zero_grad()
        sums = [loss.compute_loss(model(batch), batch) for batch in map(model.collator(), batches)]
        total = sum(each[0] for each in sums)
        total.backward()
        assert sum(int(each[1]) for each in sums) == count
        assert total.item() == pytest.approx(expected.item(), rel=1e-9)
        own = model.net.get_input_embeddings().weight.grad
        assert (own - gradient).abs().max() < 1e-9 * gradient.abs().max()


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_messages_of_weight_0_and_all_but_the_last_are_no_targets(folder_of, family):
    encoder = ProcessorEncoder(str(folder_of(family)), 500)
    end = encoder.tokenizer.eos_token
    assert targets(encoder, [*CHAT, turn("assistant", "good")]).strip() == f"good{end}"
    chat = [turn("user", "a?"), turn("assistant", "one"), *CHAT[2:], turn("assistant", "two")]
    assert targets(encoder, chat).replace(" ", "") == f"one{end}two{end}"
    assert targets(encoder, chat, last_only=True).strip() == f"two{end}"
    with pytest.raises(RowError, match="nothing to learn"):
        encoder.encode(CHAT[:2], [], Targets(last_only=True))
