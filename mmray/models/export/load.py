"""Load an exported model: the decoder, preprocessing and tokenizer are those of training, so
embeddings are equal.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load_file

from mmray.data.media.clips import has_clips
from mmray.data.text.tokenizer import TextEncoder
from mmray.errors import UsageError, os_reason
from mmray.models import lora
from mmray.models.build import build
from mmray.models.caption_decoder import DECODER_FILE
from mmray.models.export import open_clip as open_clip_files
from mmray.models.export.embedder import Embedder
from mmray.models.export.export import CONFIG, TOKENIZER, WEIGHTS, from_hf_state
from mmray.models.export.vlm import as_section, load_vlm, read_spec
from mmray.models.open_clip import rename_to_hf
from mmray.models.protocol import saved_layers
from mmray.storage.paths import AnyPath, local_copy, to_path


def load(folder: str | AnyPath, device: torch.device | str = "cpu") -> Any:
    """Load an exported model.

    Args:
        folder: Local path of the export, or a URI such as `s3://bucket/model`.
        device: Where the model computes, such as `cuda`.

    Returns:
        An Embedder, with `embed_images` and `embed_texts`; for a model of clips a ClipEmbedder,
        with `embed_audio` and `embed_video` too; for a vision-language model a Conversations, with
        `answer(messages, images)`.

    Raises:
        UsageError: The folder has no export.
    """
    path = to_path(folder)
    vlm_spec = read_spec(path)
    if vlm_spec is not None:
        return load_vlm(path, vlm_spec, torch.device(device))
    try:
        config = json.loads((path / CONFIG).read_text())
        tokenizer_json = (path / TOKENIZER).read_text()
        if (path / lora.ADAPTERS).exists():
            raise ValueError("it has adapters only; open it with peft, or export the merged model")
        is_open_clip = (path / open_clip_files.CONFIG).exists()
        with local_copy(path / (open_clip_files.WEIGHTS if is_open_clip else WEIGHTS)) as file:
            weights = rename_to_hf(load_file(file)) if is_open_clip else load_file(file)
        if (path / DECODER_FILE).exists():
            with local_copy(path / DECODER_FILE) as file:
                weights |= load_file(file)
        spec = as_section(config["model"])
        spec.settings = config["model"].get("settings", {})  # free settings of a user's own model
        encoder = TextEncoder(tokenizer_json, spec.inputs.max_tokens)
    except Exception as error:  # the tokenizers package raises bare Exception
        raise UsageError(
            f"{path} is not a model exported by `mmray export RUN {path}`: {os_reason(error)}"
        ) from error
    model = build(spec, spec.vocab_size or encoder.vocab_size, saved_layers(config["architecture"]))
    in_hf_names = is_open_clip or "model_type" in config
    model.load_state_dict(from_hf_state(model, weights) if in_hf_names else weights)
    wrapper = Embedder
    if has_clips(spec.inputs):
        from mmray.models.export.clips import ClipEmbedder

        wrapper = ClipEmbedder
    return wrapper(model.to(device).eval(), spec.inputs, encoder, torch.device(device))
