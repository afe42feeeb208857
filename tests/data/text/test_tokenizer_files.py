"""Tokenizers in the formats of CLIP, RoBERTa and SentencePiece give the ids of the reference
implementations.
"""

from __future__ import annotations

import gzip
import html
import itertools
import json
import os
import string
from pathlib import Path
from typing import Any

import ftfy
import pytest
import regex
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    CLIPTokenizer,
    RobertaTokenizer,
    Siglip2Tokenizer,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode, import_protobuf

from mmray.config import Inputs
from mmray.data.text.tokenizer import (
    TextEncoder,
    build_encoder,
    clean_caption,
    declared_pad_id,
    train_tokenizer,
)
from mmray.data.text.tokenizer_files import CLIP_BPE, load_tokenizer
from mmray.errors import UsageError

SHARED = Path(os.environ.get("MMRAY_SHARED", "/missing")) / "tokenizers" / CLIP_BPE
CAPTIONS = [
    "a photo of a cat",
    "A PHOTO of Two DOGS, isn't it? I'm sure they've 12 toys!!",
    "emoji 🐶🚀 and 👩‍🚀, a flag 🇩🇪",
    "一只猫坐在垫子上，旁边有3只狗。",
    "Éclair café naïve ÜBER straße, Ελληνικά, русский",
    "<|startoftext|>not a mark<|endoftext|>",
    "tabs\tand  spaces",
    "",
]
MERGES = ["c a", "ca t</w>", "d o", "do g</w>", "a n", "an d</w>"]


