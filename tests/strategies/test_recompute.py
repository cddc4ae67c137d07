"""recompute: bit-equal gradients, dropout and batch norm, data parallel, names and patterns, memory, the functions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from fleet.strategies._shared.module_names import check_patterns
from fleet.strategies._shared.segments import OnHost, SegmentInputs, recompute, recompute_sequential
from fleet.strategies.recompute import Recompute, RecomputeConfig
from tests.helpers.workers import run_workers


class Block(nn.Module):
    """Convolution, batch norm, dropout, and a named argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)
        self.runs = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.runs += 1
        return torch.relu(self.drop(self.bn(self.conv(x)))) * scale + x


class Net(nn.Module):
    """Three blocks; the first one's input needs no gradient."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer0, self.layer1, self.layer2 = Block(width), Block(width), Block(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer2(self.layer1(self.layer0(x), scale=0.5)).mean((2, 3)))


def applied(net: nn.Module, *names: str, offload: bool = False) -> nn.Module:
    """Returns ``net`` with the strategy on."""
    strategy = Recompute(RecomputeConfig(checkpoints=names, enable_offload=offload), None)  # type: ignore[arg-type]
    strategy.check_model(net)
    return strategy.wrap_model(net)


def step(net: nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    """Runs forward and backward once; returns the loss, gradients and buffers."""
    torch.manual_seed(seed)
    loss = net(torch.randn(5, 4, 6, 6)).square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(net.named_buffers())}


@pytest.mark.parametrize("names", [("layer0",), ("layer0", "layer1", "layer2"), ("layer?",), ("layer1.*",)])
def test_gradients_are_bit_equal(names: tuple[str, ...]) -> None:
    """A.2 recompute_configs: gradients, dropout and running statistics are those of no recompute, bit by bit."""
    torch.manual_seed(0)
    plain = Net()
    twice = applied(copy.deepcopy(plain), *names)
    assert [n for n, _ in twice.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for _ in range(2):
        plain.zero_grad()
        twice.zero_grad()
        torch.testing.assert_close(step(twice), step(plain), atol=0, rtol=0)


def test_a_module_inside_a_recomputed_one_is_part_of_it() -> None:
    """A.2 recompute_configs: "*" fits "0.1", too, and torch kept what each segment had computed again."""
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(6)])
    bytes_by_names = []
    for names in ([str(number) for number in range(6)], ["*"]):
        strategy = fleet.DistributedStrategy()
        strategy.update({"recompute": True, "recompute_configs": {"checkpoints": names}})
        found = fleet.estimate_memory(plain, (512, 32), strategy, optimizer="sgd", world_size=1, device="cpu")
        bytes_by_names.append(found.total_bytes)
    assert bytes_by_names[0] == bytes_by_names[1]
    plain = Net()
    net = applied(copy.deepcopy(plain), "layer*")
    torch.testing.assert_close(step(net), step(plain), atol=0, rtol=0)
    with pytest.raises(RuntimeError, match="to have 4 channels"):
        net(torch.randn(5, 3, 6, 6))  # no trace is left of a forward that failed
    plain.zero_grad()
    net.zero_grad()
    torch.testing.assert_close(step(net), step(plain), atol=0, rtol=0)
    assert [net.layer0.runs, net.layer1.runs] == [5, 4], "twice a step, and the one that failed"


def test_a_container_that_does_not_run_itself_hides_nothing() -> None:
    """The blocks of a list that the model walks through are recomputed, though the list is named, too."""

    class Walked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(4), Block(4)])
            self.stack = nn.Sequential(Block(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.blocks, self.stack[0]):
                x = block(x)
            return x

    net = applied(Walked(), "blocks*", "stack*")
    step(net)
    assert [block.runs for block in (*net.blocks, net.stack[0])] == [2, 2, 2]  # type: ignore[union-attr,index,misc]


def test_the_named_modules_run_twice() -> None:
    """recompute really computes again, only the named modules, and not without gradients."""
    net = applied(Net(), "layer1")
    step(net)
    assert [net.layer0.runs, net.layer1.runs, net.layer2.runs] == [1, 2, 1]
    with torch.no_grad():
        net(torch.randn(1, 4, 6, 6))
    assert net.layer1.runs == 3


def test_unknown_names_raise_with_the_nearest() -> None:
    """A.2: an unknown name raises before anything changes, and lists candidates."""
    net = Net()
    with pytest.raises(ConfigError, match="Did you mean 'layer1'"):
        applied(net, "layer0", "layerr1")
    assert "forward" not in net.layer0.__dict__
    with pytest.raises(ConfigError, match="Modules: layer0, layer0.conv"):
        check_patterns(net, ("x",), "checkpoints", None)
    strategy = fleet.DistributedStrategy()
    strategy.recompute = True
    with pytest.raises(ConfigError, match="checkpoints"):
        fleet.init(is_collective=True, strategy=strategy)


def test_activation_memory_falls() -> None:
    """What is saved for backward falls to the inputs of the segments."""

    def saved_bytes(net: nn.Module) -> int:
        sizes: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            net(torch.randn(8, 16, 12, 12))
        return sum(sizes)

    assert saved_bytes(applied(Net(16), "layer?")) < 0.2 * saved_bytes(Net(16))


def test_model_still_copies() -> None:
    """A recomputed model deep-copies, and the copy trains its own parameters."""
    net = applied(Net(), "layer1")
    twin = copy.deepcopy(net)
    step(twin)
    assert twin.layer1.conv.weight.grad is not None
    assert net.layer1.conv.weight.grad is None


def train(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """Trains two steps under data parallel."""
    strategy = fleet.DistributedStrategy()
    if names:
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": names}
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    net = Net()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    model = fleet.distributed_model(net)
    for count in range(2):
        torch.manual_seed(10 * count + rank)
        model(torch.randn(4, 4, 6, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def test_under_data_parallel() -> None:
    """A.2, 003-14: with data parallel the result is bit-equal to no recompute, on both workers."""
    plain = run_workers(train, 2, [], backend=None)
    twice = run_workers(train, 2, ["layer0", "layer2"], backend=None)
    torch.testing.assert_close(twice, plain, atol=0, rtol=0)


def test_functions() -> None:
    """B.9: recompute and recompute_sequential equal the plain calls; wrong arguments raise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(6, 4)
    plain = copy.deepcopy(net)
    plain(x).sum().backward()
    for run in (
        lambda model: fleet.recompute(model, x),
        lambda model: recompute(model.forward, x, preserve_rng_state=False),
        lambda model: recompute(model, x.clone().requires_grad_(), use_reentrant=True),
        lambda model: fleet.recompute_sequential({"segments": 2}, model, x),
        lambda model: recompute_sequential({"segments": 5}, list(model), x),
    ):
        twice = copy.deepcopy(net)
        run(twice).sum().backward()
        for name, p in twice.named_parameters():
            torch.testing.assert_close(p.grad, plain.get_parameter(name).grad, atol=0, rtol=0)
    for wrong in ({"segments": 9}, {"segments": 0}, {"pieces": 2}):
        with pytest.raises(ConfigError):
            recompute_sequential(wrong, net, x)
    with pytest.raises(ConfigError, match="1 inputs"):
        recompute(net, x, offload_indices=[1])


