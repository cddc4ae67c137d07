"""a_sync_configs["max_staleness"] and SparseEmbedding.prefetch: how old the rows of a step may be (D.7)."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, FleetError
from fleet.facade import Fleet
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.worker.async_exchange import HalfAsyncExchange
from fleet.ps.worker.connection import TrainerConfig, WorkerConnection
from fleet.ps.worker.sender import AsyncSender, SenderConfig
from fleet.ps.worker.served_model import ServedModel
from fleet.ps.worker.table_plan import TablePlan
from fleet.ps.worker.trainer import Trainer
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.fleet.ps.service import DENSE, SPARSE, gradient, in_threads, serving, silent
from tests.fleet.ps_job.test_server_job import Reference, make_adagrad, served
from tests.helpers.served import batches, run_job, train

LR, DIM = 0.1, 2
BATCHES = [torch.tensor(ids) for ids in ([1, 2], [2, 3], [3, 1], [2, 2], [1, 3], [2, 1])]


def strategy(**configs: Any) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.a_sync = True
    made.a_sync_configs = configs
    return made


class Rows(nn.Module):
    """Nothing but a table, whose rows all begin with ones."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        start = fleet.ps.Initializer("constant", 1.0)
        self.table: Any = fleet.SparseEmbedding(DIM, name="ads", initializer=start)
        if plain:
            self.table = nn.Embedding.from_pretrained(torch.ones(4, DIM), freeze=False, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids) ** 2).sum() / 2  # the gradient of a row is the row


def start(own: Fleet, made: fleet.DistributedStrategy, plain: bool = False) -> tuple[Any, Any, Rows]:
    net = Rows(plain)
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), LR), made)
    model = own.distributed_model(net)
    own.init_worker()
    return model, optimizer, net


def step(model: Any, optimizer: Any, ids: torch.Tensor, following: torch.Tensor | None = None) -> float:
    loss = model(ids)
    if following is not None:
        table = model.module.table
        table.prefetch(following)
        table.lookup._expected[-1].requested.take()  # they are here before the step: the bound allows newer ones, too
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def delayed(delay: int) -> list[float]:
    """The losses of SGD whose gradients arrive ``delay`` steps late, by hand."""
    history, losses = [np.ones((4, DIM))], []
    for number, ids in enumerate(BATCHES):
        rows = history[max(0, number - delay)]
        losses.append(float((rows[ids.numpy()] ** 2).sum() / 2))
        new = history[-1].copy()
        for key in ids.tolist():
            new[key] -= LR * rows[key]
        history.append(new)
    return losses


def test_bound_0_sees_every_step_before() -> None:
    """D.7: one worker that trains asynchronously with bound 0 trains as one process does."""

    def work(own: Fleet, rank: int) -> list[float]:
        model, optimizer, _ = start(own, strategy(max_staleness=0))
        losses = [step(model, optimizer, ids) for ids in BATCHES]
        own.stop_worker()
        return losses

    (losses,) = run_job(work, num_servers=2, strategy=strategy(max_staleness=0))
    assert losses == pytest.approx(delayed(0), rel=1e-6)


@pytest.mark.parametrize("plain", [False, True])
def test_prefetched_rows_are_one_step_older(plain: bool) -> None:
    """D.7: with bound 1 each batch sees all steps but the one before it, which is computed meanwhile."""

    def work(own: Fleet, rank: int) -> tuple[list[float], list[int]]:
        model, optimizer, _ = start(own, strategy(max_staleness=1), plain)
        client, asked = own.session.server_job.trainer.connection.client, []
        pull = client.pull
        client.pull = lambda wanted, **more: asked.append(more["step"]) or pull(wanted, **more)
        losses = [step(model, optimizer, *pair) for pair in zip(BATCHES, [*BATCHES[1:], None], strict=True)]
        client.pull = pull
        own.stop_worker()
        return losses, asked

    ((losses, asked),) = run_job(work, strategy=strategy(max_staleness=1))
    assert losses == pytest.approx(delayed(1), rel=1e-6)
    assert asked == [0, *range(1, len(BATCHES))], "one pull a batch"


