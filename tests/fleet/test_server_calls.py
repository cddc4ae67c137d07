"""The calls of a parameter-server job: names, warnings, the life of rows, settings of tables (B.2, D.4, D.6, D.8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError, NotInitializedError, OptionWarning, PSError
from fleet.facade import Fleet
from fleet.paddle.strategy_factory import HalfAsyncStrategy
from fleet.ps_job.server_job import _QUEUE_VARIABLES, ServerJob
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.fleet.ps_job.test_server_job import alone, make_sgd, served, strategy
from tests.helpers.served import WideAndDeep, batches, train


def test_the_calls_are_names_of_the_package() -> None:
    """B.2: every call, those of a parameter-server job included, is a name of ``fleet``."""
    calls = [name for name in vars(Fleet) if not name.startswith("_")]
    assert set(calls) - {"session", "util"} <= set(fleet.__all__)
    assert isinstance(fleet.StrategyFactory.create_half_async_strategy(), HalfAsyncStrategy)
    own = Fleet()
    own.init(log_level="WARNING")
    assert isinstance(own.session.server_job, ServerJob)
    own.session.close()


def test_calls_in_a_collective_job_warn_and_change_nothing() -> None:
    """B.2: Fleet warns and returns where a job has no servers."""
    own = Fleet()
    own.init(is_collective=True, log_level="WARNING")
    for call in (own.init_worker, own.stop_worker, own.init_server, own.run_server, own.shrink):
        with pytest.warns(OptionWarning, match="no parameter servers"):
            call()
    own.session.close()


def test_shrink_set_date_and_table_facts(capsys: pytest.CaptureFixture[str]) -> None:
    """D.8: rows below the threshold go; a day passes once per day."""
    own, model, optimizer = alone(strategy("sync"))
    train(model, optimizer, batches(3))
    own.print_table_stat(0, pass_id=7)
    assert capsys.readouterr().out.startswith("pass 7, table 0: ")
    own.print_table_stat("ads")
    assert capsys.readouterr().out.startswith("pass 0, table ads: ")
    own.set_date(0, "20260101")
    own.set_date("ads", "20260101")
    assert own.shrink(2) > 0
    with pytest.raises(ConfigError, match="does not exist"):
        own.print_table_stat(9)
    with pytest.raises(ConfigError, match="table 'adz' does not exist; the tables are .*'ads'"):
        own.print_table_stat("adz")
    own.stop_worker()
    own.session.close()


def test_entry_policies_and_table_settings_reach_the_servers(tmp_path: Any) -> None:
    """D.4, D.6, D.8: an id reads as zeros until it is admitted; settings by name of the table; save modes 1 to 3."""
    made = strategy("sync")
    made.sparse_table_configs = {"ads": {"sparse_optimizer": "naive", "learning_rate": 0.5, "embedx_threshold": 0}}
    own = Fleet()
    own.init(strategy=made, log_level="WARNING")
    net = WideAndDeep(entry=fleet.CountFilterEntry(3))
    optimizer, model = own.distributed_optimizer(make_sgd(net.parameters())), own.distributed_model(net)
    own.init_worker()
    one, admitted = torch.tensor([[10**12]]), []
    for _ in range(4):
        model.ads(one).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        admitted.append(bool(model.ads.lookup_rows(one).any()))
    assert admitted == [False, False, True, True]
    before = model.ads.lookup_rows(one)
    (model.ads(one).sum() * 0.5).backward()
    optimizer.step()
    torch.testing.assert_close(model.ads.lookup_rows(one), before - 0.25)  # the table's own rate
    for mode in (1, 2, 3):
        own.save_one_table(0, tmp_path / str(mode), mode=mode)
    with pytest.raises(PSError, match="no accessor"):
        own.save_persistables(tmp_path / "all", mode=1)  # the other table keeps no score
    own.stop_worker()
    own.session.close()
    wrong = Fleet()
    made.sparse_table_configs = {"adz": {}}
    wrong.init(strategy=made, log_level="WARNING")
    with pytest.raises(ConfigError, match="sparse_table_configs: 'adz' is not a sparse table"):
        served(wrong, made, make_sgd)
    wrong.session.close()


def test_calls_out_of_order_raise_and_wait_for_nobody() -> None:
    """002-19, 003-33: model and optimizer, then init and run; no server is there, and nobody is waited for."""
    data = batches(1)
    own = Fleet()
    with pytest.raises(NotInitializedError, match=r"fleet.init\(\)"):
        own.init_worker()
    role = UserDefinedRoleMaker(current_id=0, worker_num=1, server_endpoints=["127.0.0.1:1"])
    own.init(role, strategy=strategy("async"), log_level="WARNING")
    with pytest.raises(NotInitializedError, match="distributed_optimizer"):
        own.init_worker()
    net = WideAndDeep()
    optimizer = own.distributed_optimizer(make_sgd(net.parameters()))
    with pytest.raises(NotInitializedError, match="distributed_model"):
        own.init_worker()
    model = own.distributed_model(net)
    with pytest.raises(NotInitializedError, match="init_worker"):
        train(model, optimizer, data)
    for call in (own.stop_worker, lambda: own.save_persistables("never"), own.shrink):
        with pytest.raises(NotInitializedError, match="init_worker"):
            call()
    own.session.close()
    server = Fleet()
    role = UserDefinedRoleMaker(current_id=0, role=Role.SERVER, worker_num=1, server_endpoints=["127.0.0.1:1"])
    server.init(role, strategy=strategy("async"), log_level="WARNING")
    with pytest.raises(NotInitializedError, match="init_server"):
        server.run_server()
    server.session.close()


def test_the_queue_variables_are_documented_and_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """003-23: FLAGS_communicator_* stand in the documentation, and what they say is what the queues do."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "environment.md").read_text()
    values = {name: number for number, name in enumerate(_QUEUE_VARIABLES, start=3)}
    values["independent_recv_thread"] = 1
    values["thread_pool_size"] = 2  # at most one for each table
    for name, variable in _QUEUE_VARIABLES.items():
        assert f"| `{variable}` | user |  | overrides a_sync_configs['{name}'] |" in guide
        monkeypatch.setenv(variable, str(values[name]))
    own, model, optimizer = alone(strategy("async", max_merge_var_num=2, thread_pool_size=1))
    sender = own.session.server_job.running().connection.exchange._sender
    assert {name: int(getattr(sender.config, name)) for name in values} == values
    assert len(sender._threads) == values["thread_pool_size"] + 1
    train(model, optimizer, batches(2))
    own.stop_worker()
    own.session.close()
