"""Backward without a CUDA driver, because torch's engine requests streams even for fake `cuda` tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def backward(
    roots: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
    keep_graph: bool,
    create_graph: bool,
    inputs: tuple[Tensor, ...] = (),
    *_: Any,
    **__: Any,
) -> tuple[Tensor | None, ...]:
    """Run the graph in topological order like torch's engine, without streams."""
    wanted = [_edge(tensor) for tensor in inputs]
    waiting: dict[Any, list[Tensor | None]] = {}
    arrived: dict[tuple[Any, int], Tensor] = {}
    with torch.no_grad():
        for root, gradient in zip(roots, gradients, strict=True):
            _arrive(waiting, arrived, _edge(root), gradient)
        for node in _in_order([_edge(root)[0] for root in roots]):
            given = waiting.pop(node, None)
            if given is None or (wanted and "AccumulateGrad" in node.name()):
                continue
            out = node(*given) if callable(node) else node.apply(*given)
            for edge, gradient in zip(node.next_functions, out if isinstance(out, tuple) else (out,), strict=False):
                if edge[0] is not None and gradient is not None:
                    _arrive(waiting, arrived, edge, gradient)
    return tuple(arrived.get(edge) for edge in wanted)


def _edge(tensor: Tensor) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _arrive(
    waiting: dict[Any, list[Tensor | None]],
    arrived: dict[tuple[Any, int], Tensor],
    edge: tuple[Any, int],
    gradient: Tensor,
) -> None:
    """Add a gradient to the inputs of a node, in the shape, dtype and device that the node expects."""
    node, slot = edge
    expected = node._input_metadata[slot]
    if gradient.device != expected.device:
        raise RuntimeError(f"{node.name()} on {expected.device} gets a gradient on {gradient.device}")
    gradient = gradient.sum_to_size(expected.shape).to(expected.dtype)
    slots = waiting.setdefault(node, [None] * len(node._input_metadata))
    before = slots[slot]
    slots[slot] = arrived[edge] = gradient if before is None else before + gradient


def _in_order(roots: list[Any]) -> list[Any]:
    """Nodes of a graph in topological order."""
    seen, order, ahead = set(), [], [(root, False) for root in roots]
    while ahead:
        node, done = ahead.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            ahead.append((node, True))
            ahead.extend((following, False) for following, _ in node.next_functions if following is not None)
    return order[::-1]
