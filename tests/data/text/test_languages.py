"""Language tokens: the same in training, evaluation and export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import mmray
from mmray.config import Evaluate, ImageTower, Inputs, TextTower, TwoTower
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import (
    MAX_LANGUAGES,
    add_language_tokens,
    build_encoder,
    train_tokenizer,
)
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.errors import UsageError
from mmray.evaluation.batches import EvalDataset
from mmray.evaluation.evaluator import Evaluator
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.objectives.contrastive import Contrastive
from tests.evaluation.test_evaluator import Toy, on_ranks
from tests.made import CAPTIONS, make_set, row

INPUTS = Inputs(image_side=16, fit="squash", max_tokens=12, language_token="[{}]")
TRAINED = train_tokenizer([*CAPTIONS, "de pt br"], 60)
TOKENIZER = add_language_tokens(TRAINED, INPUTS.language_token, {"de", "pt-BR"})
SAID = ["de", None, "pt-BR", "xx", "de"]  # xx was added to the data after the tokenizer was built


def tokens(ids: np.ndarray) -> list[str]:
    tokenizer = Tokenizer.from_str(TOKENIZER)
    return [tokenizer.id_to_token(each) for each in ids.tolist()]


def test_stream_and_evaluation_prepend_the_language_token(tmp_path: Path) -> None:
    prepared = make_set(
        tmp_path, [row(n, texts=["a red one"], language=said) for n, said in enumerate(SAID)]
    )
    assert prepared.languages == {"de", "pt-BR", "xx"}
    block = RowReader(prepared, INPUTS, TOKENIZER, 10**6).read_block(
        SamplePlan(5, 5, 1, 0, 1, shuffle=False), np.arange(5)
    )
    (batch,) = EvalDataset(prepared, INPUTS, TOKENIZER, Evaluate(batch=8)).batches()
    assert np.array_equal(batch["input_ids"].numpy(), block["input_ids"])
    plain = build_encoder(TRAINED, Inputs(max_tokens=12)).encode(["a red one"])[0][0].tolist()
    marks = [
        [Tokenizer.from_str(TOKENIZER).token_to_id(f"[{said}]")] * (said in ("de", "pt-BR"))
        for said in SAID
    ]
    for ids, mark, length in zip(block["input_ids"], marks, block["num_tokens"], strict=True):
        assert ids[:length].tolist() == [plain[0], *mark, *plain[1:]]
    assert marks[0] and marks[0] != marks[2] and not marks[1] and not marks[3]


def test_caption_text_cannot_be_a_language_token() -> None:
    encoder = build_encoder(TOKENIZER, INPUTS)
    assert encoder.languages == ("de", "pt-BR")
    (words,) = encoder.format_texts(row(0, texts=["a [d[pt-BR]e] red [de] one"], language="pt-BR"))
    assert words == "[pt-BR]a  red  one"
    long = encoder.format_caption("a " * 40, "de")
    assert tokens(encoder.encode([long])[0][0]) == ["[CLS]", "[de]", *["a"] * 9, "[SEP]"]
    with pytest.raises(
        UsageError, match=r"no token for language 'xx'; its language tokens are de, pt-BR"
    ):
        encoder.format_caption("a", "xx")
    with pytest.raises(UsageError, match=r"without model\.inputs\.language_token"):
        build_encoder(TRAINED, Inputs()).format_caption("a", "de")


def test_existing_language_token_keeps_its_id(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<2de>", "a"])
    )
    inputs = INPUTS.model_copy(update={"language_token": "<2{}>"})
    encoder = build_encoder(
        add_language_tokens(
            load_tokenizer(str(tmp_path), None), inputs.language_token, {"de", "fr"}
        ),
        inputs,
    )
    ids, _ = encoder.encode([encoder.format_caption("a", said) for said in (None, "de", "fr")])
    assert ids.tolist() == [[2, 6, 3, 0], [2, 5, 6, 3], [2, 7, 6, 3]] and encoder.vocab_size == 8
    again = add_language_tokens(encoder.tokenizer.to_str(), "<2{}>", {"de", "fr"})
    assert build_encoder(again, inputs).vocab_size == 8


def test_invalid_languages_are_refused() -> None:
    for languages, why in (
        ((), "no row of the training set has a `language`"), 
        ([f"l{number}" for number in range(MAX_LANGUAGES + 1)], "has 1,001 languages"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=why):
            add_language_tokens(TRAINED, INPUTS.language_token, languages)


def test_exported_model_encodes_language_as_in_training(tmp_path: Path) -> None:
    prepared = make_set(tmp_path / "set", [row(0, texts=["a red one"], language="de")])
    block = RowReader(prepared, INPUTS, TOKENIZER, 10**6).read_block(
        SamplePlan(1, 1, 1, 0, 1, shuffle=False), np.arange(1)
    )
    vocab_size = build_encoder(TOKENIZER, INPUTS).vocab_size
    text, image = (
        TextTower(width=16, depth=1, heads=2),
        ImageTower(name="convnet", width=8, depth=2),
    )
    spec = TwoTower(inputs=INPUTS, image=image, text=text, vocab_size=vocab_size, embed_dim=12)
    torch.manual_seed(0)
    model = build(spec, vocab_size).eval()
    with torch.no_grad():
        ids = torch.from_numpy(block["input_ids"]).long()
        trained = model.embed_text(ids, torch.ones_like(ids))
    out = export(model, spec.model_dump(mode="json"), TOKENIZER, tmp_path / "model")
    loaded = mmray.load(out)
    assert (loaded.embed_texts(["a red one"], language="de") - trained).abs().max() <= 1e-6
    assert (loaded.embed_texts(["a red one"]) - trained).abs().max() > 1e-3
    assert 'language="de"' in (out / "README.md").read_text()
    with pytest.raises(UsageError, match="no token for language 'fr'"):
        loaded.embed_texts(["a"], language="fr")


def test_class_prompts_use_the_requested_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = make_set(tmp_path, [replace(row(0, language="de"), label=0)])
    seen: list[list[str]] = []
    embed_text = Toy.embed_text
    monkeypatch.setattr(
        Toy,
        "embed_text",
        lambda self, ids, mask: seen.append(tokens(ids[0])) or embed_text(self, ids, mask),
    )
    for language, expected in (
        (None, ["[CLS]", "a", "[SEP]"]),
        ("de", ["[CLS]", "[de]", "a", "[SEP]"]),
    ):
        settings = Evaluate(classes=("a", "a"), prompts=("{}",), language=language)
        evaluator = Evaluator(held_out, INPUTS, TOKENIZER, settings)
        on_ranks(1, lambda group, of=evaluator: of.score(Toy(), group, Contrastive(), 1))
        assert seen[-1] == expected
