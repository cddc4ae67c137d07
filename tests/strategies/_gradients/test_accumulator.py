"""Several batches for one exchange: what is counted for each optimizer, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleet.errors import ConfigError
from fleet.strategies._gradients.accumulator import Batches, CountingOptimizer, ModelBatches


def counted(model: nn.Module, per_update: int = 1, per_exchange: int = 1) -> tuple[Batches, CountingOptimizer]:
    """Returns an optimizer of rate 1 for ``model``, and what it counts."""
    batches = Batches(per_update, per_exchange)
    return batches, CountingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), batches, in_model=True)


def backward(model: nn.Module, counts: ModelBatches, outputs: int = 1, *, held: bool = False) -> None:
    """Runs one backward pass through a number of outputs."""
    made = [model(torch.ones(1, 1)) for _ in range(outputs)]
    counts.watch({"all": made}, held=held)
    torch.stack(made).sum().backward()


def test_counting() -> None:
    """A.2 accumulate_steps: a backward pass through several outputs counts once; step() needs all of them."""
    model = nn.Linear(1, 1)
    batches, optimizer = counted(model, per_exchange=2)
    said: list[bool] = []
    counts = ModelBatches(model, [batches], said.append)
    backward(model, counts, outputs=3)
    assert batches.backwards == 1
    assert "1 batches wait" in str(optimizer.saving_note())
    for call in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(ConfigError, match="accumulate_steps"):
            call()
    backward(model, counts)
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
    counts = ModelBatches(model, [batches], said.append)
    first, second = model(torch.ones(1, 1)), model(torch.ones(1, 1))
    for output in (first, second):
        counts.watch(output)
    for output in (first, second):
        output.sum().backward()
        optimizer.step()
    assert said == [False, True]
    batches.done = 1
    backward(model, counts, held=True)
    assert said[2:] == [False]


def test_each_optimizer_counts_for_itself() -> None:
    """Issue 9, 1.5: passes through a model count for its optimizers; two that disagree about one model are refused."""
    models = nn.Linear(1, 1), nn.Linear(1, 1)
    made = [counted(model, per_update=2) for model in models]
    known = [batches for batches, _ in made]
    said: list[bool] = []
    counts = [ModelBatches(model, known, said.append) for model in models]
    for _ in range(2):
        for model, own, (_, optimizer) in zip(models, counts, made, strict=True):
            backward(model, own)
            optimizer.step()
            optimizer.zero_grad()
    assert said == [False, False, True, True]
    both = nn.ModuleList(models)
    known[0].done = 1
    with pytest.raises(ConfigError, match="Step both"):
        ModelBatches(both, known, said.append).exchanges()


def test_gradients_inside_the_model_cannot_be_dropped() -> None:
    """Issue 9, 1.2: a batch that is dropped between backward() and step() is refused; before and after it is not."""
    model = nn.Linear(1, 1)
    batches, optimizer = counted(model, per_update=2)
    counts = ModelBatches(model, [batches], lambda exchanges: None)
    optimizer.zero_grad()
    backward(model, counts)
    with pytest.raises(ConfigError, match="between backward"):
        optimizer.zero_grad()
    with pytest.raises(ConfigError, match="between backward"):
        counts.check_clear(list(model.parameters()))
    counts.check_clear([torch.ones(1)])
    optimizer.step()
    optimizer.zero_grad()
