"""Muon against torch's in one process; on meshes it is tested in tests/strategies/test_mesh_options.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from fleet.strategies._shared.muon import COEFFICIENTS, gathered, orthogonal
from fleet.strategies._shared.parameter_layout import Layout, set_layout
from fleet.strategies.sharding.units import check_divided


def net() -> nn.Sequential:
    """Returns a model with tall and wide matrices."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


def train(model: nn.Module, *optimizers: Any) -> list[torch.Tensor]:
    """Returns the parameters after five steps."""
    for step in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_that_of_torch(nesterov: bool) -> None:
    """Muon: bit-equal to torch.optim.Muon for matrices and torch.optim.AdamW for the rest (Jordan et al., 2024)."""
    model = net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    expected = train(
        model,
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, nesterov=nesterov, ns_steps=4),
        torch.optim.AdamW(others, 3e-4, (0.9, 0.95), 1e-10, weight_decay=0.0),
    )
    twin = net()
    made = fleet.optimizer.Muon(twin.parameters(), nesterov=nesterov, ns_steps=4, weight_decay=0.1)
    torch.testing.assert_close(train(twin, made), expected, atol=0, rtol=0)


def test_orthogonal_by_the_formula() -> None:
    """Singular values go through p(s) = a s + b s^3 + c s^5, five times; the directions stay."""
    a, b, c = COEFFICIENTS
    matrix = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonal(matrix, 5, torch.float64), u @ s.diag() @ v)
    assert (s > 0.6).all()
    assert (s < 1.3).all()


def test_groups_say_which_rule() -> None:
    """use_muon chooses; convolutions count as matrices there; settings of a group stand before the defaults."""
    conv, head = nn.Conv2d(2, 4, 3, bias=False), nn.Linear(4, 2)
    groups = [
        {"params": conv.weight, "use_muon": True, "lr": 0.5},
        {"params": list(head.parameters()), "use_muon": False},
    ]
    optimizer = fleet.optimizer.Muon(groups, adamw_lr=0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    before = conv.weight.detach().clone()
    conv(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    step = ((before - conv.weight.detach()) / 0.5).flatten(1)
    assert conv.weight.grad is not None
    torch.testing.assert_close(
        step, orthogonal(conv.weight.grad.flatten(1) * 0.05, 5, torch.bfloat16), atol=0.02, rtol=0
    )
    state = optimizer.state_dict()
    twin = fleet.optimizer.Muon(groups, adamw_lr=0.25)
    twin.load_state_dict(state)
    assert twin.state[conv.weight].keys() == {"momentum_buffer"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"lr": -1.0}, "at least 0"),
        ({"momentum": 1.0}, "below 1"),
        ({"ns_steps": 0}, "at least 1"),
        ({"weight_decay": "much"}, "takes a number"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        fleet.optimizer.Muon(net().parameters(), **arguments)


def test_refused() -> None:
    """Vectors, sparse gradients, stages 2 and 3 of sharding, parts without a job."""
    layer = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="fewer than two dims"):
        fleet.optimizer.Muon([{"params": [layer.bias], "use_muon": True}])
    with pytest.raises(ConfigError, match="is empty"):
        fleet.optimizer.Muon([])
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = fleet.optimizer.Muon(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="dense gradients"):
        optimizer.step()
    for made in (optimizer, torch.optim.Muon([layer.weight])):
        with pytest.raises(ConfigError, match=r"orthogonalizes the update of a whole matrix.*to 1"):
            check_divided(made)
    set_layout(layer, "weight", Layout("mp", 0, 2, 0, (4, 2)))
    with pytest.raises(AssertionError, match="divided over 'mp'"):
        gathered([torch.zeros(2, 2)], [layer.weight])
