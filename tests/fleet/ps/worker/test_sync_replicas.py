"""Sync training of ``nn.Embedding``: the answer to a push brings what the step changed, and lookups ask nobody."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.facade import Fleet
from fleet.ps.client.client import Client
from fleet.ps.worker.row_replicas import RowReplicas
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import SPARSE, gradient, in_threads, replica, rows, serving
from tests.helpers.served import RowSum, run_job

RATE, ROWS = 0.05, 12


def new_net() -> RowSum:
    torch.manual_seed(0)
    return RowSum(ROWS)


def made(**configs: Any) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = False, configs
    return strategy


def start(own: Fleet, net: RowSum, optimizer_type: Any, **configs: Any) -> tuple[Any, Any]:
    optimizer = own.distributed_optimizer(optimizer_type(net.parameters(), RATE), made(**configs))
    model = own.distributed_model(net)
    own.init_worker()
    return model, optimizer


def batch(step: int, rank: int = 0, num_workers: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    ids, target = torch.randint(0, ROWS, (4, 3), generator=drawn), torch.randn(4, 1, generator=drawn)
    return ids[rank::num_workers], target[rank::num_workers]


def train(model: Any, optimizer: Any, ids: torch.Tensor, target: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(ids) - target).square().mean().backward()
    optimizer.step()


def check(found: torch.Tensor, net: RowSum) -> None:
    torch.testing.assert_close(found, net.emb.weight.detach(), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adagrad])
def test_two_workers_are_one_process_on_all_data(optimizer_type: Any, num_servers: int) -> None:
    """Each step sees the one before it, also rows that only the other worker trained; no lookup asks for rows."""
    nets = [new_net(), new_net()]

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own, nets[rank], optimizer_type)
        seen = []
        for step in range(6):
            train(model, optimizer, *batch(step, rank, 2))
            seen.append(model.emb(torch.arange(ROWS)).detach().clone())
        pulled = own.session.server_job.trainer.connection.pulled
        own.stop_worker()
        return seen, pulled

    net = new_net()
    optimizer = optimizer_type(net.parameters(), RATE)
    found = run_job(work, num_workers=2, num_servers=num_servers, strategy=made())
    for step in range(6):
        train(net, optimizer, *batch(step))
        for seen, _ in found:
            check(seen[step], net)
    assert [pulled for _, pulled in found] == [0, 0]


def test_one_that_stood_at_a_barrier_sees_what_the_others_trained() -> None:
    nets = [new_net(), new_net()]

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own, nets[rank], torch.optim.SGD)
        train(model, optimizer, *batch(0, rank, 2))
        for step in range(1, 4) if rank else ():
            train(model, optimizer, *batch(step))  # alone: the other one waits
        own.barrier_worker()
        found = [model.emb(torch.arange(ROWS)).detach().clone()]
        train(model, optimizer, *batch(4, rank, 2))
        found.append(model.emb(torch.arange(ROWS)).detach().clone())
        own.stop_worker()
        return found

    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    found = run_job(work, num_workers=2, strategy=made())
    for step in range(5):
        train(net, optimizer, *batch(step))
        if step >= 3:
            for both in found:
                check(both[step - 3], net)


def test_a_barrier_between_forward_and_backward_changes_nothing_that_they_use() -> None:
    nets = [new_net(), new_net()]

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own, nets[rank], torch.optim.SGD)
        for step in range(3):
            ids, target = batch(step, rank, 2)
            optimizer.zero_grad()
            loss = (model(ids) - target).square().mean()
            own.barrier_worker()
            loss.backward()
            optimizer.step()
        own.stop_worker()
        return model.emb.weight.detach()

    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    found = run_job(work, num_workers=2, strategy=made())
    for step in range(3):
        train(net, optimizer, *batch(step))
    for weight in found:
        check(weight, net)


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_weight_that_moves_to_shared_memory_is_still_trained(mode: str) -> None:
    """So does one whose state_dict goes to another process through a queue."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = mode != "sync"
    strategy.a_sync_configs = {"k_steps": 1} if mode == "geo" else {}

    def work(own: Fleet, rank: int) -> Any:
        net = new_net()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), RATE), strategy)
        model = own.distributed_model(net)
        own.init_worker()
        net.share_memory()
        for step in range(3):
            train(model, optimizer, *batch(step))
            own.barrier_worker()
            own.session.server_job.trainer.connection.flush()
        kept = model.emb(torch.arange(ROWS)).detach().clone()
        own.stop_worker()
        return kept

    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for step in range(3):
        train(net, optimizer, *batch(step))
    check(run_job(work, strategy=strategy)[0], net)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_rows_in_a_smaller_form_are_those_of_a_pull(wire: str) -> None:
    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own, new_net(), torch.optim.SGD, wire=wire)
        for step in range(3):
            train(model, optimizer, *batch(step))
        kept = model.emb(torch.arange(ROWS)).detach().clone()
        with torch.no_grad():
            pulled = model.emb(torch.arange(ROWS))
        own.stop_worker()
        return kept, pulled

    ((kept, pulled),) = run_job(work, strategy=made(wire=wire))
    assert torch.equal(kept, pulled)
    assert not torch.equal(kept, new_net().emb.weight.detach())


