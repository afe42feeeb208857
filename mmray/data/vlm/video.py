"""Videos as the inputs of the Qwen-VL family: frames in numpy, because the video processors of
transformers need torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from mmray.data.media.clips import Window, frame_times
from mmray.data.store.stored_row import Media
from mmray.errors import UsageError

if TYPE_CHECKING:
    from transformers.video_utils import VideoMetadata

CHANNELS = 3
CAP_OVER_MIN = 1.05  # Qwen3VLVideoProcessor caps frames at no fewer pixels than this many minima
MIN_LENGTH_S = 0.001  # shortest clip; the header of a file may have no duration


class Clip(NamedTuple):
    """Frames of a video at equal distances.

    Args:
        frames: RGB uint8 [F, H, W, 3], upright.
        times_s: Time of each frame in seconds from the start of the clip, float [F].
    """

    frames: np.ndarray
    times_s: Sequence[float]


class FrameProcessor:
    """Resizes the frames of videos and cuts them into patches, as the video processors of
    transformers do for the Qwen-VL family; their processor calls it in place of its own.

    Args:
        settings: The settings of the weights' video processor, as in its config file: `image_mean`,
            `image_std`, `size` (or `min_pixels` and `max_pixels`), and optionally `rescale_factor`,
            `patch_size`, `merge_size` and `temporal_patch_size`.
        per_clip: Whether the limits of pixels in `settings` are for all frames of a clip together
            (Qwen3-VL), not for each.
        max_pixels: Maximum width x height of a frame after resizing; None: that of `settings`.

    Raises:
        UsageError: The settings have no limits of pixels.
    """

    def __init__(
        self, settings: dict[str, Any], per_clip: bool, max_pixels: int | None = None
    ) -> None:
        size = dict(settings.get("size") or {})
        for edge, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            # Qwen2VLVideoProcessor prefers those of earlier versions.
            if edge not in size or (settings.get(name) and not per_clip):
                size[edge] = settings.get(name)
        if None in size.values():
            raise UsageError(
                "model.weights: its video processor has no `size` with shortest_edge and "
                f"longest_edge (pixels): {settings.get('size')}"
            )
        self.image_mean = settings["image_mean"]
        self.image_std = settings["image_std"]
        self.rescale_factor = settings.get("rescale_factor", 1 / 255)
        self.patch_size = int(settings.get("patch_size", 14))
        self.merge_size = int(settings.get("merge_size", 2))
        self.temporal_patch_size = int(settings.get("temporal_patch_size", 2))
        self._min_pixels = size["shortest_edge"]
        self._max_pixels = size["longest_edge"]
        self._per_clip = per_clip
        self._frame_pixels = max_pixels
        if per_clip and max_pixels is not None:
            # As Qwen3VLVideoProcessor caps frames, so that an export has the same limits.
            self._frame_pixels = max_pixels // self._factor**2 * self._factor**2
            self._min_pixels = min(self._min_pixels, int(self._frame_pixels / CAP_OVER_MIN))

    @property
    def _factor(self) -> int:
        return self.patch_size * self.merge_size

    def limits(self, frames: int, frame_rate: float) -> dict[str, Any]:
        """Return the settings with which the video processor of transformers has the same limits.

        Args:
            frames: Most frames of a clip.
            frame_rate: Frames per second, unless they would be more than `frames`.
        """
        group = self.temporal_patch_size
        frames = group * max(1, frames // group)
        limits = {
            "size": {"shortest_edge": self._min_pixels, "longest_edge": self._max_pixels},
            "cap_pixels_per_frame": False,
            "fps": frame_rate,
            "min_frames": group,
            "max_frames": frames,
        }
        most = self._frame_pixels
        if most is None:
            return limits
        if not self._per_clip:
            return limits | {
                "size": {"shortest_edge": min(self._min_pixels, most), "longest_edge": most}
            }
        return limits | {
            "size": {"shortest_edge": self._min_pixels, "longest_edge": frames * most},
            "cap_pixels_per_frame": True,
            "max_video_tokens": most // self._factor**2,
        }

    def choose_times(
        self, length_s: float, frames: int, frame_rate: float, uniform: float
    ) -> list[float]:
        """Return the times of the frames of a clip, at equal distances.

        Args:
            frame_rate: Frames per second, unless they would be more than `frames`.
            uniform: Random number in [0, 1): place of each time in its interval.

        Returns:
            Seconds from the start of the clip, ascending; their number is a multiple of
            `temporal_patch_size`.
        """
        group = self.temporal_patch_size
        length_s = max(length_s, MIN_LENGTH_S)
        num_groups = round(length_s * frame_rate / group)
        count = group * max(1, min(num_groups, frames // group))
        return frame_times(Window(0.0, length_s), count, 0.0, uniform)

    def grid(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the number of patches of a clip in time, height and width after resizing.

        Raises:
            ValueError: One side is more than 200 times the other.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        frames = num_frames if self._per_clip else 1
        least = self._min_pixels / frames
        most = self._max_pixels / frames
        if self._frame_pixels is not None:
            most = self._frame_pixels
            least = min(least, most)
        # The video processor of Qwen3-VL enlarges small frames first, that of Qwen2-VL does not.
        scale = max(1.0, self._factor / min(height, width)) if self._per_clip else 1.0
        sides = smart_resize(int(height * scale), int(width * scale), self._factor, least, most)
        patches = [side // self.patch_size for side in sides]
        return num_frames // self.temporal_patch_size, patches[0], patches[1]

    def metadata(self, times_s: Sequence[float]) -> VideoMetadata:
        """Return the times of the frames of a clip as transformers' processor reads them:
        `frames_indices` divided by `fps`.

        Args:
            times_s: At least two times in seconds from its start, at equal distances.
        """
        from transformers.video_utils import VideoMetadata

        rate = 1 / (times_s[1] - times_s[0])
        # It computes each time as an index divided by the rate.
        indices: list[Any] = [time * rate for time in times_s]
        return VideoMetadata(len(times_s), fps=rate, frames_indices=indices)

    def __call__(
        self, videos: Sequence[np.ndarray], video_metadata: object, **_: object
    ) -> dict[str, Any]:
        """Return the inputs of the vision encoder.

        Args:
            videos: Frames of each video, uint8 [F, H, W, 3].

        Returns:
            `pixel_values_videos` uint8 [patches, channels x frames x values], not normalized;
            `video_grid_thw` int64 [videos, 3]; and `video_metadata`.
        """
        grids = [self.grid(len(frames), *frames.shape[1:3]) for frames in videos]
        patches = [self._patches(*each) for each in zip(videos, grids, strict=True)]
        return {
            "pixel_values_videos": np.concatenate(patches),
            "video_grid_thw": np.array(grids, np.int64),
            "video_metadata": video_metadata,
        }

    def _patches(self, frames: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        """Return the patches of a clip, those that are merged to one token after another."""
        time, height, width = grid
        patch = self.patch_size
        merge = self.merge_size
        size = (width * patch, height * patch)
        resized = [
            Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in frames
        ]
        split = np.stack([np.asarray(frame) for frame in resized]).reshape(
            time,
            self.temporal_patch_size,
            height // merge,
            merge,
            patch,
            width // merge,
            merge,
            patch,
            CHANNELS,
        )
        ordered = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return ordered.reshape(time * height * width, -1)


def clip_length_s(media: Media, span: Sequence[float] | None) -> float:
    """Return the seconds of a video or audio that a text is about; 0 if they are not known."""
    return media.duration or 0.0 if span is None else span[1] - span[0]


def kind_of(medium: object) -> str:
    """Return the kind of a decoded medium: `image`, `video` or `audio`."""
    if isinstance(medium, Clip):
        return "video"
    return "audio" if isinstance(medium, np.ndarray) and medium.ndim == 1 else "image"
