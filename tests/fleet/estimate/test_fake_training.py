"""Fakes: copies without memory that keep what the original shares (issue 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fleet.estimate.fake_training import Fakes, mean_of_outputs


class Tied(nn.Module):
    """Shares a weight, and keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.masks = [torch.ones(4, 4)]


def test_a_copy_shares_what_the_original_shares() -> None:
    """Tied weights stay tied; types, strides and flags stay; every tensor is a fake."""
    model = Tied()
    model.a.weight.data = model.a.weight.data.t()
    with FakeTensorMode():
        fakes = Fakes(torch.device("cpu"))
        copied = fakes.model(model)
        assert isinstance(copied, Tied)
        assert copied.a.weight is copied.b.weight
        assert isinstance(copied.a.weight, nn.Parameter)
        assert copied.a.weight.stride() == model.a.weight.stride()
        assert isinstance(copied.counts, FakeTensor)
        assert copied.counts.dtype == torch.int64
        assert isinstance(copied.masks[0], FakeTensor)
        assert len(fakes.buffers) == 2
    assert not isinstance(model.a.weight, FakeTensor)


def test_an_optimizer_follows_the_copy() -> None:
    """Groups, settings and state move to the fakes."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with FakeTensorMode():
        fakes = Fakes(torch.device("cpu"))
        copied = fakes.model(model)
        moved = fakes.optimizer(optimizer, copied)
        assert [group["lr"] for group in moved.param_groups] == [0.5, 0.1]
        assert moved.param_groups[0]["params"] == [copied.weight]
        assert isinstance(moved.state[copied.weight]["exp_avg"], FakeTensor)
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_outputs_of_every_form() -> None:
    """The loss without a loss: the mean of what is floating and needs a gradient."""
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    output = {"a": [x, torch.tensor([7])], "b": (2 * x, torch.ones(2)), "c": None}
    loss: Tensor = mean_of_outputs(output)
    assert loss.item() == 2 + 4
