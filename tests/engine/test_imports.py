"""What a worker and a driver import before the first step: the time of a start is mostly that of
imports.

One new process takes the stages below in order, because each stage of its own would import torch
for seconds; nothing that a stage must not import has been imported before it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.models.test_pretrained import DECLARED, OpenClip, saved

STAGES = """
import sys

def imported(*names):
    print(sorted(set(names) & sys.modules.keys()))

# The settings of open_clip's weights.
from mmray.training.recipe import load_recipe
from mmray.data.text.tokenizer_files import load_tokenizer
inputs = load_recipe("clip", weights=sys.argv[1]).model.inputs
load_tokenizer(inputs.tokenizer, None)
print(inputs.image_side)
imported("torch", "transformers")

# A driver without Ray.
import mmray.training.driver
imported("torch", "ray")

# A step of the sample.
import torch, mmray.engine.worker
from mmray.config import recipes
from mmray.engine.metrics.meters import model_flops_of_row
from mmray.engine.optimizer import backward, build_optimizer
from mmray.engine.precision import select_precision
from mmray.models.build import build, import_libraries
from mmray.models.synthetic import synthetic_batch

config = recipes.sample()
import_libraries(config.model)
model = build(config.model, 512)
optimizer = build_optimizer(model, config.optimizer)
batch = synthetic_batch(config.model.inputs, 512, 2, "cpu")
model_flops_of_row(model, batch, select_precision("fp32", torch.device("cpu")))
outputs = model(batch)
backward([outputs["image_embed"]], [outputs["text_embed"].detach()])
optimizer.step()
optimizer.zero_grad()
imported(
    "transformers", "torchvision", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.distributed.tensor", "sympy",
)

# A model of transformers; later imports find the packages that it hides.
from importlib.util import find_spec
import_libraries(recipes.clip().model)
imported("scipy", "torchao")
import transformers.utils as utils
print(utils.is_scipy_available(), utils.is_torchao_available())
print(find_spec("scipy").name, find_spec("torchao").name)

# The device of a worker of Ray.
from mmray.config import Config
from mmray.training.workers.ray_trainer import get_device
print(get_device(Config().with_cluster(accelerator="cpu")))
imported("ray.train.torch")

# Adapters.
sys.stderr.flush()
print("stderr of peft:", file=sys.stderr)
import peft
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The process, which has ended."""
    declared = {"model_cfg": DECLARED}
    weights = saved(tmp_path_factory.mktemp("weights"), OpenClip(quick=False), declared)
    command = [sys.executable, "-W", "ignore", "-c", STAGES, str(weights)]
    return subprocess.run(command, capture_output=True, text=True)


def printed(done: subprocess.CompletedProcess[str], first: int, count: int) -> list[str]:
    """Lines of the output, or that and the error if there are fewer."""
    lines = done.stdout.splitlines()[first : first + count]
    assert len(lines) == count, done.stdout + done.stderr
    return lines


def test_driver_reads_the_settings_of_open_clips_weights_without_torch(done) -> None:
    """Its config declares sizes and preprocessing, and CLIP's merges define the tokenizer."""
    assert printed(done, 0, 2) == ["48", "[]"]


def test_driver_of_a_run_without_ray_imports_neither_torch_nor_ray(done) -> None:
    assert printed(done, 2, 1) == ["[]"]


def test_step_of_the_sample_imports_only_torch(done) -> None:
    assert printed(done, 3, 1) == ["[]"]


def test_models_of_transformers_import_neither_scipy_nor_torchao(done) -> None:
    assert printed(done, 4, 3) == ["[]", "True True", "scipy torchao"]


def test_device_of_a_worker_on_cpus_is_known_without_rays_torch_library(done) -> None:
    assert printed(done, 7, 2) == ["cpu", "[]"]


def test_adapters_import_packages_without_warnings(done) -> None:
    assert done.returncode == 0 and done.stderr.endswith("stderr of peft:\n"), done.stderr
