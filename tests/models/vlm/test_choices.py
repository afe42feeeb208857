"""Multiple choice by the likelihood of the options, against a plain loop over transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmray.config import Evaluate, Objective
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.engine.collectives import Group
from mmray.evaluation.conversations import ConversationEvaluator
from mmray.models.vlm.model import Vlm
from tests.made import encode, image_media, make_set
from tests.models.vlm.rows import IMAGE, photo, settings, text

OPTIONS = [
    ["red", "There are three shapes.", "a circle"],
    ["yes", "no"],
    ["two", "a blue triangle and a square", "one", "zero", "Which color?"],
]


def turns(number: int, option: str | None) -> list[dict[str, Any]]:
    content = [*([IMAGE] * number), text(f"Which shape is {number}?")]
    answer = {"role": "assistant", "content": [text(option)]} if option else None
    return [{"role": "user", "content": content}, *([answer] if answer else [])]


def images_of(number: int) -> list[Any]:
    return [photo(60, 30 + 20 * index) for index in range(number)]


def best_options(folder: Any) -> list[int]:
    """The option with the largest mean log-probability of its tokens, by one forward for each."""
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    net = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    best = []
    for number, options in enumerate(OPTIONS):
        scores = []
        for option in options:
            prompt, full = (
                processor(
                    text=[processor.apply_chat_template(turns(number, each), **generates)],
                    images=[images_of(number)] if number else None,
                    add_special_tokens=False,
                    return_tensors="pt",
                )
                for each, generates in ((None, {"add_generation_prompt": True}), (option, {}))
            )
            start = prompt["input_ids"].shape[1]
            # but the line break after the end of the turn
            targets = full["input_ids"][0, start:-1]
            with torch.no_grad():
                logits = net(**full).logits[0, start - 1 : -2]
            scores.append(-torch.nn.functional.cross_entropy(logits, targets).item())
        assert sorted(scores)[-1] - sorted(scores)[-2] > 1e-4
        best.append(scores.index(max(scores)))
    return best


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "gemma3"])
def test_accuracy_equals_that_of_a_plain_loop(family, folder_of, tmp_path):
    folder = folder_of(family)
    best = best_options(folder)
    spec = settings(folder, question="")
    model = Vlm(spec)
    for shift, expected in ((0, 1.0), (1, 0.0)):
        rows = []
        for number, (options, index) in enumerate(zip(OPTIONS, best, strict=True)):
            answer = options[(index + shift) % len(options)]
            messages = turns(number, answer)
            messages[1]["options"] = options
            media = [image_media(encode(_pillow(image))) for image in images_of(number)]
            rows.append(Row(f"row-{number}", media, [], messages=messages, source="a:1"))
        plain = Row("plain", [], [], messages=turns(0, "red"), source="a:2")
        make_set(tmp_path / str(shift), rows, [*rows, plain])
        held_out = PreparedSet.open(str(tmp_path / str(shift)), "test")
        config = SimpleNamespace(
            model=spec, evaluate=Evaluate(batch=2), data=None, objective=Objective()
        )
        scores = ConversationEvaluator(config, held_out, 10**7).score(model, Group(), None, 4)
        assert (scores["choice_accuracy"], scores["choice_rows"]) == (expected, 3)
        assert (scores["rows"], scores["bad_rows"]) == (4, 0)


def _pillow(image: Any) -> Any:
    from PIL import Image

    return Image.fromarray(image)
