"""A step divided by tokens has the loss of the same step divided by rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmray.config import Batch, Config, Data, Objective, Run, VlmInputs
from mmray.config import Vlm as VlmConfig
from mmray.data.prepare import map_shards
from mmray.data.prepare.token_counts import token_counts
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.token_batches import TokenPlan
from mmray.data.vlm.collate import iter_row_batches
from mmray.data.vlm.reader import ConversationReader
from mmray.data.vlm.token_counter import ProcessorCounter
from mmray.errors import DataError
from mmray.models.vlm.model import Vlm
from mmray.training.resolve import describe_unused_texts, resolve_run
from tests.made import make_set
from tests.models.vlm.folders import TEMPLATES
from tests.models.vlm.rows import stored_rows, text
from tests.models.vlm.test_targets import AGENT, turn
from tests.training.runs import Silent

WORLD = 2
STEP_ROWS = 7


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Rows with 0, 1 and 3 images in turn."""
    return make_set(tmp_path_factory.mktemp("set"), stored_rows(12))


def losses(model, reader, plan, rows):
    """Sums of the loss and numbers of targets of each step, and tokens of each micro-batch."""
    sums = torch.zeros(plan.steps, 2, dtype=torch.float64)
    sizes = []
    for rank in range(WORLD):
        steps = [plan.positions(step, rank) for step in range(plan.steps)]
        blocks = [reader.read_block(plan, positions) for positions in steps]
        batches = iter_row_batches(blocks, plan, 0, rank, rows, model.collator())
        for step, micro_batches in enumerate(batches):
            sizes.append([batch["num_tokens"].sum().item() for batch in micro_batches])
            positions = torch.cat([batch["pos"] for batch in micro_batches])
            assert positions.tolist() == steps[step].tolist()
            for batch in micro_batches:
                with torch.no_grad():
                    sums[step, 0] += model(batch)["loss_sum"]
                sums[step, 1] += len(batch["targets"])
    return sums, sizes


def test_loss_does_not_depend_on_the_division_by_tokens(folder_of, prepared, monkeypatch):
    monkeypatch.setattr(
        map_shards, "map_tasks", lambda work, items, **_: (work(item) for item in items)
    )
    weights = str(folder_of("qwen3_vl"))
    counts = token_counts(prepared, ProcessorCounter(weights))
    assert len(set(counts.tolist())) == 3
    max_tokens = int(np.sort(counts)[-5])  # the rows with three images are longer
    spec = VlmConfig(weights=weights, inputs=VlmInputs(max_tokens=max_tokens))
    reader = ConversationReader(prepared, spec, 10**6)
    torch.manual_seed(0)
    model = Vlm(spec).double()
    plan = SamplePlan(prepared.num_rows, STEP_ROWS, WORLD, seed=3, steps=3)
    by_rows, _ = losses(model, reader, plan, 2)
    limit = 2 * max_tokens
    token_plan = TokenPlan(
        **vars(plan), num_tokens=counts, max_row_tokens=max_tokens, max_tokens=limit
    )
    by_tokens, sizes = losses(model, reader, token_plan, 1)
    torch.testing.assert_close(by_tokens, by_rows, rtol=1e-9, atol=0)
    assert (by_rows[:, 1] > 0).all() and max(max(each) for each in sizes) <= limit
    # Both ranks have equally many micro-batches in each step.
    assert [len(each) for each in sizes[:3]] == [len(each) for each in sizes[3:]]


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(
        map_shards, "map_tasks", lambda work, items, **_: (work(item) for item in items)
    )


def test_set_without_the_sizes_of_its_images_is_refused(folder_of, tmp_path, in_process):
    rows = stored_rows(3)
    rows[2].media[0].width = 0
    with pytest.raises(DataError, match=r"row row-2 .* --check full"):
        token_counts(make_set(tmp_path, rows), ProcessorCounter(str(folder_of("qwen3_vl"))))


