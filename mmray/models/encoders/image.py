"""Image encoders: pixels to one feature vector a picture, before the projection into the shared space.

The sample's journey: uint8 pixels come from data/, the model's branch normalises them on the training device, a tower
here turns them into features [B, width], or into those of each place of it (for fusion.py). Every tower has the
attribute `width`. None but the ResNets has BatchNorm, none has dropout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.error import URLError

import torch
from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.weights import load_complete, load_local_or_hub, patch_config, read_state_dict, transformer_config

if TYPE_CHECKING:
    from mmray.config import ImageTower


# What image towers that keep the places of a picture have in common, torchvision's and transformers'.
def to_grid(places: Tensor) -> Tensor:
    """[B, H x H, width] -> [B, width, H, H]."""
    return places.transpose(1, 2).unflatten(2, (math.isqrt(places.shape[1]), -1))


class FeatureMapTower(nn.Module):
    """A network without its head. `first_token`: its first place is the whole picture's; `frozen`: see `train`."""

    net: Any

    def __init__(self, net: nn.Module, width: int, first_token: bool, frozen: bool) -> None:
        super().__init__()
        self.net, self.width, self.first_token, self.frozen = net, width, first_token, frozen

    def pool(self, places: Tensor) -> Tensor:
        """Features of each place [B, N, width] -> of the picture [B, width]: the first token's, or their mean."""
        return places[:, 0] if self.first_token else places.mean(dim=1)

    def grid(self, places: Tensor) -> Tensor:
        """Features of each place [B, N, width] -> laid out as the picture is, [B, width, H, H]; no first token."""
        return to_grid(places[:, 1:] if self.first_token else places)

    def train(self, mode: bool = True) -> Self:
        """Frozen BatchNorm normalises as in evaluation while training too; its scale and shift still learn."""
        super().train(mode)
        if self.frozen:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self


# Image encoders of transformers: what a directory or the hub holds, behind the seam of image_towers.py.
#
# transformers is imported when a tower is built, not with this file: it costs seconds.
HF_SETTING = "model.image.weights"
FAMILIES = ("vit", "dinov2", "resnet")  # model_type; of the first two the first token is the picture's


def build_hf_image_tower(
    spec: ImageTower, image_side: int, batch_norm: str, shape: dict[str, Any] | None = None
) -> HfImageTower:
    """The tower that the weights of `spec` hold; built to `shape` without looking for them where it is given.

    shape: `HfImageTower.shape()` of the same tower. Raises UsageError naming the setting.
    """
    from transformers import MODEL_MAPPING, AutoConfig

    if shape is None:
        net = _from_pretrained(spec)
    else:
        config, classes = AutoConfig.for_model(**shape), cast("Any", MODEL_MAPPING)
        net = classes[type(config)](config, **_unpooled(config.model_type))
    _check_compatible(net.config, image_side, spec.weights)
    if batch_norm == "synced":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return HfImageTower(net, frozen=batch_norm == "frozen")


def pretrained_config(spec: ImageTower) -> dict[str, Any]:
    """What `HfImageTower.shape()` would give, from the configuration alone. Raises UsageError."""
    from transformers import AutoConfig

    _family(spec)
    values: dict[str, Any] = load_local_or_hub(HF_SETTING, spec.weights, AutoConfig.from_pretrained).to_dict()
    return values


class HfImageTower(FeatureMapTower):
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
        """The configuration as plain values, from which `build_hf_image_tower` makes the same tower."""
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
    found = load_local_or_hub(HF_SETTING, spec.weights, ViTConfig.get_config_dict)[0].get("model_type")
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
    return load_complete(HF_SETTING, spec.weights, AutoModel.from_pretrained, family, **_unpooled(family))


def _check_compatible(config: Any, image_side: int, weights: str) -> None:
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


SETTING = "model.image.weights"
GROUP_CHANNELS = 8  # channels of one GroupNorm group


