"""Async: the answer to a push brings the dense parameters and the rows that anybody has changed."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from fleet.facade import Fleet
from fleet.ps.client.client import Client
from fleet.ps.wire.messages import Op
from fleet.ps.worker.async_exchange import AsyncExchange
from fleet.ps.worker.row_replicas import OLD_S, RowReplicas
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import SPARSE, gradient, replica, rows, serving
from tests.helpers.served import RowSum

RATE, ROWS = 0.05, 12
PUSH, EXCHANGE, PULL = (Op.PUSH, False), (Op.PUSH, True), (Op.PULL, True)


def made(**configs: Any) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = True, configs
    return strategy


def start(net: nn.Module, **configs: Any) -> tuple[Fleet, Any, Any]:
    """Returns a job of one worker, its model and its optimizer."""
    own = Fleet()
    own.init(strategy=made(**configs), log_level="WARNING")
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), RATE), made(**configs))
    model = own.distributed_model(net)
    own.init_worker()
    return own, model, optimizer


def exchange_of(own: Fleet) -> AsyncExchange:
    exchange = own.session.server_job.trainer.connection.exchange
    assert isinstance(exchange, AsyncExchange)
    return exchange


def messages(monkeypatch: pytest.MonkeyPatch, client: Client) -> list[tuple[Op, bool]]:
    """Collects what the links of ``client`` send from now on, and whether the answer is to bring values or rows."""
    sent: list[tuple[Op, bool]] = []
    for link in client._links:
        submit = link.submit

        def noting(request: Any, submit: Any = submit) -> Any:
            sent.append((request.op, request.asks_rows))
            return submit(request)

        monkeypatch.setattr(link, "submit", noting)
    return sent


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ({}, [EXCHANGE] * 4),
        ({"min_send_grad_num_before_recv": 4}, [PUSH, EXCHANGE] * 2),  # of two tables: a fetch after every second step
        ({"thread_pool_size": 2}, None),
        ({"max_staleness": 8}, None),
    ],
    ids=str,
)
def test_a_step_is_one_message(
    configs: Any, expected: list[tuple[Op, bool]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thread for each table and with a bound the fetch is a message of its own."""
    torch.manual_seed(0)
    net, plain = RowSum(ROWS), RowSum(ROWS)
    plain.load_state_dict(net.state_dict())
    own, model, optimizer = start(net, **configs)
    exchange, alone = exchange_of(own), torch.optim.SGD(plain.parameters(), RATE)
    sent = messages(monkeypatch, exchange._others[-1])
    for step in range(4):
        if exchange._replicas is not None:
            exchange._replicas._rests_until = 0.0
        ids = torch.randint(0, ROWS, (4, 3), generator=torch.Generator().manual_seed(step))
        for trained, each in ((model, optimizer), (plain, alone)):
            each.zero_grad()
            trained(ids).square().mean().backward()
            each.step()
        exchange._sender.flush()
        exchange._mailbox.deliver()
    assert sent == expected if expected else PULL in sent and EXCHANGE not in sent
    own.stop_worker()
    if not configs:  # the others may begin a step without the one before it
        torch.testing.assert_close(model.emb.weight.detach(), plain.emb.weight.detach(), atol=1e-6, rtol=0)
        torch.testing.assert_close(model.out.weight.detach(), plain.out.weight.detach(), atol=1e-6, rtol=0)
    own.session.close()


