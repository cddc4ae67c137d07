"""The role makers a script makes itself."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fleet
from fleet.env import Environment
from fleet.errors import ConfigError, OptionWarning, UnknownOptionError, UnsupportedOptionError
from fleet.role_maker import (
    GeneralRoleMaker,
    MPISymetricRoleMaker,
    PaddleCloudRoleMaker,
    Role,
    RoleMakerBase,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)
from tests.fleet.role_maker.test_fleet_contract import LAUNCHED
from tests.fleet.role_maker.test_ps_contract import SERVER, WORKER
from tests.helpers.workers import free_ports, run_workers


def test_cloud_role_of_a_server_and_a_worker() -> None:
    """001-02, 001-03, 001-09: one script, both roles, exclusive."""
    server = PaddleCloudRoleMaker(environment=Environment(SERVER))
    worker = PaddleCloudRoleMaker(environment=Environment(WORKER))
    assert (server.is_server(), server.is_worker(), server.server_index(), server.server_num()) == (True, False, 1, 2)
    assert (worker.is_server(), worker.is_worker(), worker.worker_index(), worker.worker_num()) == (False, True, 1, 2)


def test_cloud_role_reads_the_environment_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """002-15: the environment counts at the first question, not when the object is made."""
    role = PaddleCloudRoleMaker()
    for name, value in SERVER.items():
        monkeypatch.setenv(name, value)
    assert role.is_server()
    for name in SERVER:
        monkeypatch.delenv(name)
    assert role.is_server()
    assert "TRAINING_ROLE" not in os.environ


def test_cloud_role_is_collective_or_not() -> None:
    """002-15, 002-02: the same process, asked for one kind of job and for the other."""
    both = Environment({**WORKER, **LAUNCHED})
    assert PaddleCloudRoleMaker(is_collective=True, environment=both).server_num() == 0
    assert PaddleCloudRoleMaker(is_collective=False, environment=both).server_num() == 2


def test_a_job_without_servers_keeps_its_size() -> None:
    """A worker of a collective job that forgot is_collective=True must not believe it is alone."""
    assert PaddleCloudRoleMaker(environment=Environment(LAUNCHED)).worker_num() == 2
    assert PaddleCloudRoleMaker(environment=Environment({})).is_non_distributed()


@pytest.mark.parametrize("value", ["", " "])
def test_a_blank_server_list_is_no_list(value: str) -> None:
    """G4, B.3: blank counts as absent."""
    role = PaddleCloudRoleMaker(environment=Environment({"PADDLE_PSERVERS_IP_PORT_LIST": value}))
    assert (role.is_worker(), role.worker_num(), role.get_pserver_endpoints()) == (True, 1, [])


def test_cloud_role_arguments() -> None:
    PaddleCloudRoleMaker(is_collective=False, init_gloo=False)
    with pytest.warns(OptionWarning, match="init_gloo, path"):
        PaddleCloudRoleMaker(is_collective=False, init_gloo=True, path="x")
    with pytest.raises(UnknownOptionError, match="'init_gloo'"):
        PaddleCloudRoleMaker(init_glo=True)


def test_user_defined_server_and_worker() -> None:
    servers = ["127.0.0.1:36001", "127.0.0.1:36002"]
    server = UserDefinedRoleMaker(current_id=1, role=Role.SERVER, worker_num=3, server_endpoints=servers)
    assert (server.is_server(), server.server_index(), server.worker_num()) == (True, 1, 3)
    worker = UserDefinedRoleMaker(current_id=2, role=Role.WORKER, worker_num=3, server_endpoints=servers)
    assert (worker.is_worker(), worker.worker_index(), worker.server_num()) == (True, 2, 2)
    assert worker.record.source == "user defined"


def test_user_defined_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.3: identity comes from the arguments alone."""
    for name, value in {**SERVER, **LAUNCHED}.items():
        monkeypatch.setenv(name, value)
    role = UserDefinedRoleMaker(is_collective=True, current_id=0, worker_endpoints=["a:1", "b:1", "b:2"])
    assert (role.worker_index(), role.worker_num(), role.node_num(), role.server_num()) == (0, 3, 2, 0)
    assert (role.record.master, role.local_rank()) == ("a:1", 0)


