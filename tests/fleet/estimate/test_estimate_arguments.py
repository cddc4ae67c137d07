"""``fleet.estimate_memory`` (issue 3): what is wrong is said, with what was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError, StrategyConflictError


def strategy(**options: Any) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.update(options)
    return made


class Branching(nn.Module):
    """Decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def value_of_loss(output: Tensor) -> Any:
    return 3.0


def needs_closure(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        ((nn.Linear(4, 4), "4,4"), {}, "batch is '4,4'"),
        ((nn.Linear(4, 4), [(2, 4), object()]), {}, "the batch holds"),
        ((3, (2, 4)), {}, "model is 3"),
        ((lambda: 3, (2, 4)), {}, "which is no torch.nn.Module"),
        ((nn.Linear(4, 4), (2, 4), 7), {}, "strategy is 7"),
        ((nn.Linear(4, 4), (2, 4)), {"optimizer": "adamm"}, "Did you mean 'adam'"),
        ((nn.Linear(4, 4), (2, 4)), {"optimizer": 3}, "optimizer=3"),
        ((nn.Linear(4, 4), (2, 4)), {"optimizer": lambda parameters: 3}, "made 3"),
        ((nn.Linear(4, 4), (2, 4)), {"optimizer": needs_closure}, "needs one"),
        (
            (nn.Linear(4, 4), (2, 4)),
            {"optimizer": torch.optim.SGD(nn.Linear(4, 4).parameters())},
            "not one of the model's",
        ),
        ((nn.Linear(4, 4), (2, 4)), {"world_size": 0}, "world_size=0"),
        ((nn.Linear(4, 4), (2, 4)), {"world_size": True}, "world_size=True"),
        ((nn.Linear(4, 4), (2, 4)), {"device": "gpu"}, "device='gpu'"),
        ((nn.Linear(4, 4).requires_grad_(False), (2, 4)), {"optimizer": "sgd", "world_size": 1}, "nothing is trained"),
        ((nn.Linear(4, 4), (2, 4)), {"loss": value_of_loss}, "one number to train on"),
        ((nn.LazyLinear(4), (2, 4)), {}, "has no shape yet"),
        ((Branching(), (2, 4)), {}, "asks for a value"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_wrong_arguments(arguments: tuple[Any, ...], keywords: dict[str, Any], said: str) -> None:
    """What is wrong is said, with what was given."""
    with pytest.raises(ConfigError, match=said):
        fleet.estimate_memory(*arguments, **keywords)


def test_a_strategy_that_cannot_run_is_refused() -> None:
    """The plan's own errors."""
    with pytest.raises(StrategyConflictError):
        fleet.estimate_memory(nn.Linear(4, 4), (2, 4), strategy(lars=True, lamb=True))
    with pytest.raises(ConfigError, match="names no module"):
        fleet.estimate_memory(
            nn.Linear(4, 4), (2, 4), strategy(recompute=True, recompute_configs={"checkpoints": ["layer9"]})
        )


def test_a_model_that_cannot_be_copied() -> None:
    """The factory is the way out, and works."""

    class Closed(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    with pytest.raises(ConfigError, match="no copies.*Pass a function"):
        fleet.estimate_memory(Closed(4, 4), (2, 4))
