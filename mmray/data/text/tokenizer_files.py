"""Tokenizer files of transformers, CLIP and SentencePiece -> the text of a tokenizer.json.

Only the driver imports this module, because it imports transformers for some formats.
"""

from __future__ import annotations

import gzip
import json
import re
import string
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, BertWordPieceTokenizer, Regex, Tokenizer, normalizers, processors

from mmray.data.text.tokenizer import declared_pad_id
from mmray.errors import UsageError, first_line

TOKENIZER, VOCABULARY = "tokenizer.json", "vocab.txt"
TOKENIZER_CONFIG, MODEL_CONFIG, OPEN_CLIP_CONFIG = (
    "tokenizer_config.json",
    "config.json",
    "open_clip_config.json",
)
BPE_VOCABULARY, BPE_MERGES = "vocab.json", "merges.txt"
CLIP_BPE = "bpe_simple_vocab_16e6.txt.gz"
CLIP_MERGES = 49152 - 256 - 2  # the file has more lines than CLIP's vocabulary has merges
SENTENCEPIECE = ".model"
CONFIG_FILES = (TOKENIZER_CONFIG, MODEL_CONFIG, OPEN_CLIP_CONFIG)
TOKENIZER_FILES = (TOKENIZER, VOCABULARY, BPE_VOCABULARY, BPE_MERGES, CLIP_BPE, f"*{SENTENCEPIECE}")
_FORMATS = (
    f"{TOKENIZER}, {VOCABULARY}, {BPE_VOCABULARY} with {BPE_MERGES}, {CLIP_BPE}, or one "
    f"*{SENTENCEPIECE}"
)
_SETTING = "model.inputs.tokenizer"
# Tokenizers with a SentencePiece model: whether they add BOS and EOS by default.
_SPECIAL_TOKENS = {
    "t5": (False, True),
    "siglip": (False, True),
    "xlmroberta": (True, True),
    "llama": (True, False),
    "gemma": (True, False),
    "sentencepiece": (False, False),  # a BPE model alone: the ids of the library
}


def load_tokenizer(name: str, trained_tokenizer_json: str | None) -> str:
    """Return the text of the tokenizer.json for the value `name` of `model.inputs.tokenizer`.

    `trained_tokenizer_json` is that of the prepared set, if any. Other names are a folder, a file,
    or a Hugging Face Hub name. Raises UsageError.
    """
    if name == "trained":
        if trained_tokenizer_json is None:
            raise UsageError(
                f"{_SETTING} is `trained`, but there is no prepared set with a tokenizer: prepare "
                "it with "
                "prepare.vocab_size above 0 (and captions outside the held-out splits), or name "
                "another tokenizer"
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
            "from the "
            f"Hugging Face Hub ({first_line(error)[:200]}): check the name, or, without a network, "
            "name a directory "
            f"with {_FORMATS}, or `trained`"
        ) from None
    return _load_folder(Path(folder))


def tokenizer_file(folder: Path) -> Path | None:
    """The file in `folder` that holds its tokenizer, or None.

    Raises UsageError for several SentencePiece models.
    """
    for name in (TOKENIZER, VOCABULARY, BPE_VOCABULARY, CLIP_BPE):
        if (folder / name).is_file():
            return folder / name
    models = sorted(folder.glob(f"*{SENTENCEPIECE}"))
    if len(models) > 1:
        raise UsageError(
            f"{_SETTING}: {folder} holds several models, "
            f"{', '.join(m.name for m in models)}; name one"
        )
    return models[0] if models else None


def _load_folder(folder: Path) -> str:
    if (file := tokenizer_file(folder)) is None:
        raise UsageError(f"{_SETTING}: {folder} holds no tokenizer ({_FORMATS})")
    return _load_file(file)


def _load_file(file: Path) -> str:
    """Load a file, with the pad token of tokenizer_config.json and the cleaning of
    open_clip_config.json next to it.
    """
    settings = _read_settings(file.with_name(TOKENIZER_CONFIG))
    tokenizer_json = _convert_file(file, settings)
    pad = settings.get("pad_token")
    # a token is a string or a serialized AddedToken
    pad = pad.get("content") if isinstance(pad, dict) else pad
    tokenizer = Tokenizer.from_str(tokenizer_json)
    pad_id = tokenizer.token_to_id(pad) if isinstance(pad, str) else None
    if pad_id is not None and pad_id != declared_pad_id(tokenizer_json):
        tokenizer.enable_padding(pad_id=pad_id, pad_token=pad)
    kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
    # SigLIP 2 was trained on lower case; many of its files name Gemma's class, which ignores the
    # setting.
    if kind == "Siglip2Tokenizer" or (kind == "GemmaTokenizer" and settings.get("do_lower_case")):
        _prepend_normalizers(tokenizer, [normalizers.Lowercase()])
    open_clip = _read_settings(file.with_name(OPEN_CLIP_CONFIG))
    text = open_clip.get("model_cfg", open_clip).get("text_cfg", {})
    if text.get("tokenizer_kwargs", {}).get("clean") == "canonicalize":
        _canonicalize(tokenizer, split_at_underscores=True)
    return str(tokenizer.to_str())


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return dict(settings.items())
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{_SETTING}: {file} is not a JSON object: {error}") from None


