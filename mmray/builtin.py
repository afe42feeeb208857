"""Built-in parts that settings name, and limits that settings share with the code.

Settings do not import torch, and data workers do not import settings. So both read these tables,
whose values are `module:Name`, imported when they are used (`plugins.load_part`).
"""

from __future__ import annotations

from keyword import iskeyword
from typing import NamedTuple

FORMATS = {
    "json": "mmray.data.formats.listing:JsonArraySource",
    "coco": "mmray.data.formats.listing:CocoSource",
    "saved": "mmray.data.formats.parquet:HFSavedSource",
    "webdataset": "mmray.data.formats.webdataset:WebDatasetSource",
    "parquet": "mmray.data.formats.parquet:ParquetSource",
    "jsonl": "mmray.data.formats.text_lines:JsonlSource",
    "csv": "mmray.data.formats.delimited:CsvSource",
    "tsv": "mmray.data.formats.delimited:TsvSource",
    "pairs": "mmray.data.formats.listing:ImageTextPairs",
    "folders": "mmray.data.formats.listing:ClassFolders",
}
"""Source formats (`prepare.format`) by name; detection tries the formats in this order.

To add one, write a subclass of `mmray.data.formats.source:Source` whose attributes define how it is
detected, and add an entry here and a row to the table in mmray/data/formats/README.md. A user's
own class needs no entry: `--format my_package.my_module:MySource`.
"""

COLUMNS = (
    "id",
    "key",
    "image_path",
    "image",
    "images",
    "text",
    "texts",
    "label",
    "split",
    "messages",
    "conversations",
    "tools",
    "audio",
    "audios",
    "video",
    "videos",
    "t0_s",
    "t1_s",
)
"""Columns of a source row; `mmray.data.rows` validates their values."""

QUESTION_COLUMNS = ("prompt", "query", "instruction", "question")
ANSWER_COLUMNS = ("completion", "response", "output", "answer")
CHOSEN_COLUMN = "chosen"
REJECTED_COLUMNS = ("rejected", "rejected_response", "rejected_messages")
OPTION_COLUMNS = ("options", "choices")
CHAT_COLUMNS = (
    *QUESTION_COLUMNS,
    "input",
    *ANSWER_COLUMNS,
    *OPTION_COLUMNS,
    CHOSEN_COLUMN,
    *REJECTED_COLUMNS,
    "system",
    "history",
)
"""Columns of TRL, ms-swift, Alpaca and sets of questions about images, which become `messages`."""

KEEP_ALL = "all"
"""Value of `prepare.keep`: all columns of the source that are not in COLUMNS."""


def is_column_name(name: str) -> bool:
    """Return whether a name can be used as a column in a condition such as `data.where`: it must be
    a Python identifier and no keyword.
    """
    return name.isidentifier() and not iskeyword(name)


class ModelKind(NamedTuple):
    """Classes of a model kind, as `module:Class`; KINDS has those of each built-in kind by its
    name.

    Args:
        settings: Its `model` section, a subclass of `mmray.config.model:Model`. The class also
            names its branches and the objectives that train it.
        model: Its torch module, which is called with the section, the vocabulary size, and a
            WeightSource.
        hf_type: `model_type` of the models of transformers that it loads with `--weights`, or "".
    """

    settings: str
    model: str
    hf_type: str = ""


KINDS = {
    "two_tower": ModelKind("mmray.config.model_kinds:TwoTower", "mmray.models.two_tower:TwoTower"),
    "clip": ModelKind("mmray.config.model_kinds:Clip", "mmray.models.clip:Clip", "clip"),
    "siglip": ModelKind("mmray.config.model_kinds:Siglip", "mmray.models.clip:Siglip", "siglip"),
    "naflex": ModelKind("mmray.config.model_kinds:Naflex", "mmray.models.clip:Naflex", "siglip2"),
    "towers": ModelKind("mmray.config.model_kinds:Towers", "mmray.models.towers:Towers"),
    "vlm": ModelKind("mmray.config.model_kinds:Vlm", "mmray.models.vlm.model:Vlm"),
}
"""Model kinds (`model.kind`) by name.

To add one, write a section of settings and a torch module, and add an entry here and a row to the
table in mmray/models/README.md. A user's own module needs no entry and has free settings:
`--model.kind my_package.my_module:MyModel --model.settings dim 64`.
"""

