"""Checkpoints of LoRA runs have only what trains, and resume on the frozen weights of the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmray.config import Clip, ClipImage, ClipText, Inputs, Lora
from mmray.data.text.tokenizer import TextEncoder
from mmray.engine.checkpoint import files, state_io
from mmray.engine.run_state import EMA_KEY
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.training.saved_model import load_model, load_run_config
from tests.engine.single_worker import make_prepared, run_worker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_resumed_run_equals_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema: float
) -> None:
    prepared = make_prepared(tmp_path / "set")
    vocab = TextEncoder(prepared.tokenizer_json or "", 8).vocab_size
    shape = {"width": 16, "depth": 2, "heads": 2}
    image = ClipImage(patch=8, **shape)
    inputs = Inputs(image_side=16, max_tokens=8, fit="squash")
    spec = Clip(inputs=inputs, image=image, text=ClipText(**shape), embed_dim=8, vocab_size=vocab)
    torch.manual_seed(0)
    start = build(spec, vocab)
    base = export(
        start, spec.model_dump(mode="json"), prepared.tokenizer_json or "", tmp_path / "b"
    )
    lora = Lora(rank=2, train="project")
    spec = spec.replace(weights=str(base), lora=lora)

    def run(name: str, **options: Any) -> dict[str, Any]:
        settings = {"checkpoint_every": 2, "keep_checkpoints": 9, "ema": ema}
        folder = tmp_path / name
        state, _, _ = run_worker(
            prepared, folder, 4, model=spec, evaluate=False, options=options, **settings
        )
        return state

    whole = run("whole")
    middle = tmp_path / "whole" / "checkpoints" / "step-2"
    saved = state_io.load(middle)
    parts = ("model", EMA_KEY) if ema else ("model",)
    for part in parts:
        names = saved[part].keys() - {"n_averaged"}
        assert names and all("lora_" in name or "project" in name for name in names)
    assert files.load_meta(middle)["base"]["weights"] == str(base)
    with monkeypatch.context() as patch:
        patch.setattr("mmray.models.lora.leaves_out_base", lambda _: False)
        assert len(run("complete")["model"]) > len(whole["model"])
    # A complete checkpoint, as earlier versions saved it, needs no files of the base.
    complete = tmp_path / "complete" / "checkpoints" / "step-2"
    for resumed in (run("resumed", checkpoint=middle), run("continued", checkpoint=complete)):
        for part in parts:
            for name, weight in whole[part].items():
                torch.testing.assert_close(resumed[part][name], weight, rtol=0, atol=0)

    # The model for evaluation and export has the frozen weights of the start.
    last = tmp_path / "whole" / "checkpoints" / "step-4"
    loaded = load_model(load_run_config(tmp_path / "whole"), last).state_dict()
    own = start.state_dict()
    for name, weight in loaded.items():
        plain = name.replace(".base_layer", "")
        if "lora_" not in name and "project" not in name:
            assert torch.equal(weight, own[plain])
        elif not ema:
            assert torch.equal(weight, whole["model"][name])

    file = Path(base) / "model.safetensors"
    weights = load_file(file)
    weights["vision_model.post_layernorm.bias"] += 1
    save_file(weights, file, {"format": "pt"})
    for read in (
        lambda: run("changed", checkpoint=middle),
        lambda: load_model(load_run_config(tmp_path / "whole"), last),
    ):
        with pytest.raises(UsageError, match="are not those that the run started with"):
            read()
    shutil.rmtree(base)
    with pytest.raises(UsageError, match=r"model\.weights"):
        run("missing", checkpoint=middle)