def build_image_tower(
    spec: ImageTower, image_side: int, batch_norm: str, architecture: dict[str, Any] | None = None
) -> nn.Module:
    """The image tower that `spec` names, with its weights; where the model's `architecture` is given, without them.

    batch_norm: `local`, `frozen` or `synced` (model.batch_norm); of the towers here it concerns the ResNets only.
    Raises UsageError naming the setting.
    """
    if spec.name == "transformers":
        return build_hf_image_tower(spec, image_side, batch_norm, architecture["image"] if architecture else None)
    if spec.name == "convnet":
        tower: nn.Module = ConvNet(spec.width, spec.depth, image_side)
    elif spec.name == "vit":
        tower = _vit(spec, image_side)
    else:
        tower = _resnet(spec, batch_norm)
    if architecture is None and spec.weights != "none":
        saved = _pretrained(spec.name) if spec.weights == "pretrained" else read_state_dict(SETTING, spec.weights)
        _load(tower, saved, spec)
    return tower


def image_architecture(tower: nn.Module) -> dict[str, Any]:
    """`image` in the model's `architecture`: what the spec leaves to saved weights of the tower; else nothing."""
    return {"image": tower.shape()} if isinstance(tower, HfImageTower) else {}


def random_init_architecture(spec: ImageTower) -> dict[str, Any]:
    """The same, without the weights. Raises UsageError."""
    return {"image": pretrained_config(spec)} if spec.name == "transformers" else {}


