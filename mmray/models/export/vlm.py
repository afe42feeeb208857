"""Exports of vision-language models: folders that transformers and vLLM open, and `mmray.load`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from mimetypes import guess_type
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch
from PIL import Image
from safetensors.torch import load_file

from mmray.data.message_fields import Message, parse_tools
from mmray.data.messages import parse_messages
from mmray.data.rows import parse_image
from mmray.data.store.stored_row import Media
from mmray.data.vlm.reader import read_clip
from mmray.data.vlm.video import kind_of
from mmray.errors import DataError, UsageError
from mmray.models import lora
from mmray.models.export.embedder import decode_image
from mmray.models.export.export import CARD, CONFIG, replace_export
from mmray.models.pretrained import EXPORT_MARKER
from mmray.storage.paths import AnyPath, RemotePath, copy_file, temp_dir, to_path
from mmray.version import VERSION

if TYPE_CHECKING:
    from mmray.models.vlm.model import Vlm

VLM_SPEC = "mmray_model"  # key in config.json of the `model` section
ANSWER_BATCH = 16  # conversations answered at once


_CARD = """---
library_name: transformers
tags: [image-text-to-text]
---

# {name}

A vision-language model, trained and exported by mmray, with its processor, chat template and
generation settings.

```python
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor

processor = AutoProcessor.from_pretrained("{name}")
model = AutoModelForMultimodalLM.from_pretrained("{name}")
content = [
    {{"type": "image", "image": Image.open("photo.jpg")}},
    {{"type": "text", "text": "What is in the image?"}},
]
inputs = processor.apply_chat_template(
    [{{"role": "user", "content": content}}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
)
tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False)
answer = processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
```

`mmray.load("{name}").answer(messages, images)` gives the same, and keeps added special tokens, such
as those of boxes, which `skip_special_tokens` removes.

