"""What image towers that keep the places of a picture have in common, torchvision's and transformers'."""

from __future__ import annotations

import math
from typing import Any, Self

from torch import Tensor, nn


def square(places: Tensor) -> Tensor:
    """[B, H x H, width] -> [B, width, H, H]."""
    return places.transpose(1, 2).unflatten(2, (math.isqrt(places.shape[1]), -1))


class PlacesTower(nn.Module):
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
        return square(places[:, 1:] if self.first_token else places)

    def train(self, mode: bool = True) -> Self:
        """Frozen BatchNorm normalises as in evaluation while training too; its scale and shift still learn."""
        super().train(mode)
        if self.frozen:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self
