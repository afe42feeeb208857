"""Conversations of common datasets are recognized by shape and converted to content parts."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from mmray.data.rows import BadRow
from mmray.data.source_row import parse_row
from tests.made import make_set, png

IMAGE = {"type": "image"}
IMAGE_PART = {"type": "image", "text": None}
ANSWER = {"role": "assistant", "content": "a\nb"}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def parsed(values: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Content of the first message, and names of the images."""
    row = parse_row(values, "made:1")
    assert row.texts == ["a\nb"]
    assert row.messages[1] == {"role": "assistant", "content": [text("a\nb")]}
    return row.messages[0]["content"], [image.name for image in row.images]


@pytest.mark.parametrize(
    ("values", "content", "images"),
    [
        # messages without a place for the image
        (
            {"image": "a.png", "messages": [{"role": "user", "content": "what"}, ANSWER]},
            [IMAGE_PART, text("what")],
            ["a.png"],
        ),
        # LLaVA; an Arrow struct has the keys of both forms
        (
            {
                "image": "a.png",
                "conversations": [
                    {"from": "human", "value": "<image>\nwhat", "role": None},
                    {"from": "gpt", "value": "a\nb"},
                ],
            },
            [IMAGE_PART, text("what")],
            ["a.png"],
        ),
        # Qwen-VL, with the path in the text
        (
            {
                "conversations": [
                    {"from": "user", "value": "\ufeffPicture 1: <img>a.png</img>\nwhat"},
                    {"from": "assistant", "value": "a\nb"},
                ],
            },
            [text("Picture 1: "), IMAGE_PART, text("what")],
            ["a.png"],
        ),
        # ShareGPT
        (
            {
                "image": "a.png",
                "conversations": [
                    {"from": "human", "value": "what <image>"},
                    {"from": "chatgpt", "value": "a\nb"},
                ],
            },
            [text("what "), IMAGE_PART],
            ["a.png"],
        ),
        (
            {
                "images": ["a.png", "b.png"],
                "messages": [
                    {"role": "user", "content": "Is <image> like <image>?\n"}, ANSWER
                ],
            },
            [text("Is "), IMAGE_PART, text(" like "), IMAGE_PART, text("?\n")],
            ["a.png", "b.png"],
        ),
        # TRL, with the null values of Arrow structs
        (
            {
                "images": [{"path": "a.png"}, {"path": "b.png"}],
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            IMAGE | {"text": None},
                            text("what") | {"image_url": None},
                            IMAGE,
                        ],
                    },
                    {"role": "assistant", "content": [text("a\nb")]},
                ],
            },
            [IMAGE_PART, text("what"), IMAGE_PART],
            ["a.png", "b.png"],
        ),
        # texts of parts have no marks
        (
            {
                "image": "a.png",
                "messages": [{"role": "user", "content": [IMAGE, text("is <image> HTML")]}, ANSWER],
            },
            [IMAGE_PART, text("is <image> HTML")],
            ["a.png"],
        ),
        (
            {
                "image": "a.png",
                "messages": [{"role": "user", "content": [text("<image>")]}, ANSWER],
            },
            [IMAGE_PART, text("<image>")],
            ["a.png"],
        ),
        # marks beyond the number of images are text
        (
            {
                "image": "a.png",
                "messages": [{"role": "user", "content": "<image>\n<image>\n  what "}, ANSWER],
            },
            [IMAGE_PART, text("<image>\n  what ")],
            ["a.png"],
        ),
        (
            {"messages": [{"role": "user", "content": "What is <image>?"}, ANSWER]},
            [text("What is <image>?")],
            [],
        ),
        # images beyond the number of marks; the order stays, as in ms-swift
        (
            {
                "images": ["a.png", "b.png"],
                "messages": [{"role": "user", "content": "what <image>"}, ANSWER],
            },
            [IMAGE_PART, text("what "), IMAGE_PART],
            ["a.png", "b.png"],
        ),
        (
            {"image": "a.png", "messages": [{"role": "user", "content": ""}, ANSWER]},
            [IMAGE_PART],
            ["a.png"],
        ),
        # OpenAI and transformers: the parts have the images, one takes that of the column
        (
            {
                "image": "b.png",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
                            IMAGE,
                            IMAGE | {"path": "c.png"},
                            text("what"),
                        ],
                    },
                    ANSWER,
                ],
            },
            [IMAGE_PART, IMAGE_PART, IMAGE_PART, text("what")],
            ["a.png", "b.png", "c.png"],
        ),
        # OpenAI's responses, and Anthropic
        (
            {
                "messages": [
                    {
                        "role": "User",
                        "content": [
                            {"type": "input_image", "image_url": "a.png"},
                            {"type": "image", "source": {"type": "url", "url": "b.png"}},
                            {"type": "input_text", "text": "what"},
                        ],
                    },
                    ANSWER | {"role": "Assistant"},
                ]
            },
            [IMAGE_PART, IMAGE_PART, text("what")],
            ["a.png", "b.png"],
        ),
        # Qwen-VL
        (
            {
                "messages": [
                    {"role": "user", "content": [{"image": "a.png"}, {"text": "q"}]}, ANSWER
                ]
            },
            [IMAGE_PART, text("q")],
            ["a.png"],
        ),
        # text alone
        ({"messages": [{"role": "user", "content": "what"}, ANSWER]}, [text("what")], []),
        (
            {"images": [], "messages": [{"role": "user", "content": "what"}, ANSWER]},
            [text("what")],
            [],
        ),
    ],
)  # fmt: skip
def test_conversations_are_converted(values: Any, content: Any, images: Any) -> None:
    assert parsed(values) == (content, images)


