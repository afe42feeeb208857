"""Training on two data sets on Ray with two workers: the rows of each step, and a stop halfway."""

import pytest

from mmray.config.data import FULL_SHUFFLE
from mmray.data.store.mixture import MixtureComponent
from mmray.errors import UsageError
from mmray.training.driver import train
from mmray.training.resolve import resolve_run
from tests.made import make_set, png, row
from tests.training.runs import (
    STEPS,
    Silent,
    Stopping,
    config,
    expected_marks,
    lines,
    marks,
    same_weights,
    weights,
)


@pytest.fixture
def sets(tmp_path):
    """Two data sets: 30 rows, 20 of them held out, with weight 1; 8 rows with the same keys, with
    weight 1.5.
    """
    make_set(
        tmp_path / "one",
        [row(number) for number in range(30)],
        [row(number) for number in range(100, 120)],
    )
    make_set(tmp_path / "two", [row(number, png(150 + number)) for number in range(8)])
    return f"{tmp_path / 'one'} + 1.5 * {tmp_path / 'two'}"


def test_mixture_epoch_has_weighted_rows_of_each_set(sets, tmp_path):
    ready = resolve_run(config(sets, tmp_path, "r"), Silent())
    assert ready.data_identity["num_rows"] == 42 and ready.data_identity["train"] == sets
    assert ready.eval_sets[""].num_rows == 20 and ready.eval_sets[""].keys()[0] == "row-100"
    assert ready.config.data.shuffle_blocks == FULL_SHUFFLE
    again = resolve_run(config(sets.replace("1.5 * ", ""), tmp_path, "r"), Silent())
    assert again.data_identity["num_rows"] == 38
    assert again.data_identity["fingerprint"] != ready.data_identity["fingerprint"]
    shares = sets.replace("1.5 * ", "").replace(" + ", ":3 + ") + ":1"
    by_share = resolve_run(config(shares, tmp_path, "r"), Silent())
    assert by_share.data_identity["num_rows"] == 38 and by_share.data_identity["train"] == shares
    assert [part.per_epoch for part in by_share.train_set.components] == [28, 10]


@pytest.mark.slow  # two minutes
@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_mixture_resumes_bitwise_after_stop(local_ray, sets, tmp_path):
    listener = Silent()
    calm = train(config(sets, tmp_path / "runs", "calm"), listener)
    assert (
        "mixture",
        "12 rows of two per epoch (28.6 %); it has 8, each taken 1.5 times",
    ) in listener.notes
    assert (
        calm.result["status"] == "finished"
        and calm.result["metrics"]["recall_at_10/image_to_text"] >= 0
    )
    names = [f"one/row-{number}" for number in range(30)] + [
        f"two/row-{number}" for number in range(8)
    ]
    parts = (MixtureComponent(30, 30), MixtureComponent(8, 12))
    expected = list(expected_marks(STEPS, 42, names=names, components=parts))
    assert marks(calm.path) == expected
    first = train(
        config(sets, tmp_path / "runs", "stopped", ("tests.training.faults:Slowly",)), Stopping(1)
    )
    assert first.result["status"] == "stopped" and 0 < first.result["steps"] < STEPS
    second = train(config(sets, tmp_path / "runs", "stopped"), Silent())
    assert marks(second.path) == expected
    assert same_weights(weights(second.path), weights(calm.path))
    assert [line["train/loss"] for line in lines(second.path)] == [
        line["train/loss"] for line in lines(calm.path)
    ]
    with pytest.raises(UsageError, match="has other settings"):
        train(config(sets.replace("1.5", "2"), tmp_path / "runs", "stopped"), Silent())