def test_both_forms_take_named_inputs() -> None:
    """B.9: use_reentrant changes nothing: named inputs are handed on and get gradients, statistics move once."""
    net = nn.BatchNorm1d(2)

    def scaled(x: torch.Tensor, scale: float = 1.0, *, bias: torch.Tensor) -> torch.Tensor:
        return x * scale + bias

    for reentrant in (False, True):
        x, bias = torch.ones(2, requires_grad=True), torch.full((2,), 5.0, requires_grad=True)
        out = fleet.recompute(scaled, x, scale=3.0, bias=bias * 1.0, use_reentrant=reentrant, offload_indices=[0])
        assert out.tolist() == [8.0, 8.0]
        out.sum().backward()
        assert x.grad is not None
        assert bias.grad is not None
        assert (x.grad.tolist(), bias.grad.tolist()) == ([3.0, 3.0], [1.0, 1.0])
        fleet.recompute(net, torch.randn(4, 2), use_reentrant=reentrant).sum().backward()
    assert int(net.num_batches_tracked) == 2  # type: ignore[arg-type]


def test_inputs_wait_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A.2 enable_offload: the copies come back with values and flags, and gradients are bit-equal."""
    monkeypatch.setattr("fleet.strategies._shared.segments.worth_moving", lambda t: not isinstance(t, nn.Parameter))
    x = torch.randn(3, requires_grad=True)
    inputs = SegmentInputs((x, 2), {"y": [torch.ones(1)]}, None)
    inputs.set_aside()
    assert isinstance(inputs._args[0], OnHost)
    (back, two), named = inputs.take()
    assert (back is not x, back.requires_grad, two, named["y"][0].item()) == (True, True, 2, 1.0)
    torch.testing.assert_close(back, x)
    torch.manual_seed(0)
    plain = Net()
    moved = applied(copy.deepcopy(plain), "layer?", offload=True)
    torch.testing.assert_close(step(moved), step(plain), atol=0, rtol=0)


@pytest.mark.gpu
def test_offload_frees_device_memory() -> None:
    """A.2 enable_offload on a GPU: less is allocated at the end of forward, gradients are equal."""
    torch.manual_seed(0)
    plain = Net(32).cuda()
    nets = {"plain": copy.deepcopy(plain), "offload": applied(copy.deepcopy(plain), "layer?", offload=True)}
    used, gradients = {}, {}
    for name, net in nets.items():
        torch.manual_seed(1)
        x = torch.randn(16, 32, 64, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        loss = net(x).square().mean()
        torch.cuda.synchronize()
        used[name] = torch.cuda.memory_allocated() - before
        loss.backward()
        gradients[name] = {n: p.grad for n, p in net.named_parameters()}
    assert used["offload"] < 0.25 * used["plain"]
    torch.testing.assert_close(gradients["offload"], gradients["plain"])


class Cards:
    """Generators of two GPUs that stand for torch's: each draw adds one to the state of its own."""

    def __init__(self) -> None:
        self.states = [10, 20]

    def get(self, index: int) -> torch.Tensor:
        return torch.tensor(self.states[index])

    def put(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = int(state)

    def draw(self) -> tuple[int, int]:
        self.states = [state + 1 for state in self.states]
        return (self.states[0], self.states[1])


@pytest.mark.parametrize("keeps", [True, False])
def test_backward_draws_from_the_gpu_what_forward_drew(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A.2: dropout on a GPU drops the same values both times, and the generator then stands where it stood."""
    cards, drawn = Cards(), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", cards.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", cards.put)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        drawn.append(cards.draw())
        return x.square()

    loss = recompute(noisy, torch.ones(2, requires_grad=True), preserve_rng_state=keeps).sum()
    cards.draw()
    loss.backward(retain_graph=True)
    loss.backward()
    assert [card for _, card in drawn] == ([21, 21, 21] if keeps else [21, 23, 24])  # the current card
    assert cards.states[1] == (22 if keeps else 24)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_dropout_on_a_gpu(offload: bool) -> None:
    """A.2: gradients are bit-equal to those without recompute, and random numbers continue as without it."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.ReLU()) for _ in range(3)]).cuda()
    found = []
    for made in (copy.deepcopy(net), applied(copy.deepcopy(net), "0", "1", "2", offload=offload)):
        torch.manual_seed(1)
        made(torch.randn(32, 64, device="cuda")).square().mean().backward()
        found.append([*[p.grad for p in made.parameters()], torch.rand(3, device="cuda")])
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)


def test_several_backward_passes_through_one_forward() -> None:
    """Issue 9: retain_graph and autograd.grad beside backward, as torch's checkpoint; statistics move once."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    x = torch.randn(8, 4)
    plain = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
    before = int(net[1].num_batches_tracked)
    loss = fleet.recompute(net, x).square().mean()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    for value, again, parameter in zip(plain, first, net.parameters(), strict=True):
        torch.testing.assert_close(again, value, atol=1e-7, rtol=0)
        torch.testing.assert_close(parameter.grad, 2 * value, atol=1e-7, rtol=0)
    assert int(net[1].num_batches_tracked) == before + 1
