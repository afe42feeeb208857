"""Fake GPUs are as strict as real ones about devices of tensors and host synchronizations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.fake_cuda import CPU, DEVICES, made_up_gpus

pytestmark = pytest.mark.usefixtures("one_thread")
GPU, OTHER = DEVICES


class Reaching(nn.Module):
    """A common mistake: a constant that stays on the host."""

    def forward(self, numbers):
        return numbers * torch.ones(3)


@pytest.mark.parametrize("elsewhere", [CPU, OTHER])
def test_tensors_on_different_devices_are_refused(monkeypatch, elsewhere):
    with made_up_gpus(monkeypatch):
        numbers = torch.ones(3, device=GPU)
        with pytest.raises(RuntimeError, match="same device"):
            numbers + torch.ones(3, device=elsewhere)
        with pytest.raises(RuntimeError, match="same device"):
            Reaching().to(GPU)(numbers)
        assert (numbers + torch.ones((), device=CPU)).device == GPU  # a scalar may
        assert torch.equal((numbers.to(elsewhere) + torch.ones(3, device=elsewhere)).cpu(), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.item,
        float,
        bool,
        torch.nonzero,
        torch.Tensor.cpu,
        lambda tensor: tensor.to("cpu"),
        lambda tensor: tensor.reshape(1)[tensor.reshape(1) > 0],
        lambda tensor: tensor.reshape(1).tolist(),
        lambda tensor: tensor.reshape(1)[torch.tensor([0])],
        lambda tensor: tensor.reshape(1).copy_(torch.ones(1)),
        lambda tensor: torch.ones(1).copy_(tensor),
        lambda tensor: torch.ones(1).to(tensor.device),
        lambda tensor: torch.tensor(1.0, device=tensor.device),
    ],
)
def test_each_host_synchronization_is_counted(monkeypatch, read):
    with made_up_gpus(monkeypatch) as waits:
        number = torch.ones((), device=GPU) * 2
        assert waits.count == 0
        read(number)
        assert waits.count == 1


def test_gradients_equal_those_of_torch_autograd(monkeypatch):
    def gradients(device):
        torch.manual_seed(1)
        weights = torch.randn(4, 3, dtype=torch.float64).to(device).requires_grad_()
        shift = torch.randn(3, dtype=torch.float64).to(device).requires_grad_()
        hidden = (weights @ weights.T).softmax(1) @ weights + shift  # used three times, and broadcast
        first, second = hidden.split([1, 3])
        (first.sum() * second.logsumexp(0)).sum().backward()
        return [weights.grad.cpu(), shift.grad.cpu()]

    plain = gradients(CPU)
    with made_up_gpus(monkeypatch):
        there = gradients(GPU)
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(plain, there, strict=True))
