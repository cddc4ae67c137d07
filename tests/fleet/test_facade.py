"""The fleet namespace in a single process: arguments, queries, the two orders, what is refused."""

from __future__ import annotations

import platform
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, NotInitializedError, OptionWarning, StrategyConflictError, UnsupportedOptionError
from fleet.facade import Fleet
from fleet.training.fleet_model import FleetModel
from tests.helpers.fleets import own_fleet

TWO_WORKERS = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "LOCAL_RANK": "0",
}


@pytest.fixture(autouse=True)
def new_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test a Fleet of its own, and no variables of a job."""
    own_fleet(monkeypatch)
    for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def wrapped() -> tuple[Any, Any]:
    """Returns a wrapped model and optimizer."""
    net = nn.Linear(3, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    return fleet.distributed_model(net), optimizer


def test_calls_before_init_say_so() -> None:
    """B.2: a call before init names itself and init."""
    wrap = lambda: fleet.distributed_model(nn.Linear(1, 1))  # noqa: E731
    for call in (fleet.worker_index, fleet.is_server, wrap, lambda: fleet.util):
        with pytest.raises(NotInitializedError, match=r"needs fleet.init\(\) first"):
            call()


def test_init_arguments() -> None:
    """003-06, 002-02, 003-10: all arguments have defaults; wrong ones raise and start nothing."""
    assert fleet.init() is not None
    fleet.init(is_collective=True)
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    fleet.init(fleet.PaddleCloudRoleMaker(is_collective=True), log_level="WARNING")
    for wrong in ({"is_collective": 1}, {"role_maker": "me"}, {"strategy": {"amp": True}}, {"log_level": "LOUD"}):
        with pytest.raises(ConfigError):
            fleet.init(**wrong)  # type: ignore[arg-type]
    strategy = fleet.DistributedStrategy()
    for call in (
        lambda: fleet.init(strategy, True),  # type: ignore[arg-type]
        lambda: fleet.init(None, strategy),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=r"Name it: fleet.init\(is_collective=True, strategy=strategy\)\.$"):
            call()
    with pytest.raises(ConfigError, match="Write is_collective=True"):
        fleet.init(True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not compatible"):
        fleet.init(strategy=object())  # type: ignore[arg-type]


def test_queries_in_a_single_process_are_ints() -> None:
    """G17, 004-07: rank, size and local rank are ints without a launcher too."""
    fleet.init(is_collective=True)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.local_rank(), fleet.node_num()) == (0, 1, 0, 1)
    assert (fleet.rank(), fleet.nranks(), fleet.world_size()) == (0, 1, 1)
    assert int(fleet.local_rank()) == 0
    assert fleet.is_worker()
    assert fleet.is_first_worker()
    assert not fleet.is_server()
    assert not fleet.is_coordinator()
    assert fleet.server_num() == 0
    assert fleet.server_endpoints() == []
    assert isinstance(fleet.worker_endpoints(to_string=True), str)
    with pytest.raises(ConfigError, match="for parameter servers"):
        fleet.server_index()
    fleet.barrier_worker()
    np.testing.assert_array_equal(fleet.all_reduce(np.array([1, 2]), "max"), [1, 2])
    assert fleet.get_log_level_name() == "INFO"
    fleet.set_log_level("DEBUG")
    assert fleet.get_log_level_code() == 10


def test_single_process_behaves_as_the_plain_module() -> None:
    """002-01: the same numbers as plain torch, in either order of the two calls."""
    results = []
    for order in ("plain", "optimizer first", "model first"):
        torch.manual_seed(0)
        net: Any = nn.Linear(3, 1)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        fleet.init(is_collective=True)
        if order == "optimizer first":
            optimizer = fleet.distributed_optimizer(optimizer)
            net = fleet.distributed_model(net)
        elif order == "model first":
            net = fleet.distributed_model(net)
            optimizer = fleet.distributed_optimizer(optimizer)
        for _ in range(3):
            net(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(net.state_dict())
    for result in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(result[name], value, atol=0, rtol=0)


def test_strategy_is_copied_at_init() -> None:
    """A0.13: later edits have no effect and warn; a strategy given twice warns and the second one counts."""
    strategy = fleet.DistributedStrategy()
    strategy.fuse_grad_size_in_MB = 8
    fleet.init(is_collective=True, strategy=strategy)
    with pytest.warns(OptionWarning, match=r"after fleet.init\(\) had copied .* or pass the strategy to"):
        strategy.fuse_grad_size_in_MB = 16
    assert fleet.session.options["fuse_grad_size_in_MB"] == 8
    net = nn.Linear(1, 1)
    with pytest.warns(OptionWarning, match="replaces the strategy"):
        fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), strategy)
    assert fleet.session.options["fuse_grad_size_in_MB"] == 16
    with pytest.warns(OptionWarning, match=r"after fleet.distributed_optimizer\(\) had copied"):
        strategy.amp_configs["init_loss_scaling"] = 8.0


def test_conflicts_are_refused_before_anything_starts() -> None:
    """A.5: a conflict raises at init and leaves no session behind."""
    strategy = fleet.DistributedStrategy()
    strategy.lars = strategy.lamb = True
    with pytest.raises(StrategyConflictError, match="lars.*lamb|lamb.*lars"):
        fleet.init(is_collective=True, strategy=strategy)
    with pytest.raises(NotInitializedError):
        fleet.worker_index()


def test_a_second_strategy_cannot_undo_changes_in_place() -> None:
    """A strategy that comes after the model was changed in place is refused, with the way out."""
    first = fleet.DistributedStrategy()
    first.sync_batch_norm = True
    fleet.init(is_collective=True, strategy=first)
    net = nn.Linear(1, 1)
    fleet.distributed_model(net)
    second = fleet.DistributedStrategy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionWarning)
        with pytest.raises(ConfigError, match=r"Give the strategy to fleet.init\(\)"):
            fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), second)


def test_wrong_objects_are_refused() -> None:
    """B.4: what is not a module or an optimizer, or was wrapped before, is named in the error."""
    fleet.init(is_collective=True)
    model, optimizer = wrapped()
    with warnings.catch_warnings(action="ignore"):
        scripted = torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(1, 2))
    for call, value in (
        (fleet.distributed_model, "net"),
        (fleet.distributed_model, model),
        (fleet.distributed_model, scripted),
        (fleet.distributed_optimizer, model),
        (fleet.distributed_optimizer, optimizer),
        (fleet.distributed_scaler, 1),
    ):
        with pytest.raises(ConfigError):
            call(value)


def test_fleet_as_the_optimizer() -> None:
    """B.2: the 2.0 form, in which the fleet object steps, clears and knows the learning rate."""
    fleet.init(is_collective=True)
    with pytest.raises(NotInitializedError, match="distributed_optimizer"):
        fleet.step()
    model, optimizer = wrapped()
    assert isinstance(model, FleetModel)
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    fleet.step()
    fleet.clear_grad()
    assert model.weight.grad is None
    fleet.set_lr(0.5)
    assert optimizer.get_lr() == fleet.get_lr() == 0.5
    fleet.set_state_dict(fleet.state_dict())
    fleet.minimize(model(torch.ones(1, 3)).sum())
    scaler = torch.amp.GradScaler("cpu")
    assert fleet.distributed_scaler(scaler) is scaler


def test_world_without_is_collective_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers 4.1: a job of several workers never becomes several jobs of one by a forgotten argument."""
    for name, value in TWO_WORKERS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is_collective=True"):
        fleet.init()


