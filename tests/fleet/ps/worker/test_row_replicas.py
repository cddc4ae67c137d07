"""Async training of ``nn.Embedding``: lookups that train read the module's weight, a replica of the servers' rows."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import fleet
from fleet.facade import Fleet
from fleet.ps.client.client import Client
from fleet.ps.worker.row_replicas import OLD_S
from tests.fleet.ps.service import SPARSE, gradient, replica, serving
from tests.helpers.served import RowSum, run_job

_SEEDING = threading.Lock()
RATE, ROWS = 0.05, 12


def made(**configs: Any) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = True, configs
    return strategy


def new_net(seed: int = 0) -> RowSum:
    with _SEEDING:  # the generator belongs to the whole process
        torch.manual_seed(seed)
        return RowSum(ROWS)


def start(own: Fleet, optimizer_type: Any = torch.optim.SGD, seed: int = 0, **configs: Any) -> tuple[Any, Any]:
    net = new_net(seed)
    optimizer = own.distributed_optimizer(optimizer_type(net.parameters(), RATE), made(**configs))
    model = own.distributed_model(net)
    own.init_worker()
    return model, optimizer


def alone(optimizer_type: Any = torch.optim.SGD, **configs: Any) -> tuple[Fleet, Any, Any]:
    own = Fleet()
    own.init(strategy=made(**configs), log_level="WARNING")
    return own, *start(own, optimizer_type, **configs)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS, (4, 3), generator=drawn), torch.randn(4, 1, generator=drawn)


def train(model: Any, optimizer: Any, step: int) -> None:
    ids, target = batch(step)
    optimizer.zero_grad()
    (model(ids) - target).square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adagrad])
def test_steps_that_are_flushed_are_those_of_one_process(optimizer_type: Any) -> None:
    own, model, optimizer = alone(optimizer_type)
    net = new_net()
    plain = optimizer_type(net.parameters(), RATE)
    for step in range(6):
        train(model, optimizer, step)
        own.session.server_job.trainer.connection.flush()
        train(net, plain, step)
    assert own.session.server_job.trainer.connection.pulled == 0  # no lookup asked for the rows of its batch
    torch.testing.assert_close(model.emb.weight.detach(), net.emb.weight.detach(), atol=1e-6, rtol=0)
    assert torch.equal(model.emb.weight[3].detach(), net.emb.weight[3].detach())  # the padding
    own.stop_worker()
    torch.testing.assert_close(model.state_dict()["emb.weight"], net.emb.weight.detach(), atol=1e-6, rtol=0)
    own.session.close()


def test_what_waits_in_the_queue_is_in_the_weights_after_stop_worker() -> None:
    own, model, optimizer = alone(max_merge_var_num=8, send_wait_times=1000)
    before = model.emb.weight.detach().clone()
    train(model, optimizer, 0)
    own.stop_worker()
    net = new_net()
    train(net, torch.optim.SGD(net.parameters(), RATE), 0)
    assert not torch.equal(model.emb.weight.detach(), before)
    torch.testing.assert_close(model.emb.weight.detach(), net.emb.weight.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(model.out.weight.detach(), net.out.weight.detach(), atol=1e-6, rtol=0)
    own.session.close()


@pytest.mark.parametrize("merge", [1, 8])
def test_training_does_not_run_ahead_of_what_is_sent(merge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pulls the queues would fill, and every gradient be as old as they are long."""
    own, model, optimizer = alone(torch.optim.Adam, max_merge_var_num=merge)
    exchange = own.session.server_job.trainer.connection.exchange
    sender = exchange._others[0]
    push = sender.push

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.03)
        return push(*args, **kwargs)

    monkeypatch.setattr(sender, "push", slowly)
    most = 0
    for step in range(6):
        train(model, optimizer, step)
        most = max(most, *exchange.waiting().values())
    assert (most <= 1) == (merge == 1)
    own.stop_worker()
    own.session.close()


def test_an_answer_from_before_a_barrier_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as service:
        client = service.client(0, tables={0: SPARSE})
        replicas, weight = replica(client, old_s=OLD_S)
        watch = client.watch

        def slowly(table_ids: Any) -> Any:
            found = watch(table_ids)
            client.wait(client.push({0: gradient([5])}))  # another worker's, before the barrier
            replicas.expire()
            monkeypatch.undo()
            return found

        monkeypatch.setattr(client, "watch", slowly)
        replicas.receive()
        replicas.bring(OLD_S)
        assert weight[5].count_nonzero()


def test_two_workers_in_turn_are_one_process() -> None:
    """Each sees behind a barrier what the other pushed, also rows that only the other one trained."""
    steps = 6

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own, seed=rank)
        for step in range(steps):
            if step % 2 == rank:
                train(model, optimizer, step)
                own.session.server_job.trainer.connection.flush()
            own.barrier_worker()
            # Behind the barrier nothing is older; the parameters come with the next exchange.
            own.session.server_job.trainer.connection.exchange._mailbox.receive(
                own.session.server_job.trainer.connection.client
            )
            own.session.server_job.trainer.connection.exchange._mailbox.deliver()
        found = model.emb(torch.arange(ROWS)).detach()
        own.barrier_worker()
        own.stop_worker()
        return found

    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for step in range(steps):
        train(net, optimizer, step)
    for found in run_job(work, num_workers=2, num_servers=2, strategy=made()):
        torch.testing.assert_close(found, net.emb.weight.detach(), atol=1e-6, rtol=0)


