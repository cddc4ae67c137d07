"""What a job starts from is given whole and once, wherever worker 0 is killed meanwhile (D.1, D.7, 003-34)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet.errors import PSError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.client.link import Link
from fleet.ps.client.request import Request
from fleet.ps.table import ids
from fleet.ps.wire.messages import Op
from fleet.ps.worker.served_embedding import serve_embeddings
from fleet.ps.worker.table_plan import TablePlan, plan_tables
from fleet.ps.worker.trainer import Trainer, TrainerConfig
from tests.fleet.ps.service import Service, gradient, rows, serving, silent

NUM_ROWS = 20
SIZES = {"words": 3, "places": 2}


class Net(nn.Module):
    """Two tables and two dense parameters of different learning rates."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(NUM_ROWS, SIZES["words"], sparse=True)
        self.places = nn.Embedding(NUM_ROWS, SIZES["places"], sparse=True)
        self.out, self.bias = nn.Parameter(torch.rand(9) + 1), nn.Parameter(torch.rand(4) + 1)


def made(seed: int) -> tuple[Net, TablePlan]:
    net = Net(seed)
    serve_embeddings(net)
    groups = [{"params": [net.out]}, {"params": [net.words.weight, net.places.weight, net.bias], "lr": 0.5}]
    return net, plan_tables([net], torch.optim.SGD(groups, lr=1.0))


def trainer_of(
    service: Service, plan: TablePlan, rank: int = 0, client_id: int = 7, mode: str = "async", **settings: Any
) -> Trainer:
    def make(channel: int) -> Client:
        config = ClientConfig(
            endpoints=[server.endpoint for server in service.servers],
            secret=service.secret,
            rank=rank,
            num_workers=service.num_workers,
            channel=channel,
            heartbeat=False,
            **{"deadline_s": 10.0, "start_timeout_s": 5.0, **settings},
        )
        client = Client(config, transport=service.transport, notify=silent, client_id=client_id)
        service.clients.append(client)
        return client

    return Trainer(plan, TrainerConfig(mode=mode), make)


class Killed(BaseException):
    """The end of a worker."""


def killing(monkeypatch: pytest.MonkeyPatch, number: int, sent: bool) -> Callable[[], int]:
    """Ends the worker at its ``number``-th change, before or after it is sent; returns the count of changes."""
    transmit, count = Link._transmit, [0]

    def counted(self: Link, request: Request) -> None:
        if request.op not in (Op.ADD, Op.SET_DENSE):
            transmit(self, request)
            return
        count[0] += 1
        if count[0] != number or sent:
            transmit(self, request)
        if count[0] == number:
            raise Killed

    monkeypatch.setattr(Link, "_transmit", counted)
    return lambda: count[0]


def tables_of(client: Client, plan: TablePlan) -> dict[str, np.ndarray]:
    """Every row and value the servers have, by name."""
    found = {part.config.name: rows(client, range(NUM_ROWS), part.table_id) for part in plan.sparse}
    for part in plan.dense:
        found[part.config.name] = client.wait(client.pull({part.table_id: None}, wait_for_others=False))[part.table_id]
    return found


def begin_and_die(
    service: Service, monkeypatch: pytest.MonkeyPatch, number: int, sent: bool, client_id: int = 7
) -> bool:
    """Lets worker 0 start and die at a change; returns whether it came so far."""
    with monkeypatch.context() as patched:
        killing(patched, number, sent)
        trainer = trainer_of(service, made(1)[1], client_id=client_id)
        try:
            trainer.open()
        except Killed:
            return True
        finally:
            trainer.abandon()
    return False


@pytest.mark.parametrize("sent", [False, True])
def test_a_worker_0_killed_anywhere_leaves_nothing_half_given(sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two servers, two tables, two pieces of a table: the next process gives what is missing, once."""
    monkeypatch.setattr(ids, "ROWS_AT_ONCE", 7)
    first, again = Net(1), Net(2)
    number, mixed = 1, 0
    while True:
        with serving(num_servers=2) as service:
            killed = begin_and_die(service, monkeypatch, number, sent)
            _, plan = made(2)
            trainer = trainer_of(service, plan, client_id=8)
            trainer.open()
            found = tables_of(trainer.client, plan)
        for name in SIZES:
            one, other = (getattr(net, name).weight.detach().numpy() for net in (first, again))
            is_one, is_other = (found[name] == one).all(axis=1), (found[name] == other).all(axis=1)
            assert (is_one | is_other).all(), (number, name)
            mixed += bool(is_one.any() and is_other.any())
        values = np.concatenate([found[part.config.name] for part in plan.dense])
        wholes = [np.concatenate([net.out.detach(), net.bias.detach()]) for net in (first, again)]
        assert any(np.array_equal(values, whole) for whole in wholes), number
        if not killed:
            break
        number += 1
    assert number > 10  # there were many places to die at
    assert mixed > 3  # and the two processes did complete each other's work


def test_what_was_trained_or_loaded_is_not_given_again() -> None:
    """A worker 0 that comes back later finds rows that training has changed, and leaves them."""
    with serving(num_servers=2) as service:
        _, plan = made(1)
        trainer = trainer_of(service, plan)
        trainer.open()
        client, table = trainer.client, plan.sparse[0].table_id
        client.wait(client.push({table: gradient(range(NUM_ROWS), 1.0, SIZES[plan.sparse[0].config.name])}))
        before = tables_of(client, plan)
        trainer.abandon()
        other = trainer_of(service, made(2)[1], client_id=8)
        other.open()
        after = tables_of(other.client, plan)
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values)


def test_pieces_that_were_applied_stay_known_after_a_restart_of_the_server(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is in the journal and in the snapshot, beside the rows."""
    monkeypatch.setattr(ids, "ROWS_AT_ONCE", 7)
    with serving(num_servers=2, folder=tmp_path) as service:
        assert begin_and_die(service, monkeypatch, 3, sent=True)
        service.client(client_id=5, tables={}).snapshot()
        assert begin_and_die(service, monkeypatch, 6, sent=True, client_id=17)
        for index, server in enumerate(list(service.servers)):
            server.stop()
            service.start(index)
        trainer = trainer_of(service, made(1)[1], client_id=9)
        trainer.open()
        found = tables_of(trainer.client, trainer.plan)
    for name in SIZES:
        np.testing.assert_array_equal(found[name], getattr(Net(1), name).weight.detach().numpy())


def test_the_others_do_not_train_before_the_values_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker 0 that died is not waited for at the barrier after its lease; the others then wait for its values."""
    with serving(num_servers=2, num_workers=2, lease_s=0.2) as service:
        assert begin_and_die(service, monkeypatch, 5, sent=True)
        other = trainer_of(service, made(3)[1], rank=1, client_id=8, deadline_s=0.5)
        with pytest.raises(PSError, match=r"worker 0 has not given .* restart it"):
            other.open()
        other.abandon()
