"""Small reproducible jobs of this process, and the same updates by hand in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fleet
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.running import running_job

Loss = Callable[[Any, int, int], Tensor]  # of the model, the update and the logical rank


def start(num: int, **options: Any) -> LogicalWorkers:
    """Starts a job of ``num`` logical workers, and returns them."""
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": num}
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    return turns()


def turns() -> LogicalWorkers:
    """Returns the logical workers of the job."""
    job = running_job()
    assert job is not None
    assert job.logical is not None
    return job.logical


def network() -> nn.Sequential:
    """Returns a net of two layers, the same one each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer with a state."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def wrapped(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple[Any, Any]:
    """Returns the model and its optimizer, as fleet returns them."""
    made = fleet.distributed_optimizer(sgd(net) if optimizer is None else optimizer)
    return fleet.distributed_model(net), made


def rows(update: int, rank: int, count: int = 3) -> Tensor:
    """Returns the batch of a logical worker."""
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1000 * update + rank))


def square(model: Any, update: int, rank: int) -> Tensor:
    """Returns the loss of the batch of a logical worker."""
    loss: Tensor = model(rows(update, rank)).square().mean()
    return loss


def absolute(model: Any, update: int, rank: int) -> Tensor:
    """Returns another loss of the same batch."""
    loss: Tensor = model(rows(update, rank)).abs().mean()
    return loss


class Branches(nn.Module):
    """Uses one layer in each batch, and another in some."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 1)
        self.sometimes = nn.Linear(4, 1)
        self.never = nn.Linear(4, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        found: Tensor = self.always(x) + self.sometimes(x) if both else self.always(x)
        return found


def train(
    model: Any, optimizer: Any, updates: Iterable[int], loss: Loss = square, after: Callable[[], None] = lambda: None
) -> None:
    """Trains in turns; ``after`` runs at the end of each."""
    for update in updates:
        for rank in fleet.elastic.logical_ranks():
            loss(model, update, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            after()


def summed(parts: Sequence[Any]) -> Any:
    """Returns the sum of ``parts`` in the order of the tree, by its definition."""
    if len(parts) == 1:
        return parts[0]
    left = 2 ** ((len(parts) - 1).bit_length() - 1)
    return summed(parts[:left]) + summed(parts[left:])


def gradients(net: nn.Module, num: int, update: int, loss: Loss = square) -> list[Tensor]:
    """Returns the gradients of an update of ``num`` logical workers in plain torch: their mean in the tree's order."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    found = [torch.autograd.grad(loss(net, update, rank), parameters) for rank in range(num)]
    return [summed(column) / num for column in zip(*found, strict=True)]


def by_hand(num: int, updates: Iterable[int], loss: Loss = square) -> dict[str, Tensor]:
    """Returns the weights after ``updates`` of ``network()`` in plain torch."""
    net = network()
    optimizer = sgd(net)
    for update in updates:
        for parameter, gradient in zip(net.parameters(), gradients(net, num, update, loss), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return weights(net)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Returns whether all bits are the same."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )
