"""global_scatter and global_gather (surface 12)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fleet.errors import ConfigError
from fleet.moe.expert_clip import ClipGradForMOEByGlobalNorm
from fleet.moe.expert_mesh import ExpertMesh, expert_group
from fleet.moe.token_exchange import exchange_rows, expert_order, global_gather, global_scatter
from tests.helpers.workers import run_workers

# The rows that each worker has for experts 0 and 1 of worker 0, then of worker 1.
COUNTS = [[2, 1, 1, 1], [1, 1, 2, 1]]


def exchanged(rank: int, world_size: int) -> list[Any]:
    """Scatters and gathers as the example of the original's documentation, with unequal counts."""
    x = (torch.arange(5.0).view(5, 1) + 10 * rank).requires_grad_()
    here = torch.tensor(COUNTS[rank])
    there = torch.tensor([COUNTS[worker][2 * rank + expert] for worker in range(2) for expert in range(2)])
    arrived = global_scatter(x, here, there, dist.group.WORLD)
    back = global_gather(arrived, here, there, dist.group.WORLD)
    (back * back.detach()).sum().backward()
    with pytest.raises(ConfigError, match="adds up to 5 rows, and x has 4"):
        global_scatter(x[:4], here, there, dist.group.WORLD)
    with pytest.raises(ConfigError, match="one entry for each expert"):
        global_scatter(x, here[:3], there, dist.group.WORLD)
    assert x.grad is not None
    return [arrived.flatten().tolist(), torch.equal(back, x), torch.equal(x.grad, x)]


def test_rows_go_by_expert_then_by_worker_and_return() -> None:
    """Surface 12: by expert, then by worker; the pair of them is the identity, and so is its backward."""
    first, second = run_workers(exchanged, 2)
    assert first == [[0.0, 1.0, 10.0, 2.0, 11.0], True, True]
    assert second == [[3.0, 12.0, 13.0, 4.0, 14.0], True, True]


def test_alone() -> None:
    """One worker keeps its rows, in the order of its experts."""
    x = torch.arange(3.0).view(3, 1)
    counts = torch.tensor([1, 2])
    group: Any = None
    assert torch.equal(global_scatter(x, counts, counts, group), x)
    assert exchange_rows(x, [3], [3], None) is x
    assert expert_order(torch.tensor([[1, 2], [1, 0]])).tolist() == [0, 3, 1, 2]
    mesh = ExpertMesh()
    assert (mesh.size, mesh.rank, mesh.group, expert_group()) == (1, 0, None, None)
    assert ClipGradForMOEByGlobalNorm(2.0, lambda p: False).clip_norm == 2.0
