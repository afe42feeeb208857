"""Image encoders of transformers: what a directory or the hub holds, behind the seam of image_towers.py.

transformers is imported when a tower is built, not with this file: it costs seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.encoders.places import PlacesTower
from mmray.models.pretrained import fetch, whole_network

if TYPE_CHECKING:
    from mmray.config import ImageTower

SETTING = "model.image.weights"
FAMILIES = ("vit", "dinov2", "resnet")  # model_type; of the first two the first token is the picture's


def build_their_tower(
    spec: ImageTower, image_side: int, batch_norm: str, shape: dict[str, Any] | None = None
) -> TheirTower:
    """The tower that the weights of `spec` hold; built to `shape` without looking for them where it is given.

    shape: `TheirTower.shape()` of the same tower. Raises UsageError naming the setting.
    """
    from transformers import MODEL_MAPPING, AutoConfig

    if shape is None:
        net = _from_pretrained(spec)
    else:
        config, classes = AutoConfig.for_model(**shape), cast("Any", MODEL_MAPPING)
        net = classes[type(config)](config, **_unpooled(config.model_type))
    _check_fits(net.config, image_side, spec.weights)
    if batch_norm == "synced":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return TheirTower(net, frozen=batch_norm == "frozen")


def saved_shape(spec: ImageTower) -> dict[str, Any]:
    """What `TheirTower.shape()` would give, from the configuration alone. Raises UsageError."""
    from transformers import AutoConfig

    _family(spec)
    values: dict[str, Any] = fetch(SETTING, spec.weights, AutoConfig.from_pretrained).to_dict()
    return values


class TheirTower(PlacesTower):
    """transformers' ViT, DINOv2 or ResNet without a head."""

    def __init__(self, net: Any, frozen: bool = False) -> None:
        config, first_token = net.config, net.config.model_type != "resnet"
        super().__init__(net, config.hidden_size if first_token else config.hidden_sizes[-1], first_token, frozen)
        for name, weight in net.named_parameters():
            if name.endswith("mask_token"):  # of DINOv2: read in its own pretraining only, never here
                weight.requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features [B, width]: the first token's, or the mean over the places."""
        return self.pool(self.places(pixels))

    def places(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features of each place of the picture [B, N, width]."""
        hidden: Tensor = self.net(pixel_values=pixels).last_hidden_state
        return hidden if self.first_token else hidden.flatten(2).transpose(1, 2)

    def shape(self) -> dict[str, Any]:
        """The configuration as plain values, from which `build_their_tower` makes the same tower."""
        values: dict[str, Any] = self.net.config.to_dict()
        return values


def _family(spec: ImageTower) -> str:
    """The model_type of the weights. Raises UsageError for one that is no image tower."""
    from transformers import ViTConfig

    if spec.weights in ("none", "pretrained"):
        raise UsageError(
            f"model.image.weights: model.image.name `transformers` takes its shape from the weights; give a directory "
            f"saved by transformers, or a hub name (got `{spec.weights}`)"
        )
    found = fetch(SETTING, spec.weights, ViTConfig.get_config_dict)[0].get("model_type")
    if found not in FAMILIES:
        raise UsageError(
            f"model.image.weights: {spec.weights} holds a model of type {found!r}; an image tower is one of "
            f"{', '.join(FAMILIES)}"
        )
    return str(found)


def _unpooled(family: str) -> dict[str, bool]:
    return {"add_pooling_layer": False} if family == "vit" else {}


def _from_pretrained(spec: ImageTower) -> Any:
    """The network, float32. Raises UsageError where it is not whole."""
    from transformers import AutoModel

    family = _family(spec)
    return whole_network(SETTING, spec.weights, AutoModel.from_pretrained, family, **_unpooled(family))


def _check_fits(config: Any, image_side: int, weights: str) -> None:
    """A ViT has a place for each patch of one size of image; a DINOv2 stretches its places over whole patches."""
    if config.model_type == "vit" and config.image_size != image_side:
        raise UsageError(
            f"model.inputs.image_side: {weights} is for images of {config.image_size} pixels, not {image_side}; set it "
            f"to {config.image_size}"
        )
    if config.model_type == "dinov2" and image_side % config.patch_size:
        raise UsageError(
            f"model.inputs.image_side: patches of {config.patch_size} pixels ({weights}) do not tile an image of "
            f"{image_side}; take a side that {config.patch_size} divides"
        )
