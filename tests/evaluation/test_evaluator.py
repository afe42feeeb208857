"""Evaluator and its examples: correct, and independent of the number of ranks."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.config import Config, Data, Evaluate, Inputs, Towers, TwoTower
from mmray.data.store.class_names import match_classes
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.text.tokenizer import TextEncoder
from mmray.engine.collectives import Group
from mmray.errors import DataError, UsageError
from mmray.evaluation import retrieval
from mmray.evaluation.build import (
    best_metric,
    build_evaluator,
    check_classes,
    num_evaluated_rows,
    num_zero_shot_prompts,
)
from mmray.evaluation.classification import topk_accuracy, topk_hits, zero_shot_metrics
from mmray.evaluation.embeddings import EmbeddingSet, embed_texts
from mmray.evaluation.evaluator import Evaluator, embedding_loss
from mmray.evaluation.examples import NUM_SHOWN
from mmray.models.build import build
from mmray.models.protocol import HeadScores
from mmray.objectives.contrastive import Contrastive
from mmray.report.run import non_retrieval_metrics
from tests.made import CAPTIONS, make_set, row

SETTINGS = Evaluate(batch=4, prompts=("{}",))
INPUTS = Inputs(image_side=8, fit="squash", interpolation="bilinear", max_tokens=16)
NUM_ROWS = 23


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "CHUNK", 5)


class Toy(nn.Module):
    """Embeds the gray level of a row and the length of a caption, with the interface of a two-tower
    model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def embed_image(self, image: Tensor) -> Tensor:
        angle = self.dropout(image[:, 0, 0, :1].float())
        return F.normalize(torch.cat([angle.cos(), angle.sin(), angle.sin() ** 2], dim=1), dim=1)

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        angle = (input_ids * attention_mask).sum(1, keepdim=True).float()
        return F.normalize(torch.cat([angle.cos(), angle.sin(), angle.cos() ** 2], dim=1), dim=1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            "image_embed": self.embed_image(batch["image"]),
            "text_embed": self.embed_text(batch["input_ids"], batch["attention_mask"]),
            "logit_scale": self.log_scale.exp(),
        }


@dataclass
class Rank:
    """A process group for evaluation whose ranks are threads."""

    rank: int
    world_size: int
    rows: list[Any]  # shared by all ranks
    barrier: threading.Barrier
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def all_gather_variable(self, rows: Tensor) -> Tensor:
        return torch.cat(self.all_gather_objects(rows))

    def all_gather_objects(self, value: Any) -> list[Any]:
        self.rows[self.rank] = value
        self.barrier.wait()
        everyone = [*self.rows]
        self.barrier.wait()
        return everyone

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_objects(value)[0]


def on_ranks(world: int, work: Any) -> list[Any]:
    """Results of `work(group)` on each of `world` ranks; a DataError is the result of its rank."""
    rows, barrier = [None] * world, threading.Barrier(world, timeout=30)

    def run(rank: int) -> Any:
        try:
            return work(Rank(rank, world, rows, barrier))
        except DataError as error:
            return error

    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(run, range(world)))
    finally:
        # of the process: threads that set and restore it interleave
        torch.compiler.set_stance("default")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    rows = [
        row(number, texts=[f"{'a ' * (number % 5 + 1)}red", *CAPTIONS][: 1 + number % 3])
        for number in range(23)
    ]
    rows[4] = row(4, data=b"nothing")
    return make_set(tmp_path_factory.mktemp("scored") / "set", rows)


def score(
    prepared: PreparedSet,
    model: Callable[[], nn.Module] = Toy,
    world: int = 1,
    rows: int = 6,
    objective: Any = None,
    inputs: Any = INPUTS,
    **settings: Any,
) -> list[Any]:
    """Scores on each rank, each with its own `model()`: ranks are threads."""
    section = SETTINGS.replace(**settings)

    def work(group: Any) -> dict[str, float]:
        evaluator = Evaluator(prepared, inputs, prepared.tokenizer_json or "", section)
        return evaluator.score(model(), group, objective or Contrastive(), rows)

    return on_ranks(world, work)


@pytest.mark.parametrize("world", [2, 3, 30])
@pytest.mark.parametrize("limit", [None, 9])
def test_scores_do_not_depend_on_the_number_of_ranks(
    prepared: PreparedSet, world: int, limit: int | None
) -> None:
    """30 ranks for 23 rows: some ranks have no row."""
    (alone,) = score(prepared, limit=limit)
    assert alone["rows"] == (limit or NUM_ROWS) - 1
    assert alone["bad_rows"] == 1
    assert score(prepared, world=world, limit=limit) == [alone] * world