REMOVED_KINDS = {
    "generative": "model.kind: `generative` was replaced by `vlm`, which trains LLaVA and other "
    "vision-language models of transformers. Set --model.kind vlm (recipe vlm), and "
    "--model.weights to a folder saved by transformers with its processor and chat template, or to "
    "a hub name such as llava-hf/llava-1.5-7b-hf. Checkpoints of `generative` are not read: run "
    "`mmray export` of the version that wrote them, add chat_template.jinja to the export, and set "
    "--model.weights to it",
    "fusion": "model.kind: `fusion` is now `towers` with model.inputs.clip_s 0, as in the recipe "
    "fusion. Checkpoints of `fusion` are not read: run `mmray export` of the version that wrote "
    "them. In the config.json of the export set model.kind to `towers`, and add clip_s 0 to "
    "model.inputs",
}
"""Errors for model kinds of earlier versions."""

STRATEGIES = {
    "ddp": "mmray.engine.parallel.ddp:DDP",
    "fsdp": "mmray.engine.parallel.fsdp:FSDP",
    "hsdp": "mmray.engine.parallel.fsdp:HSDP",
    "branches": "mmray.engine.parallel.branches:Branches",
    "single": "mmray.engine.parallel.strategy:Strategy",
}
"""Parallel strategies (`train.parallel`) by name, whose modules import torch in functions only."""

OBJECTIVES = {
    "contrastive": "mmray.objectives.contrastive:Contrastive",
    "sigmoid": "mmray.objectives.contrastive:Sigmoid",
    "audio_text": "mmray.objectives.contrastive:AudioText",
    "video_text": "mmray.objectives.contrastive:VideoText",
    "audio_video": "mmray.objectives.contrastive:AudioVideo",
    "captioning": "mmray.objectives.captioning:Captioning",
    "distillation": "mmray.objectives.distillation:Distillation",
    "feature_distillation": "mmray.objectives.distillation:FeatureDistillation",
    "matching": "mmray.objectives.matching:Matching",
    "clip_matching": "mmray.objectives.matching:ClipMatching",
    "classification": "mmray.objectives.cross_entropy:Classification",
    "language_modelling": "mmray.objectives.language_modelling:LanguageModelling",
    "dpo": "mmray.objectives.preference:Dpo",
}
"""Objectives (`objective.kind`) by name.

To add one, write a class with the methods of `mmray.objectives.protocol:Objective`, and add an
entry here and a row to the table in mmray/models/README.md. A user's own class needs no entry:
`--objective.kind my_package.my_module:MyObjective`.
"""

ONLINE_METHODS = ("grpo", "dapo", "gspo", "rloo", "ppo", "reinforce", "online_dpo")
"""Methods that are no objectives, because they generate the answers that they train on."""

SAMPLE_VLM = "sample-vlm"
"""Value of `data.train` and of `model.weights`: generated conversations, and their tiny model."""

SAMPLE_AV = "sample-av"
"""Value of `data.train`: generated clips of moving shapes and tones."""

GROUP_CHANNELS = 8
"""Channels of a GroupNorm group in the image tower `convnet`; its width is a multiple of it."""

HF_IMAGE_TYPES = ("vit", "dinov2", "resnet", "timm_wrapper")
"""Values of `model_type` of transformers that `model.image.weights` takes."""

HF_AUDIO_TYPES = ("whisper", "clap", "clap_audio_model")
"""Values of `model_type` of transformers that `model.audio.weights` takes."""

HF_TEXT_TYPES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "ernie",
    "albert",
    "electra",
    "distilbert",
)
"""Values of `model_type` of transformers that `model.text.weights` takes."""

POSITIONS_AFTER_PAD = ("roberta", "xlm-roberta", "camembert")
"""Those of them whose first position has the number pad_token_id + 1."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of torch.distributed by type of the training device; NCCL cannot reduce on the host."""
