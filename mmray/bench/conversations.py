"""`mmray bench step` for vision-language models: mmray's loop on packed rows, against a loop
written by hand on padded ones.

Both take the same steps on the same synthetic rows of mixed lengths, which are encoded before. The
loop by hand pads micro-batches of a number of rows to their longest and calls the transformers
model with labels, as its trainers do.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmray.bench.hand_loops import train_by_hand
from mmray.bench.results import compare, describe_machine
from mmray.bench.step import (
    WARMUP_STEPS,
    StepTimer,
    build_model,
    synthetic_run,
)
from mmray.data.stream.collate import Batch
from mmray.data.stream.order import PADDING, SamplePlan
from mmray.data.stream.token_batches import TokenPlan
from mmray.data.vlm.chat_template import RowError
from mmray.data.vlm.collate import RowCollator
from mmray.data.vlm.encoder import EncodedRow, ProcessorEncoder
from mmray.engine import loop
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.precision import select_precision
from mmray.errors import UsageError
from mmray.models.vlm.model import Vlm
from mmray.objectives.cross_entropy import IGNORE_INDEX
from mmray.training.resolve import with_written_weights
from mmray.training.workers.local import measure_in_worker

if TYPE_CHECKING:
    from mmray.config import Config

NUM_ROWS = 256
IMAGE_SIDES = (64, 512)  # sides of the synthetic images in pixels
PADDED_ROWS = 8  # rows of a padded micro-batch, if the recipe has no batch.micro
MIN_STEPS = 4


def bench_conversations(config: Config, pairs: int, window_s: float) -> dict[str, Any]:
    """Compare mmray's loop on packed rows with a loop by hand on padded ones, with one worker.

    Returns:
        As `bench_step`; rows also have `tokens_per_s`.
    """
    config = with_written_weights(config.with_cluster(workers=1))
    return dict(measure_in_worker(partial(_measure, pairs=pairs, window_s=window_s), config))


def mixed_rows(encoder: ProcessorEncoder, count: int) -> list[EncodedRow]:
    """Return encoded conversations of mixed lengths with 0 to 3 images of noise, each an EncodedRow
    with `input_ids` int32 [T], `loss_weights` float32 [T] and `images` (arrays by name).

    Args:
        encoder: The processor of the model, whose `max_tokens` no row exceeds.
        count: Number of rows.
    """
    draw = random.Random(0)
    rows: list[EncodedRow] = []
    while len(rows) < count:
        sides = [draw.randint(*IMAGE_SIDES) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
        images = [
            np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)
            for side in sides
        ]
        # Mostly short texts, and some of up to half of the limit together.
        lengths = [1 + int(draw.random() ** 3 * encoder.max_tokens / 4) for _ in range(2)]
        asked, answered = (" ".join(["a"] * length) for length in lengths)
        parts: list[Any] = [{"type": "image"}] * len(images) + [{"type": "text", "text": asked}]
        messages: list[Any] = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answered},
        ]
        try:
            rows.append(encoder.encode(messages, images))
        except RowError:  # too long
            continue
    return rows


def _measure(
    config: Config, group: Group, _report: object, pairs: int, window_s: float
) -> dict[str, Any]:
    config, model = build_model(config.replace(train=config.train.replace(log_every=1)), group)
    global_batch_size = config.batch.global_
    assert isinstance(model, Vlm)
    if global_batch_size is None:
        raise UsageError("bench step needs batch.global in the recipe of a vision-language model")
    micro = config.batch.micro if isinstance(config.batch.micro, int) else PADDED_ROWS
    bench = _Bench(
        config, group, model, mixed_rows(model.encoder, NUM_ROWS), global_batch_size, micro
    )
    took_s, _ = bench.padded_window(WARMUP_STEPS + MIN_STEPS)
    steps = WARMUP_STEPS + max(MIN_STEPS, round(MIN_STEPS * window_s / took_s))
    lengths = [len(row.input_ids) for row in bench.rows]

    def measure(window: Callable[[int], tuple[float, float]]) -> dict[str, float]:
        took_s, loss = window(steps)
        rate = global_batch_size * (steps - WARMUP_STEPS) / took_s
        tokens = rate * statistics.mean(lengths)
        return {"samples_per_s": rate, "tokens_per_s": tokens, "loss": loss}

    arms = {
        "loop": partial(measure, bench.loop_window),
        "padded": partial(measure, bench.padded_window),
    }
    return {
        "machine": describe_machine(group.device),
        "batch": f"{global_batch_size} rows per step; packed up to {bench.max_tokens:,} tokens, or "
        f"in padded micro-batches of {micro} rows",
        **compare(arms, pairs, "samples_per_s", {"loop_vs_padded": ("loop", "padded")}),
        "notes": [
            f"rows of {min(lengths)} to {max(lengths)} tokens, {statistics.mean(lengths):.0f} on "
            "average"
        ],
    }


@dataclass(frozen=True)
class _Bench:
    """Model and rows of the benchmark."""

    config: Config
    group: Group
    model: Vlm
    rows: Sequence[EncodedRow]
    global_batch_size: int
    micro: int

    @property
    def max_tokens(self) -> int:
        """Tokens of a packed micro-batch: those that a padded one may have, unless the recipe has a
        limit.
        """
        return self.config.batch.tokens or self.config.model.inputs.max_tokens * self.micro

    def loop_window(self, steps: int) -> tuple[float, float]:
        """Return the seconds of the timed steps of mmray's loop, and its last loss."""
        model = deepcopy(self.model)
        plan = SamplePlan(
            len(self.rows), self.global_batch_size, 1, seed=0, steps=steps, shuffle=False
        )
        lengths = np.array([len(row.input_ids) for row in self.rows], np.uint32)
        tokens = TokenPlan(
            **vars(plan),
            num_tokens=lengths,
            max_row_tokens=int(lengths.max()),
            max_tokens=self.max_tokens,
            padded=not model.packed,
        )
        timer = StepTimer(self.group.device, until=steps)
        shape = BatchShape(self.global_batch_size, self.micro, 1, micro_tokens=self.max_tokens)
        spec = synthetic_run(self.config, self.group, model, tokens, shape, callbacks=(timer,))
        result = loop.train_loop(spec, self._packed(tokens, model.collator()))
        return timer.took_s, float(result.metrics["train/loss"])

    def _packed(self, plan: TokenPlan, collate: RowCollator) -> Iterator[list[Batch]]:
        for step in range(plan.steps):
            positions = plan.positions(step, 0)
            parts = np.split(positions, np.cumsum(plan.micro_batch_sizes(step, 0)))[:-1]
            yield [self._micro_batch(plan, part, collate) for part in parts]

    def _micro_batch(self, plan: TokenPlan, positions: np.ndarray, collate: RowCollator) -> Batch:
        valid = positions != PADDING
        numbers = plan.row_ids_at(positions[valid])
        rows = [self.rows[number] for number in numbers]
        num_tokens = np.zeros(len(positions), np.int32)
        num_tokens[valid] = [len(row.input_ids) for row in rows]
        columns: Batch = {
            "key": torch.from_numpy(positions),
            "label": torch.full((len(positions),), -1),
            "valid": torch.from_numpy(valid),
            "pos": torch.from_numpy(positions),
            "num_tokens": torch.from_numpy(num_tokens),
        }
        return columns | collate(rows)

    def padded_window(self, steps: int) -> tuple[float, float]:
        """Return the seconds of the timed steps of the loop by hand, and its last loss."""
        model = deepcopy(self.model).train()
        model.to(self.group.device)
        model.packed = False
        timer = StepTimer(self.group.device, until=steps)
        precision = select_precision(self.config.train.precision, self.group.device)
        batches = self._padded(model.collator())
        loss_of = partial(_loss_of_transformers, model)
        loss = train_by_hand(model, batches, loss_of, self.config, precision, steps, timer.on_step)
        return timer.took_s, loss

    def _padded(self, collate: RowCollator) -> Iterator[list[Batch]]:
        """Yield the padded micro-batches of each step, with the number of targets of the step."""
        remaining = cycle(self.rows)
        while True:
            rows = list(islice(remaining, self.global_batch_size))
            num_targets = sum(np.count_nonzero(row.loss_weights[1:]) for row in rows)
            micro_batches = []
            for start in range(0, len(rows), self.micro):
                batch = collate(rows[start : start + self.micro])
                batch["num_targets"] = torch.tensor(num_targets)
                micro_batches.append(
                    {name: column.to(self.group.device) for name, column in batch.items()}
                )
            yield micro_batches


def _loss_of_transformers(model: Vlm, batch: Batch) -> torch.Tensor:
    """Return the loss that the transformers model computes from padded rows and labels."""
    ids = batch["input_ids"]
    labels = torch.full_like(ids, IGNORE_INDEX).flatten()
    labels[batch["target_index"] + 1] = batch["targets"]
    inputs = model.model_inputs(batch)
    num_targets = inputs.pop("num_targets")
    output: torch.Tensor = model.net(
        **inputs,
        labels=labels.view_as(ids),
        num_items_in_batch=num_targets,
        use_cache=False,
    ).loss
    return output
