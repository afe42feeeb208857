"""Folders of tiny vision-language models: random weights, a processor, a tokenizer trained on the
spot. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "Which shape is in the image? How many circles are there? What color is the square?",
    "The image has two red circles and a blue triangle. It is green. There are three shapes.",
    "You are a helpful assistant that answers in one word. yes no one two three zero",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "<start_of_turn>{{ role }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}"
    "{% endif %}{% endfor %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The only one with generation marks: the other templates need prefix rendering.
LLAVA = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}ASSISTANT: "
    "{% generation %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}</s>"
    "{% endgeneration %}{% else %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
TOKENS = {
    "qwen2_5_vl": "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>",
    "qwen3_vl": "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>",
    "internvl": "<img> </img> <IMG_CONTEXT> <video>",
    "idefics3": "<image> <fake_token_around_image> <global-img> <end_of_utterance> "
    + " ".join(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "gemma3": "<start_of_image> <end_of_image> <image_soft_token> <start_of_turn> <end_of_turn>",
    "llava": "<image> </s>",
    "llava_next": "<image> </s>",
    "llava_onevision": "<image> <video>",
    "qwen2_audio": "<|AUDIO|> <|audio_bos|> <|audio_eos|>",
}
OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
TOKENS |= dict.fromkeys(OMNI, TOKENS["qwen3_vl"] + " <|audio_start|> <|audio_end|> <|audio_pad|>")
TOKENS["smolvlm"] = TOKENS["idefics3"]
FAMILIES = tuple(TOKENS)
AUDIO_S = 2  # longest audio
ROLES = {  # names of tokens that the processor reads from the tokenizer
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
}
ROLES |= dict.fromkeys(
    OMNI,
    {f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "video", "audio")}
    | {f"{kind}_bos_token": f"<|{kind}_start|>" for kind in ("vision", "audio")}
    | {f"{kind}_eos_token": f"<|{kind}_end|>" for kind in ("vision", "audio")},
)
TEMPLATES = {
    "qwen2_5_vl": CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>").replace(
        "{% else %}",
        "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}",
    ),
    "internvl": CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
    "idefics3": IDEFICS,
    "gemma3": GEMMA,
    "llava": LLAVA,
    "llava_onevision": CHATML.replace("IMAGE", "<image>"),
    "qwen2_audio": CHATML.replace("'image'", "'audio'").replace(
        "IMAGE", "<|audio_bos|><|AUDIO|><|audio_eos|>"
    ),
}
TEMPLATES |= {
    "qwen3_vl": TEMPLATES["qwen2_5_vl"],
    "smolvlm": IDEFICS,
    "llava_next": LLAVA,
}
TEMPLATES |= dict.fromkeys(
    OMNI,
    TEMPLATES["qwen2_5_vl"].replace(
        "{% else %}",
        "{% elif part['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}",
    ),
)


def make_tokenizer(family: str) -> Any:
    """Return a byte-level BPE tokenizer with the special tokens of a family."""
    ends = {"gemma3": "<end_of_turn>", "idefics3": "<end_of_utterance>", "llava": "</s>"}
    ends |= {"smolvlm": ends["idefics3"], "llava_next": ends["llava"]}
    return train_tokenizer(
        TOKENS[family], TEMPLATES[family], ROLES.get(family, {}), ends.get(family, "<|im_end|>")
    )


def train_tokenizer(special: str, template: str, roles: Any, eos: str = "<|im_end|>") -> Any:
    """Return a byte-level BPE tokenizer with some special tokens, of which some have roles."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokens = ["<pad>", "<bos>", "<|im_start|>", "<|im_end|>", *special.split()]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token=eos,
        chat_template=template,
        extra_special_tokens=roles,
    )


def make_folder(family: str, folder: Path, seed: int = 0, dtype: Any = None) -> Path:
    """Save a tiny random model with its processor."""
    import torch

    tokenizer = make_tokenizer(family)
    processor = make_processor(family, tokenizer)
    save_random_model(make_config(family, tokenizer), folder, seed, dtype or torch.float32)
    processor.save_pretrained(folder)
    return folder


def save_random_model(
    config: Any, folder: Path, seed: int, dtype: Any, with_vectors: bool = True
) -> None:
    """Save a model with random matrices, and vectors such as weights of norms."""
    import torch
    from transformers import AutoModelForMultimodalLM

    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if with_vectors or weight.ndim > 1:
                # Large enough for gradients to depend on each token.
                weight.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)


