"""Embed audio and video with an exported model of kind `towers`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmray.data.images.decode import BadImage
from mmray.data.media.clips import ClipColumns, full_span
from mmray.data.media.decode import WITHOUT_DURATION, BadMedia, read_header
from mmray.data.media.formats import detect_demuxer
from mmray.data.store.stored_row import Media, Row
from mmray.data.stream.collate import Batch, clip_tensors
from mmray.errors import UsageError
from mmray.models.export.embedder import Embedder, MediaInput, unreadable

Spans = Sequence[tuple[float, float] | None]
_LENGTHS = {"audio": "num_samples", "video": "num_frames"}  # columns by kind


class ClipEmbedder(Embedder):
    """Embeds texts, audio, video and images in one space; the dot product of two embeddings is
    their similarity.

    `embed_texts`, `embed_audio`, `embed_video` and `embed_images` take lists of N texts, encoded
    files (bytes) or their paths, or images, and return L2-normalized tensors float32 [N, D].
    `mmray.load` returns an instance for an export of a model of the kind `towers`; the constructor
    is that of Embedder.
    """

    def embed_audio(
        self, files: Sequence[MediaInput], spans: Spans | None = None, batch: int = 64
    ) -> Tensor:
        """Embed audio, or the sound of videos: float32 [N, D] on the CPU, 0 for a file without it,
        with a warning.

        Args:
            files: N encoded files (bytes), or their paths.
            spans: Start and end of each in seconds, None for the complete file; None: of all. Of a
                span over `model.inputs.clip_s` the middle is embedded.

        Raises:
            UsageError: The model has no audio.
            DataError: A file cannot be decoded; the message has its index.
        """
        return self._embed_media("audio", files, spans, batch)

    def embed_video(
        self, files: Sequence[MediaInput], spans: Spans | None = None, batch: int = 16
    ) -> Tensor:
        """Embed the frames of videos: float32 [N, D] on the CPU, 0 for a file without frames, with
        a warning.

        Args:
            files: N encoded files (bytes), or their paths.
            spans: Start and end of each in seconds, None for the complete file; None: of all. Of a
                span over `model.inputs.clip_s` the middle is embedded.

        Raises:
            UsageError: The model has no video.
            DataError: A file cannot be decoded; the message has its index.
        """
        return self._embed_media("video", files, spans, batch)

    def embed_images(self, images: Sequence[Any], batch: int = 64) -> Tensor:
        branch = self._branch("video")

        def embed(start: int, part: Sequence[Any]) -> Tensor:
            frame = self._pixels(start, part)[:, None]
            return branch(frame, torch.ones(len(frame), dtype=torch.long, device=self.device))

        return self._in_batches(embed, batch, images)

    def _branch(self, name: str) -> Callable[..., Tensor]:
        if name not in self.model.modalities:
            raise UsageError(f"this model has no {name}: it was trained without")
        return partial(self.model.embed, name)

    def _pair_features(self, start: int, images: Sequence[Any], tokens: Batch) -> Tensor:
        return self.model.embed_pair(self._clips(start, images, [None] * len(images)) | tokens)

    def _clips(
        self, start: int, files: Sequence[MediaInput], spans: Spans, kind: str | None = None
    ) -> Batch:
        """Return the columns of a batch of clips on the device.

        Raises DataError with the number of the file, counted from `start`, if it is unreadable.
        """
        clips = ClipColumns(self.inputs)  # type: ignore[arg-type]
        columns = clips.empty(max(1, len(files)))
        for index, (file, span) in enumerate(zip(files, spans, strict=True)):
            try:
                clips.set_row(columns, index, _read_clip(file, span, kind), None)
            except (OSError, BadImage) as error:
                is_absent = isinstance(error, BadImage) and error.reason == f"no-{kind}"
                if kind is None or not is_absent:
                    raise unreadable("file", start + index, file, error) from error
            if kind is not None and not columns[_LENGTHS[kind]][index]:
                name = "" if isinstance(file, bytes) else f" ({file})"
                warnings.warn(
                    f"file {start + index}{name} has no {kind}; its embedding is 0", stacklevel=6
                )
        return {name: each.to(self.device) for name, each in clip_tensors(columns).items()}

    def _embed_media(
        self, kind: str, files: Sequence[MediaInput], spans: Spans | None, batch: int
    ) -> Tensor:
        branch = self._branch(kind)

        def embed(start: int, part: Sequence[MediaInput], of_part: Spans) -> Tensor:
            columns = self._clips(start, part, of_part, kind)
            lengths = columns[_LENGTHS[kind]]
            return branch(columns[kind], lengths) * (lengths > 0)[:, None]

        if spans is None:
            spans = [None] * len(files)
        if len(spans) != len(files):
            raise UsageError(f"spans: {len(spans)} for {len(files)} files; give one for each file")
        return self._in_batches(embed, batch, files, spans)


def _kind_of(data: bytes) -> str:
    """Return `video` for a file with frames, otherwise `audio`. Raises BadMedia."""
    try:
        read_header(data, "video")
    except BadMedia as bad:
        if bad.reason != "no-video":
            raise
        return "audio"
    return "video"


def _check_span(span: tuple[float, float], media: Media) -> None:
    """Raise BadMedia for a span without time, or one that is outside the file."""
    start, end = full_span(media, with_sound=True)
    # The headers of MP3 and Ogg do not state the end.
    is_known = end > start and detect_demuxer(media.data) not in WITHOUT_DURATION
    if span[0] >= span[1] or (is_known and not (span[0] < end and span[1] > start)):
        has = f", which is at {start:.2f} to {end:.2f} s" if is_known else ""
        raise BadMedia("span", f"the span {span[0]:g} to {span[1]:g} s is not in the file{has}")


def _read_clip(file: MediaInput, span: tuple[float, float] | None, kind: str | None) -> Row:
    """Return the row of a file; without `kind` it is `video` if the file has frames.

    Raises OSError or BadMedia.
    """
    data = file if isinstance(file, bytes) else Path(file).read_bytes()
    media = Media(kind or _kind_of(data), data)
    if span is not None:
        _check_span(span, media)
    return Row("", [media], ["text"], spans=[list(span) if span else None])
