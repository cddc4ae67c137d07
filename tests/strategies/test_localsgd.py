"""localsgd and adaptive_localsgd: the phase, the mean, local momentum, the interval, saving and resuming."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fleet
from fleet.errors import OptionWarning
from fleet.strategies.adaptive_localsgd import interval
from tests.helpers.workers import run_workers

STEPS = 11


def net_of(seed: int) -> nn.Sequential:
    """Returns a small net with batch norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    """Returns the data of one worker at one step."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * step + rank)) * (1 + rank)


def options(kind: str, **configs: int) -> fleet.DistributedStrategy:
    """Returns a strategy with ``kind`` on."""
    strategy = fleet.DistributedStrategy()
    setattr(strategy, kind, True)
    setattr(strategy, f"{kind}_configs", configs)
    return strategy


def train(rank: int, world_size: int, kind: str, configs: dict[str, int], decay: float) -> dict[str, Any]:
    """Trains STEPS steps; returns the flat parameters after each, the running means, and the last interval."""
    fleet.init(is_collective=True, strategy=options(kind, **configs))
    net = net_of(rank)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    model = fleet.distributed_model(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    history, losses = [flat(model)], []
    for step in range(STEPS):
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        history.append(flat(model))
        losses.append(loss.item())
    return {"history": torch.stack(history), "mean": net[1].running_mean, "losses": losses, "k": optimizer.k_steps}


def flat(model: Any) -> torch.Tensor:
    """Returns all parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def reference(num_workers: int, decay: float, averages: Any) -> list[torch.Tensor]:
    """Trains all workers in one process; ``averages(step, losses)`` says whether parameters are averaged then."""
    nets = [net_of(0) for _ in range(num_workers)]
    updates = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
    history: list[list[torch.Tensor]] = [[flat(net)] for net in nets]
    for step in range(STEPS):
        losses = []
        for rank, (net, update) in enumerate(zip(nets, updates, strict=True)):
            loss = net(batch(step, rank)).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            losses.append(loss.item())
        if averages(step + 1, losses):
            with torch.no_grad():
                for same in zip(*(net.parameters() for net in nets), strict=True):
                    mean = sum(same) / num_workers
                    for p in same:
                        p.copy_(mean)
        for update in updates:
            update.param_groups[0]["lr"] *= decay
        for net, rows in zip(nets, history, strict=True):
            rows.append(flat(net))
    return [torch.stack(rows) for rows in history]


@pytest.mark.parametrize(("k_steps", "begin_step"), [(3, 2), (1, 1), (4, 0)])
def test_localsgd_equals_the_written_out_loop(k_steps: int, begin_step: int) -> None:
    """A.8: every step up to begin_step, then every k steps since the last average; momentum and buffers local."""
    state = {"last": 0}

    def averages(step: int, losses: list[float]) -> bool:
        if step <= begin_step or step - state["last"] == k_steps:
            state["last"] = step
            return True
        return False

    expected = reference(2, 1.0, averages)
    results = run_workers(train, 2, "localsgd", {"k_steps": k_steps, "begin_step": begin_step}, 1.0, backend=None)
    for result, rows in zip(results, expected, strict=True):
        torch.testing.assert_close(result["history"], rows, atol=2e-6, rtol=1e-5)
    assert not torch.equal(results[0]["mean"], results[1]["mean"])  # BN buffers are not averaged (A.8)