def test_a_save_that_is_loaded_replaces_the_rows(tmp_path: Path) -> None:
    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own, new_net(), torch.optim.SGD)
        train(model, optimizer, *batch(0))
        own.save_persistables(dirname=str(tmp_path / "save"))
        saved = model.emb(torch.arange(ROWS)).detach().clone()
        for step in range(4):
            train(model, optimizer, *batch(step))
        own.load_model(str(tmp_path / "save"))
        loaded = model.emb(torch.arange(ROWS)).detach().clone()
        own.stop_worker()
        return saved, loaded

    ((saved, loaded),) = run_job(work, strategy=made())
    assert torch.equal(saved, loaded)


def step(client: Client, replicas: RowReplicas, *keys: int, value: float = 1.0) -> None:
    with replicas.pushing() as changed:
        client.wait(client.push({0: gradient(keys, value)} if keys else {}, changed=changed))


def test_an_answer_to_a_push_that_was_lost_is_given_again() -> None:
    with serving(mode="sync", num_servers=2) as service:
        a = service.client(0, tables={0: SPARSE}, answer_timeout_s=0.3)
        replicas, weight = replica(a)
        step(a, replicas, 1)
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "drop"))
        step(a, replicas, 1, 4)
        assert weight[:, 0].tolist() == [0, -2, 0, 0, -1, 0, 0, 0]
        assert service.servers[0].state.counts["duplicates"] + service.servers[1].state.counts["duplicates"] == 1


def test_a_step_without_gradients_brings_those_of_the_others() -> None:
    with serving(mode="sync", num_workers=2, num_servers=2) as service:
        a, b = (service.client(rank, tables={0: SPARSE}) for rank in range(2))
        (one, weight), (other, _) = replica(a), replica(b)
        for _ in range(3):
            in_threads(lambda: step(a, one), lambda: step(b, other, 2, 5, value=2.0))
        assert weight[:, 0].tolist() == [0, 0, -3, 0, 0, -3, 0, 0]  # means over both workers


def test_a_server_that_came_back_makes_all_rows_be_read(tmp_path: Path) -> None:
    with serving(mode="sync", num_workers=2, folder=tmp_path / "s") as service:
        a, b = (service.client(rank, tables={0: SPARSE}) for rank in range(2))
        (one, weight), (other, others) = replica(a), replica(b)
        in_threads(lambda: step(a, one, 1, value=2.0), lambda: step(b, other, 2, value=2.0))
        weight[1:3] = 9.0  # what only reading all rows mends
        service.servers[0].stop()
        service.start(0)
        in_threads(lambda: step(a, one, 5, value=2.0), lambda: step(b, other, 6, value=2.0))
        assert weight[:, 0].tolist() == others[:, 0].tolist() == [0, -1, -1, 0, 0, -1, -1, 0]
        weight[0] = 9.0
        in_threads(lambda: step(a, one, 5, value=2.0), lambda: step(b, other, 5, value=2.0))
        assert weight[:, 0].tolist() == [9, -1, -1, 0, 0, -3, -1, 0]  # once: the next step brings its own rows alone


def test_more_than_one_message_holds_is_read_anew() -> None:
    limit = 2048
    with serving(mode="sync", num_workers=2, max_body_bytes=limit) as service:
        a, b = (service.client(rank, tables={0: SPARSE}, max_body_bytes=limit) for rank in range(2))
        (one, weight), (other, others) = replica(a, 200), replica(b, 200)
        in_threads(
            lambda: step(a, one, *range(80), value=2.0), lambda: step(b, other, *range(80, 160), value=2.0)
        )  # each push fits; the rows of both do not
        assert torch.equal(weight, others)
        assert weight[:, 0].tolist() == [-1.0] * 160 + [0.0] * 40


def test_one_whose_lease_ended_reads_what_it_missed() -> None:
    with serving(mode="sync", num_workers=2, lease_s=0.5) as service:
        a, b = service.client(0, tables={0: SPARSE}), service.client(1, tables={0: SPARSE})
        (one, weight), (other, _) = replica(a), replica(b)
        in_threads(lambda: step(a, one, 1, value=2.0), lambda: step(b, other, 1, value=2.0))
        for _ in range(3):
            step(b, other, 3)  # waits until the lease of the other one ends, then goes on without it
        step(a, one, 4)  # of a step that is over: not taken any more, but the answer has what it missed
        assert weight[:, 0].tolist() == [0, -2, 0, -3, 0, 0, 0, 0]
        assert torch.equal(weight, torch.from_numpy(rows(b, list(range(8)))))


def test_rows_of_an_older_answer_do_not_replace_those_of_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of a worker: one looks up rows behind a barrier while the other one takes a step."""
    answered, pushed = threading.Event(), threading.Event()
    with serving(mode="sync") as service:
        client = service.client(0, tables={0: SPARSE})
        replicas, weight = replica(client)
        step(client, replicas, 5)
        client.wait(client.push({0: gradient([5])}))  # by whom the answer is not read
        watch = client.watch

        def slowly(table_ids: Any) -> Any:
            found = watch(table_ids)
            answered.set()
            pushed.wait(0.3)
            return found

        monkeypatch.setattr(client, "watch", slowly)
        replicas.expire()
        thread = threading.Thread(target=lambda: replicas.bring(math.inf))
        thread.start()
        answered.wait()
        step(client, replicas, 5)
        pushed.set()
        thread.join()
        assert weight[5].tolist() == [-3, -3]
