"""The state of another optimizer, or of other shapes, is told from one that fits, also before there is any here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fleet.errors import CheckpointError
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.worker.dense_part import DensePart, GroupPlace
from fleet.ps.worker.hybrid_model import check_state

Part = tuple[torch.optim.Optimizer, list[DensePart]]


class Averaged(torch.optim.SGD):
    """An optimizer that may keep anything."""


def start(make: Any, width: int, num_rows: int = 5, trains: bool = False) -> Part:
    """Returns the optimizer of rows, which servers train, a linear layer, and a number; after a step where told."""
    net = nn.ModuleDict(
        {"rows": nn.Embedding(num_rows, 3), "fc": nn.Linear(24 // width, width), "one": nn.Linear(1, 1)}
    )
    groups = [{"params": [*net["rows"].parameters(), *net["fc"].parameters()]}, {"params": net["one"].parameters()}]
    optimizer = make(net.parameters() if make.func is torch.optim.LBFGS else groups)
    for parameter in net.parameters() if trains else ():
        parameter.grad = torch.ones_like(parameter)
    if trains:
        optimizer.step(lambda: 1.0)
    names, trained = zip(*[(name, p) for name, p in net.named_parameters() if name != "rows.weight"], strict=True)
    config = DenseTableConfig("dense.0", sum(p.numel() for p in trained))
    return optimizer, [DensePart(0, config, list(trained), GroupPlace(optimizer, 0), names=names)]


def state_of(make: Any, width: int) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = start(make, width, num_rows=9, trains=True)[0].state_dict()["state"]
    return state


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "momentum_buffer"),
        (partial(torch.optim.Adagrad, lr=0.1), "sum"),
        (partial(torch.optim.AdamW, lr=0.1, amsgrad=True), "max_exp_avg_sq"),
        (partial(torch.optim.NAdam, lr=0.1), "exp_avg"),
        (partial(torch.optim.ASGD, lr=0.1), "ax"),
    ],
)
def test_a_tensor_of_another_shape_is_named(make: Any, key: str, trains: bool) -> None:
    """Rows are not trained here: there may be more or fewer of them."""
    optimizer, parts = start(make, 6, trains=trains)
    good = state_of(make, 6)
    check_state("trainer.pt", good, optimizer, parts)
    check_state("trainer.pt", {}, optimizer, parts)
    with pytest.raises(CheckpointError, match=r"pt: '\w+' of parameter 1, 'fc.weight', .* \[4, 6\]; .* \[6, 4\]"):
        check_state("trainer.pt", state_of(make, 4), optimizer, parts)
    good[2][key] = torch.ones(7)
    with pytest.raises(CheckpointError, match=rf"pt: '{key}' of parameter 2, 'fc.bias', .* \[7\]; .* \[6\]"):
        check_state("trainer.pt", good, optimizer, parts)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, partial(Averaged, momentum=0.9)])
def test_what_only_the_optimizer_knows_is_taken(kind: Any, trains: bool) -> None:
    """Sums over rows, one vector of all parameters, and what a class of the user keeps."""
    make = partial(kind, lr=0.1)
    check_state("trainer.pt", state_of(make, 6), *start(make, 6, trains=trains))
    if make.func is Averaged and trains:
        with pytest.raises(CheckpointError, match="'momentum_buffer' of parameter 1"):
            check_state("trainer.pt", state_of(make, 4), *start(make, 6, trains=True))


ADAM, MOMENTUM = partial(torch.optim.Adam, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (MOMENTUM, ADAM, "SGD keeps 'momentum_buffer'"),
        (ADAM, MOMENTUM, "Adam keeps 'exp_avg', 'exp_avg_sq', 'step'"),
        (partial(torch.optim.SGD, lr=0.1), ADAM, "SGD keeps nothing"),
        (partial(torch.optim.Adam, lr=0.1, amsgrad=True), ADAM, "Adam keeps .*'max_exp_avg_sq'"),
        (partial(torch.optim.Adadelta, lr=0.1), ADAM, "Adadelta keeps 'acc_delta'"),
        (partial(torch.optim.RMSprop, lr=0.1, momentum=0.9), partial(torch.optim.RMSprop, lr=0.1), "'momentum_buffer'"),
    ],
)
def test_the_state_of_another_optimizer_is_told(here: Any, there: Any, text: str, trains: bool) -> None:
    """torch takes it: one of these would fail in its next step, the others would begin anew without a word."""
    with pytest.raises(CheckpointError, match=rf"pt has '.* for parameter 1, 'fc.weight', .*{text}.*remove the file"):
        check_state("trainer.pt", state_of(there, 6), *start(here, 6, trains=trains))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        (partial(torch.optim.AdamW, lr=0.2, weight_decay=0.1), ADAM),
        (ADAM, partial(torch.optim.Adam, lr=0.1, amsgrad=True)),
        (MOMENTUM, partial(torch.optim.SGD, lr=0.1)),  # which keeps nothing
        (partial(torch.optim.RAdam, lr=0.1), partial(torch.optim.RAdam, lr=0.1)),
    ],
)
def test_the_state_of_a_kindred_optimizer_is_taken(here: Any, there: Any, trains: bool) -> None:
    check_state("trainer.pt", state_of(there, 6), *start(here, 6, trains=trains))
