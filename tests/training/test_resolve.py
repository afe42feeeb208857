"""Settings resolved before a run starts: rows, steps, tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mmray.config import (
    CaptionDecoder,
    ClipInputs,
    ImageTower,
    Prepare,
    TextTower,
    Towers,
    TwoTower,
    Vlm,
)
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.prepare import pipeline as prepare_module
from mmray.data.store.manifest import read_manifest, write_manifest
from mmray.data.store.stored_row import Media
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import DataError, UsageError
from mmray.evaluation.build import build_evaluator
from mmray.storage.paths import to_path
from mmray.training import sets
from mmray.training.resolve import resolve_run
from mmray.training.workers.backend import Attempt, resume_point
from tests.data.prepare.test_pipeline import make_source, run_here
from tests.made import cache_repository, make_set, png, row
from tests.training.runs import Silent, config


def test_data_limit_is_rows_per_epoch(tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(50)])
    wanted = config(tmp_path / "set", tmp_path, "limited", steps=None, epochs=2.0)
    limited = wanted.replace(data=wanted.data.replace(limit=20))
    whole, first = resolve_run(wanted, Silent()), resolve_run(limited, Silent())
    assert (whole.data_identity["num_rows"], first.data_identity["num_rows"]) == (50, 20)
    assert (whole.steps, first.steps) == (7, 3)
    plan = resume_point(first, None).plan
    for epoch in range(2):
        assert sorted(plan.row_ids_at(np.arange(20) + 20 * epoch)) == list(range(20))


def test_evaluation_source_is_held_out_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "map_tasks", run_here)
    monkeypatch.chdir(tmp_path)
    train, other = make_source(tmp_path / "a", 40), make_source(tmp_path / "b", 12, start=100)
    splitting = config(train, tmp_path, "run")
    splitting = splitting.replace(prepare=Prepare(holdout=0.25))

    def num_rows(eval_source):
        resolved = resolve_run(
            splitting.replace(data=splitting.data.replace(eval=eval_source)), Silent()
        )
        assert resolved.train_set.num_rows + held_out == 40
        return resolved.eval_sets[""].num_rows

    held_out = 40 - resolve_run(splitting, Silent()).train_set.num_rows
    assert 0 < held_out < 20
    assert num_rows(str(other)) == 12
    assert num_rows(None) == num_rows(str(train)) == num_rows("a/rows.jsonl") == held_out


def test_images_that_prepare_accepted_are_valid_in_training_and_evaluation(tmp_path):
    """The images of the second set and of the evaluation set have 256 pixels, above the run's
    limit.
    """
    for name, side, max_pixels in (("a", 8, 100), ("b", 16, 300), ("held-out", 16, 400)):
        make_set(tmp_path / name, [row(number, png(number, side)) for number in range(8)])
        manifest = tmp_path / name / "manifest.json"
        values = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(values | {"settings": {"max_pixels": max_pixels}}))
    wanted = config(f"{tmp_path}/a + {tmp_path}/b", tmp_path, "mixed")
    data = wanted.data.replace(eval=str(tmp_path / "held-out"))
    resolved = resolve_run(wanted.replace(prepare=Prepare(max_pixels=200), data=data), Silent())
    attempt = Attempt(resolved, tmp_path, 0, checkpoint=None, bad_rows=set())
    reader = attempt.worker_context().reader
    assert reader.read_block(resume_point(resolved, None).plan, np.arange(16))["valid"].all()
    assert reader.max_pixels == 300
    assert (
        build_evaluator(resolved.config, resolved.eval_sets, resolved.tokenizer_json)
        .evaluators[""]
        .max_pixels
        == 400
    )


def test_decoder_needs_a_tokenizer_that_ends_texts(tmp_path):
    """The tokenizer of the set has an end token; without one generated captions would not end."""
    made = make_set(tmp_path / "set", [row(number) for number in range(50)])
    without_end = tmp_path / "tokenizer.json"
    values = json.loads(made.tokenizer_json) | {"post_processor": None}
    without_end.write_text(json.dumps(values))
    wanted = config(tmp_path / "set", tmp_path, "run")
    model = TwoTower(**dict(wanted.model) | {"decoder": CaptionDecoder(width=16, depth=1, heads=2)})
    assert resolve_run(wanted.replace(model=model), Silent()).config.model.has_decoder
    inputs = model.inputs.replace(tokenizer=str(without_end))
    with pytest.raises(UsageError, match=r"tokenizer.json\) adds no token at the end of a text"):
        resolve_run(wanted.replace(model=model.replace(inputs=inputs)), Silent())


def prepared_with(folder, **settings):
    """A set whose manifest has these settings of prepare; return its folder."""
    made = make_set(folder, [row(number) for number in range(32)], [row(100)])
    values = Prepare(**settings).model_dump(mode="json")
    write_manifest(made.folder, replace(made.manifest, settings=values))
    return str(folder)


def settings_lines(reporter):
    return [text for label, text in reporter.notes if label == "settings"]


def test_run_has_and_states_the_settings_of_its_sets(tmp_path):
    first = prepared_with(tmp_path / "a", columns=("text=title",), holdout=0.1, format="csv")
    second = prepared_with(tmp_path / "b", repair_text=True, holdout=0.1, columns=("text=title",))
    test = prepared_with(tmp_path / "test", caption="{}", columns=("text=title",), split="test")
    wanted = config(f"{first} + {second}", tmp_path, "run")
    data = wanted.data.replace(eval=test)
    asked = Prepare(image_side=256, repair_text=True, max_bad_fraction=0.5)
    reporter = Silent()
    resolved = resolve_run(wanted.replace(prepare=asked, data=data), reporter)
    assert settings_lines(reporter) == [
        f"{first} was prepared with image_side 0, not 256; repair_text no, not yes. It is used as "
        "it is",
        f"{second} was prepared with repair_text yes, not no. It is used as it is",
        f"{test} was prepared with caption {{}}, not a photo of a {{}}. It is used as it is",
    ]
    true = Prepare(columns=("text=title",), holdout=0.1, max_bad_fraction=0.5)
    assert resolved.config.prepare == true
    again = Silent()
    resolve_run(wanted.replace(prepare=true, data=wanted.data.replace(train=first)), again)
    assert settings_lines(again) == []


def test_settings_of_a_source_that_the_run_prepares_stay(tmp_path, monkeypatch):
    """Training rows have a split of their own, and one is also in the benchmark."""
    monkeypatch.setattr(prepare_module, "map_tasks", run_here)
    monkeypatch.chdir(tmp_path)
    train = prepared_with(tmp_path / "set", image_side=8)
    source = make_source(tmp_path / "b", 12, start=100)
    wanted = config(train, tmp_path, "run")
    asked = Prepare(split="train", check_contamination=(train,), drop_overlap=True, max_pixels=999)
    wanted = wanted.replace(prepare=asked, data=wanted.data.replace(eval=str(source)))
    reporter = Silent()
    resolved = resolve_run(wanted, reporter)
    assert resolved.config.prepare == asked and resolved.eval_sets[""].num_rows == 12
    [line] = settings_lines(reporter)
    assert line.startswith(f"{train} was prepared with max_pixels 25000000, not 999")


@pytest.mark.parametrize(
    ("train", "kind", "mean"),
    [
        ("{a}", "contrastive", "7.5"),  # 15 other rows of the step, half of all pairs
        ("{a}", "sigmoid", "7.5"),
        ("{b}", "contrastive", None),
        # as many rows of an epoch from each: both rows of a pair are in the first with 1/4
        ("{a} + {b}", "contrastive", "1.88"),
        ("{a}:3 + {b}:1", "contrastive", "4.22"),
    ],
)
def test_equal_captions_of_a_step_are_stated(tmp_path, train, kind, mean):
    sets = {name: str(tmp_path / name) for name in "ab"}
    for folder in sets.values():
        made = make_set(folder, [row(number) for number in range(32)], [row(100)])
        share = {"train": 0.5 if folder == sets["a"] else 0.0005, "test": 1.0}
        write_manifest(made.folder, replace(made.manifest, same_text_share=share))
    wanted = config(train.format(**sets), tmp_path, "run")
    wanted = wanted.replace(objective=wanted.objective.replace(kind=kind))
    reporter = Silent()
    resolve_run(wanted, reporter)
    lines = [text for label, text in reporter.notes if label == "captions"]
    assert [line.split()[0] for line in lines] == ([] if mean is None else [mean])
    assert all("of the 15 negatives" in line for line in lines)


def test_texts_about_more_than_a_clip_are_stated(tmp_path):
    rows = [row(number, texts=["a", "b"]) for number in range(20)]
    for each in rows:
        each.media = [Media("audio", b"", duration=12.0)]
        each.spans = [None, [1.0, 3.0]]
    counts = {"media_kinds": {"": {"audio": 20}}, "num_images": {"": {"0": 20}}}
    made = make_set(tmp_path / "set", rows)
    write_manifest(made.folder, replace(made.manifest, **counts))
    lines = []
    for clip_s in (5.0, 12.0):
        wanted = config(tmp_path / "set", tmp_path, "run")
        inputs = ClipInputs(frames=0, clip_s=clip_s)
        reporter = Silent()
        resolve_run(wanted.replace(model=Towers(inputs=inputs)), reporter)
        lines += [text for label, text in reporter.notes if label == "clips"]
    assert len(lines) == 1
    assert lines[0].startswith("20 of 40 texts are about more than model.inputs.clip_s 5 s (up to ")


def test_captions_that_the_model_cuts_are_stated(tmp_path):
    """Of 640 rows a tenth is read: eight groups of eight."""
    texts = ["one two three", "one " * 20]
    rows = [row(number, texts=texts[: 1 + number % 2]) for number in range(640)]
    make_set(tmp_path / "set", rows)
    lines = []
    for max_tokens in (16, 32):
        wanted = config(tmp_path / "set", tmp_path, "run")
        inputs = wanted.model.inputs.replace(max_tokens=max_tokens)
        reporter = Silent()
        resolve_run(wanted.replace(model=wanted.model.replace(inputs=inputs)), reporter)
        lines += [text for label, text in reporter.notes if label == "captions"]
    assert [line.partition(",")[0] for line in lines] == [
        "32 of 96 sampled captions have more than model.inputs.max_tokens 16 tokens"
    ]


def test_global_batch_above_the_rows_of_an_epoch_is_refused(tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(15)])
    small = config(tmp_path / "set", tmp_path, "small")
    with pytest.raises(
        UsageError,
        match=r"16 rows per step are more than the 15 rows .* --batch.global to at most 15$",
    ):
        resolve_run(small, Silent())
    assert (
        resolve_run(
            small.replace(batch=small.batch.replace(global_=15)), Silent()
        ).batch_shape.global_batch_size
        == 15
    )


@pytest.mark.parametrize(
    ("model", "kinds", "refused"),
    [
        (
            None,
            {"audio": 3, "image video": 4},
            "3 rows with audio, 4 rows with image and video among 20, .*two_tower takes one image",
        ),
        ("qwen2_audio", {}, "20 rows with image among 20, .* takes audio only"),
        ("qwen2_audio", {"video": 7}, "7 rows with video, 20 rows with image among 20"),
        ("qwen3_vl", {"audio": 8}, "8 rows with audio among 20, .* takes image only"),
        ("qwen3_vl", {"video": 8}, "8 rows with video .* needs --model.inputs.frames"),
        ({"frames": 0}, {"audio": 3, "audio image": 4}, "16 rows with image among 20, .*towers"),
        ({"audio_rate": 0}, {"audio": 8, "audio video": 3}, "8 rows with audio among 20, .*towers"),
    ],
)
def test_sets_of_media_that_the_model_does_not_take_are_refused_by_their_numbers(
    tmp_path, monkeypatch, model, kinds, refused
):
    folder = tmp_path / "set"
    make_set(folder, [row(number) for number in range(20)])
    address = to_path(str(folder))
    write_manifest(address, replace(read_manifest(address), media_kinds={"": kinds}))
    wanted = config(folder, tmp_path, "run")
    if isinstance(model, str):
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "config.json").write_text(json.dumps({"model_type": model}))
        wanted = wanted.replace(model=Vlm(weights=str(tmp_path / "weights")))
    elif model:
        wanted = wanted.replace(model=Towers(inputs=ClipInputs(**model)))
    else:
        resolve_run(wanted, Silent())  # fewer than a run may quarantine
    monkeypatch.setattr(sets, "MAX_BAD_ROWS", 6)
    with pytest.raises(DataError, match=refused):
        resolve_run(wanted, Silent())


def test_small_set_without_a_row_that_the_model_takes_is_refused(tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(5)])
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "qwen2_audio"}')
    wanted = config(tmp_path / "set", tmp_path, "run")
    wanted = wanted.replace(model=Vlm(weights=str(tmp_path / "weights")))
    with pytest.raises(DataError, match=r"5 rows with image among 5, .* takes audio only"):
        resolve_run(wanted, Silent())


def test_towers_of_video_refuse_sets_of_audio_alone(tmp_path, monkeypatch):
    make_set(tmp_path / "set", [row(number) for number in range(20)])
    address = to_path(str(tmp_path / "set"))
    counts = {"media_kinds": {"": {"audio": 20}}, "num_images": {"": {"0": 20}}}
    write_manifest(address, replace(read_manifest(address), **counts))
    wanted = config(tmp_path / "set", tmp_path, "run")
    with pytest.raises(DataError, match=r"no video and no image, .*--model.inputs.frames 0"):
        resolve_run(wanted.replace(model=Towers()), Silent())
    of_audio = wanted.replace(model=Towers(inputs=ClipInputs(frames=0)))
    resolve_run(of_audio, Silent())
    monkeypatch.setattr("mmray.data.media.decode._is_available", lambda: False)
    with pytest.raises(UsageError, match=r"pip install 'mmray\[media\]'"):
        resolve_run(of_audio, Silent())


def test_rows_that_a_selection_may_leave_out_do_not_refuse_a_set(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "map_tasks", run_here)
    monkeypatch.setattr(sets, "MAX_BAD_ROWS", 2)
    source = make_source(tmp_path / "raw", 24)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    numbered = [json.dumps(values | {"width": at}) for at, values in enumerate(rows)]
    source.write_text("\n".join(numbered))
    settings = Prepare(keep=("width",))
    manifest = prepare_module.prepare(str(source), str(tmp_path / "set"), settings)
    address = to_path(str(tmp_path / "set"))
    write_manifest(address, replace(manifest, media_kinds={"": {"video": 7}}))
    wanted = config(tmp_path / "set", tmp_path, "run")
    resolve_run(wanted.replace(data=wanted.data.replace(where="width >= 5")), Silent())
    with pytest.raises(DataError, match="7 rows with video among 24, "):
        resolve_run(wanted.replace(data=wanted.data.replace(where="width >= 4")), Silent())


def test_models_of_one_image_refuse_sets_with_another_number(tmp_path, monkeypatch):
    rows = [row(number) for number in range(20)]
    rows[3].media = []
    rows[5].media = rows[5].media * 2
    rows[9].media = rows[9].media * 3
    make_set(tmp_path / "set", rows)
    wanted = config(tmp_path / "set", tmp_path, "run")
    monkeypatch.setattr(sets, "MAX_BAD_ROWS", 2)
    with pytest.raises(
        DataError, match=r"1 rows with no image, 2 rows with several images among 20.*takes one"
    ):
        resolve_run(wanted, Silent())
    monkeypatch.undo()
    resolved = resolve_run(wanted, Silent())
    attempt = Attempt(resolved, tmp_path, 0, checkpoint=None, bad_rows=set())
    reader = attempt.worker_context().reader
    plan = resume_point(resolved, None).plan
    block = reader.read_block(plan, np.arange(20))
    unused = plan.row_ids_at(block["pos"][~block["valid"]])
    assert sorted(unused.tolist()) == [3, 5, 9]
    assert reader.explain_bad_row(5, SubprocessDecoder())[1:] == (
        "image-count",
        "the row has 2 images, not one",
    )


OTHER_TOKENS = (
    "model.inputs.tokenizer trained encodes texts as other tokens than the weights were trained "
    "with; --model.inputs.tokenizer {} encodes them alike, or a copy of its open_clip_config.json "
    "next to the tokenizer"
)


def test_inputs_that_differ_from_those_of_local_weights_are_stated(tmp_path):
    made = make_set(tmp_path / "set", [row(number) for number in range(50)])
    image, text = tmp_path / "image", tmp_path / "text"
    for folder, model_type in ((image, "vit"), (text, "bert")):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    pixels = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    (image / "preprocessor_config.json").write_text(json.dumps(pixels))
    (text / "tokenizer.json").write_text(train_tokenizer(["others"], 64))
    wanted = config(tmp_path / "set", tmp_path, "run")
    towers = {
        "image": ImageTower(name="transformers", weights=str(image)),
        "text": TextTower(weights=str(text)),
    }
    model = TwoTower(**dict(wanted.model) | towers)

    def lines(model):
        reporter = Silent()
        resolve_run(wanted.replace(model=model), reporter)
        return settings_lines(reporter)

    other_tokens = OTHER_TOKENS.format(text)
    assert lines(model) == [
        f"model.inputs.mean is 0.485 0.456 0.406, but {image} was trained with 0.5 0.5 0.5",
        f"model.inputs.std is 0.229 0.224 0.225, but {image} was trained with 0.25 0.25 0.25",
        other_tokens,
    ]
    (text / "tokenizer.json").write_text(made.tokenizer_json)
    (image / "preprocessor_config.json").unlink()
    timm = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    values = {"model_type": "timm_wrapper", "pretrained_cfg": timm}
    (image / "config.json").write_text(json.dumps(values))
    assert lines(model) == []
    cleaning = {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}}
    (text / "open_clip_config.json").write_text(json.dumps(cleaning))
    assert lines(model) == [other_tokens]
    (text / "tokenizer.json").unlink()
    assert lines(model) == [other_tokens]
    (text / "open_clip_config.json").unlink()
    assert lines(model) == []


@pytest.mark.parametrize("is_cached", [True, False])
def test_inputs_of_weights_of_the_hub_are_compared(is_cached, tmp_path, monkeypatch):
    make_set(tmp_path / "set", [row(number) for number in range(50)])
    files = {
        "config.json": json.dumps({"model_type": "vit"}),
        "preprocessor_config.json": json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}),
        "tokenizer.json": train_tokenizer(["others"], 64),
    }
    cache_repository(
        monkeypatch, tmp_path, files if is_cached else {}, missing=["open_clip_config.json"]
    )
    wanted = config(tmp_path / "set", tmp_path, "run")
    towers = {
        "image": ImageTower(name="transformers", weights="a/b"),
        "text": TextTower(weights="a/b"),
    }
    reporter = Silent()
    resolve_run(wanted.replace(model=TwoTower(**dict(wanted.model) | towers)), reporter)
    lines = settings_lines(reporter)
    if not is_cached:
        (line,) = lines
        assert "not compared with those of the weights" in line
        assert "cannot read config.json of `a/b`" in line
        return
    assert lines == [
        "model.inputs.mean is 0.485 0.456 0.406, but a/b was trained with 0.5 0.5 0.5",
        "model.inputs.std is 0.229 0.224 0.225, but a/b was trained with 0.25 0.25 0.25",
        OTHER_TOKENS.format("a/b"),
    ]
