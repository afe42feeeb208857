"""A new LLaVA from an image encoder and a causal language model: a folder that `model.weights`
takes, and that transformers opens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmray.errors import UsageError
from mmray.models.weights import load_config, load_local_or_hub, load_pretrained

if TYPE_CHECKING:
    from transformers import (
        BaseImageProcessor,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

# Values of `model_type` of image encoders, alone or in a model with a text encoder.
ENCODER_TYPES = ("clip", "clip_vision_model", "siglip", "siglip_vision_model")
VISION_SETTING = "model.vision"
LANGUAGE_SETTING = "model.language"
# Rows of the token embedding are a multiple of it, if the language model gets more of them.
EMBEDDING_MULTIPLE = 64
# A language model reads texts, so parts are joined before its own template reads them.
_JOIN_PARTS = """\
{%- set joined = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- set text = namespace(value=message['content'] or '') -%}
{%- if message['content'] and message['content'] is not string -%}
{%- set text.value = '' -%}
{%- for part in message['content'] -%}
{%- set text.value = text.value + ('<image>\\n' if part['type'] == 'image' else part['text']) -%}
{%- endfor -%}
{%- endif -%}
{%- set joined.messages = joined.messages + [dict(message, content=text.value)] -%}
{%- endfor -%}
{%- set messages = joined.messages -%}
"""
# Of a language model without a chat template, as in LLaVA 1.5.
_PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
ASSISTANT:{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{%- elif message['role'] == 'user' -%}
{{ 'USER: ' + message['content'] + ' ' }}
{%- else -%}
{{ message['content'] + ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
ASSISTANT:
{%- endif -%}
"""


def assemble(vision: str, language: str, folder: Path) -> None:
    """Write a `LlavaForConditionalGeneration` of an image encoder, a projector of two layers with
    random weights, and a language model; with its processor and chat template.

    The template is that of the language model (or `USER: ... ASSISTANT: ...`) for conversations
    with images.

    Args:
        vision: Folder of transformers, or hub name, of a CLIP or SigLIP, or of its image encoder.
        language: The same of a causal language model with its tokenizer.

    Raises:
        UsageError: A part cannot be read, or does not fit.
    """
    from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

    config = load_config(VISION_SETTING, vision, ENCODER_TYPES)
    config = getattr(config, "vision_config", config)
    with _only_errors():  # a whole CLIP has weights of texts too
        encoder = load_pretrained(VISION_SETTING, vision, AutoModel, config, dtype="auto")
    image_processor = load_local_or_hub(
        VISION_SETTING, vision, AutoImageProcessor.from_pretrained, backend="pil"
    )
    tokenizer = load_local_or_hub(
        LANGUAGE_SETTING,
        language,
        AutoTokenizer.from_pretrained,
        model_specific_special_tokens={"image_token": "<image>"},
    )
    if tokenizer.eos_token is None:
        raise UsageError(f"{LANGUAGE_SETTING}: the tokenizer of {language} has no end token")
    text_config = load_config(LANGUAGE_SETTING, language)
    text_model = load_pretrained(
        LANGUAGE_SETTING, language, AutoModelForCausalLM, text_config, dtype="auto"
    )
    with torch.random.fork_rng([]), _only_errors():
        torch.manual_seed(0)  # of the projector, and of the row of the image token
        if text_model.get_input_embeddings().num_embeddings < len(tokenizer):
            text_model.resize_token_embeddings(len(tokenizer), EMBEDDING_MULTIPLE)
        net = _join(encoder, text_model, tokenizer.image_token_id, language)
    net.save_pretrained(folder)
    _make_processor(encoder.config, image_processor, tokenizer).save_pretrained(folder)


@contextmanager
def _only_errors() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _join(
    encoder: PreTrainedModel, text_model: Any, image_token_id: int, language: str
) -> PreTrainedModel:
    """Return a LLaVA with the modules of its parts, and a new projector."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = encoder.config
    config = LlavaConfig(
        vision_config=vision,
        text_config=text_model.config,
        image_token_index=image_token_id,
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_select_strategy="default" if _has_class_token(vision) else "full",
    )
    with torch.device("meta"):
        net = LlavaForConditionalGeneration(config)
    base = text_model.base_model
    if type(base) is not type(net.model.language_model):
        raise UsageError(
            f"{LANGUAGE_SETTING}: a LLaVA cannot have the {type(base).__name__} of {language}"
        )
    net.model.vision_tower = encoder
    net.model.multi_modal_projector = type(net.model.multi_modal_projector)(config)
    net.model.language_model = base
    net.lm_head = text_model.get_output_embeddings()
    net.generation_config = text_model.generation_config
    ids = torch.arange(16)[None] % base.get_input_embeddings().num_embeddings
    with torch.no_grad():
        logits = net.eval()(input_ids=ids).logits
        if not torch.equal(logits, text_model.eval()(input_ids=ids).logits):
            raise UsageError(
                f"{LANGUAGE_SETTING}: {language} scales or caps its logits, which a LLaVA does "
                "not; take another language model"
            )
    return net


def _make_processor(
    vision: PreTrainedConfig,
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
) -> ProcessorMixin:
    from transformers import LlavaProcessor

    own = tokenizer.get_chat_template() if tokenizer.chat_template else _PLAIN_TEMPLATE
    return LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy="default" if _has_class_token(vision) else "full",
        num_additional_image_tokens=int(_has_class_token(vision)),
        chat_template=_JOIN_PARTS + own,
    )


def _has_class_token(vision: PreTrainedConfig) -> bool:
    return bool(vision.model_type == "clip_vision_model")  # SigLIP has none
