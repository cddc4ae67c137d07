"""The dense half of hybrid training, trainers as threads: means, rates, trainers without batches (D.7, D.9)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fleet.errors import NanInfError, PSError
from fleet.ps.worker.dense_exchange import DenseExchange, ProcessGroupTrainers, SingleTrainer, check_same_round
from fleet.ps.worker.table_plan import plan_tables
from tests.helpers.trainers import thread_trainers
from tests.helpers.workers import run_workers


class Net(nn.Module):
    """Three parameters, of which the last takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.bias = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.ones(1))


def exchange(net: Net, optimizer: torch.optim.Optimizer, trainers: Any) -> DenseExchange:
    plan = plan_tables([net], optimizer, dense_here=True)
    return DenseExchange(plan.dense, optimizer, trainers)


def run(work: Callable[[Any], Any], size: int = 2) -> list[Any]:
    """Returns what ``work`` returns, or raises, for each trainer."""
    results: list[Any] = [None] * size

    def one(trainers: Any) -> None:
        try:
            results[trainers.rank] = work(trainers)
        except BaseException as error:
            results[trainers.rank] = error

    threads = [threading.Thread(target=one, args=(trainers,), daemon=True) for trainers in thread_trainers(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_the_mean_of_those_that_step_and_worker_0_s_rate() -> None:
    """D.7: dense gradients are averaged; a parameter without any stays without; rate 1/3 arrives to the last bit."""

    def work(trainers: Any) -> Any:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 5.0, weight_decay=0.5)
        dense = exchange(net, optimizer, trainers)
        optimizer.load_state_dict(optimizer.state_dict())  # which gives it other groups
        optimizer.param_groups[0]["lr"] = 1 / 3 if trainers.rank == 0 else 7.0
        net.weight.grad = torch.full((2, 3), float(trainers.rank))
        if trainers.rank == 1:
            net.bias.grad = torch.ones(3)  # the other's counts as zeros
        dense.start()
        found = dense.finish()
        gradient = net.weight.grad.clone()
        dense.step()
        return found.active, gradient, net, optimizer.param_groups[0]["lr"], dense.rounds

    expected = Net()
    reference = torch.optim.SGD(expected.parameters(), 1 / 3, weight_decay=0.5)
    expected.weight.grad, expected.bias.grad = torch.full((2, 3), 0.5), torch.full((3,), 0.5)
    reference.step()
    for rank, (active, gradient, net, rate, rounds) in enumerate(run(work)):
        assert (active, rounds) == (2, 1)
        assert torch.equal(gradient, torch.full((2, 3), 0.5))
        assert all(torch.equal(one, other) for one, other in zip(net.parameters(), expected.parameters(), strict=True))
        assert rate == (1 / 3 if rank == 0 else 7.0)
        assert net.unused.grad is None


def test_a_trainer_without_batches_steps_with_the_others() -> None:
    """D.7: 4 and 2 steps, then a meeting, then 1 step each, then one leaves first: equal bits, momentum included."""

    def work(trainers: Any) -> Any:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        dense = exchange(net, optimizer, trainers)

        def steps(count: int) -> None:
            for _ in range(count):
                net.weight.grad = torch.full((2, 3), float(trainers.rank + 1))
                dense.start()
                dense.finish()
                dense.step()
                optimizer.zero_grad()

        steps(4 - 2 * trainers.rank)
        net.bias.grad = kept = torch.ones(3)
        assert dense.stand_by(leaving=False) == 0
        assert net.bias.grad is kept
        net.bias.grad = None
        steps(1)
        if trainers.rank == 0:
            steps(2)
            assert dense.stand_by(leaving=False) == 1  # trainer 1 has said that it leaves
            steps(1)
        assert dense.stand_by(leaving=True) == 2
        return net.weight.detach(), dense.rounds

    expected = Net()
    reference = torch.optim.SGD([expected.weight], 0.1, momentum=0.9)
    for mean in (1.5, 1.5, 1, 1, 1.5, 1, 1, 1):
        expected.weight.grad = torch.full((2, 3), float(mean))
        reference.step()
    for weight, rounds in run(work):
        assert torch.equal(weight, expected.weight)
        assert rounds == 8


def test_a_bad_gradient_stops_all_before_an_update() -> None:
    """003-20, FLAGS_check_nan_inf: nobody updates, whether it stepped or stood by."""

    def work(trainers: Any) -> Any:
        net = Net()
        dense = exchange(net, torch.optim.SGD(net.parameters(), 0.1), trainers)
        if trainers.rank == 2:
            with pytest.raises(NanInfError, match=r"1 other trainer"):
                dense.stand_by(leaving=False)
            return net
        net.weight.grad = torch.ones(2, 3)
        dense.start(bad=trainers.rank == 1)
        assert dense.finish().bad == 1
        return net

    for net in run(work, 3):
        assert torch.equal(net.weight, Net().weight)


def test_values_of_trainer_0_and_of_all() -> None:
    def work(trainers: Any) -> Any:
        net = Net()
        dense = exchange(net, torch.optim.SGD(net.parameters(), 0.1), trainers)
        counts = torch.full((2,), trainers.rank + 3)
        dense.copy_from_0([counts])
        shared = dense.share(b"state" if trainers.rank == 0 else b"")
        return counts.tolist(), dense.gather([trainers.rank, 2**40]), shared, dense.share(b"")

    assert run(work) == [([3, 3], [[0, 2**40], [1, 2**40]], b"state", b"")] * 2
    check_same_round([2, 2])
    with pytest.raises(PSError, match=r"after \[2, 3\] updates"):
        check_same_round([2, 3])


def test_one_trainer_needs_nobody() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), torch.tensor(0.1))
    dense = exchange(net, optimizer, SingleTrainer())
    net.weight.grad = torch.ones(2, 3)
    dense.start()
    dense.finish()
    dense.step()
    torch.testing.assert_close(net.weight.detach(), torch.full((2, 3), 0.9))
    assert dense.stand_by(leaving=False) == 0
    assert dense.stand_by(leaving=True) == 1


def sums_and_copies(rank: int, world_size: int) -> Any:
    """Sums and copies; then trainer 1 is gone, without a word."""
    group = dist.group.WORLD
    assert group is not None
    trainers = ProcessGroupTrainers(group)
    total, copied = torch.full((3,), float(rank + 1)), torch.full((2,), rank + 5)
    trainers.start_sum(total)()
    trainers.copy_from_0(copied)
    if rank == 0:
        message = ""
        try:
            trainers.start_sum(torch.ones(1))()
        except PSError as error:
            message = str(error)
        dist.destroy_process_group()
        return total, copied, message
    dist.destroy_process_group()  # its connections end
    return total, copied, ""


def test_sum_copy_and_a_trainer_that_is_gone() -> None:
    """D.7: one sum everywhere; who waits for a trainer that is gone gets an error that says what to do."""
    first, second = run_workers(sums_and_copies, 2)
    for total, copied, _ in (first, second):
        assert total.tolist() == [3, 3, 3]
        assert copied.tolist() == [5, 5]
    assert "restart all of them" in first[2]


@pytest.mark.gpu
def test_sum_on_a_gpu() -> None:
    """003-21: NCCL sums tensors of the GPU; one process, as one GPU takes one rank."""
    assert run_workers(sum_on_gpu, 1, backend="cpu:gloo,cuda:nccl") == [[2.0, 2.0]]


def sum_on_gpu(rank: int, world_size: int) -> Any:
    """Sums on the first GPU."""
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.full((2,), 2.0, device="cuda")
    ProcessGroupTrainers(group).start_sum(tensor)()
    return tensor.tolist()
