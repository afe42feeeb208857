"""Export and load: the exported folder gives the embeddings of the trained model."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mmray
from mmray.config import ImageTower, Inputs, Model, TextTower, TwoTower
from mmray.data.images.decode import decode
from mmray.data.images.transform import resize_to_square
from mmray.data.text.tokenizer import TextEncoder
from mmray.errors import DataError, UsageError
from mmray.models.build import build
from mmray.models.export import export as export_module
from mmray.models.export.export import export
from mmray.models.pretrained import pretrained_settings
from tests.made import encode
from tests.models.test_clip import TEXTS, TOKENIZER, VOCAB

Exported = tuple[nn.Module, TwoTower, Path]


def spec_of(fit: str = "crop") -> TwoTower:
    return TwoTower(
        inputs=Inputs(image_side=32, fit=fit, max_tokens=8, mean=(0.5,) * 3, std=(0.25,) * 3),
        image=ImageTower(name="convnet", width=8, depth=2),
        text=TextTower(width=16, depth=1, heads=2, dropout=0.1),
        vocab_size=VOCAB,
        embed_dim=12,
    )


def trained(spec: Model) -> nn.Module:
    """A model with weights unlike any initialization."""
    torch.manual_seed(3)
    model = build(spec, VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def photo(mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (50, 70, 4), dtype=np.uint8)
    return Image.fromarray(noise, "RGBA").convert(mode)


def save(model: nn.Module, spec: Model, out: Path | str) -> Any:
    return export(model, spec.model_dump(mode="json"), TOKENIZER, out)


def direct_images(model: nn.Module, spec: Model, images: list[bytes]) -> Tensor:
    """Pixels as in training and evaluation."""
    inputs = spec.inputs
    pixels = [
        resize_to_square(decode(data), inputs.image_side, inputs.fit, inputs.interpolation)
        for data in images
    ]
    with torch.no_grad():
        return model.embed_image(torch.from_numpy(np.stack(pixels)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    spec = spec_of()
    model = trained(spec)
    return model, spec, save(model, spec, tmp_path_factory.mktemp("out") / "model")


@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
def test_loaded_model_embeds_as_trained(tmp_path: Path, fit: str) -> None:
    spec = spec_of(fit)
    model = trained(spec)
    loaded = mmray.load(save(model, spec, tmp_path / "model"))
    data = [encode(photo(), "JPEG"), encode(photo("RGBA"), "PNG"), encode(photo("L"), "WEBP")]
    (tmp_path / "file.jpg").write_bytes(data[0])
    image, embedded = (
        direct_images(model, spec, data),
        loaded.embed_images([tmp_path / "file.jpg", *data[1:]], batch=2),
    )
    torch.testing.assert_close(embedded, image, rtol=0, atol=1e-6)
    ids, num_tokens = TextEncoder(TOKENIZER, spec.inputs.max_tokens).encode(TEXTS)
    mask = torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]
    with torch.no_grad():
        text = model.embed_text(torch.from_numpy(ids).long(), mask.long())
    for batch in (1, 2, 256):
        torch.testing.assert_close(loaded.embed_texts(TEXTS, batch), text, rtol=0, atol=1e-6)
    for each in (image, text):
        assert (each[0] - each[1]).abs().max() > 1e-3  # the output depends on the input


def test_pil_image_embeds_like_its_file(exported: Exported) -> None:
    loaded, orientation = mmray.load(exported[2]), Image.Exif()
    orientation[0x0112] = 6
    upright, rotated = encode(photo(), "JPEG"), encode(photo(), "JPEG", exif=orientation)
    assert not torch.allclose(
        loaded.embed_images([rotated]), loaded.embed_images([upright]), atol=1e-3
    )
    pairs: list[Any] = [
        (photo(mode), encode(photo(mode), "PNG")) for mode in ("RGBA", "L", "P", "1")
    ]
    for image, file in [*pairs, (Image.open(io.BytesIO(rotated)), rotated)]:
        assert torch.equal(loaded.embed_images([image]), loaded.embed_images([file]))


def test_loads_in_a_fresh_process_in_three_lines(exported: Exported) -> None:
    """The lines of the model card, without importing Ray or pydantic."""
    _, _, out = exported
    card = (out / "README.md").read_text()
    lines = card.split("```python\n")[1].split("```")[0]
    assert len(lines.splitlines()) == 3
    Image.new("RGB", (9, 9), "red").save(out.parent / "photo.jpg")
    script = lines + (
        "import sys\nprint(tuple(scores.shape), 'ray' in sys.modules, 'pydantic' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=out.parent, capture_output=True, text=True
    )
    assert done.stdout.strip() == "(1, 2) False False", done.stderr


def test_importing_mmray_is_light() -> None:
    script = (
        "import mmray, sys; print([m for m in ('torch', 'ray', 'transformers', 'pydantic') "
        "if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
    with pytest.raises(AttributeError, match="no_such"):
        mmray.no_such  # noqa: B018


@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
def test_transformers_reads_tokenizer_and_preprocessing(tmp_path: Path, fit: str) -> None:
    """The image processor config is written only if its pixels are equal."""
    from transformers import AutoImageProcessor, PreTrainedTokenizerFast

    spec = spec_of(fit)
    out = save(trained(spec), spec, tmp_path / "model")
    assert json.loads((out / "config.json").read_text())["model"] == spec.model_dump(mode="json")
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # that of the umask
    ids, num_tokens = TextEncoder(TOKENIZER, 8).encode([TEXTS[0]])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"))(TEXTS[0])[
        "input_ids"
    ]
    assert theirs == ids[0, : num_tokens[0]].tolist()
    assert (out / "preprocessor_config.json").exists() == (fit != "pad")
    if fit == "pad":
        with pytest.raises((OSError, ValueError)):
            AutoImageProcessor.from_pretrained(out)
        return
    rows, columns = np.mgrid[0:120, 0:240]  # the crop is at integer pixels, as theirs always is
    image = np.stack([rows, columns, 255 - columns], axis=-1).astype(np.uint8)
    pixels = AutoImageProcessor.from_pretrained(out)(Image.fromarray(image), return_tensors="np")[
        "pixel_values"
    ][0]
    assert (
        np.abs((pixels * 0.25 + 0.5) * 255 - resize_to_square(image, 32, fit, "bicubic")).mean()
        <= 1
    )


def test_invalid_input_is_named(exported: Exported, tmp_path: Path) -> None:
    loaded, good = mmray.load(exported[2]), encode(photo(), "PNG")
    with pytest.raises(DataError, match="image 1: truncated"):
        loaded.embed_images([good, good[:100]], batch=1)
    with pytest.raises(DataError, match=r"image 0 \(.*missing\.png\)"):
        loaded.embed_images([tmp_path / "missing.png"])
    with pytest.raises(DataError, match="text 1: blank"):
        loaded.embed_texts(["good", " \n"])
    with pytest.raises(TypeError, match="list"):
        loaded.embed_texts("a bare string")
    with pytest.raises(
        UsageError, match=r"model is an export of kind two_tower, .* mmray evaluate RUN --data SET"
    ):
        pretrained_settings(str(exported[2]))
    with pytest.raises(
        UsageError, match=r"no class_head; train one of kind `towers` with model\.classes"
    ):
        loaded.classify([good], ["a"])


def test_no_images_and_no_texts_have_no_embeddings(exported: Exported) -> None:
    loaded = mmray.load(exported[2])
    assert loaded.embed_images([]).shape == loaded.embed_texts([]).shape == (0, 12)


@pytest.mark.parametrize(
    ("name", "content"),
    [("thesis.tex", "years")]
    + [("config.json", text) for text in ('{"model_type": "clip"}', "[]", "{broken")],
)
def test_export_replaces_only_exports(tmp_path: Path, name: str, content: str) -> None:
    """A folder of the user, or one written by save_pretrained of transformers."""
    (tmp_path / name).write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"weights of weeks")
    with pytest.raises(UsageError, match="is not an exported model"):
        save(trained(spec_of()), spec_of(), tmp_path)
    with pytest.raises(UsageError, match="cannot write"):
        save(trained(spec_of()), spec_of(), tmp_path / name / "model")
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights of weeks"


def test_interrupted_export_keeps_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of()
    model = trained(spec)
    out = save(model, spec, tmp_path / "model")
    before = mmray.load(out).model.text.project.weight
    with torch.no_grad():
        model.text.project.weight.mul_(-1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export_module, "move_tree", Mock(side_effect=KeyboardInterrupt))
        save(model, spec, out)
    (tmp_path / ".model.1234abcd").mkdir()  # of an export that was killed
    (tmp_path / ".model.1234abcd" / "processor_config.json").write_text("{}")
    for expected in (before, model.text.project.weight):
        assert torch.equal(mmray.load(out).model.text.project.weight, expected)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".model.1234abcd", "model"]
        save(model, spec, out)


def test_export_to_object_store_loads_again(s3: Any) -> None:
    spec, address = spec_of(), f"{s3.address}/model"
    model = trained(spec)
    out = save(model, spec, address)
    assert str(out) == address and not Path("s3:").exists()
    assert f'mmray.load("{out.name}")' in (out / "README.md").read_text()
    loaded, data = mmray.load(address), [encode(photo(), "PNG")]
    torch.testing.assert_close(
        loaded.embed_images(data), direct_images(model, spec, data), rtol=0, atol=1e-6
    )

    with torch.no_grad():
        model.text.project.weight.mul_(-1)
    s3.fail("PUT", "model.safetensors", 1000, status=400)  # the upload fails while replacing it
    with pytest.raises(
        UsageError, match=r"cannot write the exported model s3://.*; choose another folder"
    ):
        save(model, spec, address)
    with pytest.raises(UsageError, match="is not a model exported"):
        mmray.load(address)
    s3.fail("PUT", "model.safetensors", 0)
    save(model, spec, address)
    assert torch.equal(mmray.load(address).model.text.project.weight, model.text.project.weight)
    (out / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(UsageError, match=r"s3://.* exists and is not an exported model"):
        save(model, spec, address)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, b"nonsense"])
def test_damaged_export_raises(
    exported: Exported, tmp_path: Path, name: str, content: bytes | None
) -> None:
    out = shutil.copytree(exported[2], tmp_path / "model")
    (out / name).unlink()
    if content is not None:
        (out / name).write_bytes(content)
    with pytest.raises(UsageError, match="is not a model exported"):
        mmray.load(out)