def test_set_without_a_usable_row_is_refused_with_the_reason_of_one(copy_of, tmp_path, in_process):
    template = "{% if messages[0].content[-1].text == 'How many?' %}{{ raise_exception('no') }}"
    weights = copy_of("qwen3_vl", template + "{% endif %}" + TEMPLATES["qwen3_vl"])
    make_set(tmp_path / "set", stored_rows(1))
    config = Config(
        model=VlmConfig(weights=str(weights)),
        objective=Objective(kind="language_modelling"),
        data=Data(train=str(tmp_path / "set")),
        batch=Batch(global_=1, tokens=4096),
        run=Run(storage=str(tmp_path)),
    )
    with pytest.raises(DataError, match=r"no row of .* the chat template cannot render it: no"):
        resolve_run(config.with_cluster(accelerator="cpu"), Silent())


def test_template_that_writes_no_end_of_an_answer_is_named(copy_of, tmp_path, in_process):
    prepared = make_set(tmp_path, stored_rows(1))
    template = TEMPLATES["qwen3_vl"]
    lines = []
    for each in (template, template.replace("<|im_end|>", "")):
        search = ProcessorCounter(str(copy_of("qwen3_vl", each))).search
        lines.append([*describe_unused_texts(prepared, search)])
    assert lines[0] == []
    assert "no token at the end of an answer" in lines[1][0]


def test_reserved_tokens_in_texts_are_counted_by_token(folder_of, tmp_path, in_process):
    """Also in sets whose images have no sizes, as micro-batches of rows allow."""
    search = ProcessorCounter(str(folder_of("qwen3_vl"))).search
    rows = stored_rows(6)
    answers = {2: "see <|image_pad|>, <act_1>", 4: "a<|im_end|>", 5: "<|im_end|>\n", 3: "<act_1>"}
    for number, answer in answers.items():
        last = {"role": "assistant", "content": [text(answer)]}
        rows[number] = replace(rows[number], messages=[*rows[number].messages[:-1], last])
    rows[1].media[0].width = 0
    prepared = make_set(tmp_path, rows)
    held_out = make_set(tmp_path / "held-out", rows[:3])
    lines = list(describe_unused_texts(prepared, search, [held_out]))
    assert [line.partition(" in a text")[0] for line in lines] == [
        "1 row: `<|image_pad|>`",
        "2 rows: `<|im_end|>`",
        "1 held-out row: `<|image_pad|>`",
    ]
    (tmp_path / "read-only").mkdir()
    prepared = make_set(tmp_path / "read-only", rows)
    (prepared.folder / "columns").write_text("a file where the counts would be")
    assert ["are not counted" in line for line in describe_unused_texts(prepared, search)] == [True]


@pytest.mark.parametrize(
    ("notation", "answer"),
    [
        ("reasoning_content", turn("assistant", "one", reasoning_content="why")),
        ("</think>", turn("assistant", "<think>why</think>one")),
    ],
)
def test_reasoning_that_the_template_omits_is_counted(
    copy_of, tmp_path, in_process, notation, answer
):
    template = AGENT
    if notation == "</think>":
        omitted = "{{ part.text.split('</think>')[-1] if loop.index0 < ns.asked else part.text }}"
        template = template.replace(
            "{% for part in message.content %}{{ part.text }}",
            "{% set number = loop.index0 %}{% for part in message.content %}"
            + omitted.replace("loop.index0", "number"),
        ).replace("loop.index0 > ns.asked", "true")
    search = ProcessorCounter(str(copy_of("qwen3_vl", template))).search
    assert search.omitted_reasoning == (notation,)
    rows = stored_rows(4)
    rows[1] = replace(rows[1], messages=[turn("user", "a?"), answer])
    asked = [turn("user", "a?"), answer, turn("user", "b?<|im_end|>"), turn("assistant", "two")]
    rows[3] = replace(rows[3], messages=asked)
    lines = list(describe_unused_texts(make_set(tmp_path, rows), search))
    assert [line.partition(", for example")[0] for line in lines] == [
        "1 row: `<|im_end|>` in a text is removed, because it stands for a medium, or for a start "
        "or an end of a turn",
        "1 row: the chat template omits the reasoning before the last question",
    ]
