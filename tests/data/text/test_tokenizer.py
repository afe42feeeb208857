import hashlib
import json
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer, Tokenizer

from mmray.data.text.tokenizer import (
    BadText,
    TextEncoder,
    clean_caption,
    declared_pad_id,
    load_tokenizer,
    train_tokenizer,
)
from mmray.errors import UsageError

CAPTIONS = [f"A {size} {colour} {shape}, déjà vu" for size in ("big", "small") for colour in ("red", "blue", "green")
            for shape in ("circle", "square", "triangle", "star")]  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(CAPTIONS, 200)


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("a cat", "a cat"),
        ("  a\t cat \r\n on\u00a0a mat ", "a cat on a mat"),
        ("a\x00b\x1b[0m\x7f", "ab[0m"),
        ("👩\u200d🚀 flies", "👩\u200d🚀 flies"),
        ("x" * 65536, "x" * 65536),
    ],
)
def test_clean_keeps_valid_text(raw, cleaned):
    assert clean_caption(raw) == cleaned


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", "blank"),
        (" \n\t", "blank"),
        ("\x00\x07", "blank"),
        ("\u200b\ufeff", "blank"),
        ("\ud83d", "encoding"),
        ("x" * 65537, "too-long"),
        (5, "type"),
        (None, "type"),
        (["a"], "type"),
    ],
)
def test_clean_refuses_invalid_text_with_reason(raw, reason):
    with pytest.raises(BadText) as caught:
        clean_caption(raw)
    assert caught.value.reason == reason
    assert isinstance(caught.value, ValueError)


@given(st.text(st.sampled_from("aB \t\n\x00\x85\u200b\u200d\ufeff\u00a0\u3000é👩\ud800")))
def test_clean_is_idempotent(raw):
    try:
        once = clean_caption(raw)
    except BadText:
        return
    assert clean_caption(once) == once


