"""fleet.mean in turns: every row counts as it does in one batch of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError
from tests.strategies.reproducible.turns import network, rows, sgd, start, train, weights, wrapped

COUNTS = [3, 0, 1, 7, 2]


def mean_of(model: Any, update: int, rank: int) -> Tensor:
    """Returns the mean of a batch of as many rows as its logical worker has."""
    x = rows(update, rank, COUNTS[rank])
    return fleet.mean(model(x).square().sum(), len(x))


def plain(updates: int, loss_of: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """Returns the weights after training on one batch of all rows in plain torch."""
    net = network()
    optimizer = sgd(net)
    for update in range(updates):
        optimizer.zero_grad()
        loss_of(net, torch.cat([rows(update, rank, count) for rank, count in enumerate(COUNTS)])).backward()
        optimizer.step()
    return weights(net)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


def test_uneven_batches_are_one_batch_of_all_rows() -> None:
    start(len(COUNTS))
    net = network()
    model, optimizer = wrapped(net)
    train(model, optimizer, range(3), mean_of)
    close(weights(net), plain(3, lambda net, x: net(x).square().mean()))


def test_over_rounds_of_gradient_merge() -> None:
    start(len(COUNTS), gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    net = network()
    model, optimizer = wrapped(net)
    train(model, optimizer, range(2), mean_of)
    expected = network()
    optimizer = sgd(expected)
    x = torch.cat([rows(update, rank, count) for update in range(2) for rank, count in enumerate(COUNTS)])
    expected(x).square().mean().backward()
    optimizer.step()
    close(weights(net), weights(expected))


@pytest.mark.parametrize("options", [{}, {"gradient_scale_configs": {"scale_strategy": "sum"}}])
def test_two_terms_that_count_alike(options: dict[str, Any]) -> None:
    """The mean is that of the rows, whatever a sum over workers is divided by otherwise."""
    start(len(COUNTS), **options)
    net = network()
    model, optimizer = wrapped(net)

    def two(model: Any, update: int, rank: int) -> Tensor:
        x = rows(update, rank, COUNTS[rank])
        first = fleet.mean(model(x).square().sum(), len(x))
        return first + 2 * fleet.mean(model(x).abs().sum(), len(x))

    train(model, optimizer, range(2), two)
    close(weights(net), plain(2, lambda net, x: net(x).square().mean() + 2 * net(x).abs().mean()))


def test_the_value_is_the_mean_of_the_batch() -> None:
    start(2)
    model, _ = wrapped(network())
    next(loop := fleet.elastic.logical_ranks())
    total = model(rows(0, 0)).square().sum()
    found = fleet.mean(total, 3)
    assert float(found) == float(total) / 3
    assert found.dtype == total.dtype
    assert float(fleet.mean(0 * total, 3)) == 0
    del loop


def test_a_mean_without_a_gradient_is_no_count_of_the_batch() -> None:
    """A metric beside the loss; the processes have unequal numbers of batches, and exchange nothing for it."""
    start(len(COUNTS))
    net = network()
    model, optimizer = wrapped(net)

    def with_metric(model: Any, update: int, rank: int) -> Tensor:
        loss = mean_of(model, update, rank)
        with torch.no_grad():
            assert float(fleet.mean(torch.tensor(6.0), 4)) == 1.5
            assert float(fleet.mean(torch.tensor(0.0), 0)) == 0
        assert float(fleet.mean(torch.tensor(6.0), 12)) == 0.5
        return loss

    train(model, optimizer, range(2), with_metric)
    close(weights(net), plain(2, lambda net, x: net(x).square().mean()))


def test_terms_that_count_differently_are_refused() -> None:
    start(2)
    model, _ = wrapped(network())
    next(loop := fleet.elastic.logical_ranks())
    total = model(rows(0, 0)).sum()
    fleet.mean(total, 3)
    with pytest.raises(ConfigError, match=r"two terms of one batch count 3 and 1.*count \* penalty, count"):
        fleet.mean(total, 1)
    del loop


def test_a_count_of_an_update_is_that_of_its_batch() -> None:
    start(2)
    model, _ = wrapped(network())
    next(loop := fleet.elastic.logical_ranks())
    total = model(rows(0, 0)).sum()
    fleet.mean(total, 3, update_count=3)
    with pytest.raises(ConfigError, match="this one counts 3; update_count is 6. Leave it out"):
        fleet.mean(total, 3, update_count=6)
    del loop
