"""Retrieval examples: selection, agreement with the recall, and independence of the number of ranks."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from mmray.evaluate import evaluator as evaluator_module
from mmray.evaluate.evaluator import Evaluator
from mmray.evaluate.examples import NUM_SHOWN, select_queries
from mmray.objectives.contrastive import Contrastive
from tests.evaluate.test_evaluator import INPUTS, SETTINGS, Toy, on_ranks, prepared, small_chunks  # noqa: F401 - fixtures

WAYS = ("image_to_text", "text_to_image")


def shown_of(prepared, world=1, **settings):  # noqa: F811
    """The examples of rank 0 and the metrics of the same evaluation."""
    evaluator = Evaluator(prepared, INPUTS, prepared.tokenizer_json, SimpleNamespace(**vars(SETTINGS) | settings))
    shown = []

    def score(group):
        return evaluator.score(Toy(), group, Contrastive(), 6, shown.append if group.rank == 0 else None)

    return shown, on_ranks(world, score)[0]


def test_examples_do_not_depend_on_ranks_or_chunk(prepared, monkeypatch):  # noqa: F811
    (alone,), _ = shown_of(prepared)
    for world, chunk in ((3, 5), (30, 5), (1, 2)):
        monkeypatch.setattr(evaluator_module, "CHUNK", chunk)
        assert shown_of(prepared, world=world)[0] == [alone]


def test_examples_agree_with_the_recall_and_with_the_set(prepared):  # noqa: F811
    (examples,), metrics = shown_of(prepared)
    assert examples["rows"] == metrics["rows"]
    for way in WAYS:
        hits = [item for item in examples[way] if item["rank"] == 1]
        assert len(hits) <= NUM_SHOWN and 0 < len(examples[way]) - len(hits) <= NUM_SHOWN
        for item in examples[way]:
            row = prepared.read(np.array([item["row"]]))[0]
            assert item["key"] == row.key and item["caption"] in row.texts
            assert [answer["score"] for answer in item["answers"]] == sorted(
                (answer["score"] for answer in item["answers"]), reverse=True
            )
            marked = [rank for rank, answer in enumerate(item["answers"], 1) if answer["correct"]]
            assert (marked[:1] == [item["rank"]]) if item["rank"] <= 5 else not marked
            for answer in item["answers"]:
                texts = prepared.read(np.array([answer["row"]]))[0].texts
                assert answer["caption"] in texts
                if way == "image_to_text":
                    assert answer["correct"] == (answer["caption"] in row.texts)
                else:
                    assert answer["correct"] == (item["caption"] in texts)


def test_shown_queries_have_their_own_caption_and_a_thumbnail(prepared):  # noqa: F811
    """Rows have several captions each, selected by name and number."""
    (examples,), _ = shown_of(prepared)
    queries = {(item["row"], item["caption"]) for item in examples["text_to_image"]}
    assert any(caption != prepared.read(np.array([row]))[0].texts[0] for row, caption in queries)
    shown = {item["row"] for way in WAYS for item in examples[way]}
    shown |= {answer["row"] for item in examples["text_to_image"] for answer in item["answers"]}
    assert set(examples["images"]) == {str(row) for row in shown}
    head, _, data = examples["images"][str(max(shown))].partition(",")
    assert head == "data:image/webp;base64"
    assert abs(Image.open(io.BytesIO(base64.b64decode(data))).convert("L").getpixel((8, 8)) - max(shown)) <= 2


def test_selected_queries_are_evenly_spaced():
    ranks = torch.tensor([1, 9, 1, 2, 1, 300, 1, 2])
    assert select_queries(ranks, 3).tolist() == [0, 2, 6, 3, 7, 5]
    assert select_queries(torch.ones(2, dtype=torch.int64), 3).tolist() == [0, 1]
    assert select_queries(torch.tensor([7]), 3).tolist() == [0]
