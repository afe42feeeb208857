"""Image encoders ("towers"): normalised pixels -> features [B, width], or a feature map (for fusion.py).

Three sources: ConvNet (the sample set's small network), torchvision's ResNets, and transformers' AutoModel, which also
loads timm models. Every tower has `width`. Only ResNets have BatchNorm. transformers is imported when a tower is built,
because the import takes seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.error import URLError

import torch
from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.weights import (
    load_complete,
    load_local_or_hub,
    patch_config,
    read_state_dict,
    transformer_config,
)

if TYPE_CHECKING:
    from mmray.config import ImageTower

WEIGHTS_SETTING = "model.image.weights"
GROUP_CHANNELS = 8  # channels of a GroupNorm group
HF_TYPES = ("vit", "dinov2", "resnet", "timm_wrapper")  # supported model_type values


def build_image_tower(
    spec: ImageTower, image_side: int, batch_norm: str, architecture: dict[str, Any] | None = None
) -> nn.Module:
    """Build the image tower that `spec` names with its weights, or without them if `architecture` is given.

    batch_norm: `local`, `frozen` or `synced` (model.batch_norm), for ResNets. Raises UsageError.
    """
    tower: nn.Module
    if spec.name in ("transformers", "vit"):
        tower = _build_hf_tower(spec, image_side, batch_norm, (architecture or {}).get("image"))
    elif spec.name == "convnet":
        tower = ConvNet(spec.width, spec.depth, image_side)
    else:
        tower = _resnet(spec, batch_norm)
    if architecture is None and spec.weights != "none" and spec.name != "transformers":
        saved = (
            _pretrained(spec.name) if spec.weights == "pretrained" else read_state_dict(WEIGHTS_SETTING, spec.weights)
        )
        _load(tower, saved, spec)
    return tower


def image_architecture(tower: nn.Module) -> dict[str, Any]:
    """The tower's part of the model's `architecture()`: the transformers config, if it has one."""
    return {"image": tower.config()} if isinstance(tower, HfImageTower) else {}


def random_init_architecture(spec: ImageTower) -> dict[str, Any]:
    """`image_architecture` without loading weights. Raises UsageError."""
    if spec.name != "transformers":
        return {}
    from transformers import AutoConfig

    _hf_type(spec)
    return {"image": load_local_or_hub(WEIGHTS_SETTING, spec.weights, AutoConfig.from_pretrained).to_dict()}


def to_grid(features: Tensor) -> Tensor:
    """[B, H x H, width] -> [B, width, H, H]."""
    return features.transpose(1, 2).unflatten(2, (math.isqrt(features.shape[1]), -1))


class FeatureMapTower(nn.Module):
    """A network without its head.

    prefix_tokens: leading tokens that are not patches (class token, registers). frozen: BatchNorm always uses its
    running statistics; its scale and shift are still trained.
    """

    net: Any

    def __init__(self, net: nn.Module, width: int, prefix_tokens: int, frozen: bool) -> None:
        super().__init__()
        self.net, self.width, self.prefix_tokens, self.frozen = net, width, prefix_tokens, frozen

    def pool(self, features: Tensor) -> Tensor:
        """[B, N, width] -> [B, width]: the class token, or the mean if there is none."""
        return features[:, 0] if self.prefix_tokens else features.mean(dim=1)

    def grid(self, features: Tensor) -> Tensor:
        """[B, N, width] -> feature map [B, width, H, H] without prefix tokens."""
        return to_grid(features[:, self.prefix_tokens :])

    def train(self, mode: bool = True) -> Self:
        """Set the mode, but keep frozen BatchNorm in evaluation mode."""
        super().train(mode)
        if self.frozen:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self


class HfImageTower(FeatureMapTower):
    """A ViT, DINOv2 or ResNet of transformers, or a timm model in transformers' wrapper, without its head."""

    def __init__(self, net: Any, frozen: bool = False) -> None:
        kind = net.config.model_type
        if kind == "timm_wrapper":
            prefix, width = int(getattr(net.timm_model, "num_prefix_tokens", 0)), net.timm_model.num_features
        elif kind == "resnet":
            prefix, width = 0, net.config.hidden_sizes[-1]
        else:
            prefix, width = 1, net.config.hidden_size
        super().__init__(net, width, prefix, frozen)
        for name, weight in net.named_parameters():
            if any(part in name for part in ("mask_token", "attn_pool", "fc_norm")):
                weight.requires_grad_(False)  # not used here, so it would never get a gradient

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features [B, width]."""
        return self.pool(self.features(pixels))

    def features(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features of each position [B, N, width]."""
        hidden: Tensor = self.net(pixel_values=pixels).last_hidden_state
        return hidden.flatten(2).transpose(1, 2) if hidden.ndim == 4 else hidden

    def config(self) -> dict[str, Any]:
        """The transformers config as JSON values."""
        values: dict[str, Any] = self.net.config.to_dict()
        return values


