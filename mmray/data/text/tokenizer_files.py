"""Tokenizer of `model.inputs.tokenizer` -> the text of a tokenizer.json, which data workers get.

tokenizer.json is used as it is. All other files are read by transformers, which takes seconds to
import, so only the driver imports this module.
"""

from __future__ import annotations

import gzip
import json
import re
import string
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers

from mmray.data.text.tokenizer import declared_pad_id
from mmray.errors import UsageError, first_line
from mmray.plugins import check_installed
from mmray.storage.weights_json import read_weights_json

TOKENIZER = "tokenizer.json"
VOCABULARY = "vocab.txt"
BPE_VOCABULARY = "vocab.json"
BPE_MERGES = "merges.txt"
TOKENIZER_CONFIG = "tokenizer_config.json"
MODEL_CONFIG = "config.json"
OPEN_CLIP_CONFIG = "open_clip_config.json"
CLIP_BPE = "bpe_simple_vocab_16e6.txt.gz"
CLIP_MERGES = 49152 - 256 - 2  # the file has more lines than CLIP's vocabulary has merges
SENTENCEPIECE = ".model"
T5_MODEL = "spiece.model"
FAIRSEQ_MODEL = "sentencepiece.bpe.model"
# Each tokenizer class of transformers expects one of these names.
SENTENCEPIECE_NAMES = (T5_MODEL, FAIRSEQ_MODEL, "tokenizer.model")
CONFIG_FILES = (TOKENIZER_CONFIG, MODEL_CONFIG, OPEN_CLIP_CONFIG)
TOKENIZER_FILES = (TOKENIZER, VOCABULARY, BPE_VOCABULARY, BPE_MERGES, CLIP_BPE, f"*{SENTENCEPIECE}")
_FORMATS = (
    f"{TOKENIZER}, {VOCABULARY}, {BPE_VOCABULARY} with {BPE_MERGES}, {CLIP_BPE}, or one "
    f"*{SENTENCEPIECE}"
)
_SETTING = "model.inputs.tokenizer"


def load_tokenizer(name: str, trained_tokenizer_json: str | None) -> str:
    """Load the tokenizer that `model.inputs.tokenizer` names.

    Args:
        name: `trained`; a folder; a file (tokenizer.json, vocab.txt, vocab.json with merges.txt,
            CLIP's bpe_simple_vocab_16e6.txt.gz, or a SentencePiece model); or a name of the Hugging
            Face Hub, such as `openai/clip-vit-base-patch32`, which is downloaded.
        trained_tokenizer_json: Content of the tokenizer.json of the prepared set, for `trained`;
            None if the set has none.

    Returns:
        Content of the tokenizer.json. It includes the pad token and the text cleaning that
        tokenizer_config.json and open_clip_config.json next to the file define.

    Raises:
        UsageError: The tokenizer does not exist or cannot be read.
    """
    if name == "trained":
        if trained_tokenizer_json is None:
            raise UsageError(
                f"{_SETTING} is `trained`, but there is no prepared set with a tokenizer: prepare "
                "it with prepare.vocab_size above 0 (and captions outside the held-out splits), or "
                "name another tokenizer"
            )
        return trained_tokenizer_json
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        return _load_file(path)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=[*TOKENIZER_FILES, *CONFIG_FILES])
    except Exception as error:  # noqa: BLE001 - of the hub, its cache, and the connection
        raise UsageError(
            f"{_SETTING}: {name!r} is not a local file or directory, and could not be downloaded "
            f"from the Hugging Face Hub ({first_line(error)[:200]}): check the name, or, without a "
            f"network, name a directory with {_FORMATS}, or `trained`"
        ) from None
    return _load_folder(Path(folder))


def tokenizer_file(folder: Path) -> Path | None:
    """Return the file of the tokenizer in a folder, or None if there is none.

    The first existing name counts: tokenizer.json, vocab.txt, vocab.json, CLIP's
    bpe_simple_vocab_16e6.txt.gz, and then a SentencePiece model (`*.model`).

    Raises:
        UsageError: The folder has several SentencePiece models and no other tokenizer.
    """
    for name in (TOKENIZER, VOCABULARY, BPE_VOCABULARY, CLIP_BPE):
        if (folder / name).is_file():
            return folder / name
    models = sorted(folder.glob(f"*{SENTENCEPIECE}"))
    if len(models) > 1:
        raise UsageError(
            f"{_SETTING}: {folder} holds several models, {', '.join(m.name for m in models)}; name "
            "one"
        )
    return models[0] if models else None


