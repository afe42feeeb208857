"""Models without a descriptor: trained if their self-check succeeds, refused otherwise."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import mmray
from mmray.config import Batch, Data, Objective, Train, VlmInputs, recipes
from mmray.config import Vlm as VlmConfig
from mmray.data.vlm import reader
from mmray.data.vlm.encoder import MediaSize, ProcessorEncoder
from mmray.data.vlm.token_counter import check_counts
from mmray.errors import UsageError
from mmray.models.vlm.model import Vlm
from mmray.training import driver
from tests.models.vlm.general_folders import FAMILIES, make_general_folder
from tests.models.vlm.rows import ROWS, settings
from tests.models.vlm.token_runs import make_prepared
from tests.training.runs import Silent

pytestmark = pytest.mark.usefixtures("forked_data_processes")

GENERAL = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def general_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("general")
    return cache(lambda family: make_general_folder(family, root / family))


def _plain_loss(model, messages, media):
    """The sum of the losses of the answers of a row, as transformers computes them."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model.encoder.weights)
    images = iter(media)
    turns = [
        turn
        | {
            "content": [{"type": "text", "text": turn["content"]}]
            if isinstance(turn["content"], str)
            else [
                part | {"image": Image.fromarray(next(images))} if part["type"] == "image" else part
                for part in turn["content"]
            ]
        }
        for turn in messages
    ]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(turns, **options)
    row = model.encoder.encode(messages, media)
    assert inputs["input_ids"][0].tolist() == row.input_ids.tolist()
    with torch.no_grad():
        logits = model.net(**inputs).logits[0, :-1]
    losses = F.cross_entropy(logits, inputs["input_ids"][0, 1:], reduction="none")
    return row, float(losses @ torch.from_numpy(row.loss_weights[1:]))


@GENERAL
def test_family_without_descriptor_is_trained_as_transformers_computes_it(family, general_folder):
    """Padded rows with 0, 1 and 3 images; counts of tokens; answers in a batch."""
    model = Vlm(settings(general_folder(family), max_tokens=2000))
    rows, losses = zip(*(_plain_loss(model, *each) for each in ROWS), strict=True)
    unpacked = [reader._unpack_row(reader._pack_row(row)) for row in rows]
    output = model(model.collator()(unpacked))
    output["loss_sum"].backward()
    assert output["loss_sum"].item() == pytest.approx(sum(losses), rel=1e-5)
    parts = model.parameter_parts()
    for name in ("vision", "projector", "language"):
        grads = [model.get_parameter(each).grad for each in parts[name]]
        assert any(grad is not None and grad.any() for grad in grads), name
    for (messages, media), row in zip(ROWS, rows, strict=True):
        sizes = [MediaSize(image.shape[1], image.shape[0]) for image in media]
        assert model.encoder.count_tokens(messages, sizes) == len(row.input_ids)
    prompts = [messages[:1] for messages, _ in ROWS]
    images = [
        media[: sum(part["type"] == "image" for part in prompt[0]["content"])]
        if not isinstance(prompt[0]["content"], str)
        else []
        for prompt, (_, media) in zip(prompts, ROWS, strict=True)
    ]
    together = model.answer(prompts, images, 4)
    assert together == [
        model.answer([prompt], [each], 4)[0] for prompt, each in zip(prompts, images, strict=True)
    ]


def test_model_without_chat_template_is_refused(general_folder):
    with pytest.raises(UsageError, match="no chat template"):
        Vlm(settings(general_folder("paligemma")))


def test_model_is_refused_with_the_check_that_failed(general_folder, monkeypatch):
    folder = general_folder("mistral3")
    encoder = ProcessorEncoder(str(folder), 500)
    monkeypatch.setattr(encoder, "count_tokens", lambda *_: 7)
    with pytest.raises(UsageError, match=r"mistral3.*check of its placeholders failed: 7 tokens"):
        check_counts(encoder)
    net_class = type(Vlm(settings(folder)).net)
    forward = net_class.forward

    def scale_logits(self, *arguments, **inputs):
        output = forward(self, *arguments, **inputs)
        output.logits = 3 * output.logits
        return output

    monkeypatch.setattr(net_class, "forward", scale_logits)
    with pytest.raises(UsageError, match=r"check of its loss failed: it is .* in a batch"):
        Vlm(settings(folder))
    monkeypatch.undo()
    base = type(Vlm(settings(folder)).net.model)
    monkeypatch.setattr(base, "get_image_features", torch.no_grad()(base.get_image_features))
    with pytest.raises(UsageError, match=r"check of its gradient failed: .* is zero"):
        Vlm(settings(folder))


def test_run_of_a_model_without_descriptor(general_folder, tmp_path, without_ray):
    """With batches by tokens, evaluation with answers, and an export that transformers opens."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = general_folder("qwen3_5")
    make_prepared(tmp_path / "set")
    config = recipes.sample_vlm().replace(
        model=VlmConfig(weights=str(folder), inputs=VlmInputs(max_tokens=400)),
        objective=Objective(kind="language_modelling"),
        data=Data(train=str(tmp_path / "set"), workers=1),
        batch=Batch(global_=6, tokens=600),
        train=Train(steps=2, log_every=1),
        run=recipes.sample_vlm().run.replace(storage=str(tmp_path), name="run"),
    )
    reporter = Silent()
    outcome = driver.train(config.with_cluster(workers=1, cpus_per_worker=1), reporter)
    assert outcome.result["status"] == "finished"
    assert outcome.result["metrics"]["answered"] == 3
    assert any("rows are padded" in text for _, text in reporter.notes)
    out = mmray.export(outcome.path, tmp_path / "out")
    AutoModelForImageTextToText.from_pretrained(out)
    AutoProcessor.from_pretrained(out)
