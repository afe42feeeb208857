"""Orientation of the frames of a video: rotations and mirror images, as phones store them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from av import VideoFrame


def display_matrix(frame: VideoFrame) -> np.ndarray:
    """Return the matrix [2, 2] that a player multiplies a position (x, y) of a frame by."""
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return np.eye(2, dtype=np.int32)
    return np.frombuffer(data, np.int32).reshape(3, 3)[:2, :2]


def turns_sideways(matrix: np.ndarray) -> bool:
    """Return whether a display matrix exchanges width and height, to the nearest right angle."""
    return abs(int(matrix[0, 1])) > abs(int(matrix[0, 0]))


def upright(pixels: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return pixels [H, W, C] as players show them, to the nearest right angle."""
    if turns_sideways(matrix):
        pixels = pixels.transpose(1, 0, 2)
        matrix = matrix[::-1]
    return pixels[:: -1 if matrix[1, 1] < 0 else 1, :: -1 if matrix[0, 0] < 0 else 1]
