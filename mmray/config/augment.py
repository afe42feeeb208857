"""Settings of augmentation: how a training image is varied, another way each epoch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from mmray.config.base import Section


class Augment(Section):
    """Variations of training images, drawn from (seed, epoch, key); held-out images are never varied."""

    path: ClassVar[str] = "augment"
    crop_scale: tuple[float, float] = Field(
        (1.0, 1.0), description="Random resized crop: smallest and largest share of the image's area; 1 1 is off."
    )
    crop_ratio: tuple[float, float] = Field((0.75, 4 / 3), description="Width by height of the random crop, from-to.")
    flip: float = Field(0.0, ge=0, le=1, description="Chance of a left-right flip; wrong where captions name sides.")
    brightness: float = Field(0.0, ge=0, lt=1, description="Brightness times 1 - b to 1 + b.")
    contrast: float = Field(0.0, ge=0, lt=1, description="Contrast times 1 - c to 1 + c.")
    saturation: float = Field(0.0, ge=0, lt=1, description="Saturation times 1 - s to 1 + s.")
    hue: float = Field(0.0, ge=0, le=0.5, description="Hue shifted by up to this share of the colour circle.")

    @property
    def crops(self) -> bool:
        return self.crop_scale != (1.0, 1.0)

    @property
    def varies(self) -> bool:
        return self.crops or any((self.flip, self.brightness, self.contrast, self.saturation, self.hue))

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> Augment:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_scale must be two shares of the area, 0 < low <= high <= 1 (got {low:g} {high:g})")
        low, high = self.crop_ratio
        if not 0 < low <= high:
            raise ValueError(f"crop_ratio must be two ratios, 0 < low <= high (got {low:g} {high:g})")
        return self
