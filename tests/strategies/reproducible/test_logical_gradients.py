"""LogicalGradients in one process: the update of the tree, and what a loop may do around it, or may not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import CheckpointError, ConfigError, OptionWarning
from tests.helpers.workers import WorkerError, run_workers
from tests.strategies.reproducible.turns import (
    Branches,
    absolute,
    by_hand,
    gradients,
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

# ---- the update -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8])
def test_an_update_is_the_mean_in_the_order_of_the_tree(num: int) -> None:
    """Acceptance 4: another order of the tree fails here."""
    start(num)
    model, optimizer = wrapped(network())
    train(model, optimizer, range(3))
    assert same(weights(model.module), by_hand(num, range(3)))


def test_small_buckets_and_one_bucket_are_the_same() -> None:
    found = []
    for options in ({"fuse_grad_size_in_MB": 32}, {"fuse_all_reduce_ops": False}):
        start(3, **options)
        model, optimizer = wrapped(network())
        train(model, optimizer, range(2))
        found.append(weights(model.module))
    assert same(*found)


@pytest.mark.parametrize("scale", ["avg", "sum"])
@pytest.mark.parametrize("average", [True, False])
def test_rounds_of_gradient_merge(scale: str, average: bool) -> None:
    """Each round is a tree, and the trees are added in their order; both scales are honoured."""
    start(
        3,
        gradient_merge=True,
        gradient_merge_configs={"k_steps": 2, "avg": average},
        gradient_scale_configs={"scale_strategy": scale},
    )
    net = network()
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
    expected = copy.deepcopy(net)
    divisor = (3 if scale == "avg" else 1) * (2 if average else 1)
    for first in (0, 2):
        before = weights(net)
        for number in (first, first + 1):
            train(model, optimizer, [number])
            if number == first:
                assert same(weights(net), before)
        found = [
            [torch.autograd.grad(square(expected, number, rank), [*expected.parameters()]) for rank in range(3)]
            for number in (first, first + 1)
        ]
        for place, parameter in enumerate(expected.parameters()):
            rounds = [summed([each[place] for each in one]) for one in found]
            parameter.data -= 0.1 * ((rounds[0] + rounds[1]) / divisor)
        for parameter, wanted in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, atol=1e-7, rtol=1e-6)


def test_two_backward_passes_in_a_batch_add_up() -> None:
    start(3)
    model, optimizer = wrapped(network())
    for rank in fleet.elastic.logical_ranks():
        square(model, 0, rank).backward()
        absolute(model, 0, rank).backward()
        optimizer.step()
    net = network()
    found = [
        [
            one + other
            for one, other in zip(
                torch.autograd.grad(square(net, 0, rank), [*net.parameters()]),
                torch.autograd.grad(absolute(net, 0, rank), [*net.parameters()]),
                strict=True,
            )
        ]
        for rank in range(3)
    ]
    for parameter, column in zip(model.module.parameters(), zip(*found, strict=True), strict=True):
        assert torch.equal(parameter.grad, summed(column) / 3)


def test_gradients_that_nobody_clears_add_up() -> None:
    start(2)
    net = network()
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
    plain = network()
    expected = [torch.zeros_like(p) for p in plain.parameters()]
    for update in range(3):
        expected = [old + new for old, new in zip(expected, gradients(plain, 2, update), strict=True)]
        for rank in fleet.elastic.logical_ranks():
            square(model, update, rank).backward()
            optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), expected, strict=True))  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), expected, strict=True):
                parameter -= 0.1 * gradient


def test_a_batch_without_a_backward_pass_adds_nothing() -> None:
    start(3)
    net = network()
    model, optimizer = wrapped(net)
    for rank in fleet.elastic.logical_ranks():
        if rank == 0:
            square(model, 0, rank).backward()
        optimizer.step()
    plain = network()
    expected = torch.autograd.grad(square(plain, 0, 0), [*plain.parameters()])
    assert all(torch.equal(p.grad, g / 3) for p, g in zip(net.parameters(), expected, strict=True))  # type: ignore[arg-type]


# ---- code between backward() and step() -----------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_sees_the_gradient_of_the_update(foreach: bool) -> None:
    start(3)
    model, optimizer = wrapped(network())
    norms = []
    for update in range(2):
        for rank in fleet.elastic.logical_ranks():
            square(model, update, rank).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach))
            optimizer.step()
            optimizer.zero_grad()
    plain = network()
    expected = sgd(plain)
    for update in range(2):
        for parameter, gradient in zip(plain.parameters(), gradients(plain, 3, update), strict=True):
            parameter.grad = gradient
        assert norms[3 * update + 2] == nn.utils.clip_grad_norm_(plain.parameters(), 0.01, foreach=foreach)
        assert norms[3 * update] == norms[3 * update + 1] == 0
        expected.step()
    assert same(weights(model.module), weights(plain))


def test_a_gradient_that_no_update_would_see_is_refused() -> None:
    start(2)
    model, optimizer = wrapped(network())
    for rank in fleet.elastic.logical_ranks():
        square(model, 0, rank).backward()
        model.module[0].weight.grad = torch.ones(8, 4)
        with pytest.raises(ConfigError, match=r"found a gradient that was written after backward\(\)"):
            optimizer.step()
        break


def closures(rank: int, world_size: int) -> tuple[int, dict[str, Tensor]]:
    """Trains with closures on this process's turns; returns how many ran, and the weights."""
    start(3)
    model, optimizer = wrapped(network())
    losses = []
    for update in range(2):
        for logical_rank in fleet.elastic.logical_ranks():

            def closure(update: int = update, logical_rank: int = logical_rank) -> Tensor:
                optimizer.zero_grad()
                loss = square(model, update, logical_rank)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
    return len(losses), weights(model.module)


def test_a_closure_runs_once_a_batch() -> None:
    num_losses, found = closures(0, 1)
    assert num_losses == 6
    assert same(found, by_hand(3, range(2)))


def test_closures_on_uneven_hosts() -> None:
    """The process that hosts one logical worker checks its step as the one that hosts two."""
    results = run_workers(closures, 2, backend=None)
    assert [num_losses for num_losses, _ in results] == [4, 2]
    assert all(same(found, by_hand(3, range(2))) for _, found in results)


@pytest.mark.parametrize("backward", [True, False])
def test_minimize_ends_a_batch(backward: bool) -> None:
    start(3)
    model, optimizer = wrapped(network())
    for update in range(2):
        for rank in fleet.elastic.logical_ranks():
            loss = square(model, update, rank)
            if backward:
                loss.backward()
            optimizer.minimize(loss)
            optimizer.clear_grad()
    assert same(weights(model.module), by_hand(3, range(2)))


# ---- which parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [[], [0], [1], [2], [0, 2]])
def test_a_parameter_that_no_batch_used_has_no_gradient(used: list[int]) -> None:
    """So an optimizer with weight decay leaves it as it is; one batch that used it is enough."""
    start(3)
    torch.manual_seed(0)
    net = Branches()
    model, optimizer = wrapped(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    before = weights(net)
    for rank in fleet.elastic.logical_ranks():
        model(rows(0, rank), rank in used).mean().backward()
        optimizer.step()
    assert net.never.weight.grad is None
    assert torch.equal(net.never.weight, before["never.weight"])
    assert (net.sometimes.weight.grad is None) == (not used)
    if used:
        parts = [rows(0, rank).mean(0, keepdim=True) if rank in used else torch.zeros(1, 4) for rank in range(3)]
        torch.testing.assert_close(net.sometimes.weight.grad, summed(parts) / 3)
    assert torch.equal(net.sometimes.weight, before["sometimes.weight"]) == (not used)


def test_parameters_may_be_frozen_and_unfrozen_between_updates() -> None:
    start(3)
    net = network()
    net[0].requires_grad_(False)
    model, optimizer = wrapped(net)
    plain = network()
    plain[0].requires_grad_(False)
    expected = sgd(plain)
    for update, trains in enumerate([False, True, True, False, True]):
        for layer in (net[0], plain[0]):
            layer.requires_grad_(trains)
        train(model, optimizer, [update])
        trained = [p for p in plain.parameters() if p.requires_grad]
        for parameter, gradient in zip(trained, gradients(plain, 3, update), strict=True):
            parameter.grad = gradient
        expected.step()
        expected.zero_grad()
        assert same(weights(net), weights(plain)), update


def test_a_parameter_that_is_unfrozen_amid_an_update_is_refused() -> None:
    start(2)
    net = network()
    net[0].requires_grad_(False)
    model, optimizer = wrapped(net)
    loop = fleet.elastic.logical_ranks()
    square(model, 0, next(loop)).backward()
    optimizer.step()
    net[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="unfrozen in the middle of an update"):
        square(model, 0, next(loop)).backward()


def test_a_model_of_which_nothing_trains() -> None:
    start(2)
    net = network().requires_grad_(False)
    model, optimizer = wrapped(net)
    for rank in fleet.elastic.logical_ranks():
        model(rows(0, rank))
        optimizer.step()
    assert same(weights(net), weights(network()))


def test_parameters_in_other_layouts() -> None:
    """channels_last: the gradients have the strides of their parameters, as torch's own have."""
    start(3)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = copy.deepcopy(net)
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def loss(net: Any, update: int, rank: int) -> Tensor:
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
        found: Tensor = net(x.to(memory_format=torch.channels_last)).square().mean()
        return found

    for rank in fleet.elastic.logical_ranks():
        loss(model, 0, rank).backward()
        optimizer.step()
    for parameter, gradient in zip(net.parameters(), gradients(plain, 3, 0, loss), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, gradient)


def test_parameters_of_several_types() -> None:
    start(3)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 1))
    plain = copy.deepcopy(net)
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def loss(net: Any, update: int, rank: int) -> Tensor:
        inner = net.module if hasattr(net, "module") else net
        found: Tensor = inner[1](inner[0](rows(0, rank).double()).float()).square().mean()
        return found

    for rank in fleet.elastic.logical_ranks():
        loss(model, 0, rank).backward()
        optimizer.step()
    for parameter, gradient in zip(net.parameters(), gradients(plain, 3, 0, loss), strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    start(2)
    net = nn.Embedding(5, 2, sparse=True)
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
    next(loop := fleet.elastic.logical_ranks())
    with pytest.raises(ConfigError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
    del loop


# ---- seeds -----------------------------------------------------------------------------------------------------------


def other_seeds(rank: int, world_size: int, after_start: bool) -> None:
    """Trains with a seed of each worker's own."""
    torch.manual_seed(5 if after_start else 5 + rank)
    start(2)
    model, optimizer = wrapped(network())
    if after_start:
        torch.manual_seed(5 + rank)
    train(model, optimizer, range(1))


def test_other_seeds_on_each_worker_are_refused_once_the_job_has_begun() -> None:
    with pytest.raises(WorkerError, match="learning rates or seeds.*takes one seed"):
        run_workers(other_seeds, 2, True, backend=None)


def test_before_the_job_begins_worker_0s_seed_is_taken() -> None:
    run_workers(other_seeds, 2, False, backend=None)


# ---- state ----------------------------------------------------------------------------------------------------------


def masked(model: Any, update: int, rank: int) -> Tensor:
    """Returns a loss with random numbers in it."""
    found: Tensor = (model(rows(update, rank)) * torch.rand(())).square().mean()
    return found


def test_a_state_continues_with_the_same_bits() -> None:
    start(3)
    net = network()
    torch.manual_seed(11)
    model, optimizer = wrapped(net)
    train(model, optimizer, range(2), masked)
    kept = copy.deepcopy((weights(net), optimizer.state_dict()))
    train(model, optimizer, range(2, 4), masked)
    start(3)
    again = network()
    again.load_state_dict(kept[0])
    model, optimizer = wrapped(again)
    optimizer.load_state_dict(kept[1])
    train(model, optimizer, range(2, 4), masked)
    assert same(weights(net), weights(again))


def test_the_state_in_the_last_turn_is_that_after_the_round() -> None:
    start(2)
    model, optimizer = wrapped(network())
    states = []
    train(model, optimizer, range(1), after=lambda: states.append(turns().is_last and optimizer.state_dict()))
    found = states[-1]["reproducible"]  # type: ignore[index]
    assert (found["logical_workers"], found["round"]) == (2, 1)
    assert found["kernels"]["threads"] == "1"
    assert optimizer.state_dict()["reproducible"] == found


def test_a_state_amid_an_update_is_refused() -> None:
    start(2)
    model, optimizer = wrapped(network())
    square(model, 0, next(loop := fleet.elastic.logical_ranks())).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"after 1 of 2 batches of an update.*fleet.update_loss\(loss\) returns"):
        optimizer.state_dict()
    del loop


def test_a_state_of_another_number_of_logical_workers_is_refused() -> None:
    start(3)
    model, optimizer = wrapped(network())
    train(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    start(2)
    model, optimizer = wrapped(network())
    with pytest.raises(CheckpointError, match=r"that of 3 logical workers.*\['logical_workers'\] is 2"):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict()["state"] == {}


def test_a_state_of_other_kernels_is_said() -> None:
    start(2)
    _, optimizer = wrapped(network())
    state = copy.deepcopy(optimizer.state_dict())
    state["reproducible"]["kernels"]["torch"] = "1.0"
    with pytest.warns(OptionWarning, match=r"written with other kernels \(torch '1.0' then and"):
        optimizer.load_state_dict(state)


def test_a_state_of_a_plain_job_is_loaded() -> None:
    net = network()
    optimizer = sgd(net)
    net(rows(0, 0)).mean().backward()
    optimizer.step()
    state = optimizer.state_dict()
    start(2)
    _, loaded = wrapped(network())
    loaded.load_state_dict(copy.deepcopy(state))
    assert torch.equal(loaded.state_dict()["state"][0]["momentum_buffer"], state["state"][0]["momentum_buffer"])
