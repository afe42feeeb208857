"""Times of attention and of blocks of CLIP's encoders, forward and backward, by how they are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmray.errors import first_line, is_out_of_memory
from mmray.models.attention import fuse_projections
from mmray.models.clip import Clip
from tests.gpu.workload import Case, recipe, rows_of, time_calls

BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
VARIANTS = ("as in a run", "three products", "no mix-order reductions")


def blocks(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) that time one attention and one compiled block of each
    encoder of the recipe `clip`, forward and backward, in bf16.

    Args:
        device: The device to measure.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns a dict
        or a list of dicts with a `case`, with `ms` and its `lowest` and `highest`, or `skipped`
        with the reason. Attention is timed by backend of scaled_dot_product_attention, with q, k
        and v in one tensor, as one matrix product returns them, and in three. A block is timed as a
        run computes it, with three matrix products for q, k and v, and without inductor's kernels
        that reduce along both dimensions of a matrix.
    """
    rows = rows_of(device)[0]
    spec: Any = recipe("clip", device).model
    config = Clip.default_hf_config(spec, vocab_size=512)
    patches = (spec.inputs.image_side // spec.image.patch) ** 2
    encoders = {
        "image": (config.vision_config, (rows, patches + 1)),
        "text": (config.text_config, (rows, spec.inputs.max_tokens)),
    }
    for name, (part, shape) in encoders.items():
        yield f"{name} attention", partial(_time_attention, name, part, shape, device)
    for name, (part, shape) in encoders.items():
        for variant in VARIANTS:
            case = f"{name} block, {variant}"
            yield case, partial(_time_block, name, part, shape, device, variant)


def _time_attention(
    encoder: str, config: Any, shape: tuple[int, int], device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each backend and layout of q, k and v; `shape` is (rows, tokens)."""
    heads = config.num_attention_heads
    sizes = (*shape, 3, heads, config.hidden_size // heads)
    packed = torch.randn(sizes, device=device, dtype=torch.bfloat16)
    layouts = {
        "one tensor": packed.unbind(2),
        "three tensors": [part.clone() for part in packed.unbind(2)],
    }
    gradient = packed[:, :, 0].clone().transpose(1, 2)
    results = []
    for backend_name, backend in BACKENDS.items():
        for layout, parts in layouts.items():
            inputs = [part.transpose(1, 2).detach().requires_grad_() for part in parts]

            def step(inputs: list[Tensor] = inputs) -> None:
                query, key, value = inputs
                is_causal = encoder == "text"
                output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
                torch.autograd.grad(output, inputs, gradient)

            case = f"{encoder} attention, {backend_name}, q, k and v in {layout}"
            results.append({"case": case} | _time_with_backend(step, backend))
    return results


def _time_with_backend(step: Callable[[], None], backend: SDPBackend | None) -> dict[str, Any]:
    if backend is None:
        return _time_ms(step)
    with sdpa_kernel(backend):
        try:
            step()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            # The backend does not support the device or the shape.
            return {"skipped": first_line(error)}
        return _time_ms(step)


def _time_block(
    encoder: str, config: Any, shape: tuple[int, int], device: torch.device, variant: str
) -> dict[str, Any]:
    """Time a block, computed in one of VARIANTS; `shape` is (rows, tokens)."""
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    mix_orders = variant != "no mix-order reductions"
    if device.type != "cuda" and not mix_orders:
        return {"skipped": "inductor has them on GPUs only"}
    config._attn_implementation = "sdpa"
    block: nn.Module = CLIPEncoderLayer(config).to(device)
    if variant != "three products":
        fuse_projections(block)
    if device.type == "cuda":  # on a CPU the same code is eager
        torch.compiler.reset()
        options = {"triton.mix_order_reduction": mix_orders}
        block.compile(dynamic=True if encoder == "text" else None, options=options)
    hidden = torch.randn(*shape, config.hidden_size, device=device, dtype=torch.bfloat16)
    hidden.requires_grad_()
    inputs = [hidden, *block.parameters()]

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            output = block(hidden, attention_mask=None, is_causal=encoder == "text")
        torch.autograd.grad(output, inputs, hidden)

    return _time_ms(step)


def _time_ms(step: Callable[[], None]) -> dict[str, float]:
    """Return the median, lowest and highest milliseconds of a call, after a first one."""
    step()
    times = time_calls(step)
    return {
        "ms": times.median * 1e3,
        "lowest": min(times.times) * 1e3,
        "highest": max(times.times) * 1e3,
    }
