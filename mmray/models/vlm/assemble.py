"""A new LLaVA or Idefics3 from an image encoder and a causal language model: a folder that
`model.weights` takes, and that transformers opens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmray.errors import UsageError, only_errors
from mmray.models.weights import load_config, load_local_or_hub, load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

# Values of `model_type` of image encoders, alone or in a model with a text encoder.
ENCODER_TYPES = ("clip", "clip_vision_model", "siglip", "siglip_vision_model")
VISION_SETTING = "model.vision"
LANGUAGE_SETTING = "model.language"
# Idefics3 numbers the patches of some larger grids differently from SigLIP (transformers 5.24).
MAX_GRID = 37
# Special tokens of a new model: of pixel shuffle those of Idefics3Processor.
SPECIAL_TOKENS = {
    "mlp": {"image_token": "<image>"},
    "pixel_shuffle": {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
}
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


def assemble(vision: str, language: str, folder: Path, projector: str = "mlp") -> None:
    """Write a model of an image encoder, a projector with random weights, and a language model;
    with its processor and chat template.

    The template is that of the language model (or `USER: ... ASSISTANT: ...`) for conversations
    with images.

    Args:
        vision: Folder of transformers, or hub name, of a CLIP or SigLIP, or of its image encoder.
        language: The same of a causal language model with its tokenizer.
        projector: `mlp`, two layers, for a `LlavaForConditionalGeneration`; or `pixel_shuffle` and
            one layer, for an `Idefics3ForConditionalGeneration`.

    Raises:
        UsageError: A part cannot be read, or does not fit.
    """
    from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

    config = load_config(VISION_SETTING, vision, ENCODER_TYPES)
    config = getattr(config, "vision_config", config)
    with only_errors("transformers"):  # a whole CLIP has weights of texts too
        encoder = load_pretrained(VISION_SETTING, vision, AutoModel, config, dtype="auto")
    image_processor = load_local_or_hub(
        VISION_SETTING, vision, AutoImageProcessor.from_pretrained, backend="pil"
    )
    tokenizer = load_local_or_hub(
        LANGUAGE_SETTING,
        language,
        AutoTokenizer.from_pretrained,
        model_specific_special_tokens=SPECIAL_TOKENS[projector],
    )
    if tokenizer.eos_token is None:
        raise UsageError(f"{LANGUAGE_SETTING}: the tokenizer of {language} has no end token")
    text_config = load_config(LANGUAGE_SETTING, language)
    text_model = load_pretrained(
        LANGUAGE_SETTING, language, AutoModelForCausalLM, text_config, dtype="auto"
    )
    with torch.random.fork_rng([]), only_errors("transformers"):
        torch.manual_seed(0)  # of the projector, and of the rows of new tokens
        if text_model.get_input_embeddings().num_embeddings < len(tokenizer):
            text_model.resize_token_embeddings(len(tokenizer), EMBEDDING_MULTIPLE)
        build = _build_llava if projector == "mlp" else _build_idefics3
        net, processor = build(encoder, text_model.config, image_processor, tokenizer)
        _set_language_model(net, text_model, language)
    net.save_pretrained(folder)
    own = tokenizer.get_chat_template() if tokenizer.chat_template else _PLAIN_TEMPLATE
    processor.chat_template = _JOIN_PARTS + own
    processor.save_pretrained(folder)


def _build_llava(
    encoder: PreTrainedModel, text_config: Any, image_processor: Any, tokenizer: Any
) -> tuple[Any, ProcessorMixin]:
    """Return a LLaVA with its image encoder and a new projector, and its processor."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    vision = encoder.config
    has_class_token = vision.model_type == "clip_vision_model"  # SigLIP has none
    config = LlavaConfig(
        vision_config=vision,
        text_config=text_config,
        image_token_index=tokenizer.image_token_id,
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_select_strategy="default" if has_class_token else "full",
    )
    with torch.device("meta"):
        net = LlavaForConditionalGeneration(config)
    net.model.vision_tower = encoder
    net.model.multi_modal_projector = type(net.model.multi_modal_projector)(config)
    return net, LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy="default" if has_class_token else "full",
        num_additional_image_tokens=int(has_class_token),
    )


def _build_idefics3(
    encoder: PreTrainedModel, text_config: Any, image_processor: Any, tokenizer: Any
) -> tuple[Any, ProcessorMixin]:
    """Return an Idefics3 with the encoder of a SigLIP and a new projector; and its processor, whose
    pixels are those of `image_processor`.
    """
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    vision = encoder.config
    side = vision.image_size
    grid = side // vision.patch_size
    # Side of the squares of patches that become one token.
    factor = next((each for each in (4, 2, 3) if grid % each == 0), 0)
    if vision.model_type != "siglip_vision_model" or not factor or grid > MAX_GRID:
        raise UsageError(
            "model.projector: with pixel_shuffle the model is an Idefics3, whose encoder is that "
            "of a SigLIP (no class token), and 2 x 2 or 3 x 3 patches must divide its grid of at "
            f"most {MAX_GRID} patches a side. {encoder.name_or_path} is a {vision.model_type} with "
            f"{grid}; use mlp, or another model.vision"
        )
    config = Idefics3Config(
        vision_config=vision.to_dict() | {"model_type": "idefics3_vision"},
        text_config=text_config,
        image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=text_config.tie_word_embeddings,
        scale_factor=factor,
    )
    with torch.device("meta"):
        net = Idefics3ForConditionalGeneration(config)
    # All but the pooling.
    net.model.vision_model.load_state_dict(encoder.state_dict(), strict=False, assign=True)
    net.model.connector = type(net.model.connector)(config)
    images = Idefics3ImageProcessorPil(
        **image_processor.to_dict(),
        max_image_size={"longest_edge": side},
        do_image_splitting=False,
    )
    return net, Idefics3Processor(images, tokenizer, image_seq_len=(grid // factor) ** 2)


def _set_language_model(net: Any, text_model: Any, language: str) -> None:
    base = text_model.base_model
    if type(base) is not type(net.get_decoder()):
        raise UsageError(
            f"{LANGUAGE_SETTING}: the new model cannot have the {type(base).__name__} of {language}"
        )
    net.set_decoder(base)
    net.lm_head = text_model.get_output_embeddings()
    net.generation_config = text_model.generation_config
    ids = torch.arange(16)[None] % base.get_input_embeddings().num_embeddings
    with torch.no_grad():
        logits = net.eval()(input_ids=ids).logits
        if not torch.equal(logits, text_model.eval()(input_ids=ids).logits):
            raise UsageError(
                f"{LANGUAGE_SETTING}: {language} scales or caps its logits, which the new model "
                "does not; take another language model"
            )
