"""Another number of workers: the global batch, the learning rate, and what a checkpoint says of them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR

import fleet
from fleet.elastic import keep_global_batch, scale_lr
from fleet.elastic.resize import plan_k_steps
from fleet.errors import ConfigError, OptionWarning
from tests.fleet.elastic.training import Training
from tests.helpers.fleets import own_fleet
from tests.helpers.workers import run_workers


@pytest.fixture(autouse=True)
def _own_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)


def workers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes this process one of ``count`` that were started and have not met."""
    endpoints = ",".join(f"127.0.0.1:{7000 + place}" for place in range(count))
    values = {"PADDLE_TRAINERS_NUM": str(count), "PADDLE_TRAINER_ENDPOINTS": endpoints, "PADDLE_TRAINER_ID": "0"}
    for name, value in {**values, "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:7000"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("k_steps", "planned", "now", "wanted"), [(1, 8, 2, 4), (4, 2, 8, 1), (3, 4, 6, 2)])
def test_the_global_batch_stays(k_steps: int, planned: int, now: int, wanted: int) -> None:
    """004-14."""
    assert plan_k_steps(k_steps, planned, now) == wanted
    assert wanted * now == k_steps * planned


def test_a_number_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 workers cannot share them evenly.*\[1, 2, 4, 8\]"):
        plan_k_steps(2, 4, 3)


def test_the_strategy_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    workers(monkeypatch, 2)
    strategy = fleet.DistributedStrategy()
    assert keep_global_batch(strategy, workers=8) == 4
    assert strategy.gradient_merge
    assert strategy.gradient_merge_configs["k_steps"] == 4
    same = fleet.DistributedStrategy()
    assert keep_global_batch(same, workers=2) == 1
    assert not same.gradient_merge


def test_a_reproducible_job_has_no_batch_to_keep_and_no_rate_to_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    workers(monkeypatch, 2)
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    assert keep_global_batch(strategy, workers=3) == 1
    assert not strategy.gradient_merge
    workers(monkeypatch, 1)
    scaled = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.4)
    scale_lr(scaled, workers=4)
    fleet.init(is_collective=True, strategy=strategy)
    with pytest.raises(ConfigError, match="scale_lr.. makes the learning rate follow the number of workers"):
        fleet.distributed_optimizer(scaled)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.4)
    with pytest.raises(ConfigError, match="on any number of them"):
        scale_lr(plain, workers=4)
    assert plain.param_groups[0]["lr"] == 0.4


def test_a_strategy_that_init_has_copied_is_warned_of() -> None:
    strategy = fleet.DistributedStrategy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keep_global_batch(strategy, workers=1) == 1
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    with pytest.warns(
        OptionWarning, match=r"set after fleet.init\(\) had copied the strategy, and no longer has an effect"
    ):
        assert keep_global_batch(strategy, workers=2) == 2


def test_a_strategy_for_the_optimizer_is_still_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, strategy = torch.nn.Linear(1, 1), fleet.DistributedStrategy()
    fleet.init(is_collective=True, log_level="ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keep_global_batch(strategy, workers=2) == 2
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
    with pytest.warns(OptionWarning, match=r"set after fleet.distributed_optimizer\(\) had copied the strategy"):
        assert keep_global_batch(strategy, workers=2) == 4


def test_a_sum_instead_of_an_average_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    workers(monkeypatch, 2)
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2, "avg": False}
    with pytest.raises(ConfigError, match="'avg'"):
        keep_global_batch(strategy, workers=4)
    assert strategy.gradient_merge_configs["k_steps"] == 2


@pytest.mark.parametrize(("rule", "factor"), [("linear", 0.25), ("sqrt", 0.5)])
def test_the_learning_rate_is_scaled_once(rule: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    workers(monkeypatch, 2)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.8)
    assert scale_lr(optimizer, workers=8, rule=rule) == factor
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.8 * factor)
    with pytest.raises(ConfigError, match="twice"):
        scale_lr(optimizer, workers=8)
    with pytest.raises(ConfigError, match="'linear' or 'sqrt'"):
        scale_lr(optimizer, workers=8, rule="cubic")
    with pytest.raises(ConfigError, match="from 1"):
        scale_lr(optimizer, workers=0)


def rates_after(rank: int, world_size: int, folder: str, declare: bool) -> Any:
    """Resumes (or begins) with a declared rule, makes two steps, saves; returns the rates of those steps."""
    fleet.init(is_collective=True, log_level="ERROR")
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.8)
    if declare:
        scale_lr(optimizer, workers=4)
    model, optimizer = fleet.distributed_model(net), fleet.distributed_optimizer(optimizer)
    parts = [LinearLR(optimizer, 0.5, 1.0, total_iters=2), LambdaLR(optimizer, lambda step: 0.5**step)]
    scheduler = SequentialLR(optimizer, parts, milestones=[2])
    checkpoint = fleet.elastic.Checkpoint(folder, model, optimizer, scheduler)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", OptionWarning)
        checkpoint.resume()
    rates = []
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    checkpoint.save()
    return {"rates": rates, "warned": any("Declare what you want" in str(w.message) for w in seen)}


@pytest.mark.slow
def test_a_checkpoint_of_another_number_of_workers_is_rescaled(tmp_path: Any) -> None:
    """004-14: planned for 4; two workers begin, one goes on: the rates follow the schedule, halved."""
    first = run_workers(rates_after, 2, str(tmp_path), True, backend=None)[0]
    assert first["rates"] == pytest.approx([0.2, 0.3])
    second = rates_after(0, 1, str(tmp_path), True)
    assert second["rates"] == pytest.approx([0.2, 0.1])  # 0.8 / 4, then half of it
    assert not first["warned"]
    assert not second["warned"]


def job_of(replicas: int) -> Any:
    """Stands for a session whose workers train on this many different batches."""
    return SimpleNamespace(world_size=replicas, data_replicas=replicas, logical=None)


def test_an_undeclared_change_warns(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Training(tmp_path).run(1, stop_at=2)
    from fleet.elastic.resize import warn_of_resize

    with pytest.warns(OptionWarning, match="3 batches instead of 1"):
        warn_of_resize({"world_size": 1, "k_steps": 1}, job_of(3), 1, [None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_resize({"world_size": 4, "k_steps": 1}, job_of(2), 2, [None])
        warn_of_resize({"world_size": 4, "k_steps": 1}, job_of(2), 1, [0.5])
        warn_of_resize({"world_size": 4, "replicas": 1, "k_steps": 1}, job_of(1), 1, [None])  # mp 4 before


def merged_gradient(rank: int, world_size: int, k_steps: int, samples: int) -> Any:
    """Trains two updates with this worker's share of ``samples`` samples an update; returns the parameters."""
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = k_steps > 1
    strategy.gradient_merge_configs = {"k_steps": k_steps}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1).double()
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    data = torch.randn(2 * samples, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampler = fleet.elastic.ElasticSampler(data, shuffle=False)
    for place in sampler:
        model(data[place : place + 1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach()


@pytest.mark.slow
def test_the_same_global_batch_gives_the_same_update() -> None:
    """One worker with k_steps 4 and two with 2 train alike."""
    one = merged_gradient(0, 1, 4, 4)
    two = run_workers(merged_gradient, 2, 2, 4, backend=None)
    assert torch.allclose(one, two[0], rtol=0, atol=1e-12)
    assert torch.equal(two[0], two[1])