def test_anthropic_source_becomes_bytes() -> None:
    data = base64.b64encode(png(3)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    part = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    row = parse_row({"messages": [{"role": "user", "content": [part]}, ANSWER]}, "made:1")
    assert [image.data for image in row.images] == [png(3)]
    assert row.notices == ["`cache_control` of a content part is not used"]


@pytest.mark.parametrize(
    ("part", "notice"),
    [
        (
            {"type": "video_url", "video_url": {"url": "a.mp4", "fps": 2, "detail": None}},
            "`fps` of a content part is not used",
        ),
        (
            {"type": "video", "video": "a.mp4", "path": "b.mp4", "url": None},
            "a content part names several media: the first one is used",
        ),
    ],
)
def test_what_a_part_says_beside_its_medium_is_counted(part: dict[str, Any], notice: str) -> None:
    row = parse_row({"messages": [{"role": "user", "content": [part]}, ANSWER]}, "made:1")
    assert [each.name for each in row.images] == ["a.mp4"] and row.notices == [notice]


@pytest.mark.parametrize(
    "values",
    [
        {"video": {"path": "a.mp4", "start": 1.0, "bytes": None}},
        {"videos": [{"path": "a.mp4", "start": 1.0, "end": None}]},
        {"parts": [{"type": "video", "video": {"path": "a.mp4", "start": 1.0}}]},
        {"video": {"path": "a.mp4", "start": 1.0}, "messages": None, "text": "a"},
    ],
)
def test_fields_of_an_object_of_a_medium_are_counted(values: dict[str, Any]) -> None:
    content = values.pop("parts", "what")
    turns = [{"role": "user", "content": content}, ANSWER]
    row = parse_row({"messages": turns} | values, "made:1")
    assert [each.name for each in row.images] == ["a.mp4"]
    assert [each for each in row.notices if "mark" not in each] == [
        "`start` of an image, audio or video is not used"
    ]


def test_span_of_a_caption_is_not_that_of_the_conversation() -> None:
    caption = {"text": "red", "t0_s": 1.0, "t1_s": 2.0}
    turns = [{"role": "user", "content": "<video>what"}, ANSWER]
    row = {"video": "a.mp4", "texts": [caption, "b"], "messages": turns}
    parsed_row = parse_row(row, "made:1")
    assert parsed_row.spans is None
    assert parsed_row.notices == [f"`{name}` of a text is not used" for name in ("t0_s", "t1_s")]
    assert parse_row(row | {"t0_s": 3, "t1_s": 4}, "made:1").spans == [[3, 4]] * 2
    assert parse_row(row | {"messages": None}, "made:1").spans == [[1, 2], None]


def test_mark_in_the_result_of_a_tool_is_the_place_of_an_image() -> None:
    turns = [{"from": "human", "value": "Take a screenshot."}]
    turns += [{"from": "function_call", "value": json.dumps(CALL)}]
    turns += [{"from": "observation", "value": "<image>"}, {"from": "gpt", "value": "a"}]
    row = parse_row({"image": "a.png", "conversations": turns}, "made:1")
    assert [message["content"] for message in row.messages[::2]] == [
        [text("Take a screenshot.")], [IMAGE_PART],
    ]  # fmt: skip
    assert row.notices == []


@pytest.mark.parametrize(
    "mark", ["<|image_1|>", "<image_00>", "<|image_pad|>", "<ImageHere>", "[IMG]", "<image1>"]
)
def test_marks_of_other_projects_are_counted(mark: str) -> None:
    messages = [{"role": "user", "content": f"{mark}\nwhat"}, ANSWER]
    row = parse_row({"image": "a.png", "messages": messages}, "made:1")
    assert row.messages[0]["content"] == [IMAGE_PART, text(f"{mark}\nwhat")]
    assert row.notices == ["a mark of other projects, such as `<|image_1|>`, is text"]
    assert parse_row({"messages": messages}, "made:1").notices == []


def test_parts_as_json_are_counted() -> None:
    content = json.dumps([IMAGE, text("what")])
    row = parse_row({"messages": [{"role": "user", "content": content}, ANSWER]}, "made:1")
    assert row.notices == ["a content that looks like JSON of parts is text"]


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        ({"images": [["a.png"], ["b.png"]]}, "images are lists of lists, not one list"),
        (
            {"messages": [{"role": "user", "content": [IMAGE | {"data": "x"}]}, ANSWER]},
            "the row has 0 for them; `data` of a content part is not used",
        ),
    ],
)
def test_rows_of_other_forms_are_refused_by_name(values: Any, detail: str) -> None:
    messages = [{"role": "user", "content": "what"}, ANSWER]
    with pytest.raises(BadRow, match=detail):
        parse_row({"messages": messages} | values, "made:1")


