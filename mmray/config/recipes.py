"""Complete configs by name: plain functions that return a Config.

`mmray train NAME --print-config` shows one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmray.builtin import REMOVED_KINDS, SAMPLE_AV, SAMPLE_VLM
from mmray.config import (
    AudioTower,
    Augment,
    Batch,
    Clip,
    ClipInputs,
    Config,
    CrossAttention,
    Data,
    Evaluate,
    FrameTransformer,
    ImageTower,
    Inputs,
    Naflex,
    NaflexInputs,
    Objective,
    Optimizer,
    Prepare,
    Siglip,
    TextTower,
    Towers,
    Train,
    TwoTower,
    Vlm,
    VlmInputs,
    from_yaml,
)
from mmray.errors import UsageError, suggest

OPENAI_INPUTS = Inputs(
    tokenizer="openai/clip-vit-base-patch32",
    max_tokens=77,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)


def sample() -> Config:
    """Return the recipe of a small two-tower model with contrastive loss on the generated sample
    set.

    It has under a million parameters and trains on a laptop in about a minute.
    """
    return Config(
        recipe="sample",
        model=TwoTower(
            inputs=Inputs(
                image_side=64,
                fit="squash",
                interpolation="bilinear",
                mean=(0.5,) * 3,
                std=(0.25,) * 3,
                max_tokens=32,
            ),
            image=ImageTower(name="convnet", width=32, depth=3),
            text=TextTower(width=96, depth=1, heads=4),
            embed_dim=128,
        ),
        prepare=Prepare(max_bad_fraction=0.05, vocab_size=512),
        batch=Batch(micro=128, global_=128),
        optimizer=Optimizer(lr=2e-3, warmup_steps=30, weight_decay=0.05),
        train=Train(steps=300, log_every=10, checkpoint_every=150),
        evaluate=Evaluate(every=150),
    )


def sample_vlm() -> Config:
    """Return the recipe of a small Qwen3-VL that answers questions about shapes, on generated
    conversations.

    A conversation has 0 to 3 images. The model has 0.7 million parameters and trains on two cores
    in about a minute.
    """
    return Config(
        recipe="sample-vlm",
        model=Vlm(weights=SAMPLE_VLM, inputs=VlmInputs(max_tokens=128)),
        objective=Objective(kind="language_modelling"),
        data=Data(train=SAMPLE_VLM),
        batch=Batch(micro=16, global_=32),
        optimizer=Optimizer(lr=3e-3, warmup_steps=30, weight_decay=0.05),
        train=Train(steps=200, log_every=20),
        evaluate=Evaluate(num_generations=200),
    )


def sample_av() -> Config:
    """Return the recipe of a small model of texts, audio and video on generated clips of moving
    shapes and tones.

    Its losses compare each pair of the three. It trains on two cores in about two minutes.
    """
    return Config(
        recipe="sample-av",
        model=Towers(
            inputs=ClipInputs(
                image_side=32,
                fit="squash",
                interpolation="bilinear",
                mean=(0.5,) * 3,
                std=(0.25,) * 3,
                max_tokens=16,
                clip_s=1.3,
                frames=4,
                audio_rate=8000,
            ),
            image=ImageTower(name="convnet", width=32, depth=3),
            video=FrameTransformer(depth=1, heads=4),
            audio=AudioTower(width=96, depth=2, heads=4),
            text=TextTower(width=96, depth=1, heads=4),
            embed_dim=64,
        ),
        objective=Objective(kind="audio_text + video_text + audio_video"),
        data=Data(train=SAMPLE_AV),
        prepare=Prepare(vocab_size=256),
        batch=Batch(micro=96, global_=96),
        optimizer=Optimizer(lr=2e-3, warmup_steps=30, weight_decay=0.05),
        train=Train(steps=300, log_every=25),
    )


def resnet50_bert() -> Config:
    """Return the recipe of two towers with contrastive (softmax) loss: ResNet-50 of torchvision and
    BERT-base.

    Both start from pretrained weights, at 224 pixels. A good starting point for own data.
    """
    return Config(
        recipe="resnet50-bert",
        model=TwoTower(
            inputs=Inputs(tokenizer="bert-base-uncased"),
            image=ImageTower(name="resnet50", weights="pretrained"),
            text=TextTower(weights="bert-base-uncased", width=768, depth=12, heads=12),
            embed_dim=512,
            # exact under accumulation; the pretrained weights include statistics
            batch_norm="frozen",
        ),
        prepare=Prepare(image_side=256),
        batch=Batch(micro="auto", global_=1024),
        optimizer=Optimizer(lr=1e-4, warmup_steps=500),
        train=Train(epochs=10, log_every=20),
        evaluate=Evaluate(every=500),
    )


def clip() -> Config:
    """Return the recipe that fine-tunes OpenAI's CLIP ViT-B/32 with contrastive (softmax) loss.

    `clip-scratch` trains it from random weights.
    """
    return Config(
        recipe="clip",
        model=Clip(
            weights="openai/clip-vit-base-patch32",
            inputs=OPENAI_INPUTS,
        ),
        prepare=Prepare(image_side=256),
        batch=Batch(micro="auto", global_=1024),
        optimizer=Optimizer(lr=1e-5, warmup_steps=200),
        train=Train(epochs=5, log_every=20, checkpoint_every=500),
        evaluate=Evaluate(every=500),
    )


def clip_scratch() -> Config:
    """Return the recipe that trains CLIP ViT-B/32 from random weights with the settings of OpenAI
    and open_clip.

    The loss is contrastive (softmax). Images keep their original size (`prepare.image_side` 0),
    since training crops them at random.
    """
    return Config(
        recipe="clip-scratch",
        model=Clip(
            activation="gelu",
            inputs=OPENAI_INPUTS,
        ),
        augment=Augment(crop_scale=(0.9, 1.0)),
        batch=Batch(micro="auto", global_=4096),
        optimizer=Optimizer(lr=5e-4, warmup_steps=10_000, weight_decay=0.2, clip_norm=0),
        train=Train(epochs=32, log_every=100),
        evaluate=Evaluate(every=2000),
    )


def siglip() -> Config:
    """Return the recipe that fine-tunes Google's SigLIP ViT-B/16 with its sigmoid loss.

    To train from scratch: --model.weights none --optimizer.lr 1e-3.
    """
    return Config(
        recipe="siglip",
        model=Siglip(
            weights="google/siglip-base-patch16-224",
            inputs=Inputs(
                tokenizer="google/siglip-base-patch16-224",
                max_tokens=64,
                fit="squash",
                mean=(0.5,) * 3,
                std=(0.5,) * 3,
            ),
        ),
        objective=Objective(kind="sigmoid"),
        prepare=Prepare(image_side=256),
        batch=Batch(micro="auto", global_=1024),
        optimizer=Optimizer(lr=1e-5, warmup_steps=200, weight_decay=1e-4, betas=(0.9, 0.95)),
        train=Train(epochs=5, log_every=20, checkpoint_every=500),
        evaluate=Evaluate(every=500),
    )


def naflex() -> Config:
    """Return the recipe that fine-tunes Google's SigLIP 2 NaFlex ViT-B/16, which reads images in
    their own aspect ratio, with the sigmoid loss.
    """
    weights = "google/siglip2-base-patch16-naflex"
    inputs = NaflexInputs(tokenizer=weights, max_tokens=64)
    return siglip().replace(recipe="naflex", model=Naflex(weights=weights, inputs=inputs))


def fusion() -> Config:
    """Return the recipe of ResNet-50 and BERT-base with four cross-attention layers.

    The losses are contrastive, for retrieval, and matching of images and texts.
    """
    return Config(
        recipe="fusion",
        model=Towers(
            inputs=ClipInputs(tokenizer="bert-base-uncased", clip_s=0),
            image=ImageTower(name="resnet50", weights="pretrained"),
            text=TextTower(weights="bert-base-uncased", width=768, depth=12, heads=12),
            cross=CrossAttention(width=512, dropout=0.1),
            matching=True,
            batch_norm="frozen",
        ),
        objective=Objective(kind="contrastive + matching"),
        prepare=Prepare(image_side=256),
        batch=Batch(micro="auto", global_=512),
        optimizer=Optimizer(
            lr=3e-4, warmup_steps=500, lr_multipliers=("image.tower.*=0.1", "text.tower.*=0.1")
        ),
        train=Train(epochs=10, log_every=20, checkpoint_every=500),
        evaluate=Evaluate(every=500),
    )


def vlm() -> Config:
    """Return the recipe that fine-tunes Qwen2.5-VL (3B), or another `model.weights`, on
    conversations with images.

    The vision encoder is frozen. Each worker takes micro-batches of at most 8,192 tokens.
    """
    return Config(
        recipe="vlm",
        model=Vlm(weights="Qwen/Qwen2.5-VL-3B-Instruct"),
        objective=Objective(kind="language_modelling"),
        batch=Batch(global_=128, tokens=8192),
        optimizer=Optimizer(
            lr=1e-5, warmup_steps=100, weight_decay=0.0, betas=(0.9, 0.999), freeze=("vision",)
        ),
        train=Train(
            epochs=1,
            log_every=10,
            checkpoint_every=500,
            activation_checkpointing=("language",),
        ),
        evaluate=Evaluate(every=500, batch=16),
    )


def vlm_align() -> Config:
    """Return the recipe that trains the projector of a new model of SigLIP 2 and Qwen3, or of
    another `model.vision` and `model.language`, on captions; both are frozen.

    It is the first stage of LLaVA; the second one is `vlm` from its export.
    """
    base = vlm()
    return base.replace(
        recipe="vlm-align",
        model=Vlm(vision="google/siglip2-base-patch16-384", language="Qwen/Qwen3-0.6B"),
        batch=Batch(global_=256, tokens=8192),
        optimizer=base.optimizer.replace(lr=1e-3, freeze=("vision", "language")),
    )


_FUNCTIONS = (
    sample,
    sample_vlm,
    sample_av,
    resnet50_bert,
    clip,
    clip_scratch,
    siglip,
    naflex,
    fusion,
    vlm,
    vlm_align,
)
RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__.replace("_", "-"): recipe for recipe in _FUNCTIONS
}


def load(name: str) -> Config:
    """Return the config of a built-in recipe or of a YAML file.

    Args:
        name: Name of a recipe such as `clip`, or the path of a .yaml file.

    Raises:
        UsageError: There is no such recipe (the message has the closest name), or the file is
            missing or invalid.
    """
    if name in RECIPES:
        return RECIPES[name]()
    if name == "llava":
        raise UsageError(REMOVED_KINDS["generative"])
    file = Path(name)
    if file.suffix in (".yaml", ".yml"):
        try:
            return from_yaml(file.read_bytes(), str(file), RECIPES)
        except OSError as error:
            raise UsageError(f"cannot read the recipe {file}: {error.strerror}") from None
    raise UsageError(
        f"there is no recipe `{name}`; {suggest(name, RECIPES)} (or give the path of a .yaml file)"
    )