def test_parameters_come_without_rows_while_those_are_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    own, model, optimizer = start(RowSum(ROWS))
    exchange = exchange_of(own)
    sent = messages(monkeypatch, exchange._others[0])
    assert exchange._replicas is not None
    exchange._replicas._rests_until = time.monotonic() + 60
    model(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    exchange._sender.flush()
    assert sent == [PUSH, PULL]
    assert exchange._mailbox.is_full
    own.stop_worker()
    own.session.close()


class TwoLayers(nn.Module):
    """Rows and two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))

    def forward(self, ids: torch.Tensor, layer: int) -> torch.Tensor:
        return self.layers[layer](self.emb(ids))


def test_parameters_that_had_no_gradient_come_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Fleet()
    own.init(strategy=made(), log_level="WARNING")
    net = TwoLayers()
    groups = [{"params": net.emb.parameters()}, *({"params": layer.parameters()} for layer in net.layers)]
    optimizer = own.distributed_optimizer(torch.optim.SGD(groups, RATE), made())
    model = own.distributed_model(net)
    own.init_worker()
    exchange = exchange_of(own)
    sent = messages(monkeypatch, exchange._others[0])
    for layer in range(2):
        before = [p.detach().clone() for p in net.layers.parameters()]
        assert exchange._replicas is not None
        exchange._replicas._rests_until = 0.0
        exchange._mailbox._spare = {part.table_id: np.full(4, 9.0, np.float32) for part in exchange._plan.dense}
        optimizer.zero_grad()
        model(torch.tensor([1]), layer).sum().backward()
        optimizer.step()
        exchange._sender.flush()
        exchange._mailbox.deliver()
        moved = [not torch.equal(p, was) for p, was in zip(net.layers.parameters(), before, strict=True)]
        assert moved == [layer == 0, layer == 0, layer == 1, layer == 1]
    assert sent == [EXCHANGE, PULL] * 2
    assert max(float(p.detach().abs().max()) for p in net.layers.parameters()) < 2.0
    own.stop_worker()
    own.session.close()


def step(client: Client, replicas: RowReplicas, *keys: int, value: float = 1.0) -> None:
    """What the sending thread does, and then a lookup."""
    with replicas.receiving() as changed:
        client.wait(client.push({0: gradient(keys, value)} if keys else {}, changed=changed))
    replicas.bring(math.inf)


def test_a_push_to_one_server_brings_the_rows_of_all() -> None:
    with serving(num_workers=2, num_servers=2) as service:
        a, b = (service.client(rank, tables={0: SPARSE}) for rank in range(2))
        one, weight = replica(a, old_s=OLD_S)
        places = a.tables[0].split(torch.arange(8).numpy())
        assert all(len(place) for place in places)  # type: ignore[arg-type]
        b.wait(b.push({0: gradient(list(range(8)))}))
        step(a, one, int(places[0][0]))  # type: ignore[index]
        assert torch.equal(weight, torch.from_numpy(rows(b, list(range(8)))))


def test_what_waits_is_written_by_a_lookup() -> None:
    with serving() as service:
        client = service.client(0, tables={0: SPARSE})
        one, weight = replica(client, old_s=OLD_S)
        assert one.is_due
        with one.receiving() as changed:
            client.wait(client.push({0: gradient([5])}, changed=changed))
        assert not weight.any()
        assert time.monotonic() - 1.0 < one._rests_until < time.monotonic() + OLD_S
        one.bring(OLD_S)
        assert weight[:, 0].tolist() == [0, 0, 0, 0, 0, -1, 0, 0]


def test_an_answer_that_was_lost_is_given_again() -> None:
    with serving(num_servers=2) as service:
        a = service.client(0, tables={0: SPARSE}, answer_timeout_s=0.3)
        one, weight = replica(a, old_s=OLD_S)
        step(a, one, 1)
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "drop"))
        step(a, one, 1, 4)
        assert weight[:, 0].tolist() == [0, -2, 0, 0, -1, 0, 0, 0]


def test_a_server_that_came_back_makes_all_rows_be_read(tmp_path: Path) -> None:
    with serving(num_workers=2, folder=tmp_path / "s") as service:
        a, b = (service.client(rank, tables={0: SPARSE}) for rank in range(2))
        one, weight = replica(a, old_s=OLD_S)
        step(a, one, 1)
        b.wait(b.push({0: gradient([2])}))
        service.servers[0].stop()
        service.start(0)
        step(a, one, 5)
        assert weight[:, 0].tolist() == [0, -1, -1, 0, 0, -1, 0, 0]
        weight[0] = 9.0
        step(a, one, 5)
        assert weight[:, 0].tolist() == [9, -1, -1, 0, 0, -2, 0, 0]  # once: the next answer has its own rows alone


def test_more_than_one_message_holds_is_read_anew() -> None:
    limit = 2048
    with serving(num_workers=2, max_body_bytes=limit) as service:
        a, b = (service.client(rank, tables={0: SPARSE}, max_body_bytes=limit) for rank in range(2))
        one, weight = replica(a, 200, old_s=OLD_S)
        for first in (0, 80):
            b.wait(b.push({0: gradient(list(range(first, first + 80)))}))
        step(a, one, 7)
        assert weight[:, 0].tolist() == [-1.0] * 7 + [-2.0] + [-1.0] * 152 + [0.0] * 40


def test_rows_of_a_push_that_failed_are_not_taken_for_new() -> None:
    with serving() as service:
        client = service.client(0, tables={0: SPARSE}, deadline_s=0.3)
        one, _ = replica(client, old_s=OLD_S)
        received = one._received_at
        service.servers[0].stop()
        with pytest.raises(fleet.errors.PSError, match="did not answer"):
            step(client, one, 1)
        assert one._received_at == received
        assert one._asking.acquire(blocking=False)


class Ones(nn.Module):
    """Rows and enough dense elements for the sender to rest after a push; every gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3, sparse=True)
        self.many = nn.Parameter(torch.zeros(1 << 17))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.emb(ids).sum() + self.many.sum()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    "configs", [{}, {"max_merge_var_num": 8}, {"max_staleness": 8, "max_merge_var_num": 8}], ids=str
)
@pytest.mark.parametrize("schedule", [lambda step: 0.8**step, lambda step: float(step < 5)], ids=["falls", "stops"])
def test_what_waits_is_applied_with_the_rate_it_was_computed_for(configs: Any, schedule: Any) -> None:
    net, plain = Ones(), Ones()
    plain.load_state_dict(net.state_dict())
    own, model, optimizer = start(net, **configs)
    alone = torch.optim.SGD(plain.parameters(), RATE)
    for trained, each in ((model, optimizer), (plain, alone)):
        scheduler = torch.optim.lr_scheduler.LambdaLR(each, schedule)
        for _ in range(12):
            trained(torch.arange(4)).backward()
            each.step()
            each.zero_grad()
            scheduler.step()
    own.stop_worker()
    torch.testing.assert_close(net.emb.weight.detach(), plain.emb.weight.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(net.many.detach(), plain.many.detach(), atol=1e-6, rtol=0)
    own.session.close()


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1, 2.0**128])
def test_a_rate_that_no_table_takes_is_refused_before_anything_is_pushed(rate: float) -> None:
    own, model, optimizer = start(RowSum(ROWS))
    model(torch.tensor([[1]])).sum().backward()
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(
        ConfigError,
        match=rf"learning rate of '.*' is {re.escape(str(rate))}; it must be finite in float32 and not negative",
    ):
        optimizer.step()
    assert exchange_of(own).client.step == 0
    own.session.close()
