import hashlib
import json
import shutil
import subprocess
import sys
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mmray.data.rows import BadRow
from mmray.data.text.tokenizer import TextEncoder, clean_caption, declared_pad_id, train_tokenizer
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.errors import UsageError

CAPTIONS = [f"A {size} {color} {shape}, déjà "
            "vu" for size in ("big", "small") for color in ("red", "blue", "green")
            for shape in ("circle", "square", "triangle", "star")]  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(CAPTIONS, 200)


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("  a\t cat \r\n on\u00a0a mat ", "a cat on a mat"), ("a\x00b\x1b[0m\x7f", "ab[0m"),
        ("👩\u200d🚀 flies", "👩\u200d🚀 flies"), ("x" * 65536, "x" * 65536),
        ("", "refused: blank"), ("\x00\x07", "refused: blank"), ("\u200b\ufeff", "refused: blank"),
        ("\ud83d", "refused: encoding"), ("x" * 65537, "refused: too-long"),
        (None, "refused: type"),
    ],
)  # fmt: skip
def test_caption_is_cleaned_or_refused_with_a_reason(raw, cleaned):
    try:
        assert clean_caption(raw) == cleaned
    except BadRow as bad:
        assert f"refused: {bad.reason}" == cleaned


def test_repaired_caption_is_that_of_open_clips_tokenizer():
    # UTF-8 read as Latin-1, and an entity that was escaped twice
    assert clean_caption("sch\u00c3\u00b6n &amp;amp; gut", repair=True) == "schön & gut"
    assert clean_caption("sch\u00c3\u00b6n &amp;", repair=False) == "sch\u00c3\u00b6n &amp;"


@given(st.text(st.sampled_from("aB \t\n\x00\x85\u200b\u200d\ufeff\u00a0\u3000é👩\ud800")))
def test_clean_is_idempotent(raw):
    try:
        once = clean_caption(raw)
    except BadRow:
        return
    assert clean_caption(once) == once


def test_training_is_deterministic_across_processes(trained):
    code = (
        "import sys, json, hashlib; from mmray.data.text.tokenizer import train_tokenizer; "
        "print(hashlib.sha256(train_tokenizer(json.load(sys.stdin), 200).encode()).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(CAPTIONS),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == hashlib.sha256(trained.encode()).hexdigest()
    assert train_tokenizer(iter(CAPTIONS), 200) == trained


def test_encode_pads_to_longest_and_truncates_between_special_tokens(trained):
    encoder = TextEncoder(trained, 6)
    ids, num_tokens = encoder.encode(
        ["red", "A RED circle", "big red circle small blue star and more"]
    )
    assert (ids.dtype, num_tokens.dtype, ids.shape) == (np.int32, np.int32, (3, 6))
    assert num_tokens.tolist() == [3, 5, 6] and (ids[:, 0] == 2).all()
    assert [row[count - 1] for row, count in zip(ids, num_tokens, strict=True)] == [3, 3, 3]
    assert (ids[0, 3:] == encoder.pad_id).all()
    assert ids.max() < encoder.vocab_size
    assert ids[0, 1] == ids[1, 2]  # lower-cased, and the same piece in every call
    assert encoder.encode(["red"])[0].shape == (1, 3) and encoder.encode([])[0].shape == (0, 1)


def test_tokenizer_json_and_its_folder(tmp_path, trained):
    (tmp_path / "tokenizer.json").write_text(trained)
    assert load_tokenizer(str(tmp_path), None) == trained
    assert load_tokenizer(str(tmp_path / "tokenizer.json"), None) == trained


def test_declared_pad_token_is_used(tmp_path, trained):
    (tmp_path / "tokenizer.json").write_text(trained)
    assert declared_pad_id(load_tokenizer(str(tmp_path), None)) is None
    settings = tmp_path / "tokenizer_config.json"
    for declared, pad_id in (
        ("[MASK]", 4),
        ({"content": "[SEP]", "special": True}, 3),
        ("<of no id>", None),
    ):
        settings.write_text(json.dumps({"pad_token": declared}))
        found = load_tokenizer(str(tmp_path / "tokenizer.json"), None)
        assert declared_pad_id(found) == pad_id
        assert TextEncoder(found, 8).pad_id == (pad_id or 0)
        assert (
            TextEncoder(found, 8).encode(["red"])[0].tolist()
            == TextEncoder(trained, 8).encode(["red"])[0].tolist()
        )
    padded = Tokenizer.from_str(trained)
    padded.enable_padding(pad_id=1, pad_token="[UNK]", length=8)
    (tmp_path / "tokenizer.json").write_text(padded.to_str())
    assert declared_pad_id(load_tokenizer(str(tmp_path), None)) == 1
    settings.write_text('{"pad_token": "[MASK]"}')
    # in a conflict, the value that transformers reads
    assert declared_pad_id(load_tokenizer(str(tmp_path), None)) == 4
    settings.write_text("[]")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is not a JSON object"):
        load_tokenizer(str(tmp_path), None)


def test_tokenizer_of_the_hub_has_its_config_files(tmp_path, trained, monkeypatch):
    """The pad token, open_clip's cleaning of texts, and the model type."""

    def download(name, allow_patterns):
        folder = tmp_path / "cache"
        folder.mkdir()
        for name in filter_repo_objects(
            [file.name for file in repository.iterdir()], allow_patterns=allow_patterns
        ):
            shutil.copy(repository / name, folder)
        return str(folder)

    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "tokenizer.json").write_text(trained)
    (repository / "tokenizer_config.json").write_text('{"pad_token": "[MASK]"}')
    kwargs = {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}}
    (repository / "open_clip_config.json").write_text(json.dumps({"model_cfg": kwargs}))
    (repository / "config.json").write_text('{"model_type": "siglip"}')
    (repository / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = load_tokenizer("some/model", None)
    assert found == load_tokenizer(str(repository), None) and declared_pad_id(found) == 4
    assert {file.name for file in repository.iterdir()} - {
        file.name for file in (tmp_path / "cache").iterdir()
    } == {"model.safetensors"}


def test_invalid_tokenizers_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"prepare\.vocab_size"):
        load_tokenizer("trained", None)
    with pytest.raises(UsageError, match="not a local file or directory"):
        load_tokenizer(str(tmp_path / "nothing"), None)
    with pytest.raises(UsageError, match=r"holds no tokenizer\.json and no bpe_simple"):
        load_tokenizer(str(tmp_path), None)
    for name, content, message in (
        ("vocab.txt", b"\xff\xfe\x00", "cannot be read as a tokenizer"),
        ("tokenizer.json", b"{broken", "cannot be read as a tokenizer"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=message):
            load_tokenizer(str(tmp_path / name), None)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", Mock(side_effect=ConnectionError("offline"))
    )
    with pytest.raises(UsageError, match="without a network, name a directory"):
        load_tokenizer("some/model", None)
