"""Ranks in chunks against ranks of the whole matrix, computed as plainly as can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmray.evaluate.retrieval import ranks, retrieval_metrics, top


def naive_ranks(queries: Tensor, query_owner: Tensor, gallery: Tensor, gallery_owner: Tensor) -> list[int]:
    """Sort the gallery for each query, wrong answers first among equals, and find the first right one."""
    out = []
    for query, owner in zip(queries.double().tolist(), query_owner.tolist(), strict=True):
        scores = [math.fsum(a * b for a, b in zip(query, row, strict=True)) for row in gallery.double().tolist()]
        right = [o == owner for o in gallery_owner.tolist()]
        order = sorted(range(len(scores)), key=lambda place: (-scores[place], right[place]))
        out.append(1 + [right[place] for place in order].index(True))
    return out


def several_captions(num_images: int, captions_of: list[int]) -> Tensor:
    return torch.tensor([image for image in range(num_images) for _ in range(captions_of[image])])


@given(
    vectors=st.lists(st.lists(st.integers(-8, 8), min_size=3, max_size=3), min_size=1, max_size=4),
    captions_of=st.lists(st.integers(1, 3), min_size=1, max_size=7),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_chunked_equals_naive_with_ties(vectors: list[list[int]], captions_of: list[int], seed: int) -> None:
    """Few different vectors make many ties; every chunk size from 1 to beyond the gallery."""
    draw = np.random.default_rng(seed)
    pool = torch.tensor(vectors, dtype=torch.float32) / 8
    image_owner = torch.from_numpy(draw.permutation(len(captions_of)))
    text_owner = several_captions(len(captions_of), captions_of)
    text_owner = text_owner[torch.from_numpy(draw.permutation(len(text_owner)))]
    image = pool[torch.from_numpy(draw.integers(len(pool), size=len(image_owner)))]
    text = pool[torch.from_numpy(draw.integers(len(pool), size=len(text_owner)))]
    for arguments in ((image, image_owner, text, text_owner), (text, text_owner, image, image_owner)):
        expected = naive_ranks(*arguments)
        for chunk in range(1, len(text) + 2):
            assert ranks(*arguments, chunk).tolist() == expected


@given(
    vectors=st.lists(st.lists(st.integers(-8, 8), min_size=3, max_size=3), min_size=1, max_size=4),
    captions_of=st.lists(st.integers(1, 3), min_size=1, max_size=7),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_top_is_the_head_of_the_naive_order(vectors: list[list[int]], captions_of: list[int], seed: int) -> None:
    """The whole gallery sorted as plainly as can be, ties included; its first right answer stands in place `rank`."""
    draw = np.random.default_rng(seed)
    pool = torch.tensor(vectors, dtype=torch.float32) / 8
    owner = several_captions(len(captions_of), captions_of)
    owner = owner[torch.from_numpy(draw.permutation(len(owner)))]
    image = pool[torch.from_numpy(draw.integers(len(pool), size=len(captions_of)))]
    text = pool[torch.from_numpy(draw.integers(len(pool), size=len(owner)))]
    rows = torch.arange(len(image))
    for queries, query_owner, gallery, gallery_owner in ((image, rows, text, owner), (text, owner, image, rows)):
        scores = (queries.double() @ gallery.double().T).tolist()
        right = (gallery_owner == query_owner[:, None]).tolist()
        naive = [
            sorted(range(len(gallery)), key=lambda place: (-scores[q][place], right[q][place], place))
            for q in range(len(queries))
        ]
        found = ranks(queries, query_owner, gallery, gallery_owner, 3)
        for k, chunk in ((2, 1), (5, 3), (5, 100)):
            places, best = top(queries, query_owner, gallery, gallery_owner, k, chunk)
            assert places.tolist() == [order[:k] for order in naive]
            assert best.tolist() == [[scores[q][place] for place in order[:k]] for q, order in enumerate(naive)]
        assert found.tolist() == [1 + [right[q][p] for p in order].index(True) for q, order in enumerate(naive)]


def test_top_of_a_model_that_gives_nan_has_the_right_answer_last() -> None:
    places, best = top(torch.full((1, 2), torch.nan), torch.tensor([1]), torch.eye(2), torch.arange(2), 5, 1)
    assert places.tolist() == [[0, 1]] and best.tolist() == [[math.inf, -math.inf]]


@pytest.mark.parametrize("dim", [8, 512])
def test_chunked_equals_naive_on_unit_vectors(dim: int) -> None:
    torch.manual_seed(dim)
    owner = several_captions(40, [1 + image % 5 for image in range(40)])
    image = torch.nn.functional.normalize(torch.randn(40, dim), dim=1)
    text = torch.nn.functional.normalize(image[owner] + torch.randn(len(owner), dim), dim=1)
    text[::7] = text[3]  # equal embeddings at many places of the gallery
    for arguments in ((image, torch.arange(40), text, owner), (text, owner, image, torch.arange(40))):
        expected = naive_ranks(*arguments)
        assert len(set(expected)) > 3
        for chunk in (1, 7, 32, 40, 1000):
            assert ranks(*arguments, chunk).tolist() == expected


def test_equal_rows_tie_wherever_they_stand() -> None:
    """A model that says the same of everything is ranked last, not by the rounding of a matrix product."""
    row = torch.nn.functional.normalize(torch.randn(1, 509, generator=torch.Generator().manual_seed(1)), dim=1)
    rows, owner = row.repeat(301, 1), torch.arange(301)
    for chunk in (64, 100, 301):
        assert ranks(rows, owner, rows, owner, chunk).tolist() == [301] * 301


def test_memory_is_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = torch.Tensor.__matmul__

    def watched(a: Tensor, b: Tensor) -> Tensor:
        out = plain(a, b)
        seen.append(out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    rows = torch.eye(50)
    assert ranks(rows, torch.arange(50), rows, torch.arange(50), 16).tolist() == [1] * 50
    assert max(seen) == 16 * 16
    assert sum(seen) == 50 * 50


@pytest.mark.parametrize("broken", ["queries", "gallery", "both"])
def test_not_a_number_is_no_success(broken: str) -> None:
    rows, nan = torch.eye(4), torch.full((4, 4), torch.nan)
    queries, gallery = (nan if broken in (name, "both") else rows for name in ("queries", "gallery"))
    assert ranks(queries, torch.arange(4), gallery, torch.arange(4), 3).tolist() == [4] * 4


def test_query_without_a_right_answer_is_an_error() -> None:
    rows = torch.eye(3)
    with pytest.raises(ValueError, match="owner 5 of a query has no right answer"):
        ranks(rows, torch.tensor([0, 1, 5]), rows, torch.arange(3), 2)


def test_metrics() -> None:
    metrics = retrieval_metrics(torch.tensor([1, 2, 7, 11]), "image_to_text")
    assert metrics == {
        "recall_at_1/image_to_text": 0.25,
        "recall_at_5/image_to_text": 0.5,
        "recall_at_10/image_to_text": 0.75,
        "median_rank/image_to_text": 4.5,
    }
    assert retrieval_metrics(torch.tensor([3]), "x")["median_rank/x"] == 3