def test_assistant_may_begin_and_have_an_empty_turn() -> None:
    turns = [
        ("assistant", "Hello."), ("user", "Say nothing."), ("assistant", ""), ("user", "what"),
        ("assistant", "a"),
    ]  # fmt: skip
    messages = [{"role": role, "content": content} for role, content in turns]
    row = parse_row({"image": "a.png", "messages": messages}, "made:1")
    said = [(message["role"], message["content"][-1]["text"]) for message in row.messages]
    assert said == turns
    assert row.messages[1]["content"] == [IMAGE_PART, text("Say nothing.")]
    assert row.texts == ["Hello.", "a"]
    assert row.notices == ["an empty message of the assistant is a target"]


def test_texts_stay_and_removed_characters_are_counted() -> None:
    content = "\tif x:\r\n\t\treturn\n"
    messages = [{"role": "user", "content": content}, ANSWER]
    row = parse_row({"messages": messages}, "made:1")
    assert (row.messages[0]["content"], row.notices) == ([text(content)], [])
    row = parse_row({"messages": [messages[0] | {"content": "a\0\ufeffb"}, ANSWER]}, "made:1")
    assert row.messages[0]["content"] == [text("ab")]
    assert row.notices == ["control characters or byte order marks of a message are removed"]


def test_video_as_a_list_of_frames_is_refused_by_name() -> None:
    part = {"type": "video", "video": ["0.png", "1.png"]}
    with pytest.raises(BadRow, match=r"columns video: a video is a list of 2 frames.*ffmpeg"):
        parse_row({"messages": [{"role": "user", "content": [part]}, ANSWER]}, "made:1")


def test_data_uri_becomes_bytes() -> None:
    uri = "data:image/png;base64," + base64.b64encode(png(3)).decode()
    part = {"type": "image_url", "image_url": {"url": uri}}
    row = parse_row({"messages": [{"role": "user", "content": [part]}, ANSWER]}, "made:1")
    assert [image.data for image in row.images] == [png(3)]
    for bad in ("data:image/png;base64,???", "data:image/png,abc"):
        with pytest.raises(BadRow, match=r"columns image: .*not base64"):
            parse_row({"image": bad, "text": "x"}, "made:1")


def test_marks_of_an_answer_are_text() -> None:
    answer = "    Use <image>,\n<img>b.png</img> or <video>.\n"
    said = [{"role": "user", "content": "Which tag?"}, {"role": "assistant", "content": answer}]
    row = parse_row({"image": "a.png", "messages": said}, "made:1")
    assert [message["content"] for message in row.messages] == [
        [IMAGE_PART, text("Which tag?")], [text(answer)],
    ]  # fmt: skip
    assert row.notices == ["`<image>` in a message is text, not the place of a medium"]
    assert parse_row({"messages": said}, "made:1").notices == []