def test_user_defined_collective_of_1x() -> None:
    role = UserDefinedCollectiveRoleMaker(current_id=2, worker_endpoints=["a:1", "a:2", "a:3"])
    assert (role.worker_index(), role.local_rank(), role.is_collective) == (2, 2, True)
    assert UserDefinedCollectiveRoleMaker().worker_num() == 1


def test_user_defined_gloo() -> None:
    role = UserDefinedRoleMaker(init_gloo=True, path="shared", current_id=0, worker_num=2, server_endpoints=["a:1"])
    assert (role.record.with_gloo, role.record.gloo_path) == (1, "shared")
    with pytest.raises(ConfigError, match="path"):
        UserDefinedRoleMaker(init_gloo=True, current_id=0, worker_num=2, server_endpoints=["a:1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"current_id": "0"}, "current_id='0'"),
        ({"current_id": True}, "current_id=True"),
        ({"current_id": 2, "worker_num": 2}, "current_id is 2"),
        ({"current_id": 1, "role": Role.SERVER, "server_endpoints": ["a:1"]}, "current_id is 1"),
        ({"role": Role.SERVER}, "needs server_endpoints"),
        ({"role": "SERVER"}, "role='SERVER'"),
        ({"role": Role.HETER_WORKER}, "Role.WORKER or Role.SERVER"),
        ({"worker_num": 3, "worker_endpoints": ["a:1"]}, "worker_num=3"),
        ({"worker_num": 0}, "worker_num is 0"),
        ({"worker_endpoints": ["a"]}, "host:port"),
        ({"worker_endpoints": 5}, "worker_endpoints=5"),
        ({"is_collective": True, "worker_num": 2}, "needs worker_endpoints"),
        ({"is_collective": True, "server_endpoints": ["a:1"]}, "has workers only"),
        ({"init_gloo": 1}, "init_gloo"),
        ({"worker_endpoint": ["a:1"]}, "'worker_endpoints'"),
    ],
)
def test_user_defined_with_something_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UserDefinedRoleMaker(**arguments)


@pytest.mark.parametrize("maker", [GeneralRoleMaker, MPISymetricRoleMaker])
def test_role_makers_of_1x_that_are_gone(maker: type) -> None:
    """B.3: refused with what to use instead."""
    with pytest.raises(UnsupportedOptionError, match="PaddleCloudRoleMaker"):
        maker()


def trained_with(rank: int, world_size: int, kind: str, ports: list[int]) -> list[float]:
    """Trains after ``fleet.init(role)``, as 29 public scripts begin."""
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    role: RoleMakerBase = PaddleCloudRoleMaker(is_collective=True)
    if kind == "user":
        role = UserDefinedRoleMaker(is_collective=True, current_id=rank, worker_endpoints=endpoints)
    elif kind == "user of 1.x":
        role = UserDefinedCollectiveRoleMaker(current_id=rank, worker_endpoints=endpoints)
    fleet.init(role)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    net = fleet.distributed_model(model)
    net(torch.tensor([[float(rank)]])).sum().backward()
    optimizer.step()
    assert fleet.session.job.collective
    return [fleet.worker_index(), fleet.worker_num(), model.weight.item()]


@pytest.mark.parametrize("kind", ["cloud", "user", "user of 1.x"])
def test_a_collective_role_maker_alone_starts_a_collective_job(kind: str) -> None:
    """B.3: the role maker says so; is_collective=True need not be repeated."""
    found = run_workers(trained_with, 2, kind, free_ports(2), backend=None)
    for rank, result in enumerate(found):
        assert result == [rank, 2, pytest.approx(0.95)]
