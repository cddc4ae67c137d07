"""One process leaves out the options that only divide the work, and what Fleet wraps is seen through."""

import pytest
import torch
from torch import nn

import fleet
from fleet.job.running import RUNNING
from fleet.strategies.pipeline.micro_batches import _rows
from fleet.verify.engines.fleet_engine import FleetEngine, _by_copy, alone_options


def test_one_process_keeps_what_changes_the_training() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.sharding = strategy.amp = True
    made = alone_options(strategy, 2)
    assert made.amp
    assert not made.sharding
    assert strategy.sharding


def test_a_micro_batch_has_the_rows_of_all_copies() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.pipeline = True
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 3, "split": "auto"}
    strategy.hybrid_configs = {"pp_degree": 2}
    made = alone_options(strategy, 2)
    config = made["pipeline_configs"]
    assert (config.accumulate_steps, config.micro_batch_size, config.split) == (4, 6, ("auto",))
    assert made.hybrid_configs["pp_degree"] == 1


def test_micro_batches_of_one_process_are_those_of_all_copies() -> None:
    own = [torch.arange(6), torch.arange(10, 16)]
    expected = [torch.cat(rows) for rows in zip(*(_rows(part, "x", 3, 2) for part in own), strict=True)]
    found = _by_copy(_rows, 2)(torch.cat(own), "x", 3, 4)
    assert [rows.tolist() for rows in found] == [rows.tolist() for rows in expected]
    assert found[1].tolist() == [2, 3, 12, 13]


def test_what_fleet_init_started_is_described_and_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNNING, "session", None)
    engine = FleetEngine()
    net = nn.Sequential(nn.Linear(2, 2))
    assert engine.job(net) is None
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = strategy.fp16_allreduce = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    model = fleet.distributed_model(net)
    job = engine.job(net)
    assert job is not None
    assert (job.engine, job.data_rank, job.parts, job.computing) == ("fleet", 0, False, ("gradient_merge",))
    assert engine.is_wrapper(model)
    assert not engine.is_wrapper(net)
    assert engine.parameters([net]) is None
    assert sorted(engine.parameters([]) or ()) == ["0.bias", "0.weight"]
