"""Image encoders ("towers"): normalized pixels -> features [B, width], or those of each position
(for towers.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.error import URLError

import torch
from torch import Tensor, nn

from mmray.builtin import GROUP_CHANNELS, HF_IMAGE_TYPES
from mmray.errors import UsageError, first_line
from mmray.models.encoders.positions import resize_vision_model
from mmray.models.protocol import PRETRAINED, WeightSource
from mmray.models.weights import (
    build_hf_encoder,
    copy_to_meta,
    encoder_config,
    freeze_batch_norms,
    load_state,
    read_state_dict,
    transformer_config,
)

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

    from mmray.config import ImageTower

WEIGHTS_SETTING = "model.image.weights"
TimmLayout = Literal["NLC", "NCHW", "NHWC"]
# Layers before the blocks, and those with the blocks, by package and class of the network.
RESNET_LAYERS = {
    ("torchvision", "ResNet"): (
        ("conv1", "bn1", "relu", "maxpool"),
        ("layer1", "layer2", "layer3", "layer4"),
    ),
    ("transformers", "ResNetModel"): (("embedder",), ("encoder",)),
}


def build_image_tower(
    spec: ImageTower, image_side: int, batch_norm: str, source: WeightSource = PRETRAINED
) -> ImageEncoder:
    """Build the image tower that `spec` names, with its weights.

    Args:
        spec: The `model.image` section. `name` is the tower, such as `resnet50`, and `weights` are
            `none`, `pretrained`, a file, a folder or a hub name.
        image_side: Height and width of an image in pixels.
        batch_norm: Statistics of BatchNorm: `local` (of each worker), `frozen` (the running ones of
            the weights) or `synced` (of all workers).
        source: Its part `image` is the transformers config of the tower, if it has one.

    Returns:
        A module from normalized pixels [B, 3, S, S] to one feature vector for each image [B,
        width]: what timm pools for its networks, the class token of another transformer that has
        one, the maximum over the positions of `convnet`, otherwise the mean over the positions.

    Raises:
        UsageError: The tower does not exist, or its weights cannot be read or do not fit.
    """
    net: nn.Module
    tower: ImageEncoder
    timm_layout = None
    if spec.name == "convnet":
        net = tower = ConvNet(spec.width, spec.depth)
    else:
        if spec.name in ("transformers", "vit"):
            net, width, prefix, timm_layout = _hf_network(spec, image_side, source)
        else:
            net, width, prefix = _resnet(spec, source)
        if batch_norm == "synced":
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        tower = Backbone(net, width, prefix, batch_norm == "frozen", timm_layout)
    is_file = spec.name != "transformers" and spec.weights not in ("none", "pretrained")
    if source.pretrained and is_file:
        state = read_state_dict(WEIGHTS_SETTING, spec.weights)
        state = {name: value for name, value in state.items() if not name.startswith("fc.")}
        load_state(net, state, f"{WEIGHTS_SETTING}: {spec.weights} does not fit a {spec.name}")
    return tower


class ImageEncoder(nn.Module, ABC):
    """Base of the image encoders: features of each position of an image, and their pooling.

    Forward takes normalized pixels, float [B, 3, S, S], and returns one feature vector for each
    image, [B, width], not normalized. A subclass sets `width` and implements `encode`, from what
    `embed` returns (by default the pixels) to features [B, N, width] of N positions: the class
    token and registers, if it has them, then the patches or the pixels of a feature map. It may
    override `embed`, the layers before the blocks, and `pool`, from features to [B, width]: by
    default the class token, or without one the mean over the patches.

    Attributes:
        width: Number of channels of the features.
    """

    width: int
    prefix_tokens = 0  # leading positions that are not patches (class token, registers)
    has_class_token = False  # if true, it is the first position

    def forward(self, pixels: Tensor) -> Tensor:
        return self.pool(self.features(pixels))

    def features(self, pixels: Tensor) -> Tensor:
        """Return the features of each of N positions, [B, N, width]."""
        return self.encode(self.embed(pixels))

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the hidden states before the first block; by default the pixels themselves."""
        return pixels

    @abstractmethod
    def encode(self, hidden: Tensor) -> Tensor:
        """Return the features of each of N positions, [B, N, width]: class token and registers, if
        the encoder has them, then the patches row by row.

        Args:
            hidden: Hidden states before the first block, as `embed` returns them.
        """

    def pool(self, features: Tensor) -> Tensor:
        """Return one feature vector for each image: the class token, or without one the mean over
        the patches.
        """
        if self.has_class_token:
            return features[:, 0]
        return features[:, self.prefix_tokens :].mean(dim=1)

    @torch.no_grad()
    def num_positions(self, image_side: int) -> int:
        """Return the number N of positions of the features of an image."""
        on_meta = copy_to_meta(self).eval()
        pixels = torch.zeros(1, 3, image_side, image_side, device="meta")
        return int(on_meta.features(pixels).shape[1])


