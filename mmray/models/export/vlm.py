"""Exports of vision-language models: folders that transformers and vLLM open, and `mmray.load`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mmray.data.vlm.encoder import Message
from mmray.errors import UsageError
from mmray.storage.paths import AnyPath, move_tree, to_path
from mmray.version import VERSION

CONFIG = "config.json"
EXPORT_MARKER = "mmray"  # key in config.json that marks a folder as an export
VLM_SPEC = "mmray_model"  # key in config.json of the `model` section
ANSWER_BATCH = 16  # conversations answered at once


def export_vlm(model: Any, spec: dict[str, Any], out: str | AnyPath) -> AnyPath:
    """Write weights, processor and chat template to a folder; an earlier export is replaced.

    Args:
        model: A model of the class Vlm without LoRA adapters (they are merged).
        spec: Its `model` section as JSON values.
        out: Local path of the folder.

    Returns:
        The folder.

    Raises:
        UsageError: The folder contains something else, is not writable, or is not on a local disk.
    """
    folder = to_path(out)
    if not isinstance(folder, Path):
        raise UsageError(
            f"{folder}: a vision-language model is exported to a local folder; copy it afterwards"
        )
    try:
        if folder.exists() and not (folder.is_dir() and _is_export_or_empty(folder)):
            raise UsageError(f"{folder} exists and is not an exported model: choose another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            model.save_pretrained(str(staging))
            config = json.loads((staging / CONFIG).read_text())
            config |= {EXPORT_MARKER: VERSION, VLM_SPEC: spec}
            (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            staging.chmod(0o755)
            move_tree(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"cannot write the exported model {folder}: {error}; choose another folder"
        ) from error
    return folder


def _is_export_or_empty(folder: Path) -> bool:
    if not any(folder.iterdir()):
        return True
    try:
        return EXPORT_MARKER in json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return False


class Conversations:
    """Continues conversations with images by greedy decoding.

    Args:
        model: A vision-language model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def answer(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        images: Sequence[Any] = (),
        max_new_tokens: int = 64,
    ) -> Any:
        """Return the assistant's next message of a conversation, or of each of several.

        Args:
            messages: A conversation: a list of {"role": ..., "content": ...} up to a message of the
                user; content is a text, or a list of parts {"type": "image"} and {"type": "text",
                "text": ...}. Several conversations are a list of such lists.
            images: The images of the image parts, in order, as PIL images or paths; of several
                conversations a list of such lists.
            max_new_tokens: Maximum number of tokens of an answer.

        Returns:
            The answer as a str; for several conversations a list of str.

        Raises:
            UsageError: An image cannot be read, or images do not match the image parts.
        """
        if messages and isinstance(messages[0], dict):
            one: Any = messages
            return self.answer([one], [images], max_new_tokens)[0]
        conversations: Any = messages
        if not images:
            images = [()] * len(conversations)
        answers: list[str] = []
        for start in range(0, len(conversations), ANSWER_BATCH):
            part = slice(start, start + ANSWER_BATCH)
            opened = [[_open(image) for image in each] for each in images[part]]
            try:
                answers += self.model.answer(conversations[part], opened, max_new_tokens)
            except ValueError as error:
                raise UsageError(f"cannot answer: {error}") from error
        return answers


def _open(image: Any) -> Any:
    from PIL import Image, ImageOps

    if not isinstance(image, str | Path):
        return image
    try:
        return ImageOps.exif_transpose(Image.open(image)).convert("RGB")
    except OSError as error:
        raise UsageError(f"cannot read the image {image}: {error}") from None


def read_spec(folder: AnyPath) -> Any:
    """Return the `model` section of an exported vision-language model.

    Args:
        folder: Folder of the export.

    Returns:
        The section as nested SimpleNamespace objects; None if the folder has no such export.
    """
    try:
        values = json.loads((folder / CONFIG).read_text()).get(VLM_SPEC)
    except (OSError, ValueError, AttributeError):
        return None
    return json.loads(json.dumps(values), object_hook=lambda each: SimpleNamespace(**each))


def load_vlm(folder: AnyPath, spec: Any, device: torch.device) -> Conversations:
    """Load an exported vision-language model.

    Args:
        folder: Local folder of the export.
        spec: Its `model` section as nested objects, from `read_spec`; its `weights` is set to the
            folder.
        device: Where the model computes.

    Returns:
        An object whose `answer(messages, images)` continues conversations.

    Raises:
        UsageError: The folder is not on a local disk, or the model cannot be read.
    """
    from mmray.models.vlm.model import Vlm

    if not isinstance(folder, Path):
        raise UsageError(f"{folder}: copy the exported model to a local folder and load that")
    spec.weights = str(folder)
    model: Any = Vlm(spec)
    return Conversations(model.to(device).eval())
