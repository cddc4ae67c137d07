"""gradient_merge: Paddle's numbers, the big batch, one exchange a window, clipping, and resume inside a window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fleet
from fleet.errors import CheckpointError
from fleet.strategies.gradient_merge import GradientMerge, GradientMergeConfig
from tests.fleet.test_recorded_results import recorded_net, weights
from tests.helpers.workers import run_workers

DATA = Path(__file__).parent.parent / "data" / "collective"


class OneWorker:
    """A session of one worker."""

    world_size, global_rank = 1, 0


def merged(net: nn.Module, inner: torch.optim.Optimizer, k_steps: int, avg: bool = True) -> Any:
    """Returns the optimizer with the strategy around it; the net's forward is hooked as under fleet."""
    strategy = GradientMerge(GradientMergeConfig(k_steps=k_steps, avg=avg), OneWorker())
    strategy.wrap_model(net)
    return strategy.wrap_optimizer(inner)


@pytest.mark.parametrize("avg", [True, False])
def test_equals_paddle(avg: bool) -> None:
    """Issue 3, proof 2: recorded gm_avg and gm_sum within 1e-6 over 12 steps, k = 4."""
    recorded = np.load(DATA / f"gm_{'avg' if avg else 'sum'}.1rank.npz")
    inputs = np.load(DATA / "inputs.npz")
    net = recorded_net()
    optimizer = merged(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), 4, avg)
    x, y = torch.from_numpy(inputs["x0"]), torch.from_numpy(inputs["y0"]).long().reshape(12, 8)
    for step in range(12):
        nn.functional.cross_entropy(net(x[step]), y[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in weights(net).items():
            np.testing.assert_allclose(value, recorded[name][step], atol=1e-6, rtol=0, err_msg=f"{name} at {step}")


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 10_000), st.floats(0.05, 5.0))
def test_equals_the_big_batch(k_steps: int, windows: int, seed: int, clip: float) -> None:
    """A.7: k batches of equal size equal one big batch, clipping by global norm included."""
    torch.manual_seed(seed)
    small, big = nn.Linear(3, 2), nn.Linear(3, 2)
    big.load_state_dict(small.state_dict())
    few = merged(small, torch.optim.Adam(small.parameters(), lr=0.1), k_steps)
    many = torch.optim.Adam(big.parameters(), lr=0.1)
    for _ in range(windows):
        x = torch.randn(k_steps, 4, 3)
        for batch in x:
            small(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(small.parameters(), clip)
            few.step()
            few.zero_grad()
        big(x.flatten(0, 1)).square().mean().backward()
        nn.utils.clip_grad_norm_(big.parameters(), clip)
        many.step()
        many.zero_grad()
    torch.testing.assert_close(small.state_dict(), big.state_dict(), atol=2e-5, rtol=1e-4)


def test_schedulers_advance_and_leftovers_are_carried() -> None:
    """A.7: the scheduler is the user's and counts batches; an incomplete window is carried into the next epoch."""
    net = nn.Linear(2, 1)
    start = net.weight.detach().clone()
    optimizer = merged(net, torch.optim.SGD(net.parameters(), lr=1.0), 3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    changed = []
    for _ in range(5):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        changed.append(not torch.equal(net.weight, start))
    assert changed == [False, False, True, True, True]
    assert optimizer.param_groups[0]["lr"] == 0.5**5
    assert optimizer.state_dict()["gradient_merge"]["batch"] == 2


def count_exchanges(rank: int, world_size: int, k_steps: int) -> dict[str, Any]:
    """Trains two windows by Fleet's loop; counts the buckets that were exchanged, and logs after each batch."""
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": k_steps}
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    model = fleet.distributed_model(net)
    exchanges: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        exchanges.append(batch)
        future = torch.distributed.all_reduce(bucket.buffer().div_(world_size), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model._chain.register_comm_hook(None, hook)
    for batch in range(2 * k_steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * batch + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.minimize(loss)
        model.clear_gradients()
    return {"state": dict(model.state_dict()), "exchanges": exchanges}


def test_two_workers_exchange_once_a_window() -> None:
    """A.7: no exchange in micro-steps; the result is that of all batches of both workers in one process."""
    first, second = run_workers(count_exchanges, 2, 3, backend=None)
    assert sorted(set(first["exchanges"])) == [2, 5]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for window in range(2):
        batches = [
            torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * (3 * window + b) + r))
            for b in range(3)
            for r in range(2)
        ]
        optimizer.zero_grad()
        net(torch.cat(batches)).square().mean().backward()
        optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(first["state"][name], value, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(second["state"][name], first["state"][name], atol=0, rtol=0)


def test_state_resumes_inside_a_window() -> None:
    """Issue 3, proof 4: a state saved in the middle of a window gives the parameters of the uninterrupted run."""
    torch.manual_seed(0)
    data = torch.randn(8, 4, 3)

    def run(net: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            net(data[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def new() -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        return net, merged(net, torch.optim.Adam(net.parameters()), 3)

    straight, optimizer = new()
    run(straight, optimizer, range(8))
    broken, first = new()
    run(broken, first, range(5))
    resumed, second = new()
    resumed.load_state_dict(broken.state_dict())
    second.load_state_dict(first.state_dict())
    run(resumed, second, range(5, 8))
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), atol=0, rtol=0)
    torch.optim.Adam(resumed.parameters()).load_state_dict(second.state_dict())  # a plain optimizer reads it too
    foreign = first.state_dict()
    foreign["gradient_merge"]["rank"] = 1
    with pytest.raises(CheckpointError, match="one file for each worker"):
        second.load_state_dict(foreign)


def run_loop(loop: str, optimizer: Any, losses: Iterator[torch.Tensor], model: nn.Module) -> None:
    """Runs four batches."""
    if loop == "two forwards":
        for _ in range(2):
            for loss in (next(losses), next(losses)):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return
    for _ in range(4):
        loss = next(losses)
        if loop == "skipped":
            model(torch.ones(1, 1)).sum()  # its backward never comes
        if loop in ("tutorial", "skipped", "validation"):
            optimizer.zero_grad()
        if loop not in ("static", "cleared"):
            loss.backward()
        if loop == "validation":
            model(torch.ones(1, 1))
        if loop in ("static", "cleared", "eager"):
            optimizer.minimize(loss)
        else:
            optimizer.step()
        if loop in ("cleared", "eager"):
            optimizer.clear_grad()


def loops_on_two_workers(rank: int, world_size: int, option: str) -> dict[str, list[float]]:
    """Trains one weight by several loops; batch i of rank r has the gradient i + 1 + 10 r, k is 2."""
    found = {}
    for loop in ("tutorial", "static", "cleared", "eager", "validation", "skipped", "two forwards"):
        strategy = fleet.DistributedStrategy()
        if option == "gradient_merge":
            strategy.gradient_merge = True
            strategy.gradient_merge_configs = {"k_steps": 2}
        else:
            strategy.sharding = True
            strategy.sharding_configs = {"sharding_degree": 2, "stage": int(option), "gradient_merge_acc_step": 2}
        fleet.init(is_collective=True, strategy=strategy)
        net = nn.Sequential(nn.Linear(1, 2, bias=False))
        nn.init.zeros_(net[0].weight)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        model = fleet.distributed_model(net)
        losses = (model(torch.full((1, 1), 1.0 + step + 10 * rank)).sum() for step in range(4))
        run_loop(loop, optimizer, losses, model)
        found[loop] = next(iter(model.full_state_dict().values())).flatten().tolist()
    return found


@pytest.mark.parametrize("option", ["gradient_merge", "1", "2", "3"])
def test_every_loop_merges_every_batch(option: str) -> None:
    """Issue 9, 1.2, 1.3 and 1.13: whatever the loop clears, and when; 7.5 is the mean gradient, twice two batches."""
    for found in run_workers(loops_on_two_workers, 2, option, backend=None):
        assert found == {loop: [-15.0, -15.0] for loop in found}
        assert len(found) == 7


def windows_of_two(rank: int, world_size: int) -> list[list[float]]:
    """Trains a GAN's two models, with a discriminator that steps twice and passes of one loss through both."""
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    fleet.init(is_collective=True, strategy=strategy)
    nets = [nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)]
    for net in nets:
        nn.init.ones_(net.weight)
    optimizers = [fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    models = [fleet.distributed_model(net) for net in nets]
    train_two(models, optimizers, lambda seed: torch.full((1, 2), 1.0 + seed + rank))
    return [net.weight.flatten().tolist() for net in nets]


def train_two(models: Any, optimizers: Any, data: Any) -> None:
    """Runs eight rounds: the critic steps twice, then the generator, whose loss passes through both."""
    (made, critic), (first, second) = models, optimizers
    for step in range(8):
        for turn in range(2):
            second.zero_grad()
            critic(made(data(turn)).detach()).square().mean().backward()
            second.step()
        first.zero_grad()
        critic(made(data(step % 3))).mean().backward()
        first.step()


class ByHand:
    """Plain torch: updates at every second step with the mean of what ``.grad`` held at each."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.kept = optimizer, []
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        parameter = self.optimizer.param_groups[0]["params"][0]
        self.kept.append(parameter.grad.clone())
        if len(self.kept) == 2:
            parameter.grad = (self.kept[0] + self.kept[1]) / 2
            self.optimizer.step()
            self.kept = []


def test_two_optimizers_have_windows_of_their_own() -> None:
    """Issue 9, 1.5: with one counter for both, the generator would never update, or with the critic's batches."""
    nets = [nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)]
    for net in nets:
        nn.init.ones_(net.weight)
    optimizers = [ByHand(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    train_two(nets, optimizers, lambda seed: torch.cat([torch.full((1, 2), 1.0 + seed + rank) for rank in range(2)]))
    for result in run_workers(windows_of_two, 2, backend=None):
        for found, net in zip(result, nets, strict=True):
            np.testing.assert_allclose(found, net.weight.detach().flatten().numpy(), atol=1e-5, rtol=1e-5)


def unfinished(rank: int, world_size: int) -> str:
    """Steps at the end of a window without a backward pass."""
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    fleet.init(is_collective=True, strategy=strategy)
    net = nn.Linear(1, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    model = fleet.distributed_model(net)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    model(torch.ones(1, 1))
    try:
        optimizer.step()
    except fleet.errors.ConfigError as error:
        return str(error)
    return ""


def test_a_window_does_not_end_without_an_exchange() -> None:
    """Issue 9, 1.2: a step without backward() would update each worker with its own sums."""
    for said in run_workers(unfinished, 2, backend=None):
        assert "before step()" in said


def windows_over_mp(rank: int, world_size: int) -> list[torch.Tensor]:
    """Merges two batches on workers that divide the layers after the optimizer was made; returns the whole weights."""
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    strategy.hybrid_configs = {"mp_degree": world_size}
    strategy.tensor_parallel_configs = {"plan": {"0": "column", "2": "row"}}
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1, 0.9))
    model = fleet.distributed_model(net)
    for step in range(6):
        torch.manual_seed(step)
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.full_state_dict().values())


def test_layers_may_be_divided_after_the_optimizer_was_made() -> None:
    """Issue 11: a window follows parameters whose data has become a part of it."""
    alone = run_workers(windows_over_mp, 1, backend=None)[0]
    for found in run_workers(windows_over_mp, 2, backend=None):
        for value, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)