class ConvNet(nn.Module):
    """Small residual network with GroupNorm: fast on a CPU, the same in training and evaluation.

    Pixels [B, 3, S, S] -> features [B, width]. The stem has about half of `channels` at S / 2, stage i `channels * i`
    at half the resolution of the one before. Features are the maximum over the picture: on small things in front of a
    background the mean learns far slower. Source: pre-activation residual blocks (He et al. 2016, arXiv:1603.05027),
    GroupNorm (Wu & He 2018), and two input channels that hold each pixel's place (Liu et al. 2018, arXiv:1807.03247),
    without which the maximum would forget where things are.
    """

    def __init__(self, channels: int, depth: int, image_side: int) -> None:
        super().__init__()
        if channels % GROUP_CHANNELS:
            raise UsageError(f"model.image.width: a convnet takes a multiple of {GROUP_CHANNELS} (got {channels})")
        if image_side < 2 ** (depth + 1):
            raise UsageError(
                f"model.image.depth: {depth} stages halve an image more often than {image_side} pixels allow "
                f"(model.inputs.image_side); take a smaller depth or a larger image"
            )
        self.width = channels * depth
        half = GROUP_CHANNELS * math.ceil(channels / 2 / GROUP_CHANNELS)
        sizes = [half, *(channels * stage for stage in range(1, depth + 1))]
        self.stem = nn.Conv2d(5, sizes[0], 3, stride=2, padding=1, bias=False)
        self.stages = nn.Sequential(*(_Block(sizes[i], sizes[i + 1]) for i in range(depth)))
        self.norm = _norm(self.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features [B, width]."""
        return self._map(pixels).amax(dim=(2, 3))

    def places(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features of each place of the picture [B, N, width]."""
        return self._map(pixels).flatten(2).transpose(1, 2)

    def pool(self, places: Tensor) -> Tensor:
        """Features of each place [B, N, width] -> of the picture [B, width]."""
        return places.amax(dim=1)

    def grid(self, places: Tensor) -> Tensor:
        """Features of each place [B, N, width] -> laid out as the picture is, [B, width, H, H]."""
        return to_grid(places)

    def _map(self, pixels: Tensor) -> Tensor:
        # Channels last: the convolutions of a CPU take 0.6 of the time, and a GPU's half-precision ones less too.
        placed = torch.cat([pixels, _coordinates(pixels)], dim=1).contiguous(memory_format=torch.channels_last)
        hidden: Tensor = self.norm(self.stages(self.stem(placed)))
        return hidden.relu()


class _Block(nn.Module):
    """One stage: halves the resolution, pre-activation, two 3 x 3 convolutions and a linear way round them."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(channels_in), _norm(channels_out)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.pool = nn.AvgPool2d(2, ceil_mode=True)
        # Not a 1 x 1 convolution: the strides of its gradient differ from its weight's, which DDP warns of and copies.
        self.shortcut = nn.Linear(channels_in, channels_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.norm1(x).relu()
        way_round: Tensor = self.shortcut(self.pool(active).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return way_round + self.conv2(self.norm2(self.conv1(active)).relu())


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // GROUP_CHANNELS, channels)


def _coordinates(pixels: Tensor) -> Tensor:
    """Each pixel's row and column in -1..1, [B, 2, H, W]."""
    height, width = pixels.shape[-2:]
    rows = torch.linspace(-1, 1, height, device=pixels.device, dtype=pixels.dtype)
    columns = torch.linspace(-1, 1, width, device=pixels.device, dtype=pixels.dtype)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")).expand(len(pixels), -1, -1, -1)


class _Torchvision(FeatureMapTower):
    """A torchvision network without its classifier."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features [B, width]."""
        features: Tensor = self.net(pixels)
        return features

    def places(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features of each place of the picture [B, N, width]."""
        net: Any = self.net
        if self.first_token:
            patches = net._process_input(pixels)
            tokens: Tensor = net.encoder(torch.cat([net.class_token.expand(len(patches), -1, -1), patches], dim=1))
            return tokens
        hidden = net.maxpool(net.relu(net.bn1(net.conv1(pixels))))
        hidden = net.layer4(net.layer3(net.layer2(net.layer1(hidden))))
        return hidden.flatten(2).transpose(1, 2)


def _vit(spec: ImageTower, image_side: int) -> _Torchvision:
    """torchvision's VisionTransformer (Dosovitskiy et al. 2021); features are the class token's."""
    transformer_config(spec)
    patch_config(image_side, spec.patch)
    from torchvision.models import VisionTransformer

    net = VisionTransformer(
        image_side, spec.patch, spec.depth, spec.heads, spec.width, mlp_dim=4 * spec.width, num_classes=1
    )
    net.heads = nn.Identity()
    return _Torchvision(net, spec.width, first_token=True, frozen=False)


def _resnet(spec: ImageTower, batch_norm: str) -> _Torchvision:
    """torchvision's ResNet (He et al. 2016) up to its pooled features."""
    if batch_norm == "frozen" and spec.weights == "none":
        raise UsageError(
            "model.batch_norm: `frozen` keeps the running statistics of the weights, and model.image.weights is "
            "`none`; set model.batch_norm to `local`, or model.image.weights to `pretrained` or a file"
        )
    from torchvision.models import get_model

    net = get_model(spec.name, weights=None)
    width = net.fc.in_features
    net.fc = nn.Identity()
    if batch_norm == "synced":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return _Torchvision(net, width, first_token=False, frozen=batch_norm == "frozen")


def _pretrained(name: str) -> dict[str, Tensor]:
    """torchvision's best weights of a network, from its cache or the network. Raises UsageError."""
    if not name.startswith("resnet"):
        raise UsageError(f"model.image.weights: there are no pretrained weights for `{name}`; take `none` or a file")
    from torchvision.models import get_model_weights

    weights = get_model_weights(name).DEFAULT
    try:
        state: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (URLError, TimeoutError, ConnectionError) as error:
        raise UsageError(
            f"model.image.weights: the pretrained weights of {name} are not on this machine and cannot be fetched "
            f"({error}); fetch {weights.url} where there is a network and set model.image.weights to the file, "
            f"or set it to `none`"
        ) from None
    return state


def _load(tower: nn.Module, state: dict[str, Tensor], spec: ImageTower) -> None:
    """Put weights into a tower; a classifier's are dropped. Raises UsageError where names or shapes differ."""
    target = tower.net if isinstance(tower, _Torchvision) else tower
    state = {name: value for name, value in state.items() if not name.startswith(("fc.", "heads."))}
    try:
        missing, unexpected = target.load_state_dict(state, strict=False)
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip()
        raise UsageError(f"model.image.weights: {spec.weights} is not of a {spec.name}: {detail}") from None
    if missing or unexpected:
        raise UsageError(
            f"model.image.weights: {spec.weights} is not of a {spec.name} of this shape: {len(missing)} weights are "
            f"missing and {len(unexpected)} unknown, the first is {[*missing, *unexpected][0]}"
        )
