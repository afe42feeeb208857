"""How many CPUs decode for N GPUs, and what they cost."""

import math

from mmray import cli
from mmray.bench import data_nodes
from mmray.config import recipes
from mmray.console.reporter import ConsoleReporter


def test_cpus_follow_from_measured_rates_and_prices(monkeypatch):
    monkeypatch.setattr(data_nodes, "measure_decoding", lambda inputs: 400.0)
    plan = data_nodes.plan_data_nodes(recipes.load("clip"), 8, 1000.0, gpu_price=2.0, cpu_price=0.1)
    assert plan.cpus == math.ceil(1.25 * 8000 / 400) == 25
    assert plan.cost_per_hour == 8 * 2.0 + 25 * 0.1
    monkeypatch.setattr(data_nodes, "measure_step", lambda config: (50.0, "CPU"))
    plan = data_nodes.plan_data_nodes(recipes.load("clip"), 2)
    assert (plan.samples_per_s, plan.device, plan.cost_per_hour) == (100.0, "CPU", None)


def test_command_measures_decoding(monkeypatch, capsys):
    monkeypatch.setattr(data_nodes, "DECODE_S", 0.2)
    words = ["doctor", "--recipe", "clip", "--gpus", "4", "--samples-per-s", "800"]
    assert cli.run([*words, "--cpu-price", "0.05"], ConsoleReporter()) == 0
    printed = capsys.readouterr().out
    assert "4 GPUs     800 samples/s each (given)" in printed and "cores on data nodes" in printed
    assert "per hour" in printed