class Backbone(ImageEncoder):
    """A network of torchvision or transformers (ViT, DINOv2, ResNet, or its wrapper of timm)
    without its head.

    Args:
        net: The network: a ResNet of torchvision, or one that maps normalized pixels [B, 3, S, S]
            to an output of transformers with `last_hidden_state`.
        width: Number of channels of its features.
        prefix_tokens: Number of leading positions that are not patches (class token, registers).
        frozen: BatchNorm always uses its running statistics; its scale and shift are still trained.
        timm_layout: Layout of the features that `forward_head` of a network of timm pools; None: it
            does not pool them.
    """

    def __init__(
        self,
        net: nn.Module,
        width: int,
        prefix_tokens: int,
        frozen: bool,
        timm_layout: TimmLayout | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        # the whole network, unless it is a ResNet
        package = type(net).__module__.partition(".")[0]
        layers = RESNET_LAYERS.get((package, type(net).__name__), ((), ("",)))
        self.first_layers = layers[0]
        self.layers = layers[1]
        self.width = width
        self.prefix_tokens = prefix_tokens
        self.frozen = frozen
        self.timm_layout = timm_layout
        timm_model = getattr(net, "timm_model", None)  # may have only registers
        self.has_class_token = prefix_tokens > 0 and getattr(timm_model, "cls_token", 0) is not None

    def embed(self, pixels: Tensor) -> Tensor:
        return self._apply_layers(self.first_layers, pixels)

    def encode(self, hidden: Tensor) -> Tensor:
        out = self._apply_layers(self.layers, hidden)
        hidden = out if isinstance(out, Tensor) else out.last_hidden_state
        if hidden.ndim == 4 and hidden.shape[1] != self.width:  # [B, H, H, width]: timm's Swin
            return hidden.flatten(1, 2)
        if hidden.ndim == 3:
            return hidden
        return hidden.reshape(len(hidden), self.width, -1).transpose(1, 2)

    def pool(self, features: Tensor) -> Tensor:
        """Pool as timm does, with the norm of a ConvNeXt or the attention of a SigLIP; as
        ImageEncoder does for other networks.
        """
        if self.timm_layout is None:
            return super().pool(features)
        side = math.isqrt(features.shape[1])
        if self.timm_layout == "NCHW":
            features = features.transpose(1, 2).unflatten(2, (side, side))
        elif self.timm_layout == "NHWC":
            features = features.unflatten(1, (side, side))
        timm_model: Any = self.net.timm_model
        pooled: Tensor = timm_model.forward_head(features)
        return pooled

    def _apply_layers(self, names: tuple[str, ...], hidden: Tensor) -> Any:
        for name in names:
            hidden = self.net.get_submodule(name)(hidden)
        return hidden

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, but keep frozen BatchNorm in evaluation mode."""
        super().train(mode)
        if self.frozen:
            freeze_batch_norms(self)
        return self


def _hf_network(
    spec: ImageTower, image_side: int, source: WeightSource
) -> tuple[Any, int, int, TimmLayout | None]:
    """Network, width, prefix tokens, and the layout that timm pools: from `spec.weights`, or
    untrained from a config or the settings (`vit`).
    """
    from transformers import ViTConfig

    weights = None
    if spec.name == "vit" and "image" not in source.saved:
        sizes: dict[str, Any] = {"image_size": image_side, "patch_size": spec.patch}
        config = ViTConfig(**transformer_config(spec), **sizes, layer_norm_eps=1e-6)
    else:
        config = encoder_config("image", WEIGHTS_SETTING, spec.weights, HF_IMAGE_TYPES, source)
        weights = spec.weights if source.pretrained else None
    net = build_hf_encoder(WEIGHTS_SETTING, weights, config)
    config = net.config
    if config.model_type == "vit":
        resize_vision_model(net, image_side, spec.weights)
    # it interpolates its positions
    if config.model_type == "dinov2" and image_side % config.patch_size:
        raise UsageError(
            f"model.inputs.image_side: {spec.weights} needs a multiple of {config.patch_size} "
            f"pixels, not {image_side}"
        )
    try:
        timm_layout = _freeze_unused(net, image_side)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"model.inputs.image_side: {spec.weights} cannot encode images of {image_side} pixels: "
            f"{first_line(error)}"
        ) from None
    if config.model_type == "timm_wrapper":
        timm_model = net.timm_model
        prefix_tokens = int(getattr(timm_model, "num_prefix_tokens", 0))
        return net, timm_model.num_features, prefix_tokens, timm_layout
    if config.model_type == "resnet":
        return net, config.hidden_sizes[-1], 0, None
    return net, config.hidden_size, 1, None


def _freeze_unused(net: Any, image_side: int) -> TimmLayout | None:
    """Freeze the weights that the features do not depend on, such as those of a head: they would
    get no gradient.

    They are found by a backward pass of a copy on the meta device, without memory. Raises the
    network's errors.

    Returns:
        Layout of the features that `forward_head` of a network of timm pools. None: another
        network, or its result has another width than the features.
    """
    layout: TimmLayout | None = None
    on_meta = copy_to_meta(net).eval().requires_grad_()
    with torch.enable_grad():
        pixels = torch.zeros(1, 3, image_side, image_side, device="meta")
        features = on_meta(pixels).last_hidden_state
        total = features.sum()
        if net.config.model_type == "timm_wrapper":
            timm_model: Any = on_meta.timm_model
            pooled = timm_model.forward_head(features)
            if pooled.shape == (1, timm_model.num_features):
                total = total + pooled.sum()
                is_last = features.shape[-1] == timm_model.num_features
                layout = "NLC" if features.ndim == 3 else "NHWC" if is_last else "NCHW"
        weights = list(on_meta.parameters())
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
    for weight, gradient in zip(net.parameters(), gradients, strict=True):
        if gradient is None:
            weight.requires_grad_(False)
    return layout


def _resnet(spec: ImageTower, source: WeightSource) -> tuple[Any, int, int]:
    """A torchvision ResNet (He et al. 2016) without its head; `pretrained` weights or none."""
    from torchvision.models import get_model, get_model_weights

    weights: WeightsEnum | None = None
    if source.pretrained and spec.weights == "pretrained":
        weights = get_model_weights(spec.name).DEFAULT
    try:
        net = get_model(spec.name, weights=weights, progress=False)
    except (URLError, TimeoutError, ConnectionError) as error:
        assert weights is not None
        raise UsageError(
            f"{WEIGHTS_SETTING}: cannot download the pretrained weights of {spec.name} ({error}). "
            f"Download {weights.url} on a machine with a network and set model.image.weights to "
            "the file, or set it to `none`"
        ) from None
    width = net.fc.in_features
    net.fc = nn.Identity()
    return net, width, 0


class ConvNet(ImageEncoder):
    """Small residual network with GroupNorm, fast on a CPU.

    Pooling takes the maximum over the positions, because the mean learns far more slowly on small
    objects in front of a background. Sources: pre-activation residual blocks (He et al. 2016,
    arXiv:1603.05027), GroupNorm (Wu & He 2018), and coordinate channels (CoordConv, Liu et al.
    2018, arXiv:1807.03247), which keep positions through the maximum.

    Args:
        channels: Channels of the first stage; stage n has n times as many.
        depth: Number of stages, each of which halves the resolution.
    """

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.width = channels * depth
        half = GROUP_CHANNELS * math.ceil(channels / 2 / GROUP_CHANNELS)
        sizes = [half, *(channels * stage for stage in range(1, depth + 1))]
        self.stem = nn.Conv2d(5, sizes[0], 3, stride=2, padding=1, bias=False)
        self.stages = nn.Sequential(*(_Block(sizes[i], sizes[i + 1]) for i in range(depth)))
        self.norm = _norm(self.width)

    def encode(self, pixels: Tensor) -> Tensor:
        size = pixels.shape[-2:]
        axes = [
            torch.linspace(-1, 1, side, device=pixels.device, dtype=pixels.dtype) for side in size
        ]
        coordinates = torch.stack(torch.meshgrid(axes, indexing="ij"))
        coordinates = coordinates.expand(len(pixels), -1, -1, -1)
        # Channels last: convolutions take 0.6 of the time on a CPU; half-precision ones are faster
        # on a GPU too.
        inputs = torch.cat([pixels, coordinates], dim=1)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        hidden: Tensor = self.norm(self.stages(self.stem(inputs)))
        return hidden.relu().flatten(2).transpose(1, 2)

    def pool(self, features: Tensor) -> Tensor:
        return features.amax(dim=1)


class _Block(nn.Module):
    """One stage: halves the resolution; pre-activation, two 3 x 3 convolutions and a linear
    shortcut.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels_in)
        self.norm2 = _norm(channels_out)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.pool = nn.AvgPool2d(2, ceil_mode=True)
        # Linear instead of a 1 x 1 convolution, whose gradient strides differ from its weight's:
        # DDP would copy them.
        self.shortcut = nn.Linear(channels_in, channels_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.norm1(x).relu()
        shortcut: Tensor = self.shortcut(self.pool(active).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return shortcut + self.conv2(self.norm2(self.conv1(active)).relu())


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // GROUP_CHANNELS, channels)