def test_adaptive_localsgd_equals_the_written_out_loop() -> None:
    """A.8: k = clip(ceil(sqrt(lr0 loss / (lr loss0) init_k)), 1, 16), loss averaged over the workers."""
    state: dict[str, Any] = {"last": 0, "k": 4, "first": None}
    decay = 0.8

    def averages(step: int, losses: list[float]) -> bool:
        if step > 1 and step - state["last"] < state["k"]:
            return False
        loss, rate = sum(losses) / len(losses), 0.05 * decay ** (step - 1)
        state["first"] = state["first"] or (loss, rate)
        loss_0, rate_0 = state["first"]
        state["k"] = max(1, min(16, math.ceil(math.sqrt(rate_0 * loss / (rate * loss_0) * 4))))
        state["last"] = step
        return True

    expected = reference(2, decay, averages)
    results = run_workers(train, 2, "adaptive_localsgd", {"init_k_steps": 4, "begin_step": 1}, decay, backend=None)
    assert results[0]["k"] == results[1]["k"] == state["k"]
    for result, rows in zip(results, expected, strict=True):
        torch.testing.assert_close(result["history"], rows, atol=2e-6, rtol=1e-5)


@given(st.floats(0, 1e6), st.floats(1e-9, 10), st.floats(1e-9, 1e6), st.floats(1e-9, 10), st.integers(1, 16))
def test_interval_stays_between_1_and_16(loss: float, rate: float, loss_0: float, rate_0: float, init_k: int) -> None:
    """A.8: whatever the numbers, the interval is 1 to 16; a lower loss never makes it longer."""
    k = interval(loss, rate, loss_0, rate_0, init_k)
    assert 1 <= k <= 16
    assert interval(loss / 2, rate, loss_0, rate_0, init_k) <= k


def save_between(rank: int, world_size: int) -> dict[str, Any]:
    """Saves between two averages, resumes from the worker's own files, and compares with the run that went on."""
    fleet.init(is_collective=True, strategy=options("localsgd", k_steps=4))
    net = net_of(0)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    model = fleet.distributed_model(net)
    said: list[str] = []
    state: Any = None
    for step in range(8):
        if step in (1, 6):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
            said.append(" ".join(str(w.message) for w in caught if issubclass(w.category, OptionWarning)))
            if step == 6:
                import copy

                state = copy.deepcopy(state)
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    straight = flat(model)
    fleet.init(is_collective=True, strategy=options("localsgd", k_steps=4))
    again = net_of(5)
    second = fleet.distributed_optimizer(torch.optim.SGD(again.parameters(), lr=0.05, momentum=0.9))
    resumed = fleet.distributed_model(again)
    resumed.load_state_dict(state[0])
    second.load_state_dict(state[1])
    for step in range(6, 8):
        resumed(batch(step, rank)).square().mean().backward()
        second.step()
        second.zero_grad()
    second.average()
    optimizer.average()
    return {
        "said": said,
        "same": torch.equal(flat(resumed), flat(model)),
        "moved": not torch.equal(straight, flat(model)),
        "average": flat(model),
    }


def test_saving_between_averages_says_so_and_resumes_exactly() -> None:
    """A.8, issue 3 proof 4: a note names the step; each worker's own state resumes inside the interval exactly."""
    results = run_workers(save_between, 2, backend=None)
    for rank, result in enumerate(results):
        assert result["said"][0] == ""  # step 1 has just averaged
        assert f"worker {rank} alone" in result["said"][1]
        assert "averaged at step 5" in result["said"][1]
        assert result["same"]
        assert result["moved"]
    torch.testing.assert_close(results[0]["average"], results[1]["average"], atol=0, rtol=0)


def data_parallel_steps(rank: int, world_size: int, kind: str) -> torch.Tensor:
    """Trains plain SGD under data parallel or localsgd with k = 1."""
    fleet.init(is_collective=True, strategy=options("localsgd", k_steps=1) if kind == "localsgd" else None)
    net = nn.Linear(4, 1)
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.zeros_(net.bias)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05))
    model = fleet.distributed_model(net)
    for step in range(6):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def test_k_1_equals_data_parallel_with_sgd() -> None:
    """Issue 3, proof 3: with k = 1 and SGD, averaging parameters is averaging gradients."""
    local = run_workers(data_parallel_steps, 2, "localsgd", backend=None)
    plain = run_workers(data_parallel_steps, 2, "data_parallel", backend=None)
    torch.testing.assert_close(local[0], plain[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(local[0], local[1], atol=0, rtol=0)