def make_processor(family: str, tokenizer: Any) -> Any:
    import transformers as hf

    template = {"chat_template": TEMPLATES[family]}
    audio = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=AUDIO_S)
    if family.endswith("_vl") or family in OMNI:
        patch = 14 if family.startswith("qwen2_5") else 16
        size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 16 * (2 * patch) ** 2}
        image = hf.Qwen2VLImageProcessor(patch_size=patch, size=size)
        if family in OMNI:
            omni = hf.Qwen2_5OmniProcessor if patch == 14 else hf.Qwen3OmniMoeProcessor
            video = hf.Qwen2VLVideoProcessor(patch_size=patch)
            return omni(image, video, audio, tokenizer, **template)
        if family == "qwen2_5_vl":
            # Sizes are for each frame, otherwise for all frames together.
            video = hf.Qwen2VLVideoProcessor(patch_size=patch, size=size)
            return hf.Qwen2_5_VLProcessor(image, tokenizer, video, **template)
        video = hf.Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 16384})
        return hf.Qwen3VLProcessor(image, tokenizer, video, **template)
    if family == "qwen2_audio":
        return hf.Qwen2AudioProcessor(audio, tokenizer, **template)
    if family == "internvl":
        image = hf.GotOcr2ImageProcessor(
            size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4
        )
        video = hf.InternVLVideoProcessor()
        return hf.InternVLProcessor(image, tokenizer, video, image_seq_length=4, **template)
    if family in ("idefics3", "smolvlm"):
        sizes: dict[str, Any] = {
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
        }
        if family == "idefics3":
            image = hf.Idefics3ImageProcessor(**sizes)
            return hf.Idefics3Processor(image, tokenizer, image_seq_len=4, **template)
        image = hf.SmolVLMImageProcessor(**sizes)
        video = hf.SmolVLMVideoProcessor()
        return hf.SmolVLMProcessor(image, tokenizer, video, image_seq_len=4, **template)
    if family == "gemma3":
        image = hf.Gemma3ImageProcessor(size={"height": 32, "width": 32})
        return hf.Gemma3Processor(image, tokenizer, image_seq_length=4, **template)
    if family == "llava_onevision":
        pinpoints = [[28, 28], [28, 56], [56, 28], [56, 56]]
        image = hf.LlavaOnevisionImageProcessor(
            size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
        )
        video = hf.LlavaOnevisionVideoProcessor(size={"height": 28, "width": 28})
        return hf.LlavaOnevisionProcessor(
            image,
            tokenizer,
            video,
            num_image_tokens=4,
            vision_feature_select_strategy="full",
            **template,
        )
    settings: dict[str, Any] = {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    } | template
    crop = {"height": 28, "width": 28}
    if family == "llava":
        image = hf.LlavaImageProcessor(size={"shortest_edge": 28}, crop_size=crop)
        return hf.LlavaProcessor(image, tokenizer, **settings)
    image = hf.LlavaNextImageProcessor(
        size={"shortest_edge": 28},
        crop_size=crop,
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )
    return hf.LlavaNextProcessor(image, tokenizer, **settings)


def make_config(family: str, tokenizer: Any) -> Any:
    import transformers as hf

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    audio = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "max_source_positions": 50 * AUDIO_S,
    }
    if family.endswith("_vl") or family in OMNI:
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
        }
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        ids = {
            "image_token_id": token("<|image_pad|>"),
            "video_token_id": token("<|video_pad|>"),
            "vision_start_token_id": token("<|vision_start|>"),
            "vision_end_token_id": token("<|vision_end|>"),
        }
        if family in OMNI:
            ids["audio_token_id"] = token("<|audio_pad|>")
            ids["audio_start_token_id"] = token("<|audio_start|>")
            audio["output_dim"] = 64
            ids["audio_config"] = audio
        if family.startswith("qwen2_5"):
            audio["n_window"] = 25  # parts of half a second
            vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
            config = hf.Qwen2_5OmniThinkerConfig if family in OMNI else hf.Qwen2_5_VLConfig
            return config(text_config=text | {"rope_parameters": rope}, vision_config=vision, **ids)
        vision |= {
            "patch_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        }
        text |= {"head_dim": 16, "rope_parameters": rope | {"mrope_interleaved": True}}
        if family in OMNI:
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            # Attention is within a second.
            audio |= {"downsample_hidden_size": 8, "n_window_infer": 100}
            return hf.Qwen3OmniMoeThinkerConfig(text_config=text, vision_config=vision, **ids)
        return hf.Qwen3VLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
        )
    if family == "qwen2_audio":
        return hf.Qwen2AudioConfig(
            audio_config=audio,
            text_config=text | {"model_type": "qwen2"},
            audio_token_index=token("<|AUDIO|>"),
        )
    if family == "internvl":
        return hf.InternVLConfig(
            text_config=text | {"model_type": "qwen2"},
            vision_config=vision | {"image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=token("<IMG_CONTEXT>"),
            image_seq_length=4,
        )
    if family in ("idefics3", "smolvlm"):
        config = hf.Idefics3Config if family == "idefics3" else hf.SmolVLMConfig
        return config(
            text_config=text | {"model_type": "llama"},
            vision_config=vision | {"image_size": 32, "patch_size": 8},
            image_token_id=token("<image>"),
            scale_factor=2,
        )
    if family == "gemma3":
        return hf.Gemma3Config(
            text_config=text | {"head_dim": 16, "sliding_window": 16},
            vision_config=vision | {"image_size": 32, "patch_size": 8},
            mm_tokens_per_image=4,
            image_token_index=token("<image_soft_token>"),
            boi_token_index=token("<start_of_image>"),
            eoi_token_index=token("<end_of_image>"),
        )
    if family == "llava_onevision":
        return hf.LlavaOnevisionConfig(
            text_config=text | {"model_type": "qwen2"},
            vision_config=vision | {"model_type": "siglip_vision_model"},
            image_token_index=token("<image>"),
            video_token_index=token("<video>"),
            image_grid_pinpoints=[[28, 28], [28, 56], [56, 28], [56, 56]],
            vision_aspect_ratio="anyres_max_9",
        )
    shared: dict[str, Any] = {
        "text_config": text | {"model_type": "llama"},
        "vision_config": vision | {"model_type": "clip_vision_model"},
        "image_token_index": token("<image>"),
    }
    if family == "llava":
        return hf.LlavaConfig(image_seq_length=4, **shared)
    return hf.LlavaNextConfig(image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]], **shared)