def _build_hf_tower(spec: ImageTower, image_side: int, batch_norm: str, config: dict[str, Any] | None) -> HfImageTower:
    """Load the tower from `spec.weights`, or build it untrained from `config` or (`vit`) from the settings."""
    from transformers import MODEL_MAPPING, AutoConfig, AutoModel, ViTConfig

    if config is None and spec.name == "transformers":
        kind = _hf_type(spec)
        net = load_complete(WEIGHTS_SETTING, spec.weights, AutoModel.from_pretrained, kind, **_pooler_option(kind))
    else:
        if config is None:
            shape = transformer_config(spec) | patch_config(image_side, spec.patch)
            hf: Any = ViTConfig(**shape, layer_norm_eps=1e-6)
        else:
            hf = AutoConfig.for_model(**config)
        net = cast("Any", MODEL_MAPPING)[type(hf)](hf, **_pooler_option(hf.model_type))
    _check_compatible(net.config, image_side, spec.weights)
    if batch_norm == "synced":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return HfImageTower(net, frozen=batch_norm == "frozen")


def _hf_type(spec: ImageTower) -> str:
    """The model_type of the weights. Raises UsageError if no image tower can be built from them."""
    from transformers import ViTConfig

    if spec.weights in ("none", "pretrained"):
        raise UsageError(
            f"{WEIGHTS_SETTING}: model.image.name `transformers` takes its shape from the weights; set a directory "
            f"saved by transformers, or a hub name (got `{spec.weights}`)"
        )
    kind = load_local_or_hub(WEIGHTS_SETTING, spec.weights, ViTConfig.get_config_dict)[0].get("model_type")
    if kind not in HF_TYPES:
        raise UsageError(
            f"{WEIGHTS_SETTING}: {spec.weights} holds a model of type {kind!r}; supported are {', '.join(HF_TYPES)}"
        )
    if kind == "timm_wrapper":
        try:
            import timm  # noqa: F401
        except ImportError:
            raise UsageError(
                f'{WEIGHTS_SETTING}: {spec.weights} is a timm model; install timm with `pip install "mmray[timm]"`'
            ) from None
    return str(kind)


def _pooler_option(kind: str) -> dict[str, bool]:
    return {"add_pooling_layer": False} if kind == "vit" else {}


def _check_compatible(config: Any, image_side: int, weights: str) -> None:
    """Raise UsageError if the encoder cannot process images of this size; DINOv2 interpolates its positions."""
    if config.model_type == "vit" and config.image_size != image_side:
        raise UsageError(
            f"model.inputs.image_side: {weights} needs images of {config.image_size} pixels, not {image_side}; set it "
            f"to {config.image_size}"
        )
    if config.model_type == "dinov2" and image_side % config.patch_size:
        raise UsageError(
            f"model.inputs.image_side: patches of {config.patch_size} pixels ({weights}) do not tile an image of "
            f"{image_side}; take a multiple of {config.patch_size}"
        )


