"""Objectives: model outputs -> loss."""

from mmray.objectives.build import build

__all__ = ["build"]
