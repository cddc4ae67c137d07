"""What workers on a mesh must have alike, checked before they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fleet
from fleet.checks.equal_states import group_that_differs, name_that_differs, same_parts, writers
from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear
from tests.helpers.workers import run_workers

AXES = Axes({"dp": 2, "mp": 2}, 0)


def test_groups() -> None:
    """Copies along dp, parts along mp."""
    said: list[Any] = [
        {"wrote": rank == 1, "whole": rank // 2, "parts": "ab"[rank % 2], "digest": rank % 2} for rank in range(4)
    ]
    assert group_that_differs(said, AXES, "digest", "dp") == ()
    assert group_that_differs(said, AXES, "digest", "mp") == (0, 1)
    assert group_that_differs(said, AXES, "whole", "dp") == (0, 2)
    assert writers(said, AXES) == ([1, 3], [0, 2])
    assert list(same_parts(said, AXES, "mp")) == []
    assert list(same_parts(said, AXES, "dp")) == [(0, 2), (1, 3)]
    assert name_that_differs(said, [(0, 2), (1, 3)]) == ("whole", [0, 2])
    assert name_that_differs(said[:1], [(0,)]) == ("", [0])


def net_of() -> torch.nn.Module:
    """Returns a divided model."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        ColumnParallelLinear(4, 4, has_bias=True, gather_output=False),
        RowParallelLinear(4, 4, input_is_parallel=True),
        torch.nn.Linear(4, 2),
    )


def wrong_loads(rank: int, world_size: int) -> dict[str, str]:
    """Loads states as scripts do that were written for data parallelism."""
    said = {}
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2}
    for case in ("right", "one part for all", "one worker alone", "another value", "later"):
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
        net = net_of()
        model = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        whole = model.full_state_dict()
        part = {name: value.clone() for name, value in net.state_dict().items()}
        for value in part.values():
            torch.distributed.broadcast(value, 0)
        try:
            if case == "later":
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            if case == "right":
                model.load_state_dict(whole)
            elif case == "one part for all":
                model.load_state_dict(part)
            elif case == "one worker alone" and rank == 0:
                model.load_state_dict(whole)
            elif case in ("another value", "later"):
                model.load_state_dict({**whole, "2.bias": torch.full((2,), float(rank))})
            model(torch.ones(2, 4)).sum().backward()
            said[case] = ""
        except ConfigError as error:
            said[case] = f"{error}"
    return said


def test_states_loaded_wrongly() -> None:
    """Each case raises on every worker, and names what and where."""
    for said in run_workers(wrong_loads, 2, backend=None):
        assert said["right"] == ""
        assert "hold the same part of every divided parameter" in said["one part for all"]
        assert "(ranks 0, 1)" in said["one part for all"]
        assert "Worker 0 loaded the model's state" in said["one worker alone"]
        for case in ("another value", "later"):
            assert "'2.bias' is whole on every worker along mp and differs" in said[case], said[case]


def test_nothing_written_nothing_said() -> None:
    """A worker that was absent has said nothing."""
    with pytest.raises(StopIteration):
        next(same_parts([{"parts": ""}, {"parts": ""}], Axes({"mp": 2}, 0), "mp"))
