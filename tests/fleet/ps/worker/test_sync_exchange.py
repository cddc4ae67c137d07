"""Dense parameters in sync mode: as plain torch, whatever scripts and workers do (L.1)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet.facade import Fleet
from fleet.ps.server.answers import Answers
from tests.helpers.served import ServedJob, run_job, strategy_of
from tests.helpers.sync_job import RATE, Job, Net, differs, ids_of, loss_of, plain, run_workers, train


@pytest.fixture
def job() -> Any:
    made = Job()
    yield made
    made.own.session.close()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_two_workers_train_as_plain_torch(num_servers: int) -> None:
    def work(own: Fleet, rank: int, net: Net, model: Any, optimizer: Any) -> Any:
        train(model, optimizer, range(20), rank)
        return copy.deepcopy(net)

    first, second = run_workers(work, num_servers=num_servers)
    assert differs(first, second) == 0.0
    assert differs(first, plain(20, 0, 1)) < 1e-6


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_rules_with_a_state_change_values_alone(optimizer: Any) -> None:
    def work(own: Fleet, rank: int) -> Any:
        net = Net()
        net.emb.weight.requires_grad_(False)
        trained = own.distributed_optimizer(optimizer(net.dense(), RATE), strategy_of("sync"))
        model = own.distributed_model(net)
        own.init_worker()
        train(model, trained, range(6), rank)
        own.stop_worker()
        return net

    nets = run_job(work, num_workers=2, strategy=strategy_of("sync"))
    wanted = Net()
    wanted.emb.weight.requires_grad_(False)
    made = optimizer(wanted.dense(), RATE)
    for step in range(6):
        made.zero_grad()
        (sum(loss_of(wanted, ids_of(step, rank)) for rank in range(2)) / 2).backward()
        made.step()
    assert max(differs(net, wanted) for net in nets) < 1e-5


def test_values_that_came_with_the_answer_are_not_asked_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step()
    monkeypatch.setattr(job.trainer.connection.client, "pull", None)
    job.step()
    assert job.is_right()


def in_an_array(weight: nn.Parameter) -> Any:
    array = weight.detach().numpy().copy()
    weight.data = torch.from_numpy(array)
    return array


@pytest.mark.parametrize(
    "hold",
    [lambda w: w.data, lambda w: w.detach().numpy(), in_an_array, lambda w: w.share_memory_()],
    ids=["view", "array of it", "array", "shared"],
)
def test_what_holds_the_memory_of_a_parameter_follows(hold: Callable[[nn.Parameter], Any]) -> None:
    net = Net()
    held = hold(net.middle.weight)
    job = ServedJob("sync", lambda: net, RATE)
    train(job.model, job.optimizer, range(4), 0)
    assert np.array_equal(torch.as_tensor(held).detach().numpy(), net.middle.weight.detach().numpy())
    assert differs(net, plain(4)) < 1e-6
    job.end()


def test_another_tensor_in_a_parameter_gets_the_next_values(job: Job) -> None:
    job.step()
    job.net.middle.weight.data = job.net.middle.weight.data.clone()
    for _ in range(3):
        job.step()
    assert job.is_right()


def test_a_graph_from_before_a_step_is_refused_as_in_plain_torch(job: Job) -> None:
    loss = loss_of(job.model, ids_of(0))
    job.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed"):
        loss.backward()


def test_values_that_are_flushed_in_inference_mode_are_trained_on(job: Job) -> None:
    job.step()
    with torch.inference_mode():
        job.trainer.connection.flush()
    job.step()
    assert job.is_right()


def test_an_interruption_after_the_answer_leaves_its_values(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step()
    client = job.trainer.connection.client
    wait = client.wait

    def interrupted(ticket: Any) -> Any:
        wait(ticket)
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.step()
    monkeypatch.undo()
    job.count = 2
    assert job.is_right()
    job.step()
    assert job.is_right()


# -- steps in which not all workers, or not all groups, have a share --------------------------------------------------


def test_a_worker_at_a_barrier_keeps_its_values_until_the_others_come() -> None:
    stood, done, looked = threading.Event(), threading.Event(), threading.Event()

    def work(own: Fleet, rank: int, net: Net, model: Any, optimizer: Any) -> Any:
        train(model, optimizer, range(2), rank)
        seen = []
        if rank == 0:  # has fewer batches

            def look() -> None:
                stood.wait(30)
                while not done.is_set():
                    seen.append([p.detach().clone() for p in net.dense()])
                looked.set()

            thread = threading.Thread(target=look)
            thread.start()
            stood.set()
            own.barrier_worker()
            thread.join()
        else:
            stood.wait(30)
            train(model, optimizer, range(2, 12), rank)
            alone = copy.deepcopy(net)
            done.set()
            assert looked.wait(30)
            own.barrier_worker()
        after = copy.deepcopy(net)
        train(model, optimizer, range(12, 15), rank)
        return seen if rank == 0 else alone, after, copy.deepcopy(net)

    (seen, first, first_end), (alone, second, second_end) = run_workers(work)
    before = [p.detach() for p in plain(2, 0, 1).dense()]
    assert len(seen) > 3
    for values in seen:
        for value, wanted in zip(values, before, strict=True):
            assert float((value - wanted).abs().max()) < 1e-6
    assert differs(first, second) == differs(first_end, second_end) == 0.0
    assert differs(alone, plain(2, 0, 1, then=[(10, [1])])) < 1e-6
    assert differs(first_end, plain(2, 0, 1, then=[(10, [1]), (3, [0, 1])])) < 1e-6


@pytest.mark.parametrize("leaves", [True, False])
def test_a_step_without_the_worker_at_a_barrier_is_the_mean_of_the_others(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread answers: beside a standby it is the worker's own, which waits for the step then."""
    if not leaves:
        monkeypatch.setattr(Answers, "_leave", lambda *_: False)
    pushes = threading.Event()

    def work(own: Fleet, rank: int, net: Net, model: Any, optimizer: Any) -> Any:
        train(model, optimizer, range(3), rank)
        if rank == 2:
            own.barrier_worker()
            return None
        if rank == 1:
            assert pushes.wait(30)
            time.sleep(0.3)  # worker 0 waits in its step now
        pushes.set()
        train(model, optimizer, range(3, 4), rank)
        after = copy.deepcopy(net)
        own.barrier_worker()
        return after

    first, second, _ = run_workers(work, num_workers=3)
    assert differs(first, second) == 0.0
    assert differs(first, plain(3, 0, 1, 2, then=[(1, [0, 1])])) < 1e-6


