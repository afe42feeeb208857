"""What a worker imports before its first step: the time of a start is mostly that of imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.models.test_pretrained import DECLARED, OpenClip, saved

HEAVY = (
    "{'transformers', 'torchvision', 'torch._dynamo', 'torch.distributed.checkpoint', "
    "'torch.distributed.tensor', 'sympy'}"
)
STEP = f"""
import sys, torch, mmray.engine.worker
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
print(sorted({HEAVY} & sys.modules.keys()))
"""


def test_step_of_the_sample_imports_only_torch():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_models_of_transformers_import_neither_scipy_nor_torchao():
    code = """
import sys
from importlib.util import find_spec
from mmray.config import recipes
from mmray.models.build import import_libraries
model = recipes.clip().model
import_libraries(model)
print(sorted({'scipy', 'torchao'} & sys.modules.keys()))
import transformers.utils as utils
print(utils.is_scipy_available(), utils.is_torchao_available())
print(find_spec("scipy").name, find_spec("torchao").name)  # imports find them again
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = ["[]", "True True", "scipy torchao"]
    assert done.stdout.splitlines() == lines, done.stdout + done.stderr


def test_driver_of_a_run_without_ray_imports_neither_torch_nor_ray():
    code = "import sys, mmray.training.driver; print(sorted({'torch', 'ray'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_driver_reads_the_settings_of_open_clips_weights_without_torch(tmp_path: Path) -> None:
    """Its config declares sizes and preprocessing, and CLIP's merges define the tokenizer."""
    file = saved(tmp_path, OpenClip(quick=False), {"model_cfg": DECLARED})
    code = f"""
import sys
from mmray.training.recipe import load_recipe
from mmray.data.text.tokenizer_files import load_tokenizer
inputs = load_recipe("clip", weights={str(file)!r}).model.inputs
load_tokenizer(inputs.tokenizer, None)
print(inputs.image_side, sorted({{'torch', 'transformers'}} & sys.modules.keys()))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "48 []"
