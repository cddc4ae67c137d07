"""Lookups whose gradients are summed in the order of the ids, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fleet.ps.embeddings.row_sums import MANY_IDS, picked, pooled


def case(bags: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, places and starts; some bags are empty."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (bags,), generator=draw)
    places = torch.randint(0, 7, (int(lengths.sum()),), generator=draw, dtype=torch.int32)
    return torch.randn(7, 3, generator=draw), places, lengths.cumsum(0) - lengths


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_those_of_torch(mode: str) -> None:
    rows, places, starts = case(20)
    factors = torch.randn(20, 3)
    gradients = []
    for look_up in (pooled, lambda r, p, s, m: F.embedding_bag(p, r, s, mode=m)):
        leaf = rows.clone().requires_grad_()
        found = look_up(leaf, places, starts, mode)
        (found * factors).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(pooled(rows, places, starts, mode), found)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_beside_others_have_the_same_gradients(mode: str) -> None:
    parts = [case(300, seed) for seed in range(4)]
    factors = torch.randn(300, 3)
    alone = []
    for rows, places, starts in parts:
        leaf = rows.clone().requires_grad_()
        (pooled(leaf, places, starts, mode) * factors).sum().backward()
        alone.append(leaf.grad)
    leaf = torch.cat([rows for rows, _, _ in parts]).requires_grad_()
    places = torch.cat([own + 7 * number for number, (_, own, _) in enumerate(parts)]).int()
    before = torch.tensor([0, *(len(own) for _, own, _ in parts)]).cumsum(0)
    starts = torch.cat([own + before[number] for number, (_, _, own) in enumerate(parts)])
    (pooled(leaf, places, starts, mode) * factors.repeat(4, 1)).sum().backward()
    assert torch.equal(leaf.grad, torch.cat(alone))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_of_bags_have_gradients(mode: str) -> None:
    rows, places, starts = case(20)
    second = []
    for create_graph in (True, False):
        leaf = rows.clone().requires_grad_()
        found = pooled(leaf, places, starts, mode).pow(3).sum()
        (gradient,) = torch.autograd.grad(found, leaf, create_graph=create_graph)
        second.append(gradient)
    torch.testing.assert_close(second[0].detach(), second[1])
    second[0].square().sum().backward()
    assert second[0].grad_fn is not None


@pytest.mark.parametrize("count", [MANY_IDS - 1, MANY_IDS])
def test_rows_are_picked_as_by_torch(count: int) -> None:
    places = torch.randint(0, 7, (count,), dtype=torch.int32)
    gradients = []
    for look_up in (picked, torch.embedding):
        leaf = torch.ones(7, 3, requires_grad=True)
        (look_up(leaf, places) * torch.sin(torch.arange(3.0 * count)).view(count, 3)).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
