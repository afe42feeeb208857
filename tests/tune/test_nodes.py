"""A sweep on several Ray nodes: as many concurrent trials as fit, without CPU contention."""

import json

import pytest

from mmray.config.search_space import parse_space
from mmray.tune.search import Sweep, search
from mmray.tune.trials import reset_searched
from tests.made import make_set, row
from tests.nodes import several_nodes
from tests.train.runs import config
from tests.tune.test_search import Watching

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]  # takes two minutes


@pytest.fixture
def nodes():
    with several_nodes({"num_cpus": 4}, {"num_cpus": 4}) as cluster:
        yield cluster


def test_two_trials_run_concurrently(nodes, tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(50)])
    recipe = config(tmp_path / "set", tmp_path, "sweep", address=nodes.address)
    text = recipe.model.text.model_copy(update={"dropout": 0.0})  # masks are drawn for each micro-batch
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"text": text})})
    typed = reset_searched(recipe, [])
    length = typed.model_copy(update={"train": typed.train.model_copy(update={"steps": 4})})
    listener = Watching()
    outcome = search(Sweep(recipe, length, parse_space(["batch.micro=4,8"])), listener)
    assert (outcome.summary["status"], outcome.summary["concurrency"]) == ("finished", 2)
    together = max(sum(row["status"] == "running" for row in table) for table in listener.tables)
    assert together == 2
    cut, whole = (json.loads(line) for line in (outcome.path / "trials.jsonl").read_text().splitlines())
    assert (cut["accumulation"], whole["accumulation"]) == (2, 1)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-4)  # one global batch for any split
