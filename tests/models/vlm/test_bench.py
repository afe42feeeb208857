"""The benchmark of a step: both loops take the same steps on rows of mixed lengths."""

from __future__ import annotations

import pytest

from mmray.bench import conversations
from mmray.bench.conversations import bench_conversations
from mmray.bench.step import WARMUP_STEPS
from mmray.engine.collectives import Group
from mmray.models.vlm.model import Vlm
from tests.models.vlm import token_runs


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_loop_on_packed_rows_takes_the_steps_of_the_padded_loop(family, folder_of, tmp_path):
    config = token_runs.config_of(folder_of(family), "made", tmp_path / "run", precision="fp32")
    model = Vlm(config.model)
    rows = conversations.mixed_rows(model.encoder, 16)
    lengths = [len(row.input_ids) for row in rows]
    assert max(lengths) > 2 * min(lengths)
    assert {len(row.images) > 0 for row in rows} == {True, False}
    bench = conversations._Bench(config, Group(), model, rows, global_batch_size=6, micro=2)
    took_s, loss = bench.loop_window(WARMUP_STEPS + 2)
    padded_s, expected = bench.padded_window(WARMUP_STEPS + 2)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert took_s > 0
    assert padded_s > 0


def test_result_has_the_rates_of_both_loops(folder_of, tmp_path, monkeypatch):
    monkeypatch.setattr(
        conversations,
        "measure_in_worker",
        lambda measure, config: measure(config, Group(), tmp_path),
    )
    monkeypatch.setattr(conversations, "NUM_ROWS", 12)
    config = token_runs.config_of(folder_of("qwen3_vl"), "made", tmp_path / "run", precision="fp32")
    result = bench_conversations(config, pairs=2, window_s=0.01)
    assert result["ratios"].keys() == {"loop_vs_padded"}
    loop, padded = result["rows"]
    assert (loop["arm"], padded["arm"]) == ("loop", "padded")
    assert loop["loss"] == pytest.approx(padded["loss"], rel=1e-4)
    assert min(loop["tokens_per_s"], padded["samples_per_s"]) > 0
