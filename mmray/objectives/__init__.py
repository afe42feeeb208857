"""Outputs to loss: what a model's named outputs are measured by."""

from mmray.objectives.build import build

__all__ = ["build"]
