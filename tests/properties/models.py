"""The models of the compositions: tens of parameters each, one class each, so that a script can hold its source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of one worker: four rows of 16 and of 4 numbers."""
    draws = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 16, generator=draws), torch.randn(4, 4, generator=draws)


def optimizer_of(rule: str, parameters: Any) -> Optimizer:
    """Returns one of torch's optimizers; Adam's eps keeps a gradient of 1e-9 from becoming a step."""
    if rule == "sgd":
        return torch.optim.SGD(parameters, 0.1)
    if rule == "momentum":
        return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01)
    if rule == "adam":
        return torch.optim.Adam(parameters, 0.02, eps=1e-2)
    return torch.optim.AdamW(parameters, 0.02, eps=1e-2, weight_decay=0.05)


class Example:
    """Networks, and the turns of a training step: which loss, and which optimizers (one for each net) follow it."""

    turns: tuple[tuple[str, tuple[int, ...]], ...] = (("loss", (0,)),)
    block = "0"  # a module of every net that can be recomputed, or be a unit of sharding
    has_norm = False
    shares = False  # whether a turn leaves gradients in the parameters of an optimizer that does not follow
    tries_invariants = False  # whether only the draws of invariants take it
    may_stop_late = False  # whether a batch may leave out a parameter that earlier ones used

    def data(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        """Returns a batch of one worker."""
        return batch(number, rank)

    def nets(self) -> list[nn.Module]:
        """Returns new networks; torch's generator decides their parameters."""
        return [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))]

    def after_wrap(self, nets: list[Any]) -> None:
        """Does what the script does to its networks once they are wrapped."""

    def loss(self, nets: list[Any], x: Tensor, y: Tensor) -> Tensor:
        """Returns the mean loss of a batch."""
        return F.mse_loss(nets[0](x), y)


class Mlp(Example):
    """Two linear layers."""


class ConvNorm(Example):
    """A convolution and a batch norm, whose statistics are each worker's own."""

    has_norm = True

    def nets(self) -> list[nn.Module]:
        layers = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)
        return [nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Sequential(*layers))]

    block = "1"


class Attention(Example):
    """An encoder layer, whose attention reads the parameters of its projection itself."""

    def nets(self) -> list[nn.Module]:
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        return [nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Linear(4, 16), layer, nn.Flatten(), nn.Linear(64, 4))]

    block = "2"


class Tied(Example):
    """Two layers of one weight."""

    def nets(self) -> list[nn.Module]:
        net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        net[2].weight = net[0].weight
        return [net]


class Listed(Example):
    """Parameters in a ParameterList, beside a layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.more = nn.ParameterList([nn.Parameter(torch.randn(16, 4) / 4), nn.Parameter(torch.zeros(4))])

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.first(x)) @ self.more[0] + self.more[1]

    block = "first"

    def nets(self) -> list[nn.Module]:
        return [Listed.Net()]


class Outside(Example):
    """A layer whose weight is used without calling it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.first(x)), self.second.weight, self.second.bias)

    block = "first"

    def nets(self) -> list[nn.Module]:
        return [Outside.Net()]


class Penalty(Example):
    """A penalty on the weights in the loss."""

    def loss(self, nets: list[Any], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(nets[0](x), y) + 0.02 * sum(p.square().sum() for p in nets[0].parameters())


class Outer(Example):
    """A head that the loss reads and the model does not call, as fused losses do."""

    def nets(self) -> list[nn.Module]:
        return [Outer.Net()]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.first(x))

    block = "first"

    def loss(self, nets: list[Any], x: Tensor, y: Tensor) -> Tensor:
        head = nets[0].head
        weight, bias = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in (head.weight, head.bias))
        return F.mse_loss(F.linear(nets[0](x), weight, bias), y)


class Impure(Example):
    """A block that changes its buffers: the vector of a power iteration, in place, and a counter, assigned anew."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)
            self.register_buffer("direction", torch.ones(16) / 4)
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.direction.copy_(F.normalize(self.weight @ (self.weight.T @ self.direction), dim=0))
                self.runs = self.runs + 1
            size = (self.direction.clone() @ self.weight).norm()
            return torch.tanh(F.linear(x, self.weight / size)) * (1 + 1 / (1 + self.runs))

    def nets(self) -> list[nn.Module]:
        return [nn.Sequential(Impure.Block(), nn.Linear(16, 4))]


class Frozen(Example):
    """A first layer that is not trained."""

    def nets(self) -> list[nn.Module]:
        nets = super().nets()
        nets[0][0].requires_grad_(False)
        return nets


class Thawed(Example):
    """A first layer that is not trained when the model is wrapped, and is from then on."""

    def nets(self) -> list[nn.Module]:
        nets = super().nets()
        nets[0][0].requires_grad_(False)
        return nets

    def after_wrap(self, nets: list[Any]) -> None:
        nets[0][0].requires_grad_(True)


class Chain(Example):
    """An encoder and a head with an optimizer each, and one loss."""

    turns = (("loss", (0, 1)),)

    def nets(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 4))]

    def loss(self, nets: list[Any], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(nets[1](nets[0](x)), y)


class Alternating(Example):
    """Two models that have nothing to do with each other, trained in turn."""

    turns = (("loss", (0,)), ("other_loss", (1,)))

    def nets(self) -> list[nn.Module]:
        return [*super().nets(), *super().nets()]

    def other_loss(self, nets: list[Any], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(nets[1](x), -y)


class Gan(Example):
    """A discriminator, and a generator whose loss goes through it and leaves gradients there."""

    turns = (("judge", (0,)), ("deceive", (1,)))
    shares = True

    def nets(self) -> list[nn.Module]:
        judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        return [judge, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))]

    def judge(self, nets: list[Any], x: Tensor, y: Tensor) -> Tensor:
        return (
            nets[0](torch.cat([y, nets[1](x).detach()])).mul(torch.tensor([[1.0]] * len(x) + [[-2.0]] * len(x))).mean()
        )

    def deceive(self, nets: list[Any], x: Tensor, y: Tensor) -> Tensor:
        return nets[0](nets[1](x)).mean()


class Wide(Example):
    """A weight that is large enough for dgc."""

    def nets(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))]


class ByWorker(Example):
    """Two branches, of which the rows of a worker choose one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a if x[0, 0] > 0 else self.b)(torch.tanh(self.first(x)))

    block = "first"
    tries_invariants = True
    may_stop_late = True

    def nets(self) -> list[nn.Module]:
        return [ByWorker.Net()]


class ByBatch(ByWorker):
    """Two branches, of which each batch uses one on all workers."""

    def data(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        x, y = batch(number, rank)
        x[:, 0] = number % 2 - 0.5
        return x, y


class Counted(Example):
    """A layer that counts its forwards in a buffer, and whose output depends on the count."""

    class Warmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls.add_(1)
            return self.layer(x) * (1 + self.calls / 8)

    tries_invariants = True

    def nets(self) -> list[nn.Module]:
        return [nn.Sequential(Counted.Warmed(), nn.Tanh(), nn.Linear(16, 4))]


MODELS: dict[str, type[Example]] = {
    kind.__name__: kind
    for kind in (
        Mlp, ConvNorm, Attention, Tied, Listed, Outside, Penalty, Outer, Impure, Frozen, Thawed, Chain, Alternating,
        Gan, Wide, ByWorker, ByBatch, Counted,
    )
}  # fmt: skip