def test_what_was_prefetched_and_does_not_fit_is_asked_anew() -> None:
    """D.7: other ids, a step too late, or after a load: the forward asks the servers."""

    def work(own: Fleet, rank: int) -> list[float]:
        made = strategy(max_staleness=1)
        model, optimizer, net = start(own, made)
        found = []
        net.table.prefetch(torch.tensor([1, 2]))
        found.append(model(torch.tensor([3])).item())  # others
        for _ in range(2):
            step(model, optimizer, torch.tensor([2]))
            own.session.server_job.trainer.connection.flush()
        found.append(model(torch.tensor([1, 2])).item())  # two steps later
        net.table.prefetch(torch.tensor([2]))
        own.session.server_job.trainer.connection.client.alter(0, "clear")
        own.session.server_job.trainer.connection.flush()
        found.append(model(torch.tensor([2])).item())  # the table is another one
        own.stop_worker()
        return found

    (found,) = run_job(work, strategy=strategy(max_staleness=1))
    assert found == pytest.approx([1.0, 1.0 + 0.9**4, 1.0], rel=1e-6)


def test_rows_of_any_number_of_tables_are_asked_anew_after_a_flush() -> None:
    """D.8: what came before a load is never used after it."""
    with serving(staleness=2) as service:
        exchange = HalfAsyncExchange(service.client(0), TablePlan(), 1)
        coming = [exchange.request({0: np.array([key])}, True) for key in range(20)]
        assert coming[0].rows(0, slice(None)) is not None
        exchange.flush()
        assert [one.rows(0, slice(None)) for one in coming] == [None] * 20


@pytest.mark.parametrize("half", [False, True])
def test_bound_0_keeps_dense_parameters_fresh_too(half: bool) -> None:
    """D.7: one worker trains as one process does, although dense parameters are received in the background."""
    made = fleet.StrategyFactory.create_half_async_strategy() if half else strategy()
    made.a_sync_configs = {"max_staleness": 0}

    def work(own: Fleet, rank: int) -> list[float]:
        model, optimizer = served(own, made, make_adagrad)
        losses = train(model, optimizer, batches(8))
        own.stop_worker()
        return losses

    (losses,) = run_job(work, num_servers=2, strategy=made)
    reference = Reference()
    assert losses == pytest.approx(train(reference, make_adagrad(reference.parameters()), batches(8)), rel=1e-5)


def test_a_fast_worker_waits_for_a_slow_one_and_not_at_a_barrier() -> None:
    """D.7: never more than the bound ahead; a worker that has no batch left and stands at a barrier holds nobody up."""
    bound, begun, leads = 2, [0, 0], []

    def work(own: Fleet, rank: int) -> int:
        model, optimizer, _ = start(own, strategy(max_staleness=bound))
        for epoch in range(2):
            for number in range(12 if rank else 6):
                loss = model(BATCHES[number % len(BATCHES)])
                if rank and number < 6:
                    leads.append(begun[1] - begun[0])
                begun[rank] += 1
                if not rank:
                    time.sleep(0.02)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            begun[rank] = 12 * (epoch + 1)  # each its own, and before the other can go on
            own.barrier_worker()
        steps: int = own.session.server_job.trainer.connection.client.step
        own.stop_worker()
        return steps

    steps = run_job(work, num_servers=2, num_workers=2, strategy=strategy(max_staleness=bound))
    assert max(leads) <= bound
    assert steps[1] == 24
    assert steps[0] >= 18, "it has gone on with the number of the others"


@pytest.mark.parametrize("threads", [1, 2])
def test_the_servers_are_told_of_a_step_when_all_its_tables_are_there(threads: int) -> None:
    """D.7: the dense table of plain SGD is merged and runs ahead; the step counts when the rows have come, too."""
    rows = SPARSE.__class__("rows", 2, fleet.ps.Rule("adagrad"))
    tables = {0: rows, 1: DENSE}
    with serving(staleness=3) as service:
        first = service.client(0, tables=tables, channel=1)
        clients = [
            first,
            *(service.client(0, tables=tables, channel=n + 2, client_id=first.client_id) for n in range(threads - 1)),
        ]
        sent: list[tuple[list[int], int, bool]] = []
        for client in clients:

            def push(
                gradients: Any, *, step: int, ends_step: bool = True, positions: None = None, push: Any = client.push
            ) -> Any:
                sent.append((sorted(gradients), step, ends_step))
                return push(gradients, step=step, ends_step=ends_step, positions=positions)

            client.push = push  # type: ignore[method-assign]
        sender = AsyncSender(clients, SenderConfig(thread_pool_size=threads), additive=[1])
        for number in range(1, 13):
            sender.put({0: gradient([number]), 1: np.ones(5, np.float32)}, step=number)
        sender.put({}, step=13)
        sender.flush()
        assert service.servers[0].state.job.workers[0].clock == 13
        sender.stop()
    for place, (_, told, ends) in enumerate(sent):
        if ends and told <= 12:
            had = {table: max([0, *(n for at, n, _ in sent[:place] if table in at)]) for table in tables}
            assert min(had.values()) >= told
    assert [at for at, _, ends in sent if ends and at] == [], "a push by itself ends no step"


