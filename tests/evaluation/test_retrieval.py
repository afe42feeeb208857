"""Chunked ranks equal naive ranks over the full matrix."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmray.evaluation import retrieval
from mmray.evaluation.examples import top_k
from mmray.evaluation.retrieval import compute_ranks, retrieval_metrics


def naive_ranks(queries: Tensor, gallery: Tensor, right: list[list[bool]]) -> list[int]:
    """Sort the gallery for each query, wrong answers first among ties, and find the first correct
    one.
    """
    out = []
    for query, is_right in zip(queries.double().tolist(), right, strict=True):
        scores = [
            math.fsum(a * b for a, b in zip(query, row, strict=True))
            for row in gallery.double().tolist()
        ]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], is_right[index]))
        out.append(1 + [is_right[index] for index in order].index(True))
    return out


def pairs(is_right: Tensor) -> Tensor:
    """Correct answers in the format of `compute_ranks`."""
    return is_right.nonzero().T


def several_captions(captions_of: list[int]) -> Tensor:
    return torch.arange(len(captions_of)).repeat_interleave(torch.tensor(captions_of))


@given(
    vectors=st.lists(st.lists(st.integers(-8, 8), min_size=3, max_size=3), min_size=1, max_size=4),
    captions_of=st.lists(st.integers(1, 3), min_size=1, max_size=7),
    shared=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_ranks_and_top_k_equal_naive_with_ties(
    vectors: list[list[int]], captions_of: list[int], shared: bool, seed: int
) -> None:
    """Few distinct vectors make many ties; chunk sizes from 1 to more than the gallery.

    shared: the first caption is correct for every image.
    """
    draw = np.random.default_rng(seed)
    pool = torch.tensor(vectors, dtype=torch.float32) / 8
    owner = several_captions(captions_of)
    owner = owner[torch.from_numpy(draw.permutation(len(owner)))]
    image = pool[torch.from_numpy(draw.integers(len(pool), size=len(captions_of)))]
    text = pool[torch.from_numpy(draw.integers(len(pool), size=len(owner)))]
    of_image = torch.arange(len(image))[:, None] == owner
    of_image[:, :1] |= shared
    for queries, gallery, is_right in ((image, text, of_image), (text, image, of_image.T)):
        expected = naive_ranks(queries, gallery, is_right.tolist())
        for chunk in range(1, len(text) + 2):
            with patch.object(retrieval, "CHUNK", chunk):
                assert compute_ranks(queries, gallery, pairs(is_right)).tolist() == expected
        scores, right = (queries.double() @ gallery.double().T).tolist(), is_right.tolist()
        naive = [
            sorted(
                range(len(gallery)), key=lambda index: (-scores[q][index], right[q][index], index)
            )
            for q in range(len(queries))
        ]
        for k, chunk in ((2, 1), (5, 3), (5, 100)):
            with patch.object(retrieval, "CHUNK", chunk):
                indices, best = top_k(queries, gallery, is_right, k)
            assert indices.tolist() == [order[:k] for order in naive]
            assert best.tolist() == [
                [scores[q][index] for index in order[:k]] for q, order in enumerate(naive)
            ]


@given(
    scores=st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=2, max_size=5),
    copies=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_copies_count_as_rows(scores: list[list[int]], copies: list[int], seed: int) -> None:
    """Any answer may be correct for any query, and each query has one."""
    draw = np.random.default_rng(seed)
    gallery, times = (
        torch.tensor(scores, dtype=torch.float32) / 4,
        torch.tensor(copies[: len(scores)]),
    )
    is_right = torch.from_numpy(draw.random((4, len(gallery))) < 0.4)
    is_right[range(4), draw.integers(len(gallery), size=4)] = True
    queries = torch.from_numpy(draw.integers(-4, 5, (4, 3))).float() / 4
    spread = torch.arange(len(gallery)).repeat_interleave(times)
    expected = naive_ranks(queries, gallery[spread], is_right[:, spread].tolist())
    for chunk in (1, 2, 9):
        with patch.object(retrieval, "CHUNK", chunk):
            assert (
                compute_ranks(queries, gallery, pairs(is_right), gallery_counts=times).tolist()
                == expected
            )


@pytest.mark.parametrize("dim", [8, 512])
def test_chunked_equals_naive_on_unit_vectors(dim: int) -> None:
    torch.manual_seed(dim)
    owner = several_captions([1 + image % 5 for image in range(40)])
    image = torch.nn.functional.normalize(torch.randn(40, dim), dim=1)
    text = torch.nn.functional.normalize(image[owner] + torch.randn(len(owner), dim), dim=1)
    text[::7] = text[3]  # equal embeddings at many positions of the gallery
    right = torch.arange(40)[:, None] == owner
    for queries, gallery, is_right in ((image, text, right), (text, image, right.T)):
        expected = naive_ranks(queries, gallery, is_right.tolist())
        assert len(set(expected)) > 3
        scores = top_k(queries, gallery, is_right, 3)[1]
        for chunk in (1, 7, 32, 40, 1000):
            with patch.object(retrieval, "CHUNK", chunk), torch.autocast("cpu", torch.bfloat16):
                assert compute_ranks(queries, gallery, pairs(is_right)).tolist() == expected
                torch.testing.assert_close(top_k(queries, gallery, is_right, 3)[1], scores)


def test_equal_rows_tie() -> None:
    """A model with constant output ranks last, regardless of rounding in matrix products."""
    row = torch.nn.functional.normalize(
        torch.randn(1, 509, generator=torch.Generator().manual_seed(1)), dim=1
    )
    rows, right = row.repeat(301, 1), torch.arange(301).repeat(2, 1)
    for chunk in (64, 100, 301):
        with patch.object(retrieval, "CHUNK", chunk):
            assert compute_ranks(rows, rows, right).tolist() == [301] * 301


@pytest.mark.parametrize("broken", ["queries", "gallery", "both"])
def test_nan_is_not_a_hit(broken: str) -> None:
    rows, nan = torch.eye(4), torch.full((4, 4), torch.nan)
    queries, gallery = (
        nan if broken in (name, "both") else rows for name in ("queries", "gallery")
    )
    assert compute_ranks(queries, gallery, torch.arange(4).repeat(2, 1)).tolist() == [4] * 4


def test_metrics_equal_hand_computed_values() -> None:
    metrics = retrieval_metrics(torch.tensor([1, 2, 7, 11]), "image_to_text")
    assert metrics == {
        "recall_at_1/image_to_text": 0.25,
        "recall_at_5/image_to_text": 0.5,
        "recall_at_10/image_to_text": 0.75,
        "median_rank/image_to_text": 4.5,
    }
    assert retrieval_metrics(torch.tensor([3]), "x")["median_rank/x"] == 3