def _load_folder(folder: Path) -> str:
    file = tokenizer_file(folder)
    if file is None:
        raise UsageError(f"{_SETTING}: {folder} holds no tokenizer ({_FORMATS})")
    return _load_file(file)


def _load_file(file: Path) -> str:
    """Load a file, with the pad token of tokenizer_config.json and the cleaning of
    open_clip_config.json next to it.
    """
    settings = _read_settings(file.with_name(TOKENIZER_CONFIG))
    kind = _tokenizer_kind(file, settings)
    # tokenizers and protobuf raise bare exceptions for invalid files
    try:
        tokenizer = _read_tokenizer(file, settings, kind)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001
        raise UsageError(
            f"{_SETTING}: {file} cannot be read as a tokenizer: {first_line(error)}. Set "
            f"tokenizer_class in {TOKENIZER_CONFIG} next to it, or save it as {TOKENIZER} with "
            "transformers' AutoTokenizer"
        ) from None
    pad = settings.get("pad_token")
    if isinstance(pad, dict):  # a serialized AddedToken
        pad = pad.get("content")
    pad_id = tokenizer.token_to_id(pad) if isinstance(pad, str) else None
    if pad_id is not None and pad_id != declared_pad_id(tokenizer.to_str()):
        tokenizer.enable_padding(pad_id=pad_id, pad_token=pad)
    # SigLIP 2 was trained on lower case; many of its files name Gemma's class, which ignores the
    # setting.
    if kind == "siglip2" or (kind == "gemma" and settings.get("do_lower_case")):
        _prepend_normalizers(tokenizer, [normalizers.Lowercase()])
    if kind == "siglip" and file.suffix == SENTENCEPIECE:
        _canonicalize(tokenizer, lowercase=settings.get("do_lower_case", True))
    open_clip = _read_settings(file.with_name(OPEN_CLIP_CONFIG))
    text = open_clip.get("model_cfg", open_clip).get("text_cfg", {})
    if text.get("tokenizer_kwargs", {}).get("clean") == "canonicalize":
        _canonicalize(tokenizer, split_at_underscores=True)
    return str(tokenizer.to_str())


def _read_settings(file: Path) -> dict[str, Any]:
    return read_weights_json(_SETTING, str(file.parent), [file.name])


def _tokenizer_kind(file: Path, settings: dict[str, Any]) -> str:
    """Return the tokenizer class or the model type next to a file, such as `siglip2`, or ""."""
    model_type = _read_settings(file.with_name(MODEL_CONFIG)).get("model_type")
    kind = settings.get("tokenizer_class") or model_type or ""
    return re.sub("tokenizer|fast|-", "", str(kind).lower())


def _read_tokenizer(file: Path, settings: dict[str, Any], kind: str) -> Tokenizer:
    """Read a tokenizer.json, CLIP's merges, or with transformers any other file."""
    if file.suffix == ".gz":
        return _read_clip_bpe(file)
    if file.suffix == SENTENCEPIECE:
        check_installed("sentencepiece", _SETTING, "sentencepiece")
        _check_sentencepiece(file, kind)
        options = {}
        if kind == "siglip" or (not kind and file.name == T5_MODEL):
            # transformers reads SigLIP's model without its fast tokenizers; it is one of T5
            # without T5's extra tokens.
            options = {"tokenizer_type": "t5", "extra_ids": 0}
        return _read_with_transformers(dict.fromkeys(SENTENCEPIECE_NAMES, file), file, options)
    if file.name in (BPE_VOCABULARY, BPE_MERGES):
        vocabulary = file.with_name(BPE_VOCABULARY)
        files = {BPE_VOCABULARY: vocabulary, BPE_MERGES: file.with_name(BPE_MERGES)}
        options = {} if kind else {"tokenizer_type": _byte_level_type(vocabulary)}
        return _read_with_transformers(files, file, options)
    text = file.read_text(encoding="utf-8")
    if text.lstrip().startswith("{"):
        return Tokenizer.from_str(text)
    tokens = text.removesuffix("\n").split("\n")
    missing = [token for token in ("[UNK]", "[CLS]", "[SEP]", "[PAD]") if token not in tokens]
    if missing:
        raise UsageError(
            f"{_SETTING}: the vocabulary has no {', '.join(missing)}: it is not a "
            "WordPiece vocabulary"
        )
    options = {} if kind else {"tokenizer_type": "bert"}
    if settings.get("do_lower_case") is None:
        has_capitals = any(token != token.lower() for token in tokens if not token.startswith("["))
        options["do_lower_case"] = not has_capitals
    return _read_with_transformers({VOCABULARY: file}, file, options)


