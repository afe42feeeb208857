"""Scores of generative models: perplexity and CIDEr, independent of the number of ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mmray.data.store.prepared_set import PreparedSet
from mmray.evaluation.generation import GenerationEvaluator, caption_scores, cider_d, split_words
from tests.evaluation.test_evaluator import on_ranks
from tests.made import make_set, row
from tests.models.test_generative import CONVERSATIONS, ENCODER, INPUTS, TOKENIZER, model_of

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [["a red circle", "a circle"], ["a blue square on a green ground"], ["a blue ground"]]
SETTINGS = SimpleNamespace(batch=2, limit=None, num_generations=0)
MODEL = model_of()  # initialize once: ranks are threads here and share one generator


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    """Nine rows: captions, a conversation, and an unreadable row."""
    rows = [row(number, texts=TEXTS[number % 3]) for number in range(9)]
    rows[3].messages = [
        turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in CONVERSATIONS[2]
    ]
    rows[5] = row(5, data=b"nothing")
    return make_set(tmp_path_factory.mktemp("language") / "set", rows)


def score(prepared: PreparedSet, group: Any, **settings: Any) -> dict[str, float]:
    evaluator = GenerationEvaluator(
        prepared, INPUTS, TOKENIZER, SimpleNamespace(**vars(SETTINGS) | settings)
    )  # type: ignore[arg-type]
    return evaluator.score(MODEL, group, None, 4)


def test_perplexity_covers_every_target_token(prepared: PreparedSet) -> None:
    (metrics,) = on_ranks(1, lambda group: score(prepared, group))
    losses, right = [], []
    for number, record in enumerate(prepared.read(np.arange(9))):
        if number == 5:
            continue
        pixels = torch.full((1, 3, 32, 32), number, dtype=torch.uint8)  # an image of one gray level
        for conversation in ENCODER.format_texts(record):
            columns = ENCODER.encode_batch([conversation])
            ids = torch.from_numpy(columns["input_ids"].astype(np.int64))
            at = torch.from_numpy(columns["image_pos"].astype(np.int64))
            with torch.no_grad():
                logits = MODEL({"image": pixels, "input_ids": ids, "image_pos": at})["logits"][
                    0
                ].double()
            for index in np.flatnonzero(columns["loss_mask"][0]):
                losses.append(-logits[index - 1].log_softmax(0)[ids[0, index]].item())
                right.append(logits[index - 1].argmax().item() == ids[0, index])
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert metrics["token_accuracy"] == pytest.approx(np.mean(right))
    assert (metrics["tokens"], metrics["rows"], metrics["bad_rows"]) == (len(losses), 8, 1)


@pytest.mark.parametrize("world", [2, 11])
def test_scores_do_not_depend_on_the_number_of_ranks(prepared: PreparedSet, world: int) -> None:
    (alone,) = on_ranks(1, lambda group: score(prepared, group, num_generations=6))
    assert {"bleu_4", "cider"} <= alone.keys() and alone["answered"] == 5
    for result in on_ranks(world, lambda group: score(prepared, group, num_generations=6)):
        assert result == pytest.approx(alone, rel=1e-6)


def test_answers_equal_greedy_decoding_without_cache_and_padding() -> None:
    """The reference decodes one row and one token at a time from the full text; answers are decoded
    together.

    Decoding runs a compiled language model eagerly: each layer of the cache would need its own
    graphs.
    """
    model, questions, expected = model_of(seed=1), ["a red", "what is this? a blue square", ""], []
    pixels = torch.tensor([90, 20, 200], dtype=torch.uint8).view(3, 1, 1, 1).expand(-1, 3, 32, 32)
    for image, question in zip(pixels.split(1), questions, strict=True):
        tokens: list[int] = []
        ids, at = (
            torch.from_numpy(array.astype(np.int64)) for array in ENCODER.encode_prompt(question)
        )
        with torch.no_grad():
            for _ in range(7):
                token = model({"image": image, "input_ids": ids, "image_pos": at})["logits"][
                    0, -1
                ].argmax()
                if token == ENCODER.eos_id:
                    break
                tokens.append(int(token))
                ids = torch.cat([ids, token[None, None]], dim=1)
        expected.append(ENCODER.tokenizer.decode(tokens).strip())
    assert any(expected)
    assert model.answer(ENCODER, pixels, questions, 7) == expected
    counter = CompileCounter()
    for layer in model.text.tower.layers:
        layer.compile(backend=counter)
    assert model.answer(ENCODER, pixels, questions, 7) == expected and counter.frame_count == 0


def test_the_best_captions_have_the_highest_scores() -> None:
    right = [
        "A red circle, on a green ground.",
        "two blue squares in the corner",
        "one yellow ring at the left side",
    ]
    references = [[text] for text in right]
    best = caption_scores(right, references)
    assert best == {"bleu_4": pytest.approx(1.0), "cider": pytest.approx(10.0)}
    shuffled = caption_scores([right[1], right[2], right[0]], references)
    near = caption_scores([text.replace("a", "the") for text in right], references)
    assert shuffled["cider"] < 0.5 < near["cider"] < best["cider"]
    assert shuffled["bleu_4"] < near["bleu_4"] < 1 or near["bleu_4"] == shuffled["bleu_4"] == 0
    assert caption_scores(["", "", ""], references) == {"bleu_4": 0.0, "cider": 0.0}


def test_combining_marks_belong_to_their_words() -> None:
    assert split_words("लाल कुत्ता, घास!") == ["लाल", "कुत्ता", "घास"]
    assert split_words("Cafe\u0301 \u2764\ufe0f 3.5 'dogs' don't_stop") == [
        "café",
        "3",
        "5",
        "dogs",
        "don't",
        "stop",
    ]
    wrong = caption_scores(["लील कोत्ते घास पर बैठा"], [["लाल कुत्ता घास पर बैठा"]])
    assert wrong["bleu_4"] == 0  # the consonants are equal


def test_cider_equals_hand_computed_value() -> None:
    """Two images with one word in common: idf is ln 2 for words of one image, 0 for words of
    both.
    """
    references = [[["a", "dog"]], [["a", "cat"]]]
    assert cider_d([["a", "dog"], ["a", "dog"]], references) == pytest.approx(10 * (2 / 4 + 0) / 2)
    twice = cider_d([["a", "dog", "dog"], ["a", "cat"]], references)  # the second "dog" is clipped
    one_gram = math.exp(-1 / 72) * 1 * 1 / (2 * 1)
    two_grams = math.exp(-1 / 72) * 1 / math.sqrt(1 + 1)
    assert twice == pytest.approx(10 * ((one_gram + two_grams) / 4 + 2 / 4) / 2)