def test_windows_is_refused_for_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """000-04, 000-30: distributed training on Windows is refused; a single process runs."""
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    fleet.init(is_collective=True)
    for name, value in TWO_WORKERS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedOptionError, match="Windows"):
        fleet.init(is_collective=True)


def test_init_parallel_env_alone_warns() -> None:
    """003-29: no arguments needed; one process gets a warning; the older name does the same."""
    for call in (fleet.init_parallel_env, fleet.prepare_context):
        with pytest.warns(OptionWarning, match="one process was started"):
            assert call() is None
    assert isinstance(fleet.DataParallel(nn.Linear(1, 1)), FleetModel)
    layer = nn.Linear(1, 1)
    for wrong in ({"layers": 1}, {"layers": layer, "comm_buffer_size": 0}, {"layers": layer, "strategy": 1}):
        with pytest.raises(ConfigError):
            fleet.DataParallel(**wrong)  # type: ignore[arg-type]


def test_an_exit_without_a_group_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds in a process with much in memory, and is there for the threads of a process group only."""
    collected: list[int] = []
    monkeypatch.setattr("fleet.facade.gc.collect", lambda: collected.append(1))
    alone, grouped = Fleet(), Fleet()
    alone.init(log_level="ERROR")
    alone._close()
    assert not collected
    grouped.init(log_level="ERROR")
    monkeypatch.setattr(type(grouped.session.job), "has_group", property(lambda _: True))
    grouped._close()
    assert collected


def test_names_that_scripts_of_paddle_use() -> None:
    """B.2, 003-32: clear_gradient beside clear_grad, the user's module as _layers, split_files."""
    fleet.init(is_collective=True)
    net, optimizer = wrapped()
    assert net._layers is net.module
    for clear in (optimizer.clear_gradient, optimizer.clear_gradients, fleet.clear_gradient, fleet.clear_gradients):
        net(torch.ones(2, 3)).sum().backward()
        clear()
        assert all(p.grad is None for p in net.parameters())
    assert fleet.split_files(["a", "b"]) == ["a", "b"]

    class Own(nn.Linear):
        """A module that has the name itself."""

        _layers = 3

    assert fleet.distributed_model(Own(1, 1))._layers == 3


def test_a_util_of_the_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.2: ``fleet.util = MyUtil()``, before or after init; its inherited calls work in the running job."""

    class MyUtil(fleet.UtilBase):
        """What Paddle's documentation shows."""

        def user_id(self) -> int:
            """Returns a number."""
            return 7

    with pytest.raises(NotInitializedError, match="fleet.util.barrier"):
        MyUtil().barrier()
    monkeypatch.setitem(vars(fleet), "util", None)  # takes away afterwards what is assigned here
    fleet.util = MyUtil()
    fleet.init(is_collective=True)
    assert fleet.util.user_id() == 7
    assert fleet.util.all_reduce(2.0) == 2.0
    assert fleet.util.get_file_shard(["a"]) == ["a"]
    fleet.barrier_worker()
    own = fleet.Fleet()
    own.util = MyUtil()
    own.init(is_collective=True, log_level="WARNING")
    assert own.util.user_id() == 7
    own.session.close()
