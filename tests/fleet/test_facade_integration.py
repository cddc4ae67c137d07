"""The fleet namespace on two gloo workers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, OptionWarning
from tests.helpers.workers import free_ports, run_workers, worker_environment


def queries(rank: int, world_size: int) -> dict[str, Any]:
    """Asks everything a worker may ask."""
    fleet.init(is_collective=True)
    fleet.barrier_worker()
    return {
        "rank": [
            fleet.worker_index(),
            fleet.rank(),
            fleet.worker_num(),
            fleet.nranks(),
            fleet.local_rank(),
            fleet.node_num(),
        ],
        "first": fleet.is_first_worker(),
        "endpoints": len(fleet.worker_endpoints()),
        "sum": fleet.all_reduce(np.array([rank + 1.0]), "sum").tolist(),
        "shard": fleet.util.get_file_shard(["a", "b", "c"]),
        "auc": float(fleet.metrics.auc(np.array([0.0, rank + 1.0]), np.array([2.0, 0.0]))),
    }


def test_queries_of_two_workers() -> None:
    """002-10, B.2, B.5, B.6: ranks, endpoints, reductions, file shards and metrics over the workers."""
    first, second = run_workers(queries, 2, backend=None)
    assert first["rank"] == [0, 0, 2, 2, 0, 1]
    assert second["rank"] == [1, 1, 2, 2, 1, 1]
    assert (first["first"], second["first"]) == (True, False)
    assert first["endpoints"] == 2
    assert first["sum"] == second["sum"] == [3.0]
    assert (first["shard"], second["shard"]) == (["a", "b"], ["c"])
    assert first["auc"] == second["auc"] == 1.0


def train(rank: int, world_size: int, order: str) -> dict[str, Any]:
    """Trains two steps; the strategy may come late, the seeds differ by rank."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    strategy = fleet.DistributedStrategy()
    strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
    if order == "init":
        fleet.init(is_collective=True, strategy=strategy)
        model = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(optimizer)
    else:
        fleet.init(is_collective=True)
        if order == "optimizer first":
            optimizer = fleet.distributed_optimizer(optimizer, strategy)
            model = fleet.distributed_model(net)
        else:
            model = fleet.distributed_model(net)
            optimizer = fleet.distributed_optimizer(optimizer, strategy)
    for step in range(2):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value for name, value in model.state_dict().items() if "running" not in name}


def test_strategy_may_come_with_either_call() -> None:
    """002-01, A0.13: the strategy counts wherever it is given, and the two calls may come in either order."""
    results = [run_workers(train, 2, order, backend=None) for order in ("init", "optimizer first", "model first")]
    for result in results:
        for name, value in results[0][0].items():
            torch.testing.assert_close(result[0][name], value, atol=0, rtol=0)
            torch.testing.assert_close(result[1][name], value, atol=0, rtol=0)


def optimizer_alone(rank: int, world_size: int) -> list[str]:
    """Steps an optimizer whose model was not wrapped."""
    fleet.init(is_collective=True)
    net = nn.Linear(2, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return [str(w.message) for w in caught if issubclass(w.category, OptionWarning)]


def test_optimizer_without_model_warns_once() -> None:
    """003-22: gradients would stay local; the user is told, once."""
    for said in run_workers(optimizer_alone, 2, backend=None):
        assert len(said) == 1
        assert "fleet.distributed_model" in said[0]


def model_alone(rank: int, world_size: int) -> torch.Tensor:
    """Trains a wrapped model with a plain optimizer."""
    fleet.init(is_collective=True)
    torch.manual_seed(rank)
    net = nn.Linear(2, 1)
    model = fleet.distributed_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((1, 2), float(rank))).sum().backward()
    optimizer.step()
    x = torch.ones(3, 2)
    exported = torch.export.export(model.module.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
    with pytest.raises(ConfigError, match="Record the module inside"):
        torch.export.export(model, (x,))
    return net.weight.detach().clone()


def test_model_without_optimizer_exchanges() -> None:
    """003-22, 003-31: with data parallel only, the wrapped model alone keeps workers equal; it exports as on one."""
    first, second = run_workers(model_alone, 2, backend=None)
    torch.testing.assert_close(first, second, atol=0, rtol=0)


def basic_form(rank: int, world_size: int) -> dict[str, Any]:
    """init_parallel_env and DataParallel, twice, with scale_loss and apply_collective_grads in the loop."""
    group = fleet.init_parallel_env()
    again = fleet.init_parallel_env()
    torch.manual_seed(rank)
    net = fleet.DataParallel(nn.Linear(2, 1))
    loss = net(torch.full((1, 2), float(rank + 1))).sum()
    net.scale_loss(loss).backward()
    net.apply_collective_grads()
    return {
        "same": group is again and group is not None,
        "grad": net.weight.grad.clone(),
        "weight": net.weight.detach().clone(),
        "rank": [fleet.get_rank(), fleet.get_world_size()],
        "names": list(net.state_dict()),
    }


def test_basic_form() -> None:
    """003-03, 003-27, 003-29: averaged without scaling by the user, rank 0's weights everywhere, no prefix."""
    first, second = run_workers(basic_form, 2, backend=None)
    assert first["same"]
    assert (first["rank"], second["rank"]) == ([0, 2], [1, 2])
    torch.testing.assert_close(first["grad"], torch.full((1, 2), 1.5))
    torch.testing.assert_close(first["weight"], second["weight"], atol=0, rtol=0)
    assert first["names"] == ["weight", "bias"]


def of_another_starter(starter: str, rank: int) -> dict[str, object]:
    """Returns what ``starter`` tells worker ``rank`` of 2 on one node."""
    if starter == "torch variables":
        return {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    if starter == "mpirun":
        mpi = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        return {f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()}
    step = {"PROCID": rank, "LOCALID": rank, "NTASKS": 2, "JOB_ID": 7, "STEP_ID": 0}
    step |= {"STEP_NUM_TASKS": 2, "STEP_TASKS_PER_NODE": 2}
    return {**{f"SLURM_{name}": value for name, value in step.items()}, "SLURM_STEP_NODELIST": "localhost"}


@pytest.mark.parametrize("starter", ["torch variables", "mpirun", "srun"])
def test_other_starters(starter: str) -> None:
    """Issue part 2: the same script under torchrun-like variables, mpirun and srun."""
    (port,) = free_ports(1)
    removed = dict.fromkeys(name for name in worker_environment(0, 2, [1, 2, 3]) if not name.startswith("GLOO"))

    def variables(rank: int) -> dict[str, str | None]:
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **of_another_starter(starter, rank)}
        return {**removed, **{name: str(value) for name, value in own.items()}}

    first, second = run_workers(queries, 2, backend=None, environment=variables)
    assert (first["rank"][0], second["rank"][0], first["rank"][2]) == (0, 1, 2)
    assert first["sum"] == [3.0]