def own_metrics(embeddings: dict[str, Tensor], labels: Tensor) -> dict[str, Any]:
    """A value that differs between the ranks, and the shapes."""
    shapes = {f"own/{name}": embed.shape[0] for name, embed in embeddings.items()}
    return shapes | {"own/labels": len(labels), "own/thread": threading.get_ident() % 1000}


def own_rows(embeddings: dict[str, Tensor], labels: Tensor) -> dict[str, Any]:
    return {"rows": 3, "own": 1}


@pytest.mark.parametrize("classes", [(), ("a", "b", "c")])
def test_metrics_of_the_user_get_a_row_for_each_caption(
    prepared: PreparedSet, classes: tuple[str, ...]
) -> None:
    name = "tests.evaluation.test_evaluator:own_metrics"
    ranks = score(prepared, world=2, classes=classes, metrics=(name,))
    assert ranks[0] == ranks[1], "those of rank 0"
    own = {each: value for each, value in ranks[0].items() if each.startswith("own/")}
    del own["own/thread"]
    captions = sum(1 + number % 3 for number in range(NUM_ROWS) if number != 4)
    expected = dict.fromkeys(("own/image", "own/text", "own/labels"), captions)
    assert own == expected | ({"own/classes": 3} if classes else {})
    with pytest.raises(UsageError, match=r"evaluate\.metrics: .*own_rows` returned rows, which"):
        score(prepared, metrics=("tests.evaluation.test_evaluator:own_rows",))


def own_key(embeddings: dict[str, Tensor], labels: Tensor) -> dict[str, Any]:
    return {"own/audio": embeddings["audio"].mean()}


def test_function_that_fails_is_named(prepared: PreparedSet) -> None:
    name = "tests.evaluation.test_evaluator:own_key"
    with pytest.raises(RuntimeError, match=rf"metrics: `{name}` raised KeyError: 'audio'"):
        score(prepared, metrics=(name,))


def own_changes(embeddings: dict[str, Tensor], labels: Tensor) -> dict[str, Any]:
    """Changes what it gets."""
    for embed in (*embeddings.values(), labels):
        embed.zero_()
    return {"own/changed": 1}


def own_sums(embeddings: dict[str, Tensor], labels: Tensor) -> dict[str, Any]:
    return {f"own/{name}": embed.abs().sum() for name, embed in embeddings.items()}


def test_function_that_changes_embeddings_changes_no_other_metric(tmp_path: Path) -> None:
    """The classes of two sets are embedded once."""
    names = [f"tests.evaluation.test_evaluator:{name}" for name in ("own_changes", "own_sums")]
    tasks = "pairs=p, classes=c (zero_shot), again=c (zero_shot)"
    changed = named_sets(tmp_path / "changed", tasks, metrics=tuple(names))
    same = named_sets(tmp_path / "same", tasks, metrics=(names[1],))
    added = {f"{name}/own/changed": 1 for name in ("pairs", "classes", "again")}
    assert changed == same | added


def own_labels(embeddings: dict[str, Tensor], labels: Tensor) -> dict[str, Any]:
    return {"own/smallest": labels.min(), "own/largest": labels.max()}


