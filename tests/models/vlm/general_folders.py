"""Folders of tiny models of families without a descriptor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.vlm.folders import CHATML, save_random_model, train_tokenizer

SIDE = 56
TOKENS = {  # special tokens, and what the chat template writes for an image
    "qwen3_5": "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>",
    "glm4v": "<|image|> <|video|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> "
    "<|end_of_video|>",
    "gemma4": "<|image|> <|audio|> <|video|> <boi> <eoi> <boa> <eoa>",
    "mistral3": "[IMG] [IMG_BREAK] [IMG_END]",
    "lfm2_vl": "<image> <|image_start|> <|image_end|> <|img_thumbnail|> "
    + " ".join(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)),
    "paligemma": "<image>",
}
IMAGES = {
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "gemma4": "<|image|>",
    "mistral3": "[IMG]",
    "lfm2_vl": "<image>",
}
FAMILIES = tuple(IMAGES)
ROLES = {
    "gemma4": {
        "boi_token": "<boi>",
        "eoi_token": "<eoi>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<boa>",
        "eoa_token": "<eoa>",
    },
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def make_general_folder(family: str, folder: Path) -> Path:
    """Save a tiny random model with its processor."""
    import torch

    template = CHATML.replace("IMAGE", IMAGES.get(family, "<image>"))
    tokenizer = train_tokenizer(TOKENS[family], template, ROLES.get(family, {}))
    processor = make_processor(family, tokenizer, template)
    config = make_config(family, processor.tokenizer)
    save_random_model(config, folder, 0, torch.float32, with_vectors=False)
    processor.save_pretrained(folder)
    return folder


def make_processor(family: str, tokenizer: Any, template: str) -> Any:
    import transformers as hf

    if family == "qwen3_5":
        size = {"shortest_edge": 32 * 32, "longest_edge": 16 * 32 * 32}
        image = hf.Qwen2VLImageProcessor(patch_size=16, size=size)
        video = hf.Qwen3VLVideoProcessor()
        return hf.Qwen3VLProcessor(image, tokenizer, video, chat_template=template)
    if family == "glm4v":
        size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}
        image = hf.Glm4vImageProcessor(size=size)
        return hf.Glm4vProcessor(image, tokenizer, hf.Glm4vVideoProcessor(), chat_template=template)
    if family == "gemma4":
        return hf.Gemma4Processor(
            hf.Gemma4AudioFeatureExtractor(),
            hf.Gemma4ImageProcessor(max_soft_tokens=70),
            tokenizer,
            hf.Gemma4VideoProcessor(),
            chat_template=template,
        )
    if family == "mistral3":
        image = hf.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=14)
        return hf.PixtralProcessor(
            image, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=template
        )
    if family == "lfm2_vl":
        image = hf.Lfm2VlImageProcessor(
            tile_size=64,
            encoder_patch_size=8,
            min_image_tokens=4,
            max_image_tokens=16,
            max_num_patches=64,
            downsample_factor=2,
        )
        return hf.Lfm2VlProcessor(image, tokenizer, chat_template=template)
    image = hf.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    image.image_seq_length = 16
    tokenizer.chat_template = None
    return hf.PaliGemmaProcessor(image, tokenizer)


def make_config(family: str, tokenizer: Any) -> Any:
    import transformers as hf

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    text: dict[str, Any] = TEXT | {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    deep = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    deep |= {"out_hidden_size": 64}
    if family == "qwen3_5":
        text |= {
            "head_dim": 16,
            "rope_parameters": ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }
        return hf.Qwen3_5Config(
            text_config=text,
            vision_config=deep | {"num_position_embeddings": 16},
            image_token_id=token("<|image_pad|>"),
            video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"),
            vision_end_token_id=token("<|vision_end|>"),
        )
    if family == "glm4v":
        text |= {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}
        return hf.Glm4vConfig(
            text_config=text,
            vision_config=deep | {"image_size": SIDE, "patch_size": 14},
            image_token_id=token("<|image|>"),
            video_token_id=token("<|video|>"),
            image_start_token_id=token("<|begin_of_image|>"),
            image_end_token_id=token("<|end_of_image|>"),
            video_start_token_id=token("<|begin_of_video|>"),
            video_end_token_id=token("<|end_of_video|>"),
        )
    if family == "gemma4":
        text |= {
            "head_dim": 16,
            "vocab_size_per_layer_input": len(tokenizer),
            "hidden_size_per_layer_input": 8,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
        }
        sizes = {name: VISION[name] for name in TEXT if name in VISION}
        return hf.Gemma4Config(
            text_config=text,
            vision_config=sizes | {"num_key_value_heads": 2, "head_dim": 16},
            audio_config=None,
            boi_token_id=token("<boi>"),
            eoi_token_id=token("<eoi>"),
            image_token_id=token("<|image|>"),
            video_token_id=token("<|video|>"),
            audio_token_id=token("<|audio|>"),
            boa_token_id=token("<boa>"),
            eoa_token_index=token("<eoa>"),
        )
    if family == "mistral3":
        return hf.Mistral3Config(
            text_config=text | {"model_type": "mistral", "sliding_window": None},
            vision_config=VISION | {"model_type": "pixtral", "image_size": 112, "head_dim": 16},
            image_token_index=token("[IMG]"),
            spatial_merge_size=2,
            tie_word_embeddings=False,
        )
    siglip = VISION | {"vision_use_head": False}
    if family == "lfm2_vl":
        del siglip["image_size"]
        layers = ["conv", "full_attention"]
        return hf.Lfm2VlConfig(
            text_config=text | {"model_type": "lfm2", "layer_types": layers},
            vision_config=siglip
            | {"model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 64},
            image_token_id=token("<image>"),
            projector_hidden_size=64,
        )
    return hf.PaliGemmaConfig(
        text_config=text | {"model_type": "gemma"},
        vision_config=siglip | {"model_type": "siglip_vision_model"},
        image_token_index=token("<image>"),
        projection_dim=64,
        hidden_size=64,
    )
