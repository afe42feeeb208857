"""Documents: the example model trains, command lines parse, links lead to files."""

import re
import shlex
import sys

import pytest
import torch

import mmray
from mmray.cli.train import train
from mmray.config.recipes import RECIPES
from mmray.models.build import build
from mmray.models.export.export import export
from tests.conftest import ROOT
from tests.engine.single_worker import run_worker
from tests.made import make_set, noisy, row
from tests.training import runs

README = (ROOT / "README.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
EXAMPLE = next(code for language, code in FENCES if language == "python" and "nn.Module" in code)
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("mmray/**/*.md"), *ROOT.glob("tests/*.md")]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
COMMAND = re.compile(r"\b(?:mmray |jobs/)train(?:\.py)? ?([^&\n]*)")


def commands():
    """Arguments of each `mmray train` or `jobs/train.py` in the code blocks."""
    for language, block in FENCES:
        if language != "python":
            yield from (
                shlex.split(found[1], comments=True)
                for found in COMMAND.finditer(block.replace("\\\n", " "))
            )


def own_model_flags():
    """Arguments of `mmray train` in the command that uses the example."""
    return next(words for words in commands() if "my_pkg:MyModel" in words)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_documented_train_commands_parse(words):
    config = train.parse([word for word in words if not word.endswith(".yaml")])["settings"]
    assert config.recipe in RECIPES


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_documents_lead_to_files(document):
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


def rows_with_words():
    """22 rows with distinct images and distinct captions."""
    words = ["a", "red", "much", "longer", "caption"]
    for number in range(22):
        caption = " ".join(word for bit, word in enumerate(words) if (number + 1) >> bit & 1)
        yield row(number, noisy(number), [caption])


@pytest.mark.usefixtures("one_thread")  # a worker sets its own number of threads
def test_example_model_trains_evaluates_and_exports(tmp_path, monkeypatch):
    (tmp_path / "my_pkg.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_pkg", raising=False)  # of another test
    config = train.parse(own_model_flags())["settings"]
    spec = config.model.model_copy(
        update={"inputs": runs.config("made", tmp_path, "run").model.inputs}
    )
    state, lines, _ = run_worker(
        make_set(tmp_path / "set", list(rows_with_words())),
        tmp_path / "run",
        4,
        model=spec,
        steps=60,
    )
    losses = [line["train/loss"] for line in lines]
    assert len(losses) == 60 and sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert "evaluate/recall_at_1/image_to_text" in lines[-1]
    tokenizer = (tmp_path / "run" / "tokenizer.json").read_text()
    vocabulary = state["model"]["words.weight"].shape[0]
    model = build(spec, vocabulary)
    model.load_state_dict(state["model"])
    spec = spec.model_copy(update={"vocab_size": vocabulary})
    loaded = mmray.load(export(model, spec.model_dump(mode="json"), tokenizer, tmp_path / "out"))
    norms = torch.cat([loaded.embed_images([noisy(9)]), loaded.embed_texts(["a red one"])]).norm(
        dim=1
    )
    assert torch.allclose(norms, torch.ones(2), atol=1e-5)