def test_equal_images_have_the_first_label_of_their_rows(tmp_path: Path) -> None:
    labels = [None, 2, 1, 1, None]
    rows = [
        replace(row(number // 2), key=f"row-{number}", label=labels[number]) for number in range(5)
    ]
    name = "tests.evaluation.test_evaluator:own_labels"
    (metrics,) = score(make_set(tmp_path / "set", rows), metrics=(name,))
    assert (metrics["own/smallest"], metrics["own/largest"]) == (-1, 2)
    assert "other_label_rows" not in metrics
    (metrics,) = score(make_set(tmp_path / "labeled", rows[:4]), metrics=(name,))
    assert (metrics["own/smallest"], metrics["own/largest"]) == (1, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_with_another_label_than_their_equal_image_are_counted(
    tmp_path: Path, world: int
) -> None:
    labels = [None, 2, 1, 0, 0, 1, 2]
    rows = [
        replace(row(number // 4), key=f"row-{number}", label=label)
        for number, label in enumerate(labels)
    ]
    for metrics in score(make_set(tmp_path / "set", rows), world=world):
        assert metrics["other_label_rows"] == 4


class BatchNormalized(Toy):
    """Fails for a single row."""

    def embed_image(self, image: Tensor) -> Tensor:
        F.batch_norm(image[:, :, 0, 0].float(), None, None, training=True)
        return super().embed_image(image)


def test_a_single_row_is_embedded_only_if_a_batch_has_one(prepared: PreparedSet) -> None:
    assert score(prepared, model=BatchNormalized, limit=8) == score(prepared, limit=8)


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_scores_do_not_depend_on_the_chunk(
    prepared: PreparedSet, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = score(prepared)
    monkeypatch.setattr(retrieval, "CHUNK", chunk)
    assert score(prepared) == [one | {"loss": pytest.approx(one["loss"], rel=1e-6)}]


def test_scores_of_a_case_computed_by_hand() -> None:
    """Three images on the axes.

    Image 1 has two captions, one of them wrong; the caption of image 2 equals image 0.
    """
    axes = torch.eye(3)
    embedded = EmbeddingSet(
        row=torch.tensor([10, 11, 12]),
        image=axes,
        label=torch.full((3,), -1),
        image_index=torch.tensor([0, 1, 1, 2]),
        text=axes[[0, 1, 2, 0]],
        text_id=torch.arange(4),
        locations=torch.tensor([[10, 0], [11, 0], [11, 1], [12, 0]]),
        head_metrics={},
        scalar_outputs={"logit_scale": torch.tensor(2.0)},
    )

    def score_embeddings(group: Any) -> dict[str, float]:
        metrics = embedding_loss(embedded, group, Contrastive(), 2)
        for direction, ranked in embedded.rank(group).items():
            metrics |= retrieval.retrieval_metrics(ranked.ranks, direction)
        return metrics | retrieval.mean_recall(metrics)

    (metrics,) = on_ranks(1, score_embeddings)
    # Image to text: image 0 ties with a wrong caption (rank 2), image 1 is right, image 2 scores 0
    # where wrong ones score 1, 0 and 0: rank 4. Text to image: 1, 1, then rank 3 (1, and a tie at
    # 0), then rank 3 likewise.
    assert metrics["recall_at_1/image_to_text"] == pytest.approx(1 / 3)
    assert metrics["recall_at_1/text_to_image"] == pytest.approx(2 / 4)
    assert metrics["recall_at_5/image_to_text"] == 1
    assert metrics["median_rank/image_to_text"] == 2
    assert metrics["median_rank/text_to_image"] == 2
    assert metrics["recall_at_1/mean"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    # Groups of two rows and their first captions: {10, 11} match perfectly, {12} is alone and costs
    # nothing.
    two = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    assert metrics["loss"] == pytest.approx(
        F.cross_entropy(two, torch.arange(2)).item() * 2 / 3, rel=1e-6
    )


class KnowsClasses(Toy):
    """Knows the class of an image by its gray level and of a caption by its length, up to `known`
    classes.
    """

    def __init__(self, known: int) -> None:
        super().__init__()
        self.known = known

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logit_scale": torch.ones(())}

    def embed_image(self, image: Tensor) -> Tensor:
        return F.one_hot((image[:, 0, 0, 0] % 3).long(), 3).float()

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        shortest = 3  # one word, with start and end token
        return F.one_hot((attention_mask.sum(1) - shortest).clamp(max=self.known - 1), 3).float()


@pytest.mark.parametrize("world", [1, 4])
def test_images_that_share_a_caption_are_correct_answers(tmp_path: Path, world: int) -> None:
    """Three images of each of three classes, as from class folders."""
    rows = [row(number, texts=[" ".join(["a"] * (1 + number % 3))]) for number in range(9)]
    held_out = make_set(tmp_path / "set", rows)
    for metrics in score(held_out, lambda: KnowsClasses(3), world):
        assert metrics["recall_at_1/image_to_text"] == metrics["recall_at_1/text_to_image"] == 1
    for metrics in score(held_out, lambda: KnowsClasses(2), world):
        # An image of class 1 ties with the three captions of class 2, one of class 2 with all wrong
        # captions; captions of class 2 rank the three images of class 1 first, and tie with three
        # more.
        assert metrics["recall_at_1/image_to_text"] == pytest.approx(1 / 3)
        assert metrics["median_rank/image_to_text"] == 4
        assert metrics["recall_at_1/text_to_image"] == pytest.approx(2 / 3)
        assert metrics["recall_at_5/text_to_image"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("training", [True, False])
def test_loss_equals_training_loss_and_state_is_restored(
    prepared: PreparedSet, training: bool
) -> None:
    model, before = Toy().train(training), torch.get_rng_state()
    (metrics,) = score(prepared, lambda: model, rows=100)
    assert model.training == training
    assert torch.equal(torch.get_rng_state(), before)
    good = [number for number in range(NUM_ROWS) if number != 4]
    texts = [prepared.read([number])[0].texts[0] for number in good]  # type: ignore[arg-type]
    ids, num_tokens = TextEncoder(prepared.tokenizer_json or "", INPUTS.max_tokens).encode(texts)
    batch = {
        "image": torch.tensor(good, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 8, 8),
        "input_ids": torch.from_numpy(ids),
        "attention_mask": (
            torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]
        ).long(),
        "valid": torch.ones(len(good), dtype=torch.bool),
    }
    loss_sum, count, _ = Contrastive().compute_loss(model.eval()(batch), batch)
    assert metrics["loss"] == pytest.approx((loss_sum / count).item(), rel=1e-6)
    assert metrics["loss_rows"] == len(good), "fewer negatives than in a step of 100 rows"
    assert "loss_rows" not in score(prepared, rows=2)[0]
    assert score(prepared, rows=2, loss_batch=4)[0]["loss_rows"] == 4


class Labeled(Toy):
    """Classifies a pair by its image's gray level: correct except for rows of class 2, predicted as
    class 0.
    """

    def head_scores(self, batch: dict[str, Tensor]) -> dict[str, HeadScores]:
        gray = batch["image"][:, 0, 0, :1].float()
        return {"classification": HeadScores(head(gray), batch["label"], 3)}


def head(gray: Tensor) -> Tensor:
    return F.one_hot((gray[:, 0] % 3 % 2).long(), 3).float()


@pytest.mark.parametrize("world", [1, 3])
def test_classification_head_and_zero_shot_are_scored(tmp_path: Path, world: int) -> None:
    """Rows 0..11 with class row % 3, three of them without a label."""
    rows = [replace(row(number), label=number % 3) for number in range(12)]
    rows[3], rows[4], rows[5] = (
        replace(rows[3], label=None),
        replace(rows[4], label=None),
        replace(rows[5], label=None),
    )
    held_out = make_set(tmp_path / "set", rows)
    classes, prompts = ("a", "red", "one"), ("{}", "a {}")
    named = replace(held_out.manifest, class_names=classes)  # like class folders
    of_the_set = score(PreparedSet(held_out.folder, named), Labeled, prompts=prompts)
    assert of_the_set == score(held_out, Labeled, classes=classes, prompts=prompts)
    # a set that numbers the classes of the run in another order
    others = [each if each.label is None else replace(each, label=2 - each.label) for each in rows]
    reversed_set = make_set(tmp_path / "reversed", others)
    named = replace(reversed_set.manifest, class_names=classes[::-1])
    run = Towers(classes=3, class_names=classes)
    matched = match_classes(run, PreparedSet(reversed_set.folder, named))
    assert of_the_set == score(matched, Labeled, prompts=prompts)
    model, encoder = Labeled().eval(), TextEncoder(held_out.tokenizer_json or "", INPUTS.max_tokens)
    embeddings = []
    for name in classes:
        ids = [torch.from_numpy(encoder.encode([prompt.format(name)])[0]) for prompt in prompts]
        embeddings.append(
            F.normalize(sum(model.embed_text(each, torch.ones_like(each)) for each in ids) / 2)
        )
    hits = []
    for number in (number for number in range(12) if rows[number].label in (0, 1, 2)):
        image = model.embed_image(torch.full((1, 3, 8, 8), number, dtype=torch.uint8))
        hits.append(int((image * torch.cat(embeddings)).sum(dim=1).argmax()) == rows[number].label)
    for metrics in score(held_out, Labeled, world, classes=classes, prompts=prompts):
        assert metrics["classification/rows"] == metrics["zero_shot/rows"] == 9
        assert metrics["classification/top_1"] == pytest.approx(6 / 9)
        assert "classification/top_5" not in metrics  # of three classes
        assert metrics["zero_shot/top_1"] == pytest.approx(sum(hits) / 9)


class CountsTokens(nn.Module):
    """Embeds texts as another model does, and counts the token positions that it computes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.positions = 0

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.positions += input_ids.numel()
        embedding: Tensor = self.model.embed_text(input_ids, attention_mask)
        return embedding


@pytest.mark.parametrize("kind", ["two_tower", "clip", "siglip"])
def test_class_embeddings_equal_those_of_texts_embedded_one_by_one(
    prepared: PreparedSet, kind: str
) -> None:
    """10 prompts of different lengths for each of 3 classes, in batches of 4."""
    classes = ("a", "red one", "a blue square a blue square")
    prompts = tuple(f"{'a ' * (number % 5)}{{}}{' red' * (number // 5)}" for number in range(10))
    encoder = TextEncoder(prepared.tokenizer_json or "", INPUTS.max_tokens)
    sizes = {"width": 32, "depth": 2, "heads": 2}
    model_section = {"kind": kind, "inputs": INPUTS, "text": sizes, "image": sizes | {"patch": 4}}
    spec = Config.model_validate({"model": model_section}).model
    model = CountsTokens(build(spec, encoder.vocab_size).eval())
    progress: list[tuple[str, int]] = []
    evaluator = Evaluator(
        prepared,
        INPUTS,
        prepared.tokenizer_json or "",
        SETTINGS.replace(prompts=prompts),
        on_progress=lambda *args: progress.append(args),
    )
    embedded = evaluator._class_embeddings(model, Group(), classes)
    assert progress == [("prompts", 4)] * 7 + [("prompts", 2)]
    lengths = []
    for name, own in zip(classes, embedded, strict=True):
        ids = [torch.from_numpy(encoder.encode([each.format(name)])[0]).long() for each in prompts]
        lengths += [each.shape[1] for each in ids]
        with torch.no_grad():
            alone = [model.model.embed_text(each, torch.ones_like(each)) for each in ids]
        expected = F.normalize(torch.cat(alone).mean(dim=0), dim=0)
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    assert sum(lengths) <= model.positions < 1.1 * sum(lengths) < 0.9 * len(lengths) * max(lengths)


def test_texts_are_embedded_in_their_order() -> None:
    """Of 0 to 3 tokens."""
    ids = torch.arange(1, 22).reshape(7, 3)
    mask = (torch.arange(3) < torch.tensor([1, 3, 0, 2, 3, 1, 2])[:, None]).long()
    tokens = {"input_ids": ids, "attention_mask": mask}
    expected = Toy().embed_text(ids, mask)
    for rows in (1, 2, 3, 7, 100):
        assert torch.equal(embed_texts(Toy(), tokens, rows, Group()), expected)
    none = {name: column[:0] for name, column in tokens.items()}
    assert embed_texts(Toy(), none, 2, Group()).shape == (0, 0)


def test_names_of_classes_that_do_not_match_the_labels_are_refused(tmp_path: Path) -> None:
    rows = [replace(row(number), label=number % 3) for number in range(9)]
    held_out = make_set(tmp_path / "set", rows)
    (error,) = score(held_out, Labeled, classes=("a", "red"))
    assert "has 2 names" in str(error) and "label 2" in str(error)
    names = ("apple", "red fox", "candle")
    named = PreparedSet(held_out.folder, replace(held_out.manifest, class_names=names))
    for classes, message in (
        (("apple", "red_fox"), "2 names, .* has 3 labels"),
        (("candle", "apple", "red fox"), "label 0 is 'apple', given is 'candle'"),
        (("apple", "red fox", "candle", "x"), "4 names"),
        (("a candle", "an apple", "a red-fox"), "label 0 is 'apple', given is 'a candle'"),
        (("apple", "apple", "candle"), "label 1 is 'red fox', given is 'apple'"),
    ):
        with pytest.raises(UsageError, match=message):
            check_classes(classes, named)
    check_classes(("Apple", "red_fox", "a candle"), named)  # other words for the same classes
    check_classes((), named)


@pytest.mark.parametrize("world", [1, 3])
def test_rows_of_one_image_are_one_image_with_several_captions(tmp_path: Path, world: int) -> None:
    """One row per caption, as the CSV files of Flickr and COCO, scores like one row per image."""
    captions = [[" ".join(["a"] * (3 * number + k + 1)) for k in range(3)] for number in range(4)]
    one = make_set(tmp_path / "one", [row(n, texts=captions[n]) for n in range(4)])
    repeated = [
        replace(row(n, texts=[captions[n][k]]), key=f"{n}-{k}") for k in range(3) for n in range(4)
    ]
    several = make_set(tmp_path / "several", repeated)
    examples: list[Any] = []
    of_one = score(one, Toy, world)[0]
    of_several = score(several, Toy, world)[0]
    assert of_several == pytest.approx(of_one)
    assert of_one["rows"] == 4
    embedded = Evaluator(several, INPUTS, several.tokenizer_json or "", SETTINGS).score(
        Toy(), Rank(0, 1, [None], threading.Barrier(1)), Contrastive(), 4, examples.append
    )
    shown = examples[0]["text_to_image"]
    assert embedded and {item["caption"] for item in shown} <= {
        text for texts in captions for text in texts
    }
    assert len({item["caption"] for item in shown}) == len(shown)


def test_no_readable_row_raises_on_every_rank(tmp_path: Path) -> None:
    damaged = make_set(tmp_path / "set", [row(number, data=b"nothing") for number in range(2)])
    for error in score(damaged, world=2):
        assert isinstance(error, DataError)
        assert "cannot read any of 2 evaluation rows" in str(error)


def named_sets(tmp_path: Path, tasks: str, **settings: Any) -> dict[str, float]:
    """Scores of 9 rows named `pairs`, and of 6 rows of two classes named `classes`, by tasks."""
    rows = [replace(row(number), label=number % 2) for number in range(6)]
    classes = make_set(tmp_path / "classes", rows)
    sets = {
        "pairs": make_set(tmp_path / "pairs", [row(number) for number in range(9)]),
        "classes": PreparedSet(classes.folder, replace(classes.manifest, class_names=("a", "red"))),
    }
    sets |= {"again": sets["classes"]} if "again" in tasks else {}
    evaluate = Evaluate(**settings)
    config = Config(model=TwoTower(inputs=INPUTS), data=Data(eval=tasks), evaluate=evaluate)
    done = {"rows": 0, "prompts": 0}

    def on_progress(unit: str, number: int) -> None:
        done[unit] += number

    evaluator = build_evaluator(config, sets, sets["pairs"].tokenizer_json or "", on_progress)
    metrics = evaluator.score(Toy(), Group(), Contrastive(), 6)
    prompts = num_zero_shot_prompts(config, sets)
    assert done == {"rows": num_evaluated_rows(config, sets), "prompts": prompts}
    assert (prompts > 0) == ("classes/zero_shot/top_1" in metrics)
    return metrics


def test_each_named_set_has_the_metrics_of_its_task(tmp_path: Path) -> None:
    metrics = named_sets(tmp_path, "pairs=p, classes=c (zero_shot cifar)")
    of_pairs = {name for name in metrics if name.startswith("pairs/")}
    assert {"pairs/recall_at_1/mean", "pairs/loss", "pairs/rows", "pairs/bad_rows"} <= of_pairs
    assert metrics.keys() - of_pairs == {
        "classes/rows",
        "classes/bad_rows",
        "classes/zero_shot/top_1",
        "classes/zero_shot/mean_per_class_recall",
        "classes/zero_shot/rows",
    }
    both = named_sets(tmp_path, "pairs=p, classes=c")
    assert {"classes/recall_at_1/mean", "classes/zero_shot/top_1"} <= both.keys()
    assert "classes/zero_shot/top_1" not in named_sets(tmp_path, "pairs=p, classes=c (retrieval)")


def test_limited_evaluation_states_the_rows_of_its_set(tmp_path: Path) -> None:
    """The limit of 8 is above the 6 rows of `classes`."""
    metrics = named_sets(tmp_path, "pairs=p, classes=c", limit=8)
    assert (metrics["pairs/rows"], metrics["pairs/rows_in_set"]) == (8, 9)
    assert "classes/rows_in_set" not in metrics
    shown = dict(non_retrieval_metrics(metrics))
    assert shown["pairs, rows"] == "8" and shown["pairs, rows in set (evaluate.limit)"] == "9"


def count_rows_in_set(*inputs: object) -> dict[str, float]:
    return {"rows_in_set": 1.0}


def test_own_metric_with_the_name_of_that_number_is_refused(tmp_path: Path) -> None:
    metrics = (f"{__name__}:count_rows_in_set",)
    with pytest.raises(UsageError, match="returned rows_in_set, which is another metric"):
        named_sets(tmp_path, "pairs=p, classes=c", limit=8, metrics=metrics)


def test_zero_shot_of_a_set_without_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs has the task zero_shot, .* no class names"):
        named_sets(tmp_path, "pairs=p (zero_shot), classes=c")


def test_best_checkpoint_is_selected_by_the_first_set() -> None:
    for sets, metric in (
        ("prepared/x", "evaluate/recall_at_1/mean"),
        ("a=x, b=y (zero_shot)", "evaluate/a/recall_at_1/mean"),
        ("b=y (zero_shot), a=x", "evaluate/b/zero_shot/top_1"),
    ):
        assert best_metric(Config(data=Data(eval=sets))) == metric


def test_mean_per_class_recall_of_a_case_computed_by_hand() -> None:
    """Three of four rows of class 0 are right, one of two of class 2; class 1 does not occur."""
    before = torch.tensor([0, 0, 0, 1, 0, 2])
    metrics = zero_shot_metrics(before, torch.tensor([0, 0, 0, 0, 2, 2]), 3)
    assert metrics["zero_shot/mean_per_class_recall"] == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert metrics["zero_shot/top_1"] == pytest.approx(4 / 6)


def test_topk_of_a_case_computed_by_hand() -> None:
    scores = torch.tensor([[3.0, 1, 2], [1, 1, 0], [0, math.nan, 1], [9, 0, 0], [math.nan, 0, 0]])
    label = torch.tensor([0, 0, 2, -1, 0])
    right, in_five, rows = topk_hits(scores, label).tolist()
    # Correct; a tie (wrong); a NaN in another class (wrong); no label; a NaN in its own class.
    assert (right, rows) == (1, 4)
    assert in_five == 3
    assert topk_accuracy(topk_hits(scores, label), "zero_shot", 3) == {
        "zero_shot/top_1": 0.25,
        "zero_shot/rows": 4.0,
    }


def test_top_5_equals_naive_search() -> None:
    draw = torch.Generator().manual_seed(0)
    scores, label = torch.randn(50, 9, generator=draw), torch.randint(0, 9, (50,), generator=draw)
    found = topk_accuracy(topk_hits(scores, label), "c", 9)
    naive = [label[row] in scores[row].argsort(descending=True)[:5] for row in range(50)]
    assert found["c/top_5"] == pytest.approx(sum(naive) / 50)
    assert found["c/top_1"] == pytest.approx((scores.argmax(1) == label).double().mean().item())


def shown_of(prepared: PreparedSet, world: int = 1) -> tuple[list[Any], dict[str, float]]:
    """The examples of rank 0 and the metrics of the same evaluation."""
    shown: list[Any] = []

    def score(group: Any) -> dict[str, float]:
        settings: Any = SETTINGS
        evaluator = Evaluator(prepared, INPUTS, prepared.tokenizer_json or "", settings)
        return evaluator.score(
            Toy(), group, Contrastive(), 6, shown.append if group.rank == 0 else None
        )

    return shown, on_ranks(world, score)[0]


def test_examples_do_not_depend_on_ranks_or_chunk(
    prepared: PreparedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,), _ = shown_of(prepared)
    for world, chunk in ((3, 5), (30, 5), (1, 2)):
        monkeypatch.setattr(retrieval, "CHUNK", chunk)
        assert shown_of(prepared, world=world)[0] == [alone]


def test_examples_agree_with_the_recall_and_with_the_set(prepared: PreparedSet) -> None:
    (examples,), metrics = shown_of(prepared)
    assert examples["rows"] == metrics["rows"]
    for way in ("image_to_text", "text_to_image"):
        hits = [item for item in examples[way] if item["rank"] == 1]
        assert len(hits) <= NUM_SHOWN and 0 < len(examples[way]) - len(hits) <= NUM_SHOWN
        for item in examples[way]:
            row = prepared.read(np.array([item["row"]]))[0]
            assert item["key"] == row.key and item["caption"] in row.texts
            scores = [answer["score"] for answer in item["answers"]]
            assert scores == sorted(scores, reverse=True)
            marked = [rank for rank, answer in enumerate(item["answers"], 1) if answer["correct"]]
            assert (marked[:1] == [item["rank"]]) if item["rank"] <= 5 else not marked
            for answer in item["answers"]:
                texts = prepared.read(np.array([answer["row"]]))[0].texts
                assert answer["caption"] in texts
                if way == "image_to_text":
                    assert answer["correct"] == (answer["caption"] in row.texts)
                else:
                    assert answer["correct"] == (item["caption"] in texts)


class Captioning(Toy):
    """Has losses of captions in its outputs, and names the gray level of an image."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        squares = batch["input_ids"].square() * batch["attention_mask"]
        gray = batch["image"][:, 0, 0, 0]
        return super().forward(batch) | {"caption_losses": squares.sum(1) / 100 + gray / 255}

    def caption(self, image: Tensor, end_id: int) -> Tensor:
        word = 5 + image[:, 0, 0, 0].long() % 9
        end = torch.full_like(word, end_id)
        return torch.stack([word, end, word], dim=1)


@pytest.mark.parametrize("world", [1, 3, 30])
def test_perplexity_is_that_of_the_tokens_of_first_captions(
    prepared: PreparedSet, world: int
) -> None:
    encoder = TextEncoder(prepared.tokenizer_json or "", INPUTS.max_tokens)
    loss = num_tokens = 0.0
    for number, each in enumerate(prepared.read(np.arange(NUM_ROWS))):
        if number == 4:  # not an image
            continue
        ids, _ = encoder.encode(each.texts[:1])
        loss += np.square(ids.astype(float)).sum() / 100 + number / 255  # its gray level
        num_tokens += ids.size - 1  # without [CLS]
    for metrics in score(prepared, model=Captioning, world=world):
        assert metrics["caption_perplexity"] == pytest.approx(math.exp(loss / num_tokens))


class CountsCaptions(Captioning):
    """Counts how often it embeds a text, by the sum of its tokens."""

    counts: ClassVar[Counter[int]] = Counter()

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.counts.update((input_ids * attention_mask).sum(1).tolist())
        return super().embed_text(input_ids, attention_mask)


def test_captions_of_a_model_with_a_decoder_are_embedded_once(prepared: PreparedSet) -> None:
    CountsCaptions.counts.clear()
    scores = score(prepared, model=CountsCaptions)[0]
    encoder = TextEncoder(prepared.tokenizer_json or "", INPUTS.max_tokens)
    expected = Counter[int]()
    for number, each in enumerate(prepared.read(np.arange(NUM_ROWS))):
        if number != 4:  # not an image
            expected.update(int(encoder.encode([text])[0].sum()) for text in each.texts)
    assert Counter({key: n for key, n in CountsCaptions.counts.items() if key}) == expected
    without = score(prepared)[0]
    assert {name: scores[name] for name in without} == without


def test_examples_have_generated_captions_up_to_the_end(prepared: PreparedSet) -> None:
    saved: list[dict[str, Any]] = []

    def work(group: Any) -> dict[str, float]:
        evaluator = Evaluator(prepared, INPUTS, prepared.tokenizer_json or "", SETTINGS)
        return evaluator.score(Captioning(), group, Contrastive(), 6, saved.append)

    on_ranks(1, work)
    tokenizer = TextEncoder(prepared.tokenizer_json or "", 8).tokenizer
    shown = [each["row"] for each in saved[0]["image_to_text"]]
    expected = {str(number): tokenizer.decode([5 + number % 9]) for number in shown}
    assert saved[0]["generated"] == expected and len({*expected.values()}) > 2


class Counting(Toy):
    """Counts the texts that it embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.num_texts = 0

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.num_texts += len(input_ids)
        return super().embed_text(input_ids + round(self.log_scale.item()), attention_mask)


def test_sets_with_equal_classes_share_their_embeddings_until_weights_change(
    tmp_path: Path,
) -> None:
    sets = {}
    for name, numbers in (("one", range(6)), ("two", range(40, 49)), ("three", range(6))):
        rows = [replace(row(number), label=number % 2) for number in numbers]
        made = make_set(tmp_path / name, rows)
        names = ("a", "red") if name != "three" else ("one", "red")
        manifest = replace(made.manifest, class_names=names)
        sets[name] = PreparedSet(made.folder, manifest)
    wanted = ", ".join(f"{name}={name} (zero_shot)" for name in sets)
    evaluate = Evaluate(prompts=("{}", "a {}"))
    config = Config(model=TwoTower(inputs=INPUTS), data=Data(eval=wanted), evaluate=evaluate)
    tokenizer = sets["one"].tokenizer_json or ""
    together = build_evaluator(config, sets, tokenizer)
    model = Counting()
    for log_scale in (1.5, 3.2):
        model.log_scale.data.fill_(log_scale)
        model.num_texts = 0
        metrics = together.score(model, Group(), Contrastive(), 6)
        shared = model.num_texts
        alone = {}
        for name in sets:
            single = config.replace(data=Data(eval=f"{name}={name} (zero_shot)"))
            scores = build_evaluator(single, sets, tokenizer).score(
                model, Group(), Contrastive(), 6
            )
            alone |= scores
        assert metrics == alone
        prompts = 2 * 2
        # also one call for the widths of each set
        assert model.num_texts - shared == shared + prompts