def _convert_file(path: Path, settings: dict[str, Any]) -> str:
    """Return the text of the tokenizer.json;

    `settings` of tokenizer_config.json, if any. Raises UsageError.
    """
    try:
        if path.name in (BPE_VOCABULARY, BPE_MERGES):
            vocabulary = json.loads(path.with_name(BPE_VOCABULARY).read_text(encoding="utf-8"))
            lines = path.with_name(BPE_MERGES).read_text(encoding="utf-8").split("\n")
            return _byte_level_bpe(
                vocabulary, [line for line in lines if not line.startswith("#version")]
            )
        if path.suffix == ".gz":
            return _clip_bpe(path)
        if path.suffix == SENTENCEPIECE:
            return _sentencepiece(path, settings)
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            return str(Tokenizer.from_str(text).to_str())
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers and protobuf raise bare Exceptions for invalid files
        raise UsageError(
            f"{_SETTING}: {path} cannot be read as a tokenizer: {first_line(error)}"
        ) from None
    return _wordpiece(text, settings.get("do_lower_case"))


def _wordpiece(text: str, lowercase: bool | None) -> str:
    """A BERT vocabulary, one token a line; lowercase None: if it has no capital letters."""
    vocabulary = {token: index for index, token in enumerate(text.removesuffix("\n").split("\n"))}
    if missing := [
        token for token in ("[UNK]", "[CLS]", "[SEP]", "[PAD]") if token not in vocabulary
    ]:
        raise UsageError(
            f"{_SETTING}: the vocabulary has no {', '.join(missing)}: it is not a "
            "WordPiece vocabulary"
        )
    if lowercase is None:
        lowercase = not any(
            token != token.lower() for token in vocabulary if not token.startswith("[")
        )
    return str(BertWordPieceTokenizer(vocabulary, lowercase=lowercase).to_str())


def _clip_bpe(path: Path) -> str:
    """The merges of OpenAI's CLIP; its vocabulary follows from them (Radford et al. 2021,
    clip/simple_tokenizer.py).
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    with gzip.open(path, "rt", encoding="utf-8") as file:
        merges = [line for line in file.read().split("\n")[1 : CLIP_MERGES + 1] if line]
    characters = list(bytes_to_unicode().values())
    pieces = [
        *characters,
        *(f"{each}</w>" for each in characters),
        *(merge.replace(" ", "") for merge in merges),
    ]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    return _byte_level_bpe({piece: index for index, piece in enumerate(pieces)}, merges)


def _byte_level_bpe(vocabulary: dict[str, int], merges: list[str]) -> str:
    """The tokenizer of CLIP or RoBERTa, chosen by its special tokens.

    A merge is two pieces with a space between.
    """
    from transformers import CLIPTokenizer, RobertaTokenizer

    pairs: Any = [tuple(merge.split(" ")) for merge in merges if merge]
    if {"<|startoftext|>", "<|endoftext|>"} <= vocabulary.keys():
        return str(CLIPTokenizer(vocabulary, pairs).backend_tokenizer.to_str())
    if {"<s>", "</s>"} <= vocabulary.keys():
        return str(RobertaTokenizer(vocabulary, pairs).backend_tokenizer.to_str())
    raise UsageError(
        f"{_SETTING}: {BPE_VOCABULARY} has neither <|startoftext|> (CLIP) nor <s> and </s> "
        "(RoBERTa), so its special "
        f"tokens are unknown; save it as {TOKENIZER} with transformers' AutoTokenizer"
    )


def _sentencepiece(path: Path, settings: dict[str, Any]) -> str:
    """A SentencePiece model, unigram or BPE, as the tokenizer class of its settings reads it."""
    from transformers.convert_slow_tokenizer import SpmConverter, import_protobuf

    proto: Any = import_protobuf().ModelProto.FromString(path.read_bytes())
    trainer, is_bpe = proto.trainer_spec, proto.trainer_spec.model_type == proto.trainer_spec.BPE
    kind = (
        settings.get("tokenizer_class")
        or _read_settings(path.with_name(MODEL_CONFIG)).get("model_type")
        or ""
    )
    name = re.sub("tokenizer|fast|-", "", str(kind).lower())
    # of XLM-RoBERTa or CamemBERT, whose ids differ
    if not name and path.name != "sentencepiece.bpe.model":
        name = "sentencepiece" if is_bpe else "t5"
    if name not in _SPECIAL_TOKENS or not (is_bpe or trainer.model_type == trainer.UNIGRAM):
        raise UsageError(
            f"{_SETTING}: {path} belongs to a tokenizer of type `{name or 'unknown'}`; supported "
            "are unigram and BPE "
            f"models of {', '.join(_SPECIAL_TOKENS)} (tokenizer_class in {TOKENIZER_CONFIG}); save "
            f"it as {TOKENIZER} "
            "with transformers' AutoTokenizer and the package sentencepiece"
        )
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    special = [piece.piece for piece in proto.pieces if piece.type == piece.CONTROL]
    if name == "xlmroberta":  # fairseq's order
        special, trainer.unk_id = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], 3
        pieces = [*((token, 0.0) for token in special[:4]), *pieces[3:], (special[4], 0.0)]
    ids = {piece: index for index, (piece, _) in enumerate(pieces)}
    legacy = settings.get("legacy") is not False
    tokenizer: Tokenizer = SpmConverter.build_tokenizer_from_spm_proto(
        proto, ids if is_bpe else pieces, legacy=legacy
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    adds_bos, adds_eos = _SPECIAL_TOKENS[name]
    bos = [trainer.bos_piece] if settings.get("add_bos_token", adds_bos) else []
    eos = [trainer.eos_piece] if settings.get("add_eos_token", adds_eos) else []
    ends = [(token, ids[token]) for token in bos + eos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos], special_tokens=ends
    )
    if name == "siglip":
        _canonicalize(tokenizer, lowercase=settings.get("do_lower_case", True))
    return str(tokenizer.to_str())


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
    tokenizer.normalizer = normalizers.Sequence(
        [*first, *([tokenizer.normalizer] if tokenizer.normalizer else [])]
    )