The processor has the pixel limits of training. Training put transparent images on white.
"""
_ARGUMENTS = """
Its class has a fixed limit for videos. With videos, pass that of training too:
`processor_kwargs={}`.
"""


def export_vlm(
    model: Vlm,
    spec: dict[str, Any],
    out: str | AnyPath,
    adapters_only: bool = False,
    log: Callable[[str, str], None] = lambda text, label: None,
) -> AnyPath:
    """Write weights, processor and chat template to a folder; an earlier export is replaced.

    Args:
        model: The module `Vlm` with its trained weights. With adapters only if `adapters_only`;
            otherwise merge them first.
        spec: Its `model` section as JSON values, {field: value}.
        out: Local path, or URI such as `s3://bucket/model`, of the folder.
        adapters_only: Write the adapters and the projector as peft does, without the weights that
            the run started with.
        log: Called with (warning, label) if the processor cannot keep a limit of the run.

    Returns:
        The folder.

    Raises:
        UsageError: The folder contains something else, or is not writable. The model has trained
            weights that peft cannot save.
    """
    folder = to_path(out)
    with replace_export(folder) as staging:
        arguments = model.save_pretrained(str(staging), with_weights=not adapters_only)
        if adapters_only:
            lora.save_adapters(model.net, spec["lora"], spec["weights"], staging)
        config = json.loads((staging / CONFIG).read_text())
        config |= {EXPORT_MARKER: VERSION, VLM_SPEC: spec}
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if not adapters_only:
            card = _CARD.format(name=folder.name)
            (staging / CARD).write_text(card + (_ARGUMENTS.format(arguments) if arguments else ""))
    if arguments:
        log(
            "the processor of this model replaces the limit of model.inputs.frame_pixels: in "
            f"transformers, call it with {arguments}",
            "warning",
        )
    return folder


class Conversations:
    """Continues conversations with images, videos and audio by greedy decoding.

    `answer` takes a list of messages in any notation that `mmray prepare` reads, with their media
    (paths, or PIL images), and returns the assistant's next message as text.

    Args:
        model: A vision-language model of mmray, the module `Vlm`, which has the processor too.
    """

    def __init__(self, model: Vlm) -> None:
        self.model = model

    def answer(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        images: Sequence[Any] = (),
        max_new_tokens: int = 64,
    ) -> Any:
        """Return the assistant's next message of a conversation, or of each of several.

        Args:
            messages: Such as {"role": "user", "content": parts}, {"from": "human", "value":
                "<image>..."}, or parts with media of their own, {"type": "image", "image": PATH}.
            images: The media of the other parts, in order, decoded as in training: paths of images,
                videos and audio (the suffix determines the kind), encoded images (bytes) or PIL
                images; of several conversations a list of such lists.

        Returns:
            The answer as a str; for several conversations a list of str.

        Raises:
            UsageError: The media do not match the parts.
            DataError: A file cannot be read; the message has its index in its conversation.
        """
        conversations: Sequence[Any] = messages
        if messages and isinstance(messages[0], dict):
            return self.answer([conversations], [images], max_new_tokens)[0]
        if not images:
            images = [()] * len(conversations)
        answers: list[str] = []
        for start in range(0, len(conversations), ANSWER_BATCH):
            part = slice(start, start + ANSWER_BATCH)
            try:
                rows = [*map(self._parse, conversations[part], images[part])]
                prompts, media = zip(*rows, strict=True)
                answers += self.model.answer(prompts, media, max_new_tokens)
            except ValueError as error:
                raise UsageError(f"cannot answer: {error}") from error
        return answers

    def _parse(
        self, messages: Sequence[Message], images: Sequence[Any]
    ) -> tuple[Sequence[Message], list[Any]]:
        """Return a conversation as `mmray prepare` stores it, and its media in the order of parts.

        Raises ValueError.
        """
        given = [self._open(*each) for each in enumerate(images)]
        counts = Counter(map(kind_of, given))
        rest = {kind: iter([each for each in given if kind_of(each) == kind]) for kind in counts}
        parsed = parse_messages([*messages, {"role": "assistant", "content": "-"}], counts)
        for notice in parsed.notices:
            if notice.endswith("is not used"):
                warn(notice, stacklevel=4)
        prompt = [*parsed.messages[:-1]]
        if tools := parse_tools(messages[0].get("tools") or []):
            prompt[0] = prompt[0] | {"tools": tools}
        media: list[Any] = []
        for index, (kind, value) in enumerate(parsed.media):
            if value is None:
                media += islice(rest.get(kind, ()), 1)
                continue
            if not isinstance(value, Image.Image):
                reference = parse_image(value, kind)
                value = reference.file if reference.data is None else reference.data
            media.append(self._open(index, value, kind))
        return prompt, media

    def _open(self, index: int, medium: Any, kind: str = "image") -> Any:
        """Decode a medium; the suffix of a path determines its kind."""
        is_file = isinstance(medium, str | Path)
        if is_file:
            guessed = (guess_type(medium)[0] or "").partition("/")[0]
            kind = guessed if guessed in ("video", "audio") else kind
        if kind != "image":
            try:
                data = Path(medium).read_bytes() if is_file else medium
                return read_clip(Media(kind, data), self.model.encoder)
            except (OSError, ValueError) as error:
                name = f" ({medium})" if is_file else ""
                raise DataError(f"{kind} {index}{name}: {error}") from None
        if is_file or isinstance(medium, bytes | Image.Image):
            return decode_image(index, medium)
        return medium


def read_spec(folder: AnyPath) -> Any:
    """Return the `model` section of an exported vision-language model.

    Returns:
        The section as nested SimpleNamespace objects; None if the folder has no such export.
    """
    try:
        values = json.loads((folder / CONFIG).read_text()).get(VLM_SPEC)
    except (OSError, ValueError, AttributeError):
        return None
    return as_section(values)


def as_section(values: object) -> Any:
    """Return the `model` section of an export, JSON values, as an object with attributes."""
    return json.loads(json.dumps(values), object_hook=lambda each: SimpleNamespace(**each))


def load_vlm(folder: AnyPath, spec: Any, device: torch.device) -> Conversations:
    """Load an exported vision-language model.

    Args:
        folder: Folder of the export; one on an object store is downloaded.
        spec: Its `model` section as nested objects, from `read_spec`. Its `weights` is set to the
            folder, unless that has adapters only.
        device: Where the model computes.

    Returns:
        A Conversations, whose `answer(messages, images)` continues conversations.

    Raises:
        UsageError: The model cannot be read.
    """
    from mmray.models.vlm.model import Vlm

    with temp_dir() as temporary:
        if isinstance(folder, RemotePath):
            for file in folder.iterdir():
                copy_file(file, temporary / file.name)
            folder = temporary
        has_adapters_only = (folder / lora.ADAPTERS).exists()
        if not has_adapters_only:
            spec.weights = str(folder)
        model = Vlm(spec)
        if has_adapters_only:
            # Exports of earlier versions have fewer settings.
            added = {"encoder_targets": (), "load_in_4bit": False}
            spec.lora = SimpleNamespace(**added | vars(spec.lora))
            lora.add_adapters(model, spec.lora)
            lora.load_adapters(model.net, load_file(folder / lora.ADAPTERS))
    return Conversations(model.to(device).eval())
