"""Contradicting settings are refused before anything starts, each with a fix."""

import json
import subprocess
import sys
from contextlib import suppress

import pytest

from mmray import cli, objectives
from mmray.config import (
    Batch,
    Clip,
    ClipImage,
    ClipInputs,
    ClipText,
    Config,
    CrossAttention,
    ImageTower,
    Inputs,
    Objective,
    TextTower,
    Towers,
    TwoTower,
    recipes,
)
from mmray.console.reporter import ConsoleReporter
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import dry_run
from mmray.engine.parallel.strategy import Strategy
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.training import driver
from mmray.training.validate import unsupported_reasons, validate_settings
from tests.training.runs import Silent


def config(recipe="sample", workers=1, **sections):
    base = recipes.load(recipe)
    base = base.with_model_kind(sections.get("model", {}).get("kind", base.model.kind))
    cluster = base.cluster.model_copy(update={"workers": workers} | sections.pop("cluster", {}))
    given = {
        name: getattr(base, name).model_copy(update=values) for name, values in sections.items()
    }
    return base.model_copy(update={**given, "cluster": cluster})


def fsdp(**train):
    return {"workers": 2, "train": {"parallel": "fsdp"} | train}


def float8(**train):
    return {"train": {"float8": "tensorwise"} | train}


RESNET = {"recipe": "resnet50-bert"}
VLM = {"recipe": "vlm", "workers": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 2, "train": {"parallel": "single"}}, "set --cluster.workers 1"),
        ({"workers": 2, "train": {"parallel": "branches"}}, "set --cluster.workers 1"),
        ({"workers": 1, "train": {"parallel": "fsdp"}}, "set --cluster.workers 2"),
        ({"batch": {"tokens": 4096}}, "batch.tokens: the rows of model.kind two_tower"),
        ({"data": {"targets": "last"}}, "only model.kind `vlm` has them (got `two_tower`)"),
        (fsdp(precision="fp16"), "set --train.precision bf16"),
        (
            fsdp() | {"optimizer": {"kind": "bitsandbytes.optim:AdamW8bit"}},
            "optimizer.kind: bitsandbytes cannot update sharded weights",
        ),
        (
            fsdp(parallel="hsdp", precision="fp16"),
            "hsdp supports fp32 and bf16; set --train.precision bf16",
        ),
        (
            {"train": {"parallel": "branches"}, "model": {"kind": "my.package:Mine"}},
            "an image and a text tower",
        ),
        ({"batch": {"micro": "auto"}, "model": {"batch_norm": "synced"}}, "set --batch.micro"),
        (float8(precision="fp16"), "float8 needs bf16, not fp16; set --train.precision bf16"),
        (float8(compile="none"), "set --train.compile inductor or --train.float8 none"),
        (float8() | {"cluster": {"accelerator": "cpu"}}, "train.float8 needs GPUs"),
        (VLM | {"evaluate": {"classes": ("cat", "dog")}}, "`vlm` has no embeddings"),
        ({"objective": {"kind": "matching"}}, "for model.kind `towers`, not `two_tower`"),
        ({"objective": {"kind": "sigmoid"}}, "set --model.logit-bias"),
        ({"model": {"logit_bias": -10.0}}, "set --model.logit-bias None"),
        (
            {"recipe": "fusion", "objective": {"kind": "contrastive"}},
            "add `+ matching` to --objective.kind, or set",
        ),
        ({"recipe": "fusion", "objective": {"kind": "matching"}}, "example `+ contrastive`"),
        (
            {"recipe": "fusion", "objective": {"kind": "audio_text"}},
            "audio_text is for model.kind `towers`, not `towers` of text, image (model.inputs",
        ),
        (
            {"recipe": "sample-av", "objective": {"kind": "audio_text"}},
            "trains the branch video; add one of its pairs, for example `+ video_text`, or switch",
        ),
        ({"recipe": "sample-av", "model": {"matching": True}}, "add `+ clip_matching`"),
        ({"recipe": "sample-av", "model": {"logit_bias": -10.0}}, "set --model.logit-bias None"),
        (
            {
                "recipe": "sample-av",
                "objective": {"kind": "audio_text + video_text + classification"},
            },
            "set --model.classes N",
        ),
        ({"recipe": "fusion", "model": {"classes": 3}}, "or set --model.classes 0"),
        (
            VLM | {"objective": {"kind": "contrastive"}},
            "such as language_modelling",
        ),
        (
            {"train": {"activation_checkpointing": ("vision",)}},
            "has no branch `vision`; it has image, text",
        ),
        (
            RESNET | {"model": {"batch_norm": "synced"}, "cluster": {"accelerator": "cpu"}},
            "`synced` needs GPUs",
        ),
        (RESNET | {"model": {"image": ImageTower(name="resnet50")}}, "model.batch_norm: `frozen`"),
        (
            {"evaluate": {"num_generations": 5}},
            "evaluate.num_generations: model.kind `two_tower` generates no text",
        ),
    ],
)
def test_unsupported_settings_are_refused(given, message):
    assert message in "\n".join(unsupported_reasons(config(**given)))


