"""Several batches for one exchange: what is counted for each optimizer, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleet.errors import ConfigError
from fleet.strategies._gradients.accumulator import AccumulatingOptimizer, InModel, accumulate
from fleet.strategies._gradients.passes import passes_of


class Divided(nn.Module):
    """Stands for a divided model: records what it is told about exchanges."""

    def __init__(self, module: nn.Module, known: list[InModel], said: list[bool]) -> None:
        super().__init__()
        self.module = module
        self.said = said
        self.held = False
        accumulate(passes_of(self), known)

    @property
    def require_backward_grad_sync(self) -> bool:
        return not self.held

    def set_exchanges(self, exchanges: bool) -> None:
        self.said.append(exchanges)

    def forward(self, outputs: int) -> dict[str, list[torch.Tensor]]:
        return {"all": [self.module(torch.ones(1, 1)) for _ in range(outputs)]}


def counted(model: nn.Module, per_update: int = 1, per_exchange: int = 1) -> tuple[InModel, AccumulatingOptimizer]:
    """Returns an optimizer of rate 1 for ``model``, and what it counts."""
    accumulator = InModel("sharding", per_update=per_update, per_exchange=per_exchange)
    return accumulator, AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), accumulator)


def forward(model: Divided, outputs: int = 1, *, held: bool = False) -> torch.Tensor:
    """Returns the sum of a number of outputs of ``model``."""
    model.held = held
    made = passes_of(model).forward(model, (outputs,), {})
    return torch.stack(made["all"]).sum()


def test_counting() -> None:
    """A.2 accumulate_steps: a backward pass through several outputs counts once; step() needs all of them."""
    model = nn.Linear(1, 1)
    batches, optimizer = counted(model, per_exchange=2)
    said: list[bool] = []
    divided = Divided(model, [batches], said)
    forward(divided, outputs=3).backward()
    assert batches.passes == 1
    assert "1 batches wait" in str(optimizer.saving_note())
    for call in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(ConfigError, match="accumulate_steps"):
            call()
    forward(divided).backward()
    assert said == [False, True]
    optimizer.step()
    assert optimizer.saving_note() is None
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_steps_between_updates() -> None:
    """A.2 gradient_merge_acc_step: every third call updates, and schedulers see every call."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    _, optimizer = counted(model, per_update=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 100)
    seen = []
    for _ in range(6):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        scheduler.step()  # warns when the optimizer did not step before
        seen.append(model.weight.item())
    assert seen == [0, 0, -1, -1, -1, -2]
    assert optimizer.merges()


def test_the_exchange_is_decided_when_backward_begins() -> None:
    """Issue 9, 1.2: two forwards before two backward passes; only the second pass exchanges, and no_sync() none."""
    model = nn.Linear(1, 1)
    batches, optimizer = counted(model, per_update=2)
    said: list[bool] = []
    divided = Divided(model, [batches], said)
    first, second = forward(divided), forward(divided)
    for output in (first, second):
        output.backward()
        optimizer.step()
    assert said == [False, True]
    batches.steps = 1
    forward(divided, held=True).backward()
    assert said[2:] == [False]


def test_each_optimizer_counts_for_itself() -> None:
    """Issue 9, 1.5: passes through a model count for its optimizers; two that disagree about one model are refused."""
    models = nn.Linear(1, 1), nn.Linear(1, 1)
    made = [counted(model, per_update=2) for model in models]
    known = [batches for batches, _ in made]
    said: list[bool] = []
    divided = [Divided(model, known, said) for model in models]
    for _ in range(2):
        for model, (_, optimizer) in zip(divided, made, strict=True):
            forward(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert said == [False, False, True, True]
    both = Divided(nn.Sequential(*models), known, said)
    known[0].steps = 1
    with pytest.raises(ConfigError, match="Step both"):
        forward(both).backward()


def test_gradients_inside_the_model_cannot_be_dropped() -> None:
    """Issue 9, 1.2: a batch that is dropped between backward() and step() is refused; before and after it is not."""
    model = nn.Linear(1, 1)
    batches, optimizer = counted(model, per_update=2)
    divided = Divided(model, [batches], [])
    optimizer.zero_grad()
    forward(divided).backward()
    with pytest.raises(ConfigError, match="between backward"):
        optimizer.zero_grad()
    with pytest.raises(ConfigError, match="between backward"):
        batches.note_clear(list(model.parameters()))
    batches.note_clear([torch.ones(1)])
    optimizer.step()
    optimizer.zero_grad()
