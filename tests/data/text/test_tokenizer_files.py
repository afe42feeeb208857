"""Tokenizers in the formats of CLIP, RoBERTa and SentencePiece give the ids of the reference
implementations.
"""

from __future__ import annotations

import gzip
import html
import itertools
import json
import os
from pathlib import Path

import ftfy
import pytest
import regex
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    CLIPTokenizer,
    Siglip2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmray.data.text.tokenizer import (
    TextEncoder,
    clean_caption,
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
    model = json.loads(loaded)["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    assert loaded == CLIPTokenizer(model["vocab"], merges).backend_tokenizer.to_str()


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
def test_texts_of_clip_are_repaired_whatever_prepare_did(
    tmp_path: Path, caption: str, repaired: str
) -> None:
    file = small_clip_bpe(tmp_path)
    encoder = TextEncoder(load_tokenizer(str(file), None), 64)
    expected = SimpleTokenizer(file).encode(caption)
    for prepared in (clean_caption(caption), clean_caption(caption, repair=True)):
        [ids], [count] = encoder.encode([encoder.format_caption(prepared)])
        assert ids[:count].tolist() == expected == SimpleTokenizer(file).encode(repaired)


def test_other_tokenizers_leave_texts() -> None:
    other = TextEncoder(train_tokenizer(["a cat"], 60), 8)
    assert other.format_caption("“a” &amp; b") == "“a” &amp; b"


def test_texts_of_open_clips_siglip_are_cleaned(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["a cat sat"], 60))
    [expected] = ids_of(load_tokenizer(str(tmp_path), None), ["a cat"])
    kwargs = {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": kwargs}))
    cleaned = ids_of(load_tokenizer(str(tmp_path), None), ["A  CAT!?", "a_cat", "a cat"])
    assert cleaned == [expected] * 3


def test_other_tokenizer_files_are_refused_with_the_way_to_convert_them(tmp_path: Path) -> None:
    for name in ("spiece.model", "vocab.json", "vocab.txt"):
        (tmp_path / name).write_bytes(b"\x00junk")
        message = rf"holds no tokenizer\.json .*{name}.*save_pretrained"
        with pytest.raises(UsageError, match=message):
            load_tokenizer(str(tmp_path), None)
        with pytest.raises(UsageError, match=rf"{name} cannot be read .*save_pretrained"):
            load_tokenizer(str(tmp_path / name), None)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("kind", ["Siglip2Tokenizer", "GemmaTokenizer", "NaFlex"])
def test_siglip_2_reads_lower_case(kind: str, tmp_path: Path) -> None:
    """Its tokenizer.json has no such normalizer; transformers' class, its model type and, in older
    files, do_lower_case add it.
    """
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *"\u2581AaCct"]
    Siglip2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]
    ).save_pretrained(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)("A CAt").input_ids
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"] = tokenizer["normalizer"]["normalizers"][1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "GemmaTokenizer" if kind == "NaFlex" else kind
    settings |= {"do_lower_case": True} if kind == "GemmaTokenizer" else {}
    model_type = "siglip2" if kind == "NaFlex" else "siglip"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_str(load_tokenizer(str(tmp_path), None)).encode("A CAt").ids == expected