@pytest.mark.parametrize(
    ("parallel", "workers"),
    [("ddp", 1), ("ddp", 4), ("fsdp", 2), ("hsdp", 4), ("branches", 1), ("single", 1)],
)
@pytest.mark.parametrize("micro", [8, "auto"])
def test_supported_settings_pass(parallel, workers, micro):
    assert (
        unsupported_reasons(
            config(workers=workers, train={"parallel": parallel}, batch={"micro": micro})
        )
        == []
    )


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_recipes_pass(recipe):
    base = recipes.load(recipe)
    if recipe == "vlm":  # the config.json of its weights is on the hub
        base = base.replace(model=recipes.load("sample-vlm").model)
    assert unsupported_reasons(base) == []


INPUTS = Inputs(image_side=32, max_tokens=8)
TEXT, VIT = (
    TextTower(width=16, depth=1, heads=2),
    {"width": 16, "depth": 1, "heads": 2, "patch": 16},
)


def tower(name="convnet", batch_norm="local", side=32, text=TEXT, **image):
    sections = {
        "inputs": Inputs(image_side=side, max_tokens=8),
        "image": ImageTower(name=name, **image),
        "text": text,
    }
    return TwoTower(**sections, embed_dim=8, batch_norm=batch_norm)


def clip(weights="none", **image):
    text = ClipText(width=16, depth=1, heads=2)
    return Clip(inputs=INPUTS, image=ClipImage(**VIT | image), text=text, weights=weights)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            tower(width=16, depth=6),
            r"model\.image\.depth: 6 stages need images of at least 128 pixels, not 32",
        ),
        (
            tower(width=20, depth=2),
            r"model\.image\.width: the convnet needs a multiple of 8 \(got 20\)",
        ),
        (
            tower(width=16, depth=2, weights="pretrained"),
            r"model\.image\.weights: `pretrained` names no weights",
        ),
        (
            tower("vit", **VIT | {"heads": 3}),
            r"model\.image\.heads: 3 heads do not divide the width of 16",
        ),
        (
            tower("vit", **VIT | {"patch": 12}),
            r"model\.image\.patch: patches of 12 pixels do not tile an image of 32",
        ),
        (
            tower("vit", **VIT, weights="pretrained"),
            r"model\.image\.weights: `pretrained` names no weights",
        ),
        (
            tower("vit", **VIT, text=TEXT.replace(heads=3)),
            r"model\.text\.heads: 3 heads do not divide",
        ),
        (
            tower("vit", **VIT, text=TEXT.replace(weights="pretrained")),
            r"model\.text\.weights: `pretrained`",
        ),
        (tower("transformers"), r"takes its shape from the weights; .* \(got `none`\)"),
        (
            tower("resnet18", "frozen"),
            r"model\.batch_norm: `frozen`.*model\.image\.weights is `none`",
        ),
        (clip(heads=3), r"model\.image\.heads: 3 heads do not divide the width of 16"),
        (clip(patch=12), r"model\.image\.patch: patches of 12 pixels"),
        (clip("pretrained"), r"model\.weights: `pretrained` names no weights"),
        (
            Towers(cross=CrossAttention(width=16, heads=3), matching=True),
            r"model\.cross\.heads: 3 heads do not divide",
        ),
    ],
)
def test_models_that_cannot_be_built_are_refused_with_and_without_a_driver(spec, message):
    with pytest.raises(UsageError, match=message):
        validate_settings(Config(model=spec, batch=Batch(micro=2)))
    with pytest.raises(UsageError, match=message):
        build(spec, 20)