def test_a_worker_that_pushes_nothing_sees_rows_that_are_hardly_old() -> None:
    meeting = threading.Barrier(2)

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own)
        model.emb(torch.arange(ROWS))
        meeting.wait()
        if rank:
            train(model, optimizer, 0)
            own.session.server_job.trainer.connection.flush()
        meeting.wait()
        with torch.no_grad():
            at_once = model.emb(torch.arange(ROWS))  # evaluates: the servers' rows
        time.sleep(OLD_S)
        later = model.emb(torch.arange(ROWS)).detach()
        own.barrier_worker()
        own.stop_worker()
        return at_once, later

    net = new_net()
    train(net, torch.optim.SGD(net.parameters(), RATE), 0)
    for found in run_job(work, num_workers=2, strategy=made()):
        for rows in found:
            torch.testing.assert_close(rows, net.emb.weight.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("configs", [{"max_staleness": 1}, {"k_steps": 2}, {}])
def test_where_rows_are_replicas(configs: dict[str, Any]) -> None:
    own, model, _ = alone(**configs)
    lookup = model.emb.lookup
    assert (lookup.whole is not None, lookup.bring is not None) == {
        "max_staleness": (False, False), "k_steps": (True, False), "": (True, True),
    }["".join(configs)]  # fmt: skip
    own.stop_worker()
    assert lookup.whole is None
    assert lookup.bring is None
    own.session.close()


def test_many_workers_ask_for_the_rows_of_their_batches() -> None:
    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own)
        train(model, optimizer, rank)
        own.barrier_worker()
        own.stop_worker()
        return model.emb.lookup.whole

    assert run_job(work, num_workers=5, strategy=made()) == [None] * 5


def test_rows_with_statistics_come_from_the_servers() -> None:
    own = Fleet()
    strategy = made()
    strategy.sparse_table_configs = {"emb": {"sparse_accessor_class": "SparseAccessor"}}
    own.init(strategy=strategy, log_level="WARNING")
    net = RowSum(ROWS)
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), RATE), strategy)
    model = own.distributed_model(net)
    own.init_worker()
    assert model.emb.lookup.whole is None
    train(model, optimizer, 0)
    own.stop_worker()
    own.session.close()


def test_a_prefetch_asks_for_nothing() -> None:
    own, model, optimizer = alone()
    with pytest.raises(IndexError, match="there are 12 rows"):
        model.emb.prefetch(torch.tensor([12]))
    model.emb.prefetch(batch(0)[0])
    train(model, optimizer, 0)
    assert own.session.server_job.trainer.connection.pulled == 0
    own.stop_worker()
    own.session.close()


def test_a_save_that_is_loaded_replaces_the_rows(tmp_path: Any) -> None:
    own, model, optimizer = alone()
    train(model, optimizer, 0)
    own.save_persistables(dirname=str(tmp_path / "save"))
    saved = model.emb.weight.detach().clone()
    for step in range(4):
        train(model, optimizer, step)
    own.session.server_job.trainer.connection.flush()
    assert not torch.equal(model.emb(torch.arange(ROWS)), saved)
    own.load_model(str(tmp_path / "save"))
    assert torch.equal(model.emb(torch.arange(ROWS)), saved)
    train(model, optimizer, 1)
    own.session.server_job.trainer.connection.flush()
    assert not torch.equal(model.emb(torch.arange(ROWS)), saved)
    own.stop_worker()
    own.session.close()


def pushed(client: Client, *keys: int, value: float = 1.0) -> None:
    client.wait(client.push({0: gradient(keys, value)}))


def test_a_server_that_came_back_makes_all_rows_be_read(tmp_path: Any) -> None:
    with serving(num_workers=2, folder=tmp_path / "s") as service:
        a, b = service.client(0, tables={0: SPARSE}), service.client(1, tables={0: SPARSE})
        rows, weight = replica(a, old_s=OLD_S)
        assert not weight.any()
        pushed(b, 2)
        rows.bring(0.0)
        assert weight[2].tolist() == [-1, -1]
        pushed(b, 2, 3)
        service.servers[0].stop()
        service.start(0)
        pushed(b, 5)
        rows.bring(0.0)
        assert weight[:, 0].tolist() == [0, 0, -2, -1, 0, -1, 0, 0]
        assert not a.watch([0])[0]


def test_threads_that_look_up_at_once_leave_the_newest_rows() -> None:
    """Whichever thread takes an older answer writes it before the newer one is written."""
    written, begun, go_on = [], threading.Event(), threading.Event()

    class Rows:
        def numpy(self) -> Rows:
            return self

        def __setitem__(self, ids: Any, rows: str) -> None:
            if rows == "older":
                begun.set()
                go_on.wait(10)
            written.append(rows)

    with serving() as service:
        replicas, _ = replica(service.client(0, tables={0: SPARSE}), old_s=OLD_S)
        replicas._weights = {0: Rows()}  # type: ignore[dict-item]
        replicas._arrived.extend({0: (slice(None), text)} for text in ("older", "newer"))
        threads = [threading.Thread(target=replicas.bring, args=(float("inf"),)) for _ in range(2)]
        threads[0].start()
        assert begun.wait(10)
        threads[1].start()
        threads[1].join(0.1)
        go_on.set()
        for thread in threads:
            thread.join(10)
    assert written == ["older", "newer"]


def test_the_thread_that_does_not_train_asks_and_rests_and_writes_nothing() -> None:
    with serving() as service:
        a = service.client(0, tables={0: SPARSE})
        rows, weight = replica(a, old_s=OLD_S)
        rows._rests_until = 0.0
        pushed(a, 1)
        rows.receive()
        assert not weight.any()
        rows.bring(OLD_S)
        assert weight[1].tolist() == [-1, -1]
        pushed(a, 1)
        rows._rests_until = time.monotonic() + 60
        rows.receive()
        rows.bring(60.0)
        assert weight[1].tolist() == [-1, -1]
        rows.expire()
        rows.bring(OLD_S)
        assert weight[1].tolist() == [-2, -2]