def test_a_pull_waits_for_the_slowest() -> None:
    """D.7: and is let go when that worker has pushed, stands at a barrier, or is gone."""
    with serving(staleness=1, num_workers=2) as service:
        fast, slow = service.client(0), service.client(1)
        order: list[str] = []
        for number in (1, 2):
            fast.wait(fast.push({0: gradient([1])}, step=number))

        def pulls(name: str) -> None:
            fast.wait(fast.pull({0: np.array([1])}, step=2))
            order.append(name)

        def later(name: str, action: Any) -> None:
            time.sleep(0.1)
            order.append(name)
            action()

        in_threads(
            lambda: pulls("pull"),
            lambda: later("push", lambda: slow.wait(slow.push({}, step=1))),
        )
        assert order == ["push", "pull"]
        fast.wait(fast.push({0: gradient([1])}, step=3))
        order.clear()
        fast.step = 4
        standing = threading.Thread(target=lambda: later("barrier", slow.barrier), daemon=True)
        standing.start()
        fast.wait(fast.push({}, step=4))
        fast.wait(fast.pull({0: np.array([1])}, step=4))
        order.append("pull")
        assert order == ["barrier", "pull"]
        fast.barrier()
        standing.join(10)
        assert not standing.is_alive()
        assert slow.step == 4


@pytest.mark.parametrize(
    ("a_sync", "configs", "reason"),
    [
        (False, {"max_staleness": 3}, "sync training always sees all steps"),
        (True, {"k_steps": 5, "max_staleness": 3}, "k_steps apart by design"),
    ],
)
def test_a_bound_where_there_is_none_to_set_is_refused(a_sync: bool, configs: dict[str, int], reason: str) -> None:
    """003-13: never ignored."""
    made = fleet.DistributedStrategy()
    made.a_sync = a_sync
    made.a_sync_configs = configs
    maker = UserDefinedRoleMaker(current_id=0, role=Role.WORKER, worker_num=1, server_endpoints=["127.0.0.1:1"])
    with pytest.raises(FleetError, match=reason):
        Fleet().init(maker, strategy=made)


def test_prefetch_is_refused_where_no_step_may_be_missed() -> None:
    """D.7: sync, and bound 0; geo mode and modules that are not connected have no such step."""

    def work(own: Fleet, rank: int) -> None:
        net = start(own, made)[2]
        try:
            net.table.prefetch(BATCHES[0])
        finally:
            own.stop_worker()

    sync = fleet.DistributedStrategy()
    sync.a_sync = False
    for made, reason in ((sync, "every step sees"), (strategy(max_staleness=0), "max_staleness'] is 0")):
        with pytest.raises(ConfigError, match=reason):
            run_job(work, strategy=made)
    made = strategy(k_steps=3)
    run_job(work, strategy=made)
    Rows().table.prefetch(BATCHES[0])


def test_workers_and_servers_must_have_the_same_bound() -> None:
    """D.7: a worker that believes in another bound than the servers keep is told so."""
    with serving(staleness=1) as service:

        def make(channel: int) -> Client:
            config = ClientConfig(
                endpoints=[service.servers[0].endpoint], num_workers=1, secret=service.secret, heartbeat=False
            )
            return Client(config, transport=service.transport, notify=silent)

        trainer = Trainer(ServedModel(WorkerConnection(TablePlan(), TrainerConfig(staleness=2), make)))
        with pytest.raises(ConfigError, match="with max_staleness 2, and the parameter servers in mode 'async' with 1"):
            trainer.open()
        trainer.abandon()