@pytest.mark.parametrize(
    ("content", "num_images", "notices"),
    [
        ("<image>what", 1, []),
        ("what", 2, []),
        ("<image><image>what", 1, ["`<image>` in a message is text, not the place of a medium"]),
        ("<image>what", 2, ["image without a mark, put before the first user's text"]),
        ([IMAGE, text("what")], 2, ["image without a mark, put before the first user's text"]),
        (
            [IMAGE, text("what <audio>")],
            1,
            ["`<audio>` in a message is text, not the place of a medium"],
        ),
    ],
)
def test_marks_and_images_that_differ_are_counted(
    content: Any, num_images: int, notices: list[str]
) -> None:
    images = [f"{number}.png" for number in range(num_images)]
    messages = [{"role": "user", "content": content}, ANSWER]
    row = parse_row({"images": images, "messages": messages}, "made:1")
    assert [image.name for image in row.images] == images
    assert row.notices == notices


def test_places_in_the_system_come_before_those_of_the_user() -> None:
    messages = [
        {"role": "system", "content": "as <image>"}, {"role": "user", "content": "<video>"}, ANSWER
    ]  # fmt: skip
    columns = {"images": ["a.png", "b.png"], "video": "c.mp4"}
    row = parse_row(columns | {"messages": messages}, "made:1")
    assert [image.name for image in row.images] == ["a.png", "b.png", "c.mp4"]
    types = [[part["type"] for part in message["content"]] for message in row.messages]
    assert types == [["text", "image"], ["image", "video"], ["text"]]


@pytest.mark.parametrize(
    ("content", "images"), [([IMAGE, IMAGE], ["a.png"]), ([IMAGE | {"path": "b.png"}], ["a.png"])]
)
def test_parts_and_images_must_agree(content: Any, images: list[str]) -> None:
    messages = [{"role": "user", "content": content}, ANSWER]
    with pytest.raises(BadRow, match=r"columns image-count: .* the row has 1 for them"):
        parse_row({"images": images, "messages": messages}, "made:1")


def test_videos_and_audio_take_their_places() -> None:
    """Marks of a kind that the row does not have are text, such as HTML."""
    row = parse_row(
        {
            "images": ["a.png"],
            "videos": ["b.mp4", "c.mp4"],
            "audio": "d.wav",
            "t0_s": 1,
            "t1_s": 2.5,
            "messages": [
                {"role": "user", "content": "<video>\nIs <image> in <video>?"},
                ANSWER,
            ],
        },
        "made:1",
    )
    assert [(each.kind, each.name) for each in row.images] == [
        ("audio", "d.wav"),
        ("video", "b.mp4"),
        ("image", "a.png"),
        ("video", "c.mp4"),
    ]
    types = [part["type"] for part in row.messages[0]["content"]]
    assert types == ["audio", "video", "text", "image", "text", "video", "text"]
    assert row.spans == [[1.0, 2.5]]
    part = {"type": "video_url", "video_url": {"url": "e.mp4"}}
    messages = [{"role": "user", "content": [text("<audio> of"), part]}, ANSWER]
    row = parse_row({"messages": messages}, "made:1")
    assert [(each.kind, each.name) for each in row.images] == [("video", "e.mp4")]
    messages = [{"role": "user", "content": "a <video> tag"}, ANSWER]
    assert parse_row({"messages": messages}, "made:1").messages[0]["content"] == [
        text("a <video> tag")
    ]


def test_lists_of_videos_are_of_conversations() -> None:
    messages = [{"role": "user", "content": [{"type": "video"}, text("What?")]}, ANSWER]
    with pytest.raises(BadRow, match=r"columns video-count: .* 1 parts .* the row has 0"):
        parse_row({"videos": [], "messages": messages}, "made:1")
    with pytest.raises(BadRow, match="both video and videos: choose one"):
        parse_row({"video": "a.mp4", "videos": ["b.mp4"], "messages": messages}, "made:1")
    row = parse_row({"videos": ["a.mp4"], "audios": ["b.wav"]}, "made:1")
    assert [(each.kind, each.name) for each in row.images] == [
        ("audio", "b.wav"),
        ("video", "a.mp4"),
    ]
    with pytest.raises(BadRow, match="columns video-count: the row has 2 of video"):
        parse_row({"videos": ["a.mp4", "b.mp4"], "text": "two"}, "made:1")


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ("hello", "must be a list"), ([], "must be a list"), (["hello"], "must be {role, content}"),
        ([{"role": "user", "content": "what"}], "nothing to learn"),
        ([{"role": "teacher", "content": "what"}], "the role of a message"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}], "has a text"),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": [text(" ")]}, ANSWER],
            "message of the user is empty",
        ),
        ([{"role": "user", "content": "x"}, ANSWER | {"content": [IMAGE]}], "has a text"),
        ([ANSWER], "no message is the user's"),
        ([{"role": "system", "content": "x"}, ANSWER], "no message is the user's"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "has no url"),
        ([{"role": "assistant", "content": [{"type": "file"}]}], "must be of type text"),
        ([{"role": "assistant", "content": 5}], "content must be text"),
        (
            [{"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}],
            "only the first",
        ),
        ([{"role": "assistant", "content": "\ud83d"}], "surrogate"),
        ([{"role": "assistant", "content": "a" * 70000}], "is over"),
    ],
)  # fmt: skip
def test_invalid_conversation_is_quarantined(value: Any, detail: str) -> None:
    with pytest.raises(BadRow, match=detail) as bad:
        parse_row({"image": "a.png", "messages": value}, "made:1")
    assert (bad.value.stage, bad.value.reason, bad.value.key) == ("columns", "messages", "made:1")


