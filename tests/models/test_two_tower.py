"""Two-tower model: normalised outputs, gradients, temperature, and no effect of padding."""

import math

import pytest
import torch
from torch import Tensor, nn

from mmray.config import CustomModel, ImageTower, Inputs, TextTower, TwoTower, model_section
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch

VOCAB = 50
INPUTS = Inputs(image_side=32, mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1), max_tokens=12)
TEXT = TextTower(width=16, depth=1, heads=2)
IMAGES = {
    "convnet": ImageTower(name="convnet", width=8, depth=2),
    "vit": ImageTower(name="vit", width=16, depth=1, heads=2, patch=8),
    "resnet18": ImageTower(name="resnet18"),
}


def _spec(image: str = "convnet", **changes) -> TwoTower:
    return TwoTower(inputs=INPUTS, image=IMAGES[image], text=TEXT, embed_dim=8, batch_norm="local", **changes)


def _model(spec: TwoTower | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(spec or _spec(), VOCAB)


def _batch(rows: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    return synthetic_batch(INPUTS, VOCAB, rows, "cpu", seed)


@pytest.mark.parametrize("image", IMAGES)
def test_embeddings_are_normalised_and_every_parameter_gets_a_gradient(image):
    model = _model(_spec(image))
    outputs = model(_batch())
    assert set(outputs) == {"image_embed", "text_embed", "logit_scale"}
    for name in ("image_embed", "text_embed"):
        assert outputs[name].shape == (4, 8)
        torch.testing.assert_close(outputs[name].norm(dim=1), torch.ones(4))
    scores = outputs["logit_scale"] * outputs["image_embed"] @ outputs["text_embed"].T
    nn.functional.cross_entropy(scores, torch.arange(4)).backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_branches_cover_all_but_the_temperature():
    model = _model()
    image, text = (set(branch.parameters()) for branch in model.branches().values())
    assert list(model.branches()) == ["image", "text"]
    assert not image & text
    assert set(model.parameters()) - image - text == {model.log_scale}
    batch = _batch()
    torch.testing.assert_close(model.embed_image(batch["image"]), model(batch)["image_embed"])
    torch.testing.assert_close(
        model.embed_text(batch["input_ids"], batch["attention_mask"]), model(batch)["text_embed"]
    )


def test_pixels_are_normalised_in_the_model():
    model, batch = _model(), _batch(rows=2)
    seen = []
    model.image.tower.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model.embed_image(batch["image"])
    mean, std = torch.tensor(INPUTS.mean), torch.tensor(INPUTS.std)
    expected = (batch["image"].permute(0, 2, 3, 1) / 255 - mean) / std
    torch.testing.assert_close(seen[0], expected.permute(0, 3, 1, 2), atol=1e-5, rtol=1e-5)
    assert not [name for name in model.state_dict() if "mean" in name or "std" in name]


def test_model_runs_in_float64():
    outputs = _model().double()(_batch())
    assert {value.dtype for value in outputs.values()} == {torch.float64}


def test_half_precision_gives_float32_embeddings():
    with torch.autocast("cpu", torch.bfloat16):
        outputs = _model()(_batch())
    assert outputs["image_embed"].dtype == outputs["text_embed"].dtype == torch.float32
    torch.testing.assert_close(outputs["image_embed"].norm(dim=1), torch.ones(4))


def test_temperature_starts_as_set_and_is_clamped():
    model = _model(_spec(temperature=0.2))
    assert model(_batch())["logit_scale"].item() == pytest.approx(5.0)
    model.constrain()
    assert model(_batch())["logit_scale"].item() == pytest.approx(5.0)
    with torch.no_grad():
        model.log_scale.fill_(10.0)
    model.constrain()
    assert model.log_scale.item() == pytest.approx(math.log(100))
    assert model.log_scale.requires_grad


def test_embeddings_do_not_depend_on_padding():
    model, batch = _model().double().eval(), _batch()
    ids, mask = batch["input_ids"].clone(), batch["attention_mask"].clone()
    mask[:, 7:] = 0
    ids[:, 7:] = 0
    short = model.embed_text(ids[:, :7], mask[:, :7])
    torch.testing.assert_close(model.embed_text(ids, mask), short, rtol=1e-12, atol=1e-12)
    ids[:, 7:] = 9
    torch.testing.assert_close(model.embed_text(ids, mask), short, rtol=1e-12, atol=1e-12)


def test_text_embedding_depends_on_word_order():
    model, batch = _model().eval(), _batch()
    turned = model.embed_text(batch["input_ids"].flip(1), batch["attention_mask"])
    assert (turned - model.embed_text(batch["input_ids"], batch["attention_mask"])).abs().max() > 1e-3


def test_empty_caption_stays_finite():
    model, batch = _model(), _batch()
    batch["attention_mask"][2:] = 0
    embedding = model.embed_text(batch["input_ids"], batch["attention_mask"])
    embedding.sum().backward()
    assert embedding.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in model.text.parameters())


@pytest.mark.parametrize("image", ["convnet", "vit"])
def test_rows_are_independent(image):
    model, batch = _model(_spec(image)).double(), _batch()
    alone = model.embed_image(batch["image"][:1])
    torch.testing.assert_close(model.embed_image(batch["image"])[:1], alone, rtol=1e-9, atol=1e-9)


def test_same_seed_gives_same_weights_and_batches():
    one, two, other = _model().state_dict(), _model().state_dict(), _model(seed=1).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    batch, again, differing = _batch(), _batch(), _batch(seed=1)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(batch["image"], differing["image"])


def test_synthetic_batch_has_the_columns_of_a_collated_one():
    batch = _batch(rows=3)
    assert {name: (tuple(column.shape), column.dtype) for name, column in batch.items()} == {
        "image": ((3, 3, 32, 32), torch.uint8),
        "input_ids": ((3, 12), torch.int64),
        "attention_mask": ((3, 12), torch.int64),
        "key": ((3,), torch.int64),
        "label": ((3,), torch.int64),
        "valid": ((3,), torch.bool),
        "pos": ((3,), torch.int64),
    }
    assert int(batch["input_ids"].max()) < VOCAB
    assert batch["valid"].all()


class CustomModel(nn.Module):
    """A user's model."""

    def __init__(self, spec: CustomModel, vocab_size: int) -> None:
        super().__init__()
        self.seen = (spec.kind, vocab_size)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError


class WithoutForward(nn.Module):
    """A class without `forward`."""

    def __init__(self, *_: object) -> None:
        super().__init__()


def test_custom_model_is_built_by_name():
    kind = f"{__name__}:CustomModel"
    assert build(model_section(kind)(kind=kind), VOCAB).seen == (kind, VOCAB)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("two_towers", r"unknown kind `two_towers`; use one of two_tower"),
        ("no_such_package:Model", r"cannot load `no_such_package:Model`: No module named"),
        ("mmray.models.build:Missing", r"cannot load `mmray\.models\.build:Missing`"),
        (f"{__name__}:WithoutForward", r"has no forward\(batch\); see mmray/models/protocol\.py"),
        ("operator:is_", r"`operator:is_` built a bool, not a torch\.nn\.Module"),
    ],
)
def test_invalid_kind_is_named(kind, message):
    with pytest.raises(UsageError, match=rf"^model\.kind: .*{message}"):
        build(model_section(kind)(kind=kind), VOCAB)
