"""Tokenizer of `model.inputs.tokenizer` -> the text of a tokenizer.json, which data workers get."""

from __future__ import annotations

import gzip
import re
import string
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mmray.data.text.tokenizer import declared_pad_id
from mmray.errors import UsageError, first_line
from mmray.storage.weights_json import read_weights_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MODEL_CONFIG = "config.json"
OPEN_CLIP_CONFIG = "open_clip_config.json"
CLIP_BPE = "bpe_simple_vocab_16e6.txt.gz"
CLIP_MERGES = 49152 - 256 - 2  # the file has more lines than CLIP's vocabulary has merges
CLIP_START = "<|startoftext|>"
CLIP_END = "<|endoftext|>"
CLIP_WORDS = (
    rf"{re.escape(CLIP_START)}|{re.escape(CLIP_END)}|'s|'t|'re|'ve|'m|'ll|'d"
    r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
CONFIG_FILES = (TOKENIZER_CONFIG, MODEL_CONFIG, OPEN_CLIP_CONFIG)
# Files of other tokenizers, from which transformers writes a tokenizer.json.
_OTHER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "*.model")
_SETTING = "model.inputs.tokenizer"


def load_tokenizer(name: str, trained_tokenizer_json: str | None) -> str:
    """Load the tokenizer that `model.inputs.tokenizer` names.

    Args:
        name: `trained`; a folder; a file (tokenizer.json or CLIP's bpe_simple_vocab_16e6.txt.gz);
            or a name of the Hugging Face Hub, such as `openai/clip-vit-base-patch32`, which is
            downloaded.
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
        folder = snapshot_download(name, allow_patterns=[TOKENIZER, CLIP_BPE, *CONFIG_FILES])
    except Exception as error:  # noqa: BLE001 - of the hub, its cache, and the connection
        raise UsageError(
            f"{_SETTING}: {name!r} is not a local file or directory, and could not be downloaded "
            f"from the Hugging Face Hub ({first_line(error)[:200]}): check the name, or, without a "
            f"network, name a directory with {TOKENIZER}, or `trained`"
        ) from None
    return _load_folder(Path(folder))


def tokenizer_file(folder: Path) -> Path | None:
    """Return the file of the tokenizer in a folder, tokenizer.json or CLIP's
    bpe_simple_vocab_16e6.txt.gz, or None if there is none.
    """
    files = (folder / name for name in (TOKENIZER, CLIP_BPE))
    return next((file for file in files if file.is_file()), None)


def _load_folder(folder: Path) -> str:
    file = tokenizer_file(folder)
    if file is not None:
        return _load_file(file)
    others = [file.name for pattern in _OTHER_FILES for file in folder.glob(pattern)]
    hint = f"; {others[0]}: {_how_to_convert(folder)}" if others else ""
    raise UsageError(f"{_SETTING}: {folder} holds no {TOKENIZER} and no {CLIP_BPE}{hint}")


def _how_to_convert(folder: Path) -> str:
    call = f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
    return f"transformers writes a {TOKENIZER} from other files: {call}"


def _load_file(file: Path) -> str:
    """Load a file, with the pad token of tokenizer_config.json and the cleaning of
    open_clip_config.json next to it.
    """
    settings = _read_settings(file.with_name(TOKENIZER_CONFIG))
    # The tokenizers package raises bare exceptions for invalid files.
    try:
        if file.suffix == ".gz":
            tokenizer = _read_clip_bpe(file)
        else:
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001
        raise UsageError(
            f"{_SETTING}: {file} cannot be read as a {TOKENIZER}: {first_line(error)}; "
            f"{_how_to_convert(file.parent)}"
        ) from None
    pad = settings.get("pad_token")
    if isinstance(pad, dict):  # a serialized AddedToken
        pad = pad.get("content")
    pad_id = tokenizer.token_to_id(pad) if isinstance(pad, str) else None
    if pad_id is not None and pad_id != declared_pad_id(tokenizer.to_str()):
        tokenizer.enable_padding(pad_id=pad_id, pad_token=pad)
    # SigLIP 2 was trained on lower case; many of its files name Gemma's class, which ignores the
    # setting.
    kind = _tokenizer_kind(file, settings)
    if kind == "siglip2" or (kind == "gemma" and settings.get("do_lower_case")):
        _prepend_normalizers(tokenizer, [normalizers.Lowercase()])
    if _has_canonical_texts(file.parent):
        _canonicalize(tokenizer)
    return str(tokenizer.to_str())


def _has_canonical_texts(folder: Path) -> bool:
    """Return whether open_clip_config.json in a folder, if there is one, defines this cleaning."""
    open_clip = _read_settings(folder / OPEN_CLIP_CONFIG)
    text = open_clip.get("model_cfg", open_clip).get("text_cfg", {})
    clean: object = text.get("tokenizer_kwargs", {}).get("clean")
    return clean == "canonicalize"


def clean_as(folder: Path, tokenizer_json: str) -> str:
    """Return a tokenizer with the cleaning of texts that open_clip_config.json in a folder defines,
    if it has one.
    """
    if not _has_canonical_texts(folder):
        return tokenizer_json
    tokenizer = Tokenizer.from_str(tokenizer_json)
    _canonicalize(tokenizer)
    return str(tokenizer.to_str())


def _read_settings(file: Path) -> dict[str, Any]:
    return read_weights_json(_SETTING, str(file.parent), [file.name])


def _tokenizer_kind(file: Path, settings: dict[str, Any]) -> str:
    """Return the tokenizer class or the model type next to a file, such as `siglip2`, or ""."""
    model_type = _read_settings(file.with_name(MODEL_CONFIG)).get("model_type")
    kind = settings.get("tokenizer_class") or model_type or ""
    kind = re.sub("tokenizer|fast|-", "", str(kind).lower())
    # As in transformers, for NaFlex; other models of SigLIP 2 have the type `siglip`.
    return "siglip2" if kind == "gemma" and model_type == "siglip2" else kind


def _read_clip_bpe(file: Path) -> Tokenizer:
    """Read the merges of OpenAI's CLIP; its vocabulary follows from them (Radford et al. 2021,
    clip/simple_tokenizer.py).

    It equals CLIPTokenizer of transformers, whose import takes seconds.
    """
    lines = gzip.decompress(file.read_bytes()).decode().split("\n")
    merges = [line for line in lines[1 : CLIP_MERGES + 1] if line]
    visible = [code for code in range(256) if chr(code).isprintable() and chr(code) != " "]
    characters = [chr(code) for code in visible]
    # Each other byte is one of the next characters.
    characters += [chr(256 + index) for index in range(256 - len(visible))]
    pieces = [
        *characters,
        *(f"{character}</w>" for character in characters),
        *(merge.replace(" ", "") for merge in merges),
        CLIP_START,
        CLIP_END,
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            pairs,
            unk_token=CLIP_END,
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            fuse_unk=False,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([CLIP_START, CLIP_END])
    start, end = ((token, vocabulary[token]) for token in (CLIP_START, CLIP_END))
    tokenizer.post_processor = processors.RobertaProcessing(end, start, False, False)
    return tokenizer


def _canonicalize(tokenizer: Tokenizer) -> None:
    """Remove punctuation and capitals from texts, as canonicalize_text of open_clip does."""
    cleaning = [
        normalizers.Lowercase(),
        normalizers.Replace("_", " "),
        normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]
    _prepend_normalizers(tokenizer, cleaning)


def _prepend_normalizers(tokenizer: Tokenizer, first: list[Any]) -> None:
    rest = [tokenizer.normalizer] if tokenizer.normalizer else []
    tokenizer.normalizer = normalizers.Sequence([*first, *rest])