class ConvNet(nn.Module):
    """Small residual network with GroupNorm, fast on a CPU.

    Pixels [B, 3, S, S] -> features [B, width]. The stem has about `channels / 2` channels at S / 2; stage i has
    `channels * i` at half the resolution of the previous one. Pooling takes the maximum, because the mean learns far
    more slowly on small objects in front of a background. Source: pre-activation residual blocks (He et al. 2016,
    arXiv:1603.05027), GroupNorm (Wu & He 2018), and coordinate channels (CoordConv, Liu et al. 2018, arXiv:1807.03247),
    which keep positions through the maximum.
    """

    def __init__(self, channels: int, depth: int, image_side: int) -> None:
        super().__init__()
        if channels % GROUP_CHANNELS:
            raise UsageError(f"model.image.width: the convnet needs a multiple of {GROUP_CHANNELS} (got {channels})")
        if image_side < 2 ** (depth + 1):
            raise UsageError(
                f"model.image.depth: {depth} stages need images of at least {2 ** (depth + 1)} pixels, not "
                f"{image_side}. Reduce the depth or increase model.inputs.image_side"
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

    def features(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features of each position [B, N, width]."""
        return self._map(pixels).flatten(2).transpose(1, 2)

    def pool(self, features: Tensor) -> Tensor:
        """[B, N, width] -> [B, width]: the maximum over positions."""
        return features.amax(dim=1)

    def grid(self, features: Tensor) -> Tensor:
        """[B, N, width] -> feature map [B, width, H, H]."""
        return to_grid(features)

    def _map(self, pixels: Tensor) -> Tensor:
        # Channels last: convolutions take 0.6 of the time on a CPU; half-precision ones are faster on a GPU too.
        inputs = torch.cat([pixels, _coordinates(pixels)], dim=1).contiguous(memory_format=torch.channels_last)
        hidden: Tensor = self.norm(self.stages(self.stem(inputs)))
        return hidden.relu()


class _Block(nn.Module):
    """One stage: halves the resolution; pre-activation, two 3 x 3 convolutions and a linear shortcut."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(channels_in), _norm(channels_out)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.pool = nn.AvgPool2d(2, ceil_mode=True)
        # Linear instead of a 1 x 1 convolution, whose gradient strides differ from its weight's: DDP would copy them.
        self.shortcut = nn.Linear(channels_in, channels_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.norm1(x).relu()
        shortcut: Tensor = self.shortcut(self.pool(active).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return shortcut + self.conv2(self.norm2(self.conv1(active)).relu())


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // GROUP_CHANNELS, channels)


def _coordinates(pixels: Tensor) -> Tensor:
    """Each pixel's row and column in -1..1, [B, 2, H, W]."""
    height, width = pixels.shape[-2:]
    rows = torch.linspace(-1, 1, height, device=pixels.device, dtype=pixels.dtype)
    columns = torch.linspace(-1, 1, width, device=pixels.device, dtype=pixels.dtype)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")).expand(len(pixels), -1, -1, -1)


class _ResNet(FeatureMapTower):
    """A torchvision ResNet (He et al. 2016) without its classifier."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features [B, width]."""
        features: Tensor = self.net(pixels)
        return features

    def features(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] -> features of each position [B, N, width]."""
        net: Any = self.net
        hidden = net.maxpool(net.relu(net.bn1(net.conv1(pixels))))
        hidden = net.layer4(net.layer3(net.layer2(net.layer1(hidden))))
        return hidden.flatten(2).transpose(1, 2)


def _resnet(spec: ImageTower, batch_norm: str) -> _ResNet:
    if batch_norm == "frozen" and spec.weights == "none":
        raise UsageError(
            "model.batch_norm: `frozen` needs the running statistics of trained weights, but model.image.weights is "
            "`none`. Set model.batch_norm to `local`, or model.image.weights to `pretrained` or a file"
        )
    from torchvision.models import get_model

    net = get_model(spec.name, weights=None)
    width = net.fc.in_features
    net.fc = nn.Identity()
    if batch_norm == "synced":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return _ResNet(net, width, prefix_tokens=0, frozen=batch_norm == "frozen")


def _pretrained(name: str) -> dict[str, Tensor]:
    """torchvision's default weights of a ResNet, from its cache or a download. Raises UsageError."""
    if not name.startswith("resnet"):
        raise UsageError(
            f"{WEIGHTS_SETTING}: torchvision has no pretrained weights for `{name}` here; set `none` or a file"
        )
    from torchvision.models import get_model_weights

    weights = get_model_weights(name).DEFAULT
    try:
        state: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (URLError, TimeoutError, ConnectionError) as error:
        raise UsageError(
            f"{WEIGHTS_SETTING}: cannot download the pretrained weights of {name} ({error}). Download {weights.url} on "
            "a machine with a network and set model.image.weights to the file, or set it to `none`"
        ) from None
    return state


def _load(tower: nn.Module, state: dict[str, Tensor], spec: ImageTower) -> None:
    """Load weights into a tower without those of a classifier. Raises UsageError if names or shapes differ."""
    target = tower.net if isinstance(tower, FeatureMapTower) else tower
    state = {name: value for name, value in state.items() if not name.startswith(("fc.", "heads."))}
    try:
        missing, unexpected = target.load_state_dict(state, strict=False)
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip()
        raise UsageError(f"{WEIGHTS_SETTING}: {spec.weights} does not fit a {spec.name}: {detail}") from None
    if missing or unexpected:
        raise UsageError(
            f"{WEIGHTS_SETTING}: {spec.weights} does not fit this {spec.name}: {len(missing)} weights are missing and "
            f"{len(unexpected)} unexpected, first {[*missing, *unexpected][0]}"
        )
