"""sync_batch_norm on the CPU equals one batch norm over the union of the workers' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fleet.strategies.sync_batch_norm import SharedBatchNorm, convert_batch_norm
from tests.helpers.workers import run_workers


def data(rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the same values on every rank."""
    return torch.randn(rows, 3, *shape, generator=torch.Generator().manual_seed(7)) * 2 + 5


def run_shared(rank: int, world_size: int, shape: tuple[int, ...], counts: list[int]) -> dict[str, Any]:
    """Runs one step on this rank's rows with shared statistics."""
    norm = convert_batch_norm(nn.BatchNorm2d(3) if shape else nn.BatchNorm1d(3), torch.distributed.group.WORLD)
    start = sum(counts[:rank])
    x = data(sum(counts), shape)[start : start + counts[rank]].clone().requires_grad_()
    y = norm(x)
    (y * torch.arange(1, y.numel() + 1).view_as(y).remainder(7)).sum().backward()
    return {
        "y": y.detach(),
        "gx": x.grad,
        "gw": norm.weight.grad,
        "gb": norm.bias.grad,
        "mean": norm.running_mean,
        "var": norm.running_var,
    }


def expected(shape: tuple[int, ...], counts: list[int]) -> tuple[Any, Any, Any]:
    """Runs plain batch norm over all rows with the same loss per rank; returns outputs, input gradients, module."""
    norm: Any = nn.BatchNorm2d(3) if shape else nn.BatchNorm1d(3)
    x = data(sum(counts), shape).requires_grad_()
    y = norm(x)
    loss = torch.zeros(())
    for part in y.split(counts):
        loss = loss + (part * torch.arange(1, part.numel() + 1).view_as(part).remainder(7)).sum()
    loss.backward()
    return y.detach(), x.grad, norm


def test_equals_one_norm_over_all_rows() -> None:
    """A.1 sync_batch_norm: outputs, gradients and running statistics, with uneven batches."""
    for shape, counts in (((4, 5), [4, 2]), ((), [3, 5])):
        results = run_workers(run_shared, 2, shape, counts)
        y, gx, norm = expected(shape, counts)
        close = {"atol": 2e-5, "rtol": 1e-5}
        torch.testing.assert_close(torch.cat([r["y"] for r in results]), y, **close)
        torch.testing.assert_close(torch.cat([r["gx"] for r in results]), gx, **close)
        torch.testing.assert_close(sum(r["gw"] for r in results), norm.weight.grad, **close)
        torch.testing.assert_close(sum(r["gb"] for r in results), norm.bias.grad, **close)
        for result in results:
            torch.testing.assert_close(result["mean"], norm.running_mean, **close)
            torch.testing.assert_close(result["var"], norm.running_var, **close)


def test_conversion_keeps_parameters_and_eval_uses_running_statistics() -> None:
    """The converted module holds the same parameters, and in eval mode needs no peer."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight = net[1].weight
    net[1].running_mean.fill_(2.0)
    converted = convert_batch_norm(net, None).eval()
    assert isinstance(converted[1], SharedBatchNorm)
    assert converted[1].weight is weight
    assert list(converted.state_dict()) == list(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).state_dict())
    x = torch.full((2, 3), 2.0)
    torch.testing.assert_close(converted[1](x), torch.zeros(2, 3))
