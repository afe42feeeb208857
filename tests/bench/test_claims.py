"""The textbook's recipe and mmray's beside each other: the same work where they say so, and verdicts from figures."""

import json

import pytest

from mmray.bench import claims
from mmray.bench.claims import bench_claims, verdict
from mmray.config import Batch, Objective, recipes
from mmray.errors import UsageError
from tests.bench.test_step import tiny


def test_a_verdict_follows_from_the_ratio():
    machine = {"cpu": "EPYC", "cores": 2, "device": "cpu"}
    assert "reproduced on 2 cores of EPYC (textbook : textbook, no workers = 1.41)" in verdict(
        "DataLoader workers", 1.41, machine
    )
    gpu = verdict("AMP and accumulation", 1.29, machine | {"device": "H200"})
    assert gpu.startswith("+30% by AMP and accumulation: not reproduced on H200 with 2 cores")


def test_what_the_textbook_cannot_train_is_refused():
    with pytest.raises(UsageError, match="contrastive"):
        bench_claims(tiny(objective=Objective(kind="my.package:Mine")), 8, 1, 1.0, print)


def test_the_textbook_pads_to_what_the_text_branch_takes():
    assert claims.textbook_tokens(recipes.load("resnet50-bert")) == 512
    assert claims.textbook_tokens(recipes.load("clip")) == 77


@pytest.mark.cluster
def test_bench_claims_from_end_to_end(local_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(claims.tempfile, "gettempdir", lambda: str(tmp_path))
    said = []
    result = bench_claims(tiny(workers=2, batch=Batch(micro=2)), 8, 1, 0.01, said.append)
    rows = {row["arm"]: row for row in result["rows"]}
    assert list(rows) == [
        "textbook, no workers",
        "textbook",
        "no workers, no padding",
        "+ Ray Data stream",
        "+ AMP",
        "+ accumulation",
        "mmray",
    ]
    assert rows["textbook"]["vs_textbook"] == 1.0 and all(row["samples_per_s"] > 0 for row in rows.values())
    assert result["ratios"]["AMP and accumulation"] == pytest.approx(
        rows["+ accumulation"]["samples_per_s"] / rows["+ Ray Data stream"]["samples_per_s"], rel=0.01
    )
    assert len(result["notes"]) == len(claims.CLAIMS) and len(said) == 1 + len(rows)
    json.dumps(result)
    with pytest.raises(UsageError, match="fewer than a batch"):
        bench_claims(tiny(workers=2, batch=Batch(micro=8)), 8, 1, 0.01, said.append)