QUESTION = {"role": "user", "content": "what"}
CALL = {"name": "weather", "arguments": {"city": "X"}}
CALLS = [{"type": "function", "function": CALL}]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ({"weight": 0}, {"weight": 0.0}),
        ({"weight": 1}, {}),
        ({"weight": 0.5, "loss": True}, {"weight": 0.5}),
        ({"loss": False}, {"weight": 0.0}),
        ({"train": False, "weight": None}, {"weight": 0.0}),
        ({"reasoning": "why", "name": "bob"}, {"reasoning_content": "why", "name": "bob"}),
        ({"tool_calls": CALLS}, {"tool_calls": CALLS}),
        ({"tool_calls": json.dumps(CALLS), "content": None}, {"tool_calls": CALLS}),
        ({"function_call": CALL}, {"tool_calls": CALLS}),
        (
            {"function_call": CALL | {"arguments": json.dumps(CALL["arguments"])}},
            {"tool_calls": CALLS},
        ),
    ],
)
def test_fields_of_a_message_are_kept(message, fields, tmp_path) -> None:
    values = {"messages": [QUESTION, ANSWER | message, ANSWER]}
    row = parse_row(values, "made:1")
    assert {name: row.messages[1].get(name) for name in fields} == fields
    assert row.messages[1].keys() == {"role", "content", *fields}
    assert make_set(tmp_path, [row]).read(np.arange(1))[0].messages == row.messages


@pytest.mark.parametrize(
    ("turn", "role", "fields"),
    [
        ({"from": "function_call", "value": json.dumps(CALL)}, "assistant", {"tool_calls": CALLS}),
        ({"from": "observation", "value": "sunny"}, "tool", {}),
        ({"role": "tool", "content": "", "tool_call_id": "1"}, "tool", {"tool_call_id": "1"}),
        ({"role": "function", "content": "2", "name": "f"}, "tool", {"name": "f"}),
    ],
)
def test_turns_of_tools(turn, role, fields) -> None:
    row = parse_row({"messages": [QUESTION, turn, ANSWER], "tools": json.dumps(CALLS)}, "made:1")
    message = row.messages[1]
    assert message == {"role": role, "content": message["content"]} | fields
    assert row.messages[0]["tools"] == CALLS


def test_fields_that_are_not_used_are_noted() -> None:
    values = [{"role": "developer", "content": "x"}, QUESTION | {"weight": 1, "uuid": "a"}]
    row = parse_row({"messages": [*values, ANSWER | {"name": "b", "score": None}]}, "made:1")
    assert row.messages[0]["role"] == "developer"
    assert row.notices == [
        "`name` of a message is used only by a chat template that reads it",
        "`uuid` of a message is not used",
        "`weight` is not used but for the assistant's messages",
    ]


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ({"weight": -1}, "`weight` of a message must be true, false or a number from 0"),
        ({"loss": "no"}, "`loss` of a message must be"),
        ({"weight": 0}, "and a weight over 0: there is nothing to learn"),
        ({"tool_calls": "{"}, "must be JSON"),
        ({"tool_calls": ["a"]}, "`tool_calls` of a message has a wrong form"),
        ({"from": "function_call", "role": None, "content": "call"}, "must be JSON"),
        ({"reasoning_content": "a" * 70000}, "is over"),
    ],
)
def test_invalid_fields_are_quarantined(message, detail) -> None:
    with pytest.raises(BadRow, match=detail):
        parse_row({"messages": [QUESTION, ANSWER | message]}, "made:1")


def test_tools_that_are_no_schemas_are_quarantined() -> None:
    with pytest.raises(BadRow, match="tools must be a list of JSON schemas"):
        parse_row({"messages": [QUESTION, ANSWER], "tools": ["weather"]}, "made:1")
