"""Rows of a prepared set as micro-batches of a vision-language model, and its evaluation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.data.block import BlockAccessor

from mmray.config import Evaluate, Objective
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import BlockPlan, SamplePlan
from mmray.data.vlm.collate import iter_row_batches
from mmray.data.vlm.reader import ConversationReader, unpack_rows
from mmray.engine.collectives import Group
from mmray.evaluation.conversations import ConversationEvaluator
from mmray.models.vlm.model import Vlm
from tests.made import image_media, make_set
from tests.models.vlm.rows import encode_rows, settings, stored_rows

NUM_ROWS = 9


@pytest.fixture(scope="module")
def spec(folder_of):
    values = settings(folder_of("qwen3_vl"))
    values.inputs.question = "what"
    return values


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Row 4 has a damaged image."""
    rows = stored_rows(NUM_ROWS)
    rows[4].media = [image_media(b"no image")]
    return make_set(tmp_path_factory.mktemp("set"), rows, stored_rows(3))


@pytest.fixture(scope="module")
def model(spec):
    return Vlm(spec)


def test_steps_do_not_depend_on_the_size_of_blocks(prepared, spec, model):
    reader = ConversationReader(prepared, spec, 10**7)
    plan = SamplePlan(NUM_ROWS, 4, world_size=1, seed=1, steps=4)
    steps = {}
    for name, blocks in {
        "of several steps": BlockPlan(plan, 1, steps_per_block=2),
        "of a part of a step": BlockPlan(plan, 1, steps_per_block=1, blocks_per_step=2),
    }.items():
        arrays = (reader.read_block(plan, blocks.positions(each)) for each in range(blocks.count))
        steps[name] = list(iter_row_batches(arrays, plan, 1, 0, 3, model.collator()))
    first, second = steps.values()
    assert len(first) == len(second) == 3
    for step, (own, other) in enumerate(zip(first, second, strict=True), 1):
        assert [len(batch["valid"]) for batch in own] == [3, 1]
        positions = torch.cat([batch["pos"] for batch in own])
        assert positions.tolist() == plan.positions(step, 0).tolist()
        for batch, same in zip(own, other, strict=True):
            assert batch.keys() == same.keys()
            assert all(torch.equal(column, same[name]) for name, column in batch.items())


def test_damaged_row_keeps_its_position_and_has_no_tokens(prepared, spec, model):
    reader = ConversationReader(prepared, spec, 10**7)
    plan = SamplePlan(NUM_ROWS, NUM_ROWS, world_size=1, seed=0, steps=1, shuffle=False)
    block = reader.read_block(plan, plan.positions(0, 0))
    assert block["valid"].tolist() == [number != 4 for number in range(NUM_ROWS)]
    assert block["num_tokens"][4] == 0
    rows = unpack_rows(block)
    for number, expected in enumerate(encode_rows(model.encoder) * 3):
        if number != 4:
            actual = rows[number]
            assert actual.input_ids.tolist() == expected.input_ids.tolist()
            assert actual.loss_weights.tolist() == expected.loss_weights.tolist()
            assert actual.images.keys() == expected.images.keys()
            for name, column in expected.images.items():
                assert np.array_equal(actual.images[name], column)
    stored, reason, _ = reader.explain_bad_row(4, SubprocessDecoder())
    assert (stored.key, reason) == ("row-4", "format")


def test_blocks_pass_through_ray_data(prepared, spec):
    """The columns of a block of Ray have equal lengths, although rows have different sizes."""
    reader = ConversationReader(prepared, spec, 10**7)
    plan = SamplePlan(NUM_ROWS, NUM_ROWS, world_size=1, seed=0, steps=1, shuffle=False)
    block = reader.read_block(plan, plan.positions(0, 0))
    received = BlockAccessor.for_block(BlockAccessor.batch_to_block(block)).to_numpy()
    assert received["valid"].tolist() == block["valid"].tolist()
    for own, other in zip(unpack_rows(block), unpack_rows(received), strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            assert own.input_ids.tolist() == other.input_ids.tolist()
            for name, column in own.images.items():
                assert np.array_equal(column, other.images[name])


def test_row_over_max_tokens_is_explained_with_its_count(prepared, spec):
    short = SimpleNamespace(**vars(spec) | {"inputs": SimpleNamespace(**vars(spec.inputs))})
    short.inputs.max_tokens = 20
    reader = ConversationReader(prepared, short, 10**7)
    _, reason, detail = reader.explain_bad_row(2, SubprocessDecoder())
    assert reason == "tokens"
    assert "tokens exceed model.inputs.max_tokens 20" in detail


def answer_metrics(answers, references):
    assert len(answers) == len(references)
    return {"own/references": sum(map(len, references))}


def test_rows_that_are_too_long_have_no_answer_and_references_no_reserved_tokens(
    tmp_path, spec, model, caplog
):
    rows = stored_rows(3)
    for number, words in {0: "long " * 3000, 1: "see <|im_end|>"}.items():
        last = {"role": "assistant", "content": [{"type": "text", "text": words}]}
        rows[number] = replace(rows[number], messages=[*rows[number].messages[:-1], last])
    held_out = make_set(tmp_path, rows)
    evaluate = Evaluate(batch=2, num_generations=3)
    config = SimpleNamespace(model=spec, evaluate=evaluate, data=None, objective=Objective())
    shown = []
    evaluator = ConversationEvaluator(config, held_out, 10**7)
    scores = evaluator.score(model, Group(), None, 4, shown.append)
    assert (scores["rows"], scores["bad_rows"], scores["answered"]) == (2, 1, 2)
    assert [each["references"] for each in shown[0]["answers"]] == [["see "], ["blue"]]
    [line] = caplog.messages
    assert rows[0].source in line and "tokens exceed" in line


def test_evaluation_counts_the_targets_of_all_rows(prepared, spec, model):
    held_out = PreparedSet.open(str(prepared.folder), "test")
    metrics = ("tests.models.vlm.test_stream:answer_metrics",)
    evaluate = Evaluate(batch=2, num_generations=3, metrics=metrics)
    config = SimpleNamespace(model=spec, evaluate=evaluate, data=None, objective=Objective())
    shown = []
    evaluator = ConversationEvaluator(config, held_out, 10**7)
    scores = evaluator.score(model, Group(), None, 4, shown.append)
    rows = encode_rows(model.encoder)
    batch = model.collator()(rows)
    loss = model(batch)["loss_sum"].item() / len(batch["targets"])
    assert scores["loss"] == pytest.approx(loss, rel=1e-4)
    assert scores["tokens"] == len(batch["targets"])
    assert (scores["rows"], scores["bad_rows"], scores["answered"]) == (3, 0, 3)
    assert scores["own/references"] == 3
    assert 0 <= scores["exact_match"] <= scores["vqa_accuracy"] <= 1
    examples = shown[0]["answers"]
    assert [each["key"] for each in examples] == ["row-0", "row-1", "row-2"]
    assert [each["references"] for each in examples] == [
        ["two red"],
        ["a circle and a triangle"],
        ["blue"],
    ]
    images = [
        [part["image"][:22] for turn in each["turns"] for part in turn["parts"] if "image" in part]
        for each in examples
    ]
    assert images == [["data:image/webp;base64"] * count for count in (0, 1, 3)]
    roles = [turn["role"] for turn in examples[2]["turns"]]
    assert roles == ["user", "assistant", "user"]
