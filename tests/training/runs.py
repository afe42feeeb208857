"""Small runs for tests: a config, reporters that keep their calls, and readers of run files."""

import json
import os
import re
import signal

import numpy as np
import torch

from mmray.config import (
    Batch,
    Cluster,
    Config,
    CustomModel,
    Data,
    Evaluate,
    ImageTower,
    Inputs,
    Optimizer,
    Run,
    TextTower,
    Train,
)
from mmray.config import TwoTower as Model
from mmray.data.store.stored_row import hash_key
from mmray.data.stream.order import PADDING, SamplePlan
from mmray.engine.checkpoint import state_io
from mmray.engine.metrics.meters import rows_sha
from mmray.models.two_tower import TwoTower
from tests.made import make_set, row

STEPS = 12
# in the driver's log; before, a signal ends the run at once
TRAINS = re.compile(r"^[\d.]+ s +training$", re.M)
HELD_OUT = [row(number) for number in range(100, 120)]
IMAGE = ImageTower(name="convnet", width=8, depth=2)
TEXT = TextTower(width=16, depth=1, heads=2, dropout=0.1)


class Silent:
    """A RunReporter that keeps its calls."""

    def __init__(self):
        self.notes, self.steps = [], []

    def log(self, text, label=""):
        self.notes.append((label, text))

    def status(self, title):
        self.notes.append(("status", title))

    def phase(self, title):
        self.notes.append(("phase", title))

    def prepare_progress(self, progress):
        self.notes.append(("prepare", progress.stage))

    def step(self, metrics, total_steps):
        self.steps.append(metrics["step"])


class Stopping(Silent):
    """Sends SIGINT once, at the first step from `at` on."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def step(self, metrics, total_steps):
        super().step(metrics, total_steps)
        if self.at and metrics["step"] >= self.at:
            self.at = 0
            os.kill(os.getpid(), signal.SIGINT)


class DoubleTowers(TwoTower):
    """The towers below without dropout as a user's model, in float64: differences are errors and
    not rounding.
    """

    def __init__(self, spec, vocab_size):
        text = TEXT.model_copy(update={"dropout": 0.0})
        super().__init__(
            Model(inputs=spec.inputs, image=IMAGE, text=text, embed_dim=16), vocab_size
        )
        self.double()


def in_double(wanted):
    """The same run in double precision, without dropout."""
    own = CustomModel(kind="tests.training.runs:DoubleTowers", inputs=wanted.model.inputs)
    return wanted.replace(model=own)


def make_data(folder):
    """Write a prepared set of 50 rows and 20 held-out ones; return its folder."""
    make_set(folder, [row(number) for number in range(50)], HELD_OUT)
    return folder


def config(data, storage, name, callbacks=(), address=None, **train_settings):
    """Two workers, two micro-batches each, 16 rows per step, with dropout."""
    return Config(
        model=Model(
            inputs=Inputs(image_side=16, fit="squash", max_tokens=12),
            image=IMAGE,
            text=TEXT,
            embed_dim=16,
        ),
        data=Data(train=str(data), block_mb=0.02, workers=1),
        batch=Batch(micro=4, global_=16),
        optimizer=Optimizer(lr=1e-3, warmup_steps=2),
        train=Train(
            **{"steps": STEPS, "log_every": 1, "checkpoint_every": 3} | train_settings,
            callbacks=callbacks,
        ),
        evaluate=Evaluate(every=6),
        cluster=Cluster(workers=2, address=address),
        run=Run(name=name, storage=str(storage)),
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def marks(folder):
    """The rows of each step."""
    return [(line["step"], line["rows_start"], line["rows_sha"]) for line in lines(folder)]


def expected_marks(steps, rows=50, global_batch_size=16, names=None, **plan):
    """The rows of each step according to the order, computed without the stream."""
    plan = SamplePlan(rows, global_batch_size, 1, 0, steps, **plan)
    names = names or [f"row-{number}" for number in range(rows)]
    for step in range(steps):
        positions = plan.positions(step, 0)
        keys = [
            hash_key(names[number]) for number in plan.row_ids_at(positions[positions != PADDING])
        ]
        yield step + 1, plan.rows_start(step), rows_sha(torch.tensor(np.array(keys, np.int64)))


def weights(folder):
    return state_io.load_weights(folder / "checkpoints" / f"step-{STEPS}")


def same_weights(one, other):
    return one.keys() == other.keys() and all(
        bool((one[name] == other[name]).all()) for name in one
    )