def _check_sentencepiece(file: Path, kind: str) -> None:
    """Raise UsageError for a model that transformers would read with other ids without an error."""
    from transformers.convert_slow_tokenizer import import_protobuf

    proto: Any = import_protobuf().ModelProto.FromString(file.read_bytes())
    trainer = proto.trainer_spec
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        raise UsageError(
            f"{_SETTING}: {file} is a SentencePiece model of words or characters; only unigram and "
            "BPE models are supported"
        )
    if file.name == FAIRSEQ_MODEL and not kind:
        raise UsageError(
            f"{_SETTING}: {file} has the ids of XLM-RoBERTa or CamemBERT, which differ. Set "
            f'{{"tokenizer_class": "XLMRobertaTokenizer"}} in {TOKENIZER_CONFIG} next to it'
        )


def _read_with_transformers(
    files: dict[str, Path], given: Path, options: dict[str, Any]
) -> Tokenizer:
    """Return the fast tokenizer that AutoTokenizer reads from `files` (by the name that it
    expects) and the config files next to the `given` file.
    """
    from transformers import AutoTokenizer

    files = files | {
        name: given.with_name(name)
        for name in (TOKENIZER_CONFIG, MODEL_CONFIG)
        if given.with_name(name).is_file()
    }
    with TemporaryDirectory() as folder:
        for name, file in files.items():
            (Path(folder) / name).symlink_to(file.resolve(strict=True))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    return tokenizer.backend_tokenizer


def _read_clip_bpe(file: Path) -> Tokenizer:
    """Read the merges of OpenAI's CLIP; its vocabulary follows from them (Radford et al. 2021,
    clip/simple_tokenizer.py).
    """
    from transformers import CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    lines = gzip.decompress(file.read_bytes()).decode().split("\n")
    merges = [line for line in lines[1 : CLIP_MERGES + 1] if line]
    characters = list(bytes_to_unicode().values())
    pieces = [
        *characters,
        *(f"{character}</w>" for character in characters),
        *(merge.replace(" ", "") for merge in merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    return CLIPTokenizer(vocabulary, pairs).backend_tokenizer


def _byte_level_type(vocabulary: Path) -> str:
    """Return the type of a byte-level BPE vocabulary by its special tokens."""
    tokens = json.loads(vocabulary.read_text(encoding="utf-8"))
    if {"<|startoftext|>", "<|endoftext|>"} <= tokens.keys():
        return "clip"
    if {"<s>", "</s>"} <= tokens.keys():
        return "roberta"
    raise UsageError(
        f"{_SETTING}: {BPE_VOCABULARY} has neither <|startoftext|> (CLIP) nor <s> and </s> "
        f"(RoBERTa), so its special tokens are unknown; set tokenizer_class in {TOKENIZER_CONFIG}"
    )


def _canonicalize(
    tokenizer: Tokenizer, lowercase: bool = True, split_at_underscores: bool = False
) -> None:
    """Remove punctuation and capitals from texts, as canonicalize_text of SiglipTokenizer and of
    open_clip does.
    """
    cleaning: list[Any] = [normalizers.Lowercase()] if lowercase else []
    cleaning += [normalizers.Replace("_", " ")] if split_at_underscores else []
    cleaning += [
        normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]
    _prepend_normalizers(tokenizer, cleaning)


def _prepend_normalizers(tokenizer: Tokenizer, first: list[Any]) -> None:
    rest = [tokenizer.normalizer] if tokenizer.normalizer else []
    tokenizer.normalizer = normalizers.Sequence([*first, *rest])
