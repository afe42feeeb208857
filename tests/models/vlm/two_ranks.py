"""Steps of vision-language models on two and four gloo ranks; test_ranks.py checks the results.

Rank 0 often has no image, so without the dummy row it would skip the vision encoder's collectives.
"""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from mmray.config import Config, Objective
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.collate import Batch
from mmray.engine.collectives import Group
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import accumulate_gradients, zero_gradients
from mmray.evaluation.conversations import ConversationEvaluator
from mmray.models.protocol import find_blocks
from mmray.models.vlm.model import Vlm
from mmray.objectives import build
from mmray.objectives.language_modelling import LanguageModelling
from tests.engine import toy
from tests.engine.ranks import join_group
from tests.models.vlm import token_runs
from tests.models.vlm.rows import double_model, encode_rows

Split = list[list[list[int]]]  # rows of each micro-batch of each rank
# Rank 0 has no image at all, and one video.
SPLIT: Split = [[[0], [0, 0]], [[2], [1]]]
VIDEO_SPLIT: Split = [[[0], [0, 3]], [[2, 4], [1]]]


def main(rank: int, folder: str, models: dict[str, tuple[str, int]]) -> None:
    """Gradients by family and strategy; `models` has weights and random steps before."""
    group = join_group(folder, "vlm", rank, 2)
    results: dict[str, Any] = {}
    for family, (weights, random_steps) in models.items():
        model = double_model(weights)
        for parallel, each in (("ddp", copy.deepcopy(model)), ("fsdp", model)):
            results[f"{family} {parallel}"] = gradient(each, group, parallel, random_steps)
    torch.save(results, f"{folder}/rank-{rank}.pt")
    os._exit(0)  # see tests/engine/ranks.py


def hybrid(rank: int, folder: str, weights: str, split: Split) -> None:
    """The gradient of a step of four ranks on two nodes."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    group = join_group(folder, "hybrid", rank, 4)
    torch.save(
        gradient(double_model(weights), group, "hsdp", split=split), f"{folder}/rank-{rank}.pt"
    )
    os._exit(0)  # see tests/engine/ranks.py


def preferences(rank: int, folder: str, weights: str) -> None:
    """Gradients of dpo by strategy."""
    group = join_group(folder, "preferences", rank, 2)
    model = double_model(weights)
    results = {
        parallel: gradient(each, group, parallel, is_dpo=True)
        for parallel, each in (("ddp", copy.deepcopy(model)), ("fsdp", model))
    }
    torch.save(results, f"{folder}/rank-{rank}.pt")
    os._exit(0)  # see tests/engine/ranks.py


def gradient(
    model: Vlm,
    group: Group,
    parallel: str,
    random_steps: int = 0,
    split: Split | None = None,
    is_dpo: bool = False,
) -> torch.Tensor:
    """The gradient of a step, after some random ones."""
    rows = encode_rows(model.encoder)
    if is_dpo:
        # The other answer is the last token.
        rows = [
            replace(
                row,
                rejected=replace(
                    row, loss_weights=np.eye(len(row.input_ids), dtype=np.float32)[-1]
                ),
                reference=np.array([-60.0, -61.0]),
            )
            for row in rows
        ]
    collator = model.collator(pairs=is_dpo)
    objective: Any = build(Objective(kind="dpo")) if is_dpo else LanguageModelling()
    state = toy.train_state(model, group, objective, parallel=parallel)

    def step(split: Split) -> None:
        micro_batches: list[Batch] = []
        for numbers in split[group.rank]:
            columns = {
                "valid": torch.ones(len(numbers), dtype=torch.bool),
                "key": torch.tensor(numbers),
                "pos": torch.tensor(numbers),
                "num_tokens": torch.tensor([len(rows[each].input_ids) for each in numbers]),
            }
            micro_batches.append(collator([rows[number] for number in numbers]) | columns)
        accumulate_gradients(state, make_local_batch(micro_batches), lambda index: index)

    draw = random.Random(0)
    for _ in range(random_steps):
        step([draw_rows(draw, len(rows)) for _ in range(2)])
        zero_gradients(state)
    split = split or (VIDEO_SPLIT if len(rows) > 3 else SPLIT)
    if group.world_size > 1:
        step(split)
    else:
        step([[[number] for rank in split for numbers in rank for number in numbers]])
    gradients = []
    for weight in model.parameters():
        if weight.requires_grad:
            grad = weight.grad
            assert grad is not None
            gradients.append((grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten())
    return torch.cat(gradients)


def draw_rows(draw: random.Random, num_rows: int) -> list[list[int]]:
    """The rows of two micro-batches of a rank; half of the time none has an image."""
    if draw.random() < 0.5:
        return [[0], [0]]
    return [[draw.randrange(num_rows)] for _ in range(2)]


def resume(rank: int, folder: str, config: Config, checkpoint: str) -> None:
    """Continue a run of one rank with two, and evaluate a sharded model."""
    group = join_group(folder, "resume", rank, 2)
    token_runs.run(config.with_cluster(workers=2), group, Path(checkpoint), parallel="fsdp")
    scores = evaluate(config, group, "fsdp")
    torch.save(scores, f"{folder}/rank-{rank}.pt")
    os._exit(0)  # see tests/engine/ranks.py


def evaluate(config: Config, group: Group, parallel: str) -> dict[str, float]:
    """Scores of the held-out rows, with generated answers; rank 0 has one batch more than rank 1.

    While the last block of the decoder runs, the first one is sharded again.
    """
    spec: Any = config.model
    torch.manual_seed(0)
    model = Vlm(spec).double()
    toy.train_state(model, group, LanguageModelling(), parallel=parallel)
    held_out = PreparedSet.open(config.data.train, "test")
    blocks = list(find_blocks(model.branches()["language"]))
    gathered: list[bool] = []

    def check(*_: Any) -> None:
        gathered.extend(not isinstance(weight, DTensor) for weight in blocks[0].parameters())

    blocks[-1].register_forward_pre_hook(check)
    config = config.replace(evaluate=config.evaluate.replace(batch=1))
    scores = ConversationEvaluator(config, held_out, 10**7).score(model, group, None, 6)
    assert gathered
    assert any(gathered) == (parallel == "ddp")
    return scores
