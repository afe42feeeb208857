"""Rows with a chosen and a rejected answer, in the forms of TRL, ms-swift and LLaMA-Factory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmray.config import Prepare
from mmray.data.formats.values import normalize_values
from mmray.data.messages import message_text, split_rejected
from mmray.data.prepare.pipeline import prepare
from mmray.data.rows import BadRow
from mmray.data.source_row import parse_row
from mmray.data.store.prepared_set import PreparedSet

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
EARLIER = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "earlier"}]
HUMAN = {"from": "human", "value": "q"}


def parsed(values: dict[str, Any]) -> Any:
    return parse_row(normalize_values(values, (), "{}"), "made:1")


def turns(values: dict[str, Any]) -> list[list[tuple[str, str]]]:
    """Role and text of each message of the chosen, and of the rejected conversation."""
    return [
        [(message["role"], message_text(message)) for message in conversation]
        for conversation in split_rejected(parsed(values).messages)
    ]


@pytest.mark.parametrize(
    ("values", "earlier"),
    [
        # TRL with the prompt in a column, as texts and as messages
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, []),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, []),
        ({"prompt": [*EARLIER, USER], "chosen": [GOOD], "rejected": [BAD]}, EARLIER),
        # TRL with the prompt in both
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, []),
        ({"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, EARLIER),
        # hh-rlhf
        (
            {
                "chosen": "\n\nHuman: p\n\nAssistant: earlier\n\nHuman: q\n\nAssistant: good",
                "rejected": "\n\nHuman: p\n\nAssistant: earlier\n\nHuman: q\n\nAssistant: bad",
            },
            EARLIER,
        ),
        # UltraFeedback has the prompt once more
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, []),
        # ms-swift
        ({"messages": [*EARLIER, USER, GOOD], "rejected_response": "bad"}, EARLIER),
        ({"query": "q", "response": "good", "rejected_response": "bad"}, []),
        ({"messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, []),
        # LLaMA-Factory
        (
            {
                "conversations": [HUMAN],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            [],
        ),
        ({"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}, []),
        # a set of questions about images
        ({"question": "q", "chosen": "good", "rejected": "bad", "image": "a.png"}, []),
    ],
)
def test_both_answers_follow_the_same_prompt(values: dict[str, Any], earlier: list[Any]) -> None:
    prompt = [(each["role"], each["content"]) for each in [*earlier, USER]]
    assert turns(values) == [[*prompt, ("assistant", "good")], [*prompt, ("assistant", "bad")]]
    assert "a rejected answer, which only objective dpo uses" in parsed(values).notices
    weights = [each.get("weight") for each in split_rejected(parsed(values).messages)[0]]
    assert weights == [0.0 if role == "assistant" else None for role, _ in prompt] + [None]


def test_system_column_is_the_start_of_both() -> None:
    values = {"system": "s", "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert [each[0] for each in turns(values)] == [("system", "s")] * 2
    assert [each[-1][1] for each in turns(values)] == ["good", "bad"]


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "good"}, "or equal to the chosen"),
        ({"messages": [USER, GOOD], "rejected_response": "good"}, "are equal"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "empty, or equal"),
        ({"prompt": "q", "chosen": "good", "rejected": " "}, "needs a text of the assistant"),
        ({"chosen": "good", "rejected": "bad"}, "have no prompt"),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: r"},
            "in place of a message of the assistant",
        ),
        ({"prompt": "q", "chosen": "good", "rejected": [USER]}, "starts with it"),
        (
            {
                "prompt": "q",
                "chosen": "good",
                "rejected": [{"role": "assistant", "content": [{"type": "image", "image": "b"}]}],
            },
            "put them into the prompt",
        ),
        ({"prompt": "q", "rejected": "bad", "image": "a.png"}, "none of the columns"),
        ({"prompt": "q", "chosen": "a"}, "needs a rejected answer; --columns completion=chosen"),
        ({"chosen": [USER, GOOD], "image": "a.png"}, "rejected answer; --columns messages=chosen"),
        ({"prompt": "q", "chosen": "a", "rejected": ["b", "c"]}, "must be text or a list of parts"),
    ],
)
def test_rows_without_a_preference_are_refused_by_name(values: Any, detail: str) -> None:
    with pytest.raises(BadRow, match=detail):
        parsed(values)


def test_set_keeps_both_answers_and_counts_them(tmp_path: Any, in_process: Any) -> None:
    rows = [
        {"prompt": "q", "chosen": "good", "rejected": bad} for bad in ("bad", "worse", "bad")
    ] + [{"prompt": "q", "completion": "good"}]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = prepare(str(source), str(tmp_path / "set"), Prepare(max_bad_fraction=0.5))
    assert manifest.num_rows == 3  # two are equal
    assert [line for line in manifest.notice_lines if "rejected answer" in line and "3" in line]
    rows_of_set = PreparedSet.open(str(tmp_path / "set")).read([0, 1, 2])
    pairs = [split_rejected(row.messages) for row in rows_of_set]
    rejected = [pair and message_text(pair[1][-1]) for pair in pairs]
    assert sorted(map(str, rejected)) == ["None", "bad", "worse"]
