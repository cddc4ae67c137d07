"""Marks of experts: on parameters and on modules, also after a copy; values of the workers that hold the same ones."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import nn

from fleet.job.axes import make_axes
from fleet.strategies._shared.experts import expert_modules, expert_names, is_expert, mark_experts, share_experts
from tests.helpers.workers import run_workers


class Holder(nn.Module):
    """A module with experts, one of which has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
        mark_experts(self.experts)


def test_marks_survive_a_copy() -> None:
    """Surface 12: expert and no_sync as scripts read them; a deep copy is marked when its modules are looked at."""
    model = Holder()
    assert is_expert(model.experts[0].weight)
    assert not is_expert(model.dense.weight)
    assert model.experts[0].weight.no_sync
    twin = copy.deepcopy(model)
    assert [name for name, _ in expert_modules(twin)] == ["experts"]
    assert is_expert(twin.experts[0].weight)
    buffers = ["experts.1.running_mean", "experts.1.running_var", "experts.1.num_batches_tracked"]
    assert expert_names(twin) == ["experts.0.weight", "experts.0.bias", *buffers]


def shared(rank: int, world_size: int) -> list[Any]:
    """Returns this worker's expert after the first holder of it has given its values."""
    axes = make_axes({"dp": 1, "sharding": 4}, rank, dist.group.WORLD, 60.0, {"moe_sharding": 2, "ep": 2})
    model = Holder()
    model.experts[0].weight.data.fill_(float(rank))
    model.dense.weight.data.fill_(float(rank))
    share_experts(model, axes)
    groups = [axes.ranks("ep"), axes.ranks("moe_sharding"), axes.ranks("pp", "ep")]
    found = [float(t[0, 0]) for t in (model.experts[0].weight, model.dense.weight)]
    return [*groups, axes.rank("ep"), axes.size("moe_sharding", "ep"), *found]


def test_copies_of_an_expert_start_equal() -> None:
    """Surface 1.4: workers along moe_sharding hold the same experts; the first of them gives the values."""
    for rank, found in enumerate(run_workers(shared, 4)):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert found == [pair, (rank % 2, rank % 2 + 2), pair, rank % 2, 4, float(rank % 2), float(rank)]