def test_a_group_without_gradients_here_takes_the_steps_of_others() -> None:
    def loss(net: Any, step: int, rank: int) -> torch.Tensor:
        hidden = net.hidden(net.emb(ids_of(step, rank)))
        return (net.out(net.middle(hidden)) if rank else hidden).square().mean()

    def groups(net: Net) -> list[dict[str, Any]]:
        first = [*net.emb.parameters(), *net.hidden.parameters()]
        return [{"params": first}, {"params": [*net.middle.parameters(), *net.out.parameters()]}]

    def work(own: Fleet, rank: int) -> Any:
        net = Net()
        optimizer = own.distributed_optimizer(torch.optim.SGD(groups(net), RATE), strategy_of("sync"))
        model = own.distributed_model(net)
        own.init_worker()
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
        after = copy.deepcopy(net)  # stop_worker() takes the servers' values
        own.stop_worker()
        return after

    nets = run_job(work, num_workers=2, strategy=strategy_of("sync"))
    wanted = Net()
    made = torch.optim.SGD(groups(wanted), RATE)
    for step in range(4):
        made.zero_grad()
        ((loss(wanted, step, 0) + loss(wanted, step, 1)) / 2).backward()
        made.step()
    assert max(differs(net, wanted) for net in nets) < 1e-6
