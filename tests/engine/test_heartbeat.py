"""The heartbeat of a training worker reports the state of the training thread."""

import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from mmray.config import Cluster
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import SamplePlan
from mmray.engine import heartbeat, loop
from mmray.engine.heartbeat import Heartbeat
from mmray.errors import TrainingError
from tests.engine import toy
from tests.polling import wait_until


def states_of(call, messages, tmp_path, first_step=0):
    """Run `call` in a thread with a heartbeat; return the states of its heartbeats."""

    def run():
        with Heartbeat(lambda message: messages.append(message) or False, {}, tmp_path).running(
            first_step
        ):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return [message["state"] for message in beats(messages)]


def beats(messages):
    """The heartbeats without the report of the end, which a late one may follow."""
    return [message for message in messages if "state" in message]


def test_compilation_in_a_backward_is_no_wait_for_other_ranks(tmp_path, monkeypatch):
    """A compiler that takes long compiles the forward, and its backward only when it is called."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    torch._dynamo.reset()
    messages = []

    def compiler(graph, _):
        wait_until(lambda: any(beat["state"] == "compiling" for beat in beats(messages)))
        return graph.forward

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, grad):
            return torch.compile(lambda grad: grad * 2, backend=compiler)(grad)

    callbacks = torch._dynamo.callback.callback_handler
    before = [*callbacks.start_callbacks, *callbacks.end_callbacks]
    one = torch.ones(1, requires_grad=True)
    states = states_of(lambda: Function.apply(one).backward(), messages, tmp_path)
    assert one.grad == 2 and "compiling" in states and set(states) <= set(Cluster().state_limits_s)
    assert not any(
        beat["in_collective"] for beat in beats(messages) if beat["state"] == "compiling"
    )
    # the next run of this process registers its own
    assert [*callbacks.start_callbacks, *callbacks.end_callbacks] == before


@pytest.mark.parametrize(
    "file",
    [
        heartbeat.COLLECTIVES_FILE,
        "/torch/distributed/a.py",
    ],
)
def test_import_of_a_module_does_not_count_as_its_waits(tmp_path, monkeypatch, file):
    """A rank whose import hangs waits for no other rank."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    messages = []
    lines = ["end = len(messages) + 3", "while len(messages) < end: sleep(0.005)"]
    code = compile("\n".join(lines), file, "exec")
    names = {"messages": messages, "sleep": time.sleep}
    assert set(states_of(lambda: exec(code, names), messages, tmp_path)) == {"starting"}
    assert not any(beat["in_collective"] for beat in beats(messages))


def test_rank_starts_until_its_first_step(tmp_path):
    messages = []
    beat = Heartbeat(lambda message: messages.append(message) or False, {}, tmp_path)
    with beat.running(3):
        assert beat._observe()["state"] == "starting"
        beat.on_step(4, None)
        assert beat._observe()["state"] == "training"


def test_wait_for_rows_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    plan = SamplePlan(num_rows=8, global_batch_size=8, world_size=1, seed=1, steps=1)
    release, messages = threading.Event(), []

    def slow_blocks():
        release.wait(120)
        yield from ()

    def train():
        beat = Heartbeat(messages.append, {}, tmp_path)
        spec = replace(toy.train_spec(toy.Toy(), plan), heartbeat=beat)
        with beat.running(0), suppress(TrainingError):
            loop.train_loop(spec, iter_micro_batches(slow_blocks(), plan.rank_rows, toy.MICRO))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    wait_until(lambda: messages and messages[-1]["state"] == "waiting_for_data")
    release.set()
    thread.join(60)
    assert not thread.is_alive()


def test_micro_batches_of_a_long_step_count_as_progress(tmp_path, monkeypatch):
    """Each heartbeat within the step differs from the one before, so no time limit is exceeded."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    messages = []
    beat = Heartbeat(lambda message: messages.append(message) or False, {}, tmp_path)

    class Slow(toy.Toy):
        def forward(self, batch):
            num_sent = len(messages)
            while len(messages) < num_sent + 2:  # of which one was observed in this forward
                time.sleep(0.005)
            return super().forward(batch)

    plan = SamplePlan(num_rows=8, global_batch_size=8, world_size=1, seed=1, steps=1)
    with beat.running(0):
        toy.run(Slow(), plan, micro=2, heartbeat=beat, callbacks=(beat,))
    in_step = {message["progress"] for message in messages if message.get("step") == 0}
    assert len(in_step) >= 7  # four micro-batches, three of them in both passes


def test_hang_writes_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    messages = []

    def send(message):
        messages.append(message)
        return True

    with Heartbeat(send, {"rank": 0}, tmp_path).running(5):
        wait_until(lambda: len(messages) >= 2)  # the stacks are written after the first
    assert "test_heartbeat.py" in (tmp_path / "stacks" / "step-5-rank-0.txt").read_text()
