"""Loops in turns: how they clear gradients, several optimizers, and loops that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError
from tests.helpers.workers import run_workers
from tests.strategies.reproducible.turns import (
    Branches,
    absolute,
    by_hand,
    network,
    rows,
    same,
    sgd,
    square,
    start,
    summed,
    train,
    turns,
    weights,
    wrapped,
)

# ---- gradients that are cleared -------------------------------------------------------------------------------------


def _cleared_by_hand(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEARS: dict[str, Callable[[Any, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "user's optimizer": lambda model, optimizer: optimizer.user_optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "user's model": lambda model, optimizer: model.module.zero_grad(),
    "paddle": lambda model, optimizer: optimizer.clear_grad(),
    "by hand": _cleared_by_hand,
}


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("clear", CLEARS)
def test_any_way_to_clear_gradients(clear: str, comes_first: bool) -> None:
    start(3)
    model, optimizer = wrapped(network())
    for update in range(2):
        for rank in fleet.elastic.logical_ranks():
            if comes_first:
                CLEARS[clear](model, optimizer)
            square(model, update, rank).backward()
            optimizer.step()
            if not comes_first:
                CLEARS[clear](model, optimizer)
    assert same(weights(model.module), by_hand(3, range(2)))


def test_gradients_from_before_the_first_update_add_up_wherever_they_are_cleared() -> None:
    """Each logical worker clears once an update: a process that clears after each turn must not do so more often."""
    found = []
    for clears in (True, False):
        start(3)
        net = network()
        model, optimizer = wrapped(net)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        for rank in fleet.elastic.logical_ranks():
            square(model, 0, rank).backward()
            optimizer.step()
            if clears or turns().is_last:
                optimizer.zero_grad()
        found.append(weights(net))
    assert same(*found)


@pytest.mark.parametrize("clear", [name for name in CLEARS if "zeros" not in name])
def test_a_batch_that_is_cleared_before_step_is_left_out(clear: str) -> None:
    start(3)
    net = network()
    model, optimizer = wrapped(net)
    for rank in fleet.elastic.logical_ranks():
        square(model, 0, rank).backward()
        if rank == 1:
            CLEARS[clear](model, optimizer)
        optimizer.step()
    plain = network()
    found = [torch.autograd.grad(square(plain, 0, rank), [*plain.parameters()]) for rank in (0, 2)]
    for parameter, (first, last) in zip(net.parameters(), zip(*found, strict=True), strict=True):
        assert torch.equal(parameter.grad, (first + last) / 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("clear", [name for name in CLEARS if "zeros" not in name])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_batch_that_was_exchanged_cannot_be_left_out(clear: str, rounds: int) -> None:
    """The other workers have its gradients: they would go on with another update."""
    start(2, gradient_merge=rounds > 1, gradient_merge_configs={"k_steps": rounds})
    model, optimizer = wrapped(network())
    loop = fleet.elastic.logical_ranks()
    square(model, 0, next(loop)).backward()
    optimizer.step()
    square(model, 0, next(loop)).backward()
    CLEARS[clear](model, optimizer)
    with pytest.raises(ConfigError, match=r"cleared between backward\(\) and step\(\).*leave its backward\(\) out"):
        optimizer.step()


def test_a_backward_pass_after_clearing_counts_alone() -> None:
    start(2)
    model, optimizer = wrapped(network())
    for rank in fleet.elastic.logical_ranks():
        absolute(model, 0, rank).backward()
        optimizer.zero_grad()
        square(model, 0, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(model.module), by_hand(2, range(1)))


# ---- several optimizers ---------------------------------------------------------------------------------------------


def halves() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def critics_loss(generator: Any, critic: Any, update: int, rank: int) -> Tensor:
    fake = generator(rows(update, rank)).detach()
    found: Tensor = critic(rows(update + 50, rank)).mean() - critic(fake).mean()
    return found


def generators_loss(generator: Any, critic: Any, update: int, rank: int) -> Tensor:
    found: Tensor = critic(generator(rows(update, rank))).mean()
    return found


def start_gan(num: int) -> tuple[Any, Any, Any, Any]:
    """Returns generator and critic, and their optimizers."""
    start(num)
    nets = halves()
    made = [fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    return (*(fleet.distributed_model(net) for net in nets), *made)


def test_a_generator_and_a_critic_in_loops_of_their_own() -> None:
    generator, critic, generators, critics = start_gan(3)
    for update in range(3):
        for rank in fleet.elastic.logical_ranks():
            critics_loss(generator, critic, update, rank).backward()
            critics.step()
            critics.zero_grad()
        for rank in fleet.elastic.logical_ranks():
            generators_loss(generator, critic, update, rank).backward()
            generators.step()
            generators.zero_grad()
            critics.zero_grad()  # it rests, and the loss of the generator has reached it
    plain = halves()
    for update in range(3):
        for net, loss_of in ((plain[1], critics_loss), (plain[0], generators_loss)):
            found = [torch.autograd.grad(loss_of(*plain, update, rank), [*net.parameters()]) for rank in range(3)]
            with torch.no_grad():
                for parameter, column in zip(net.parameters(), zip(*found, strict=True), strict=True):
                    parameter -= 0.1 * summed(column) / 3
    for net, expected in zip((generator.module, critic.module), plain, strict=True):
        for parameter, wanted in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("num", [1, 3])
def test_a_loss_after_the_step_of_another_optimizer_is_refused(num: int, frozen: bool) -> None:
    """The generator would see the new critic on processes in their last turn, and the old one on others."""
    generator, critic, _, critics = start_gan(num)
    rank = next(loop := fleet.elastic.logical_ranks())
    critics_loss(generator, critic, 0, rank).backward()
    critics.step()
    critics.zero_grad()
    critic.module.requires_grad_(not frozen)
    with pytest.raises(ConfigError, match=r"after step\(\) on the batch of logical worker 0.*before its first step"):
        generators_loss(generator, critic, 0, rank).backward()
    del loop


def test_one_loss_of_two_optimizers() -> None:
    start(3)
    net = network()
    first, last = (fleet.distributed_optimizer(sgd(net[place])) for place in (0, 2))
    model = fleet.distributed_model(net)
    for update in range(2):
        for rank in fleet.elastic.logical_ranks():
            square(model, update, rank).backward()
            for optimizer in (first, last):
                optimizer.step()
                optimizer.zero_grad()
    assert same(weights(net), by_hand(3, range(2)))


def branches_of_two(rank: int, world_size: int) -> dict[str, Tensor]:
    """Trains a net whose second half is used by one logical worker, with an optimizer for each half."""
    start(2)
    torch.manual_seed(0)
    net = Branches()
    optimizers = [
        fleet.distributed_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
        for layer in (net.sometimes, net.always)
    ]
    model = fleet.distributed_model(net)
    for update in range(4):
        for logical_rank in fleet.elastic.logical_ranks():
            model(rows(update, logical_rank), logical_rank == 0).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return weights(net)


def test_optimizers_of_which_some_workers_use_one() -> None:
    """All workers exchange in one order, also where a backward pass reaches other optimizers on each."""
    (alone,) = run_workers(branches_of_two, 1, backend=None)
    for found in run_workers(branches_of_two, 2, backend=None):
        assert same(found, alone)


def test_an_optimizer_may_rest_for_whole_updates() -> None:
    start(2)
    net = network()
    first, last = (fleet.distributed_optimizer(sgd(net[place])) for place in (0, 2))
    model = fleet.distributed_model(net)
    before = weights(net)
    for update in range(2):
        for rank in fleet.elastic.logical_ranks():
            square(model, update, rank).backward()
            last.step()
            first.zero_grad()
            last.zero_grad()
    assert torch.equal(net[0].weight, before["0.weight"])
    assert not torch.equal(net[2].weight, before["2.weight"])


def test_a_later_optimizer_takes_the_parameters() -> None:
    start(2)
    net = network()
    earlier = fleet.distributed_optimizer(sgd(net))
    later = fleet.distributed_optimizer(sgd(net))
    model = fleet.distributed_model(net)
    train(model, later, range(2))
    assert same(weights(net), by_hand(2, range(2)))
    next(loop := fleet.elastic.logical_ranks())
    with pytest.raises(ConfigError):
        earlier.step()
    del loop


# ---- loops that are refused -----------------------------------------------------------------------------------------


def test_a_batch_of_no_logical_worker_is_told_what_to_write() -> None:
    start(2)
    model, optimizer = wrapped(network())
    wanted = r"ElasticSampler\(data, batch_size=B\) and iterate over sampler.batches\(loader\) in place of a Distrib"
    with pytest.raises(ConfigError, match=rf"backward\(\) was called on a batch that belongs to no.*{wanted}"):
        square(model, 0, 0).backward()
    with pytest.raises(ConfigError, match=r"step\(\) was called on a batch that belongs to no logical worker"):
        optimizer.step()


def test_a_loop_without_step_is_refused() -> None:
    start(2)
    model, _ = wrapped(network())
    loop = fleet.elastic.logical_ranks()
    square(model, 0, next(loop)).backward()
    with pytest.raises(ConfigError, match=r"step\(\) was not called on that of logical worker 0.*gradient_merge"):
        next(loop)


def test_a_step_that_was_left_out_is_noticed_in_the_next_batch() -> None:
    start(3)
    model, optimizer = wrapped(network())
    loop = fleet.elastic.logical_ranks()
    square(model, 0, next(loop)).backward()
    optimizer.zero_grad()
    next(loop)
    square(model, 0, 1).backward()
    with pytest.raises(ConfigError, match="0 of this round's batches were stepped on before it, where 1 are due"):
        optimizer.step()


def test_a_step_that_was_left_out_of_the_last_batch_is_noticed() -> None:
    start(2)
    model, optimizer = wrapped(network())
    loop = fleet.elastic.logical_ranks()
    square(model, 0, next(loop)).backward()
    optimizer.step()
    next(loop)
    with pytest.raises(ConfigError, match=r"step\(\) was not called on that of logical worker 1"):
        next(loop, None)


@pytest.mark.parametrize("num", [1, 2])
def test_a_second_step_on_a_batch_is_refused(num: int) -> None:
    """As many processes as logical workers, or one: it is refused alike."""
    start(num)
    model, optimizer = wrapped(network())
    square(model, 0, next(loop := fleet.elastic.logical_ranks())).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="a second time on the batch of logical worker 0"):
        optimizer.step()
    del loop
