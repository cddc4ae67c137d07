"""use_hierarchical_allreduce: the sum over all workers on two levels."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.workers import run_workers
from tests.strategies.test_fp16_allreduce import fp16_gradient


def test_hierarchical_allreduce_on_two_levels() -> None:
    """A.1 use_hierarchical_allreduce: 4 workers in groups of 2 get the mean over all, also in float16."""
    results = run_workers(fp16_gradient, 4, "float16", 2, backend=None)
    for result in results:
        torch.testing.assert_close(result, torch.tensor([[1 / 3, 0.1, 2050.5]]), atol=1.0, rtol=1e-3)
        torch.testing.assert_close(result, results[0], atol=0, rtol=0)


def hierarchical_sums(rank: int, world_size: int) -> list[float]:
    """Returns what the two levels add up, and how many groups this worker sends to."""
    from fleet.strategies.use_hierarchical_allreduce import TwoLevels

    everyone = tuple(range(world_size))
    levels = TwoLevels(everyone, [everyone], 2)
    calls: list[str] = []
    for name in ("reduce", "all_reduce", "broadcast"):
        real = getattr(torch.distributed, name)

        def counted(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            calls.append(_name)
            return _real(*args, **kwargs)

        setattr(torch.distributed, name, counted)
    tensor = torch.tensor([float(rank + 1)])
    levels.sum(tensor).wait()
    return [tensor.item(), float(calls.count("all_reduce"))]


def test_only_leaders_talk_between_groups() -> None:
    """A.1 use_hierarchical_allreduce: the sum is right, and one worker of each group talks to the other group."""
    assert run_workers(hierarchical_sums, 4) == [[10.0, 1.0], [10.0, 0.0], [10.0, 1.0], [10.0, 0.0]]
