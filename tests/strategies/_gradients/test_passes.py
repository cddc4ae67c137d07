"""Passes: which backward passes fill gradients, exchange them, and of which loss they came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.strategies._gradients.passes import Passes, fills_gradients, forwards_behind, nodes_behind, passes_of
from tests.helpers.workers import run_workers


@dataclass
class Output:
    """What a model of today returns."""

    first: Tensor
    second: Tensor


class Net(nn.Module):
    """Two outputs in an object, and something on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.side: Tensor | None = None

    def forward(self, x: Tensor) -> Output:
        y = self.linear(x)
        self.side = y * 2
        return Output(y, y + 1)


def made(net: nn.Module) -> tuple[Passes, list[str]]:
    """Returns the passes of a net in one process, and what happens."""
    passes, seen = passes_of(net), []
    passes.starts.append(lambda: seen.append("start"))
    return passes, seen


def test_a_pass_begins_once_and_grad_is_none() -> None:
    """Issue 9, 1.9: several outputs are one pass; torch.autograd.grad is none, of inputs and of parameters."""
    net = Net()
    passes, seen = made(net)
    x = torch.ones(1, 2, requires_grad=True)
    output = passes.forward(net, (x,), {})
    torch.autograd.grad(output.first.sum(), x, retain_graph=True)
    torch.autograd.grad(output.first.sum(), net.linear.weight, retain_graph=True)
    loss = output.first.sum() + output.second.sum()
    assert seen == []
    assert [forward.differentiated for forward in set(forwards_behind(loss))] == [""]
    loss.backward()
    assert seen == ["start"]
    assert {forward.differentiated for forward in forwards_behind(loss)} == {"user"}
    assert not passes.running


def test_a_leaf_has_no_graph_behind_it() -> None:
    leaf = nn.Parameter(torch.ones(()))
    assert list(nodes_behind(leaf)) == forwards_behind(leaf) == []
    names = [type(node).__name__ for node in nodes_behind((2 * leaf).exp())]
    assert names == ["ExpBackward0", "MulBackward0", "AccumulateGrad"]
    ended = nodes_behind((2 * leaf).exp(), ends=lambda node: type(node).__name__ == "MulBackward0")
    assert [type(node).__name__ for node in ended] == names[:2]


def test_passes_that_nobody_waits_for_are_noticed() -> None:
    """They are counted, also when a graph is passed twice, and their losses are differentiated."""
    net = Net()
    passes = passes_of(net)
    x = torch.ones(1, 2, requires_grad=True)
    loss = passes.forward(net, (x,), {}).first.sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert (passes.begun, [forward.differentiated for forward in forwards_behind(loss)]) == (0, [""])
    for number in (1, 2):
        loss.backward(retain_graph=True)
        assert (passes.begun, [forward.differentiated for forward in forwards_behind(loss)]) == (number, ["user"])
        assert not passes.running
    seen: list[str] = []  # whoever begins to wait is told of the next pass
    passes.starts.append(lambda: seen.append("start"))
    loss.backward()
    assert (passes.begun, seen, passes.running) == (3, ["start"], False)


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_the_script_on_an_output_run_beside_it(inside: bool) -> None:
    """Whether the module has put them there or the loop; a handle removes its own alone."""
    seen: list[str] = []

    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.handle = y.register_hook(lambda gradient: seen.append("module")) if inside else None
            return y

    net = Hooked(2, 1)
    passes = passes_of(net)
    output = passes.forward(net, (torch.ones(1, 2),), {})
    handle = output.register_hook(lambda gradient: seen.append("loop") or 2 * gradient)
    output.retain_grad()
    output.sum().backward(retain_graph=True)
    assert (passes.begun, seen) == (1, ["module", "loop"] if inside else ["loop"])
    assert output.grad.tolist() == [[2.0]]
    handle.remove()
    output.sum().backward()
    assert (passes.begun, seen.count("loop"), net.bias.grad.item()) == (2, 1, 3.0)


def test_a_pass_that_failed_does_not_last() -> None:
    """A hook that raises leaves a pass without an end; the next forward starts afresh."""
    net = Net()
    passes, seen = made(net)
    output = passes.forward(net, (torch.ones(1, 2),), {})
    handle = net.linear.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.first.sum().backward()
    handle.remove()
    passes.forward(net, (torch.ones(1, 2),), {}).first.sum().backward()
    assert seen == ["start", "start"]


def test_a_frozen_model_takes_part_in_the_passes_of_others() -> None:
    """A loss that passes through a frozen model is differentiated; the frozen model begins no pass."""
    net, frozen = Net(), nn.Linear(2, 1).requires_grad_(False)
    (passes, seen), (others, begun) = made(net), made(frozen)
    others.everyone = lambda: [*net.parameters(), *frozen.parameters()]
    loss = others.forward(frozen, (passes.forward(net, (torch.ones(1, 2),), {}).first,), {}).sum()
    loss.backward()
    assert (seen, begun) == (["start"], [])
    assert [forward.differentiated for forward in forwards_behind(loss)] == ["user"]
    assert not fills_gradients([])
    assert fills_gradients([], alone=True)


def loops(rank: int, world_size: int, find_unused: bool) -> list[Tensor]:
    """Trains with two forwards before two backward passes, and with two passes through one graph."""
    strategy = fleet.DistributedStrategy()
    strategy.find_unused_parameters = find_unused
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.5))
    model = fleet.distributed_model(net)
    train(model, optimizer, lambda seed: torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * seed + rank)))
    return [p.detach() for p in net.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    """Runs the two loops."""
    for step in range(3):
        first, second = (model(data(2 * step + part)).square().mean() for part in range(2))
        optimizer.zero_grad()
        first.backward()
        second.backward()
        optimizer.step()
        loss = model(data(50 + step)).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        optimizer.step()


@pytest.mark.parametrize("find_unused", [False, True])
def test_every_backward_pass_exchanges(find_unused: bool) -> None:
    """Issue 9, 1.2: with data parallel alone torch exchanges one pass per forward, the rest would stay local."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    generator = [torch.Generator() for _ in range(2)]
    train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.5),
        lambda seed: torch.cat(
            [torch.randn(2, 3, generator=g.manual_seed(10 * seed + r)) for r, g in enumerate(generator)]
        ),
    )
    for result in run_workers(loops, 2, find_unused, backend=None):
        torch.testing.assert_close(result, [p.detach() for p in net.parameters()], atol=1e-6, rtol=1e-5)