def folder_of(model_type, path, **values):
    """A folder of transformers without weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type} | values))
    return str(path)


def test_weights_that_do_not_fit_are_refused_before_data_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    siglip = folder_of("siglip", tmp_path / "siglip", vision_config={"patch_size": 14})
    bert = folder_of("bert", tmp_path / "bert", max_position_embeddings=2)
    cases = (
        (clip(siglip), "type `siglip`, and model.kind clip takes clip; set --model.kind siglip"),
        (clip("/no/weights"), "model.weights: /no/weights does not exist"),
        (tower("transformers", weights=bert), r"model\.image\.weights: .* type `bert`.* takes vit"),
        (tower("vit", **VIT, text=TEXT.replace(weights=siglip)), r"model\.text\.weights: .*siglip"),
    )
    for spec, message in cases:
        with pytest.raises(UsageError, match=message):
            driver.train(Config(model=spec, batch=Batch(micro=2)), Silent())
    assert not (tmp_path / "runs").exists() and not (tmp_path / "prepared").exists()


def test_settings_that_weights_override_pass():
    assert clip("openai/clip", patch=12).unsupported_reasons() == []
    assert tower("resnet18", "frozen", weights="w.pth", heads=3).unsupported_reasons() == []


IMAGES = ClipInputs(**dict(INPUTS), clip_s=0)
OBJECTIVES = (
    "contrastive", "sigmoid", "matching", "classification", "language_modelling",
    "contrastive + sigmoid", "contrastive + matching", "sigmoid + matching",
    "contrastive + classification", "contrastive + matching + classification",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "supported"),
    [
        ("two_tower", {}, ["contrastive"]),
        ("two_tower", {"logit_bias": -10.0}, ["sigmoid", "contrastive + sigmoid"]),
        ("fusion", {"matching": False}, ["contrastive"]),
        ("fusion", {}, ["contrastive + matching"]),
        ("fusion", {"logit_bias": -10.0}, ["sigmoid + matching"]),
        ("fusion", {"matching": False, "classes": 3}, ["contrastive + classification"]),
        ("fusion", {"classes": 3}, ["contrastive + matching + classification"]),
    ],
)
def test_validation_and_dry_run_support_the_same_objectives(kind, settings, supported):
    towers = {"image": ImageTower(name="vit", **VIT), "text": TEXT, "embed_dim": 8}
    if kind == "fusion":
        spec = Towers(
            **{"inputs": IMAGES, "matching": True} | towers | settings,
            cross=CrossAttention(width=16, depth=1, heads=2),
            vocab_size=20,
        )
    else:
        spec = TwoTower(**towers, inputs=INPUTS, vocab_size=20, **settings)
    model = build(spec, 20)
    early, late = [], []
    for name in OBJECTIVES:
        config = Config(model=spec, objective=Objective(kind=name))
        early += [] if unsupported_reasons(config) else [name]
        shape = BatchShape(3, 3, world_size=1)
        with suppress(UsageError):
            dry_run(config, model, objectives.build(config.objective), Group(), shape, steps=1)
            late.append(name)
    assert early == late == supported


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["resnet50-bert", "--model.image.weights", "none"], "model.batch_norm: `frozen` needs"),
        (
            ["sample", "--objective.kind", "contrastiv"],
            "objective.kind: no `contrastiv`; use one of contrastive",
        ),
        (
            ["sample", "--data.train", "http://127.0.0.1:9/rows"],
            "http://127.0.0.1:9/rows cannot be opened",
        ),
        (
            ["sample", "--run.storage", "http://127.0.0.1:9/rows"],
            "http://127.0.0.1:9/rows cannot be opened",
        ),
    ],
)
def test_train_refuses_before_ray_starts(monkeypatch, capfd, flags, message):
    monkeypatch.setattr(driver, "ray_session", lambda *_, **__: pytest.fail("Ray was started"))
    assert cli.run(["train", *flags], ConsoleReporter()) == 2
    assert message in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("name", ["cats, dogs", "cats + dogs"])
def test_path_that_reads_as_a_mixture_is_refused(tmp_path, capfd, name):
    (tmp_path / name).mkdir()
    assert cli.run(["train", "--data.train", str(tmp_path / name)], ConsoleReporter()) == 2
    assert "separate the sets of a mixture: rename it" in " ".join(capfd.readouterr().err.split())


def test_validation_imports_neither_torch_nor_ray():
    code = (
        "import sys, mmray.training.validate; assert not {'torch', 'ray', 'transformers'} & "
        "sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_strategy_is_refused_and_an_own_one_is_asked():
    with pytest.raises(UsageError, match=r"train\.parallel: no `ddpp`; use one of ddp, fsdp"):
        unsupported_reasons(config(train={"parallel": "ddpp"}))
    own = config(train={"parallel": f"{__name__}:TwoNodes"})
    assert unsupported_reasons(own) == ["two nodes only"] and own.train.gpus_per_worker == 4


class TwoNodes(Strategy):
    num_devices = 4

    @classmethod
    def unsupported_reasons(cls, config):
        return ["two nodes only"]
