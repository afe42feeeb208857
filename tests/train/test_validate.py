"""Contradicting settings are refused before anything starts, each with a fix."""

import pytest

from mmray.config import recipes
from mmray.train.validate import unsupported_reasons


def config(recipe="sample", workers=1, **sections):
    base = recipes.load(recipe)
    given = {name: getattr(base, name).model_copy(update=values) for name, values in sections.items()}
    return base.model_copy(update={"cluster": base.cluster.model_copy(update={"workers": workers}), **given})


def fsdp(**train):
    return {"workers": 2, "train": {"parallel": "fsdp", **train}}


REGIONS = {"recipe": "fusion", "model": {"regions": True}}
LLAVA = {"recipe": "llava", "workers": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 2, "train": {"parallel": "single"}}, "set --cluster.workers 1"),
        ({"workers": 2, "train": {"parallel": "branches"}}, "set --cluster.workers 1"),
        ({"workers": 1, "train": {"parallel": "fsdp"}}, "set --cluster.workers 2"),
        (fsdp(precision="fp16"), "set --train.precision bf16"),
        (fsdp(channels_last=True), "set --train.channels_last False"),
        (fsdp(grad_compression="bf16"), "train.grad_compression bf16 needs `ddp`"),
        ({"train": {"parallel": "branches"}, "model": {"kind": "my.package:Mine"}}, "an image and a text tower"),
        ({"batch": {"micro": "auto"}, "model": {"batch_norm": "synced"}}, "set --batch.micro"),
        (LLAVA | {"evaluate": {"classes": ("cat", "dog")}}, "evaluate.classes: a generative model"),
        (LLAVA | {"evaluate": {"num_generations": 5}}, "which fsdp shards; set it to 0"),
        ({"objective": {"kind": "region_text"}}, "for model.kind `fusion`, not `two_tower`"),
        ({"recipe": "fusion", "objective": {"kind": "matching + region_text"}}, "set --model.regions True"),
        (REGIONS, "add `+ region_text` to --objective.kind"),
        (REGIONS | {"objective": {"kind": "matching + region_text"}}, "set --model.inputs.max-boxes"),
        ({"evaluate": {"num_generations": 5}}, "evaluate.num_generations: model.kind `two_tower` is not generative"),
    ],
)
def test_unsupported_settings_are_refused(given, message):
    assert message in "\n".join(unsupported_reasons(config(**given)))


@pytest.mark.parametrize(("parallel", "workers"), [("ddp", 1), ("ddp", 4), ("fsdp", 2), ("branches", 1), ("single", 1)])
@pytest.mark.parametrize("micro", [8, "auto"])
def test_supported_settings_pass(parallel, workers, micro):
    assert unsupported_reasons(config(workers=workers, train={"parallel": parallel}, batch={"micro": micro})) == []