class SimpleTokenizer:
    """OpenAI's clip/simple_tokenizer.py, written from its definition."""

    def __init__(self, file: Path) -> None:
        merges = gzip.decompress(file.read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
        self.byte_encoder = bytes_to_unicode()
        pairs = [tuple(merge.split()) for merge in merges if merge]
        letters = list(self.byte_encoder.values())
        names = [
            *letters,
            *(letter + "</w>" for letter in letters),
            *("".join(pair) for pair in pairs),
        ]
        names += ["<|startoftext|>", "<|endoftext|>"]
        self.encoder = {name: index for index, name in enumerate(names)}
        self.ranks = {pair: index for index, pair in enumerate(pairs)}
        self.pattern = regex.compile(
            r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+""",
            regex.IGNORECASE,
        )

    def bpe(self, token: str) -> list[str]:
        if token in ("<|startoftext|>", "<|endoftext|>"):
            return [token]
        word = [*token[:-1], token[-1] + "</w>"]
        while len(word) > 1:
            best = min(itertools.pairwise(word), key=lambda pair: self.ranks.get(pair, 1e9))
            if best not in self.ranks:
                break
            merged, index = [], 0
            while index < len(word):
                if tuple(word[index : index + 2]) == best:
                    merged.append("".join(best))
                    index += 2
                else:
                    merged.append(word[index])
                    index += 1
            word = merged
        return word

    def encode(self, text: str) -> list[int]:
        text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
        words = regex.findall(self.pattern, " ".join(text.split()).lower())
        parts = ["".join(self.byte_encoder[byte] for byte in word.encode()) for word in words]
        ids = [self.encoder[piece] for part in parts for piece in self.bpe(part)]
        return [self.encoder["<|startoftext|>"], *ids, self.encoder["<|endoftext|>"]]


def ids_of(tokenizer_json: str, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def small_clip_bpe(folder: Path) -> Path:
    """A file in CLIP's format with few merges;

    OpenAI's has more lines than its vocabulary has merges.
    """
    file = folder / CLIP_BPE
    file.write_bytes(gzip.compress(("#version: 0.2\n" + "\n".join(MERGES) + "\n").encode()))
    return file


@pytest.mark.parametrize("real", [False, True])
def test_clip_bpe_has_the_ids_of_openai(real: bool, tmp_path: Path) -> None:
    if real and not SHARED.is_file():
        pytest.skip("MMRAY_SHARED holds no real tokenizer")
    file = SHARED if real else small_clip_bpe(tmp_path)
    reference, loaded = SimpleTokenizer(file), load_tokenizer(str(file), None)
    encoder = TextEncoder(loaded, 77)
    repaired = [encoder.format_caption(text) for text in CAPTIONS]
    assert ids_of(loaded, repaired) == [reference.encode(text) for text in CAPTIONS]
    assert (
        encoder.vocab_size == len(reference.encoder) == (49408 if real else 512 + len(MERGES) + 2)
    )
    assert encoder.encode(["cat " * 99])[0][0, [0, -1]].tolist() == [
        encoder.vocab_size - 2,
        encoder.vocab_size - 1,
    ]
    assert load_tokenizer(str(file.parent), None) == loaded if not real else True


@pytest.mark.parametrize(
    ("caption", "repaired"),
    [
        ("caf\u00c3\u00a9 &amp;amp; cat", "café & cat"),
        ("it\u00e2\u0080\u0099s  voil\u00c3\u00a0\n", "it's voilà"),  # of Latin-1, with controls
        ("“a” dog\u2019s", '"a" dog\'s'),
        ("cat &#39;n&#39; dog &lt;3", "cat 'n' dog <3"),
        ("plain cat", "plain cat"),
    ],
)
@pytest.mark.parametrize("language_token", ["", "[{}]"])
def test_texts_of_clip_are_repaired_whatever_prepare_did(
    tmp_path: Path, caption: str, repaired: str, language_token: str
) -> None:
    file = small_clip_bpe(tmp_path)
    inputs = Inputs(language_token=language_token)
    encoder = build_encoder(load_tokenizer(str(file), None), inputs)
    expected = SimpleTokenizer(file).encode(caption)
    for prepared in (clean_caption(caption), clean_caption(caption, repair=True)):
        [ids], [count] = encoder.encode([encoder.format_caption(prepared)])
        assert ids[:count].tolist() == expected == SimpleTokenizer(file).encode(repaired)


def test_other_tokenizers_leave_texts() -> None:
    other = TextEncoder(train_tokenizer(["a cat"], 60), 8)
    assert other.format_caption("“a” &amp; b") == "“a” &amp; b"


def test_vocab_and_merges_of_clip_have_the_ids_of_transformers(tmp_path: Path) -> None:
    vocabulary = SimpleTokenizer(small_clip_bpe(tmp_path)).encoder
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    expected = CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))(CAPTIONS)[
        "input_ids"
    ]
    for name in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt", tmp_path / CLIP_BPE):
        assert ids_of(load_tokenizer(str(name), None), CAPTIONS) == expected


def test_vocab_and_merges_of_roberta_have_the_ids_of_transformers(tmp_path: Path) -> None:
    letters = list(bytes_to_unicode().values())
    merges = ["c a", "ca t", "Ġ d", "o g", "Ġd og"]
    pieces = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        *letters,
        *(merge.replace(" ", "") for merge in merges),
        "<mask>",
    ]
    (tmp_path / "vocab.json").write_text(
        json.dumps({piece: index for index, piece in enumerate(pieces)})
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    expected = RobertaTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))(
        CAPTIONS
    )["input_ids"]
    loaded = load_tokenizer(str(tmp_path), None)
    assert ids_of(loaded, CAPTIONS) == expected and TextEncoder(loaded, 8).pad_id == 1
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "RobertaTokenizer"})
    )
    assert AutoTokenizer.from_pretrained(tmp_path)(CAPTIONS)["input_ids"] == expected


PIECES = [
    ("▁", -2.0),
    ("▁a", -1.5),
    ("▁cat", -2.5),
    ("s", -3.0),
    ("▁do", -3.0),
    ("g", -3.2),
    ("猫", -4.0),
    (".", -3.5),
]
PIECES += [(letter, -6.0) for letter in "acdeot"]


def sentencepiece_model(
    file: Path, special: list[str], model_type: int = 1
) -> list[tuple[str, float]]:
    """Write a SentencePiece model whose first pieces are special; return its vocabulary."""
    proto: Any = import_protobuf().ModelProto()
    vocabulary = [*((piece, 0.0) for piece in special), *PIECES]
    for piece, score in vocabulary:
        kind = 2 if piece == "<unk>" else 3 if piece in special else 1  # unknown, control, normal
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type, proto.trainer_spec.unk_id = model_type, special.index("<unk>")
    file.write_bytes(proto.SerializeToString())
    return vocabulary


SPM_TEXTS = ["a cat", "a dog. cats", "猫 a", "the cat", "a"]


def test_sentencepiece_of_t5_and_siglip_has_the_ids_of_transformers(tmp_path: Path) -> None:
    vocabulary = sentencepiece_model(tmp_path / "spiece.model", ["<pad>", "</s>", "<unk>"])
    reference = T5Tokenizer(vocabulary, extra_ids=0)
    expected = reference(SPM_TEXTS)["input_ids"]
    for name in (tmp_path, tmp_path / "spiece.model"):
        assert ids_of(load_tokenizer(str(name), None), SPM_TEXTS) == expected
    assert expected[0] == [4, 5, 1]  # a, cat, end

    # lower-cases and removes punctuation
    settings = {"tokenizer_class": "SiglipTokenizer", "pad_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    siglip, texts = load_tokenizer(str(tmp_path), None), [*SPM_TEXTS, "A  CAT!?", "a [do-g]s"]
    cleaned = [
        " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())
        for text in texts
    ]
    assert ids_of(siglip, texts) == reference(cleaned)["input_ids"]
    assert declared_pad_id(siglip) == 1

    kwargs = {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}}  # of open_clip's SigLIP
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": kwargs}))
    texts = ["A  CAT!?", "a_cat", "a cat"]
    assert (
        ids_of(load_tokenizer(str(tmp_path), None), texts) == reference(["a cat"] * 3)["input_ids"]
    )


def test_sentencepiece_of_xlm_roberta_shifts_the_ids(tmp_path: Path) -> None:
    sentencepiece_model(tmp_path / "sentencepiece.bpe.model", ["<unk>", "<s>", "</s>"])
    with pytest.raises(UsageError, match="ids of XLM-RoBERTa or CamemBERT, which differ"):
        load_tokenizer(str(tmp_path), None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}))
    # fairseq: <s> <pad> </s> <unk>
    assert ids_of(load_tokenizer(str(tmp_path), None), ["a cat"]) == [[0, 5, 6, 2]]


def test_sentencepiece_bpe_merges_by_score(tmp_path: Path) -> None:
    file = tmp_path / "a.model"
    names = [
        piece for piece, _ in sentencepiece_model(file, ["<unk>", "<s>", "</s>"], model_type=2)
    ]
    pieces = ["▁a", "▁", "c", "a", "t"]  # ▁cat is no merge of two pieces
    assert ids_of(load_tokenizer(str(file), None), ["a cat"]) == [
        [names.index(piece) for piece in pieces]
    ]
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "add_eos_token": true}'
    )
    llama = load_tokenizer(str(file), None)
    assert ids_of(llama, ["a cat"]) == [[names.index(piece) for piece in ["<s>", *pieces, "</s>"]]]
    assert Tokenizer.from_str(llama).encode("a</s>", add_special_tokens=False).tokens == [
        "▁a",
        "</s>",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe"},
        {
            "model_type": "bpe",
            "byte_fallback": True,
            "split_digits": True,
            "normalization_rule_name": "identity",
        },
        {"model_type": "bpe", "add_dummy_prefix": False, "user_defined_symbols": ["<image>"]},
        {
            "model_type": "bpe",
            "normalization_rule_name": "nmt_nfkc_cf",
            "remove_extra_whitespaces": False,
        },
        {"model_type": "unigram", "remove_extra_whitespaces": False},
    ],
)
def test_sentencepiece_models_have_the_ids_of_the_library(
    options: dict[str, Any], tmp_path: Path
) -> None:
    import sentencepiece

    texts = [text for text in CAPTIONS if "<|" not in text] + [
        "a <image> b",
        "1,234.5  x",
        "ａｂｃ ﬁ",
        "▁ under",
    ]
    model = str(tmp_path / "a.model")
    options |= {"vocab_size": 400, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 20), model_prefix=model.removesuffix(".model"), **options
    )
    (tmp_path / "tokenizer_config.json").write_text('{"add_eos_token": false}')
    expected = sentencepiece.SentencePieceProcessor(model_file=model).encode(texts)
    assert ids_of(load_tokenizer(model, None), texts) == expected


def test_unsupported_tokenizer_files_are_refused(tmp_path: Path) -> None:
    sentencepiece_model(tmp_path / "a.model", ["<unk>"], model_type=3)
    with pytest.raises(UsageError, match="only unigram and BPE models"):
        load_tokenizer(str(tmp_path / "a.model"), None)
    (tmp_path / "b.model").write_bytes(b"\x00junk")
    with pytest.raises(UsageError, match=r"holds several models, a\.model, b\.model; name one"):
        load_tokenizer(str(tmp_path), None)
    with pytest.raises(UsageError, match=r"b\.model cannot be read as a tokenizer"):
        load_tokenizer(str(tmp_path / "b.model"), None)
    (tmp_path / "vocab.json").write_text('{"<s>": 0, "</s>": 1}')
    with pytest.raises(UsageError, match=r"vocab\.json cannot be read .*merges\.txt"):
        load_tokenizer(str(tmp_path), None)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UsageError, match=r"vocab\.json has neither <\|startoftext\|> \(CLIP\)"):
        load_tokenizer(str(tmp_path), None)


@pytest.mark.parametrize("kind", ["Siglip2Tokenizer", "GemmaTokenizer"])
def test_siglip_2_reads_lower_case(kind: str, tmp_path: Path) -> None:
    """Its tokenizer.json has no such normalizer; transformers' class and, in older files,
    do_lower_case add it.
    """
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *"\u2581AaCct"]
    Siglip2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]
    ).save_pretrained(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)("A CAt").input_ids
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"] = tokenizer["normalizer"]["normalizers"][1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": kind
    }
    settings |= {"do_lower_case": True} if kind == "GemmaTokenizer" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_str(load_tokenizer(str(tmp_path), None)).encode("A CAt").ids == expected