def test_special_tokens_come_first(trained):
    vocabulary = json.loads(trained)["model"]["vocab"]
    assert [vocabulary[token] for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(vocabulary) <= 200
    assert "circle" in vocabulary


def test_training_is_deterministic_across_processes(trained):
    code = (
        "import sys, json, hashlib; from mmray.data.text.tokenizer import train_tokenizer; "
        "print(hashlib.sha256(train_tokenizer(json.load(sys.stdin), 200).encode()).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(CAPTIONS), capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == hashlib.sha256(trained.encode()).hexdigest()
    assert train_tokenizer(iter(CAPTIONS), 200) == trained


def test_training_works_with_small_vocabulary_and_no_texts():
    assert TextEncoder(train_tokenizer(CAPTIONS, 16), 8).vocab_size <= 16
    assert TextEncoder(train_tokenizer([], 100), 8).vocab_size == 5


def test_encode_pads_to_longest_and_truncates_between_special_tokens(trained):
    encoder = TextEncoder(trained, 6)
    ids, num_tokens = encoder.encode(["red", "A RED circle", "big red circle small blue star and more"])
    assert (ids.dtype, num_tokens.dtype) == (np.int32, np.int32)
    assert ids.shape == (3, 6)
    assert num_tokens.tolist() == [3, 5, 6]
    assert (ids[:, 0] == 2).all()
    assert [row[count - 1] for row, count in zip(ids, num_tokens, strict=True)] == [3, 3, 3]
    assert (ids[0, 3:] == encoder.pad_id).all()
    assert ids.max() < encoder.vocab_size
    assert ids[0, 1] == ids[1, 2]  # lower-cased, and the same piece in every call
    assert encoder.encode(["red"])[0].shape == (1, 3)
    assert encoder.encode([])[0].shape == (0, 1)


def test_named_trained_tokenizer_must_exist(trained):
    assert load_tokenizer("trained", trained) == trained
    with pytest.raises(UsageError, match=r"prepare\.vocab_size"):
        load_tokenizer("trained", None)


def test_vocabulary_file_and_directories(tmp_path, trained):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    from_file = load_tokenizer(str(tmp_path / "vocab.txt"), None)
    assert load_tokenizer(str(tmp_path), None) == from_file
    assert TextEncoder(from_file, 8).encode(["A cats dog"])[0].tolist() == [[2, 7, 5, 6, 1, 3]]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert TextEncoder(load_tokenizer(str(tmp_path), None), 8).encode(["A cats"])[0].tolist() == [[2, 1, 5, 6, 3]]
    (tmp_path / "tokenizer.json").write_text(trained)
    assert load_tokenizer(str(tmp_path), None) == trained
    (tmp_path / "cased.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "Cat", "cat"]))
    cased = TextEncoder(load_tokenizer(str(tmp_path / "cased.txt"), None), 8)
    assert cased.encode(["Cat cat"])[0].tolist() == [[2, 4, 5, 3]]


def test_declared_pad_token_is_used(tmp_path, trained):
    (tmp_path / "tokenizer.json").write_text(trained)
    assert declared_pad_id(load_tokenizer(str(tmp_path), None)) is None
    settings = tmp_path / "tokenizer_config.json"
    for declared, pad_id in (("[MASK]", 4), ({"content": "[SEP]", "special": True}, 3), ("<of no id>", None)):
        settings.write_text(json.dumps({"pad_token": declared}))
        found = load_tokenizer(str(tmp_path / "tokenizer.json"), None)
        assert declared_pad_id(found) == pad_id
        assert TextEncoder(found, 8).pad_id == (pad_id or 0)
        assert TextEncoder(found, 8).encode(["red"])[0].tolist() == TextEncoder(trained, 8).encode(["red"])[0].tolist()
    padded = Tokenizer.from_str(trained)
    padded.enable_padding(pad_id=1, pad_token="[UNK]", length=8)
    (tmp_path / "tokenizer.json").write_text(padded.to_str())
    assert declared_pad_id(load_tokenizer(str(tmp_path), None)) == 1
    settings.write_text('{"pad_token": "[MASK]"}')
    assert declared_pad_id(load_tokenizer(str(tmp_path), None)) == 4  # in a conflict, the value that transformers reads
    settings.write_text("[]")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is not a JSON object"):
        load_tokenizer(str(tmp_path), None)


def test_hub_tokenizer_is_loaded_with_its_pad_token(tmp_path, trained, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(trained)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "[MASK]"}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path))
    assert load_tokenizer("some/model", None) == load_tokenizer(str(tmp_path), None)
    assert declared_pad_id(load_tokenizer("some/model", None)) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", "a\nb\n", "no \\[UNK\\]"),
        ("tokenizer.json", "{broken", "cannot be read as a tokenizer"),
        ("vocab.txt", b"\xff\xfe\x00", "cannot be read as a tokenizer"),
    ],
)
def test_invalid_tokenizer_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        load_tokenizer(str(tmp_path / name), None)


def test_missing_tokenizer_names_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no file or directory"):
        load_tokenizer(str(tmp_path / "nothing"), None)
    with pytest.raises(UsageError, match=r"neither tokenizer\.json nor vocab\.txt"):
        load_tokenizer(str(tmp_path), None)

    def offline(name, allow_patterns):
        raise ConnectionError("cannot find the requested files")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UsageError, match="no network, name a directory"):
        load_tokenizer("some/model", None)


def test_bert_vocabulary_gives_ids_of_bert_tokenizer(shared_data):
    """The ids equal those of the BERT tokenizer in the tokenizers library."""
    path = str(shared_data / "tokenizers" / "bert-base-uncased-vocab.txt")
    encoder = TextEncoder(load_tokenizer(path, None), 64)
    reference = BertWordPieceTokenizer(path, lowercase=True)
    captions = ["Déjà vu: a woman's astronaut, 东京!", "keycap: #", "unbelievably long-winded"]
    ids, num_tokens = encoder.encode(captions)
    assert encoder.vocab_size == 30522
    for caption, row, count in zip(captions, ids, num_tokens, strict=True):
        assert row[:count].tolist() == reference.encode(caption).ids
