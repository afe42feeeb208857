"""Load the processor of a vision-language model without torch, which costs 600 MB in each data
process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from mmray.data.vlm.families import MODEL_CONFIG, WEIGHTS_SETTING, Family
from mmray.data.vlm.video import FrameProcessor
from mmray.errors import UsageError
from mmray.plugins import load_class, packages_hidden

# Files of a model, besides its weights, that determine its inputs and answers.
PROCESSOR_FILES = (
    MODEL_CONFIG,
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def read_processor_files(weights: str) -> dict[str, bytes]:
    """Return the content of each of PROCESSOR_FILES that a model has, by name.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub.
    """
    folder = Path(weights)
    if folder.is_dir():
        paths = {name: folder / name for name in PROCESSOR_FILES}
        return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    from transformers.utils import cached_file

    content = {}
    for name in PROCESSOR_FILES:
        with suppress(OSError, ValueError):  # loading the processor explains it
            content[name] = Path(str(cached_file(weights, name))).read_bytes()
    return content


@contextmanager
def torch_hidden() -> Iterator[None]:
    """Context manager in which transformers does not find torch, unless one of them was imported
    before.

    transformers imports torch whenever it is installed, which costs 600 MB in each data process.
    It checks once, so other packages can import torch afterwards.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    logger = logging.getLogger("transformers")  # it warns that it has no torch
    logger.disabled = True
    try:
        with packages_hidden("torch"):
            yield
    finally:
        logger.disabled = False


def load_processor(weights: str, config: dict[str, Any] | None) -> Any:
    """Load the processor of a model with an image processor in numpy, and without a video
    processor, which would need torch.

    Args:
        config: Content of its config.json; `model_type` determines the class. None: load it as
            transformers does, with torch.

    Raises:
        UsageError: The processor cannot be loaded.
    """
    from transformers import AutoProcessor
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    try:
        if config is None:
            return AutoProcessor.from_pretrained(weights)
        # A thinker has the processor of the whole model.
        whole_type = model_type_to_module_name(config["model_type"])
        name = PROCESSOR_MAPPING_NAMES[whole_type]
        processor_class = load_class(f"transformers:{name}", WEIGHTS_SETTING)
        return _without_video(processor_class).from_pretrained(weights)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"{WEIGHTS_SETTING}: cannot load the processor of `{weights}`: "
            f"{str(error).strip().splitlines()[0]}"
        ) from None


def _without_video(processor_class: Any) -> Any:
    """Return a processor class of transformers without a video processor, and with an image
    processor in numpy.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    class WithoutVideo(processor_class):
        def check_argument_for_proper_class(self, _name: str, argument: object) -> type:
            return type(argument)

        @classmethod
        def _get_arguments_from_pretrained(
            cls, path: str, processor_dict: object = None, **options: Any
        ) -> list[Any]:
            load: dict[str, Callable[[str], Any]] = {
                "image_processor": partial(AutoImageProcessor.from_pretrained, backend="pil"),
                "feature_extractor": AutoFeatureExtractor.from_pretrained,
                "tokenizer": AutoTokenizer.from_pretrained,
                "video_processor": lambda _: None,
            }
            return [load[name](path) for name in processor_class.get_attributes()]

    return WithoutVideo


def load_frame_processor(
    weights: str, family: Family, processor: object, frame_pixels: int | None
) -> FrameProcessor:
    """Load the settings of a model's video processor, without transformers' class, which needs
    torch.

    Args:
        processor: The model's processor, whose class may have settings that replace those saved.
        frame_pixels: Maximum width x height of a frame after resizing; None: the processor's
            default.

    Raises:
        UsageError: The settings cannot be read.
    """
    from transformers.video_processing_utils import BaseVideoProcessor

    try:
        settings, _ = BaseVideoProcessor.get_video_processor_dict(weights)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"{WEIGHTS_SETTING}: cannot read the video processor of `{weights}`: "
            f"{str(error).strip().splitlines()[0]}"
        ) from None
    fixed = getattr(processor, "videos_kwargs", {})
    if "size" in fixed:
        fixed = fixed | {"min_pixels": None, "max_pixels": None}
    settings |= fixed
    return FrameProcessor(settings, family.video == "clip", frame_pixels)


def crop_arguments(image_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of the images of SigLIP, which are not cropped, as the crop by which
    LlavaProcessor counts tokens.
    """
    size = image_settings.get("size") or {}
    has_crop = image_settings.get("crop_size") is not None
    return {"crop_size": dict(size)} if "height" in size and not has_crop else {}
