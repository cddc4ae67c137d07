"""Dense parameters that lie in the server's memory: forks, signals, and systems without such memory (L.1)."""

from __future__ import annotations

import copy
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet.errors import PSError
from fleet.facade import Fleet
from fleet.ps.server.offered_row import OfferedRow
from fleet.ps.table.dense_table import DenseTable, DenseTableConfig
from fleet.ps.wire.memory_file import NotShared
from fleet.ps.worker import mapped_parameters
from fleet.ps.worker.exchange_modes import SyncExchange
from tests.helpers.mapped_job import RATE, Job, Net, differs, ids_of, mapped_of, plain, run_workers, train
from tests.helpers.served import ServedJob, run_job, strategy_of


@pytest.fixture
def job() -> Any:
    made = Job()
    yield made
    made.own.session.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_that_is_forked_keeps_the_values_of_its_start(job: Job) -> None:
    job.step()
    wanted = [p.detach().clone() for p in job.net.dense()]
    ready_end, ready = os.pipe()
    answer, answer_end = os.pipe()
    child = os.fork()
    if not child:
        is_same = False
        try:
            os.read(ready_end, 1)
            is_same = all(torch.equal(p, w) for p, w in zip(job.net.dense(), wanted, strict=True))
        finally:
            os.write(answer_end, b"1" if is_same else b"0")
            os._exit(0)
    for _ in range(3):
        job.step()
    os.write(ready, b"1")
    assert os.read(answer, 1) == b"1"
    os.waitpid(child, 0)
    assert job.mapped.holds()
    assert job.is_right()
    for end in (ready_end, ready, answer, answer_end):
        os.close(end)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_thread_may_fork_while_steps_run(job: Job) -> None:
    """Each child finds the values of one step, and the steps go on."""
    over = threading.Event()
    found: list[bool] = []
    job.step()
    wanted = [differs(plain(steps), plain(0)) for steps in range(1, 41)]
    initial = plain(0)

    def fork() -> None:
        while not over.is_set():
            end, start = os.pipe()
            child = os.fork()
            if not child:
                is_whole = False
                try:
                    is_whole = min(abs(differs(job.net, initial) - each) for each in wanted) < 1e-6
                finally:
                    os.write(start, b"1" if is_whole else b"0")
                    os._exit(0)
            found.append(os.read(end, 1) == b"1")
            os.waitpid(child, 0)
            os.close(end)
            os.close(start)

    thread = threading.Thread(target=fork)
    thread.start()
    while job.count < 40:
        job.step()
        while len(found) < job.count // 10 and thread.is_alive():  # a fork takes longer than some steps
            time.sleep(0.001)
    over.set()
    thread.join()
    assert len(found) >= 4
    assert all(found)
    assert job.is_right()


def test_after_a_fork_the_servers_are_not_asked_for_what_was_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be ahead of a worker whose lease was over."""
    job.step()
    job.mapped.copy_pages()
    assert job.mapped.is_written()
    monkeypatch.setattr(job.trainer.client, "pull", None)
    job.step()
    assert job.mapped.holds()
    assert not job.mapped.is_written()
    assert job.is_right()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interruption_between_worker_and_server_leaves_no_doubt(
    when: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the server took it that this worker maps its values, or was never asked."""
    job.step()
    link = job.trainer.client._links[0]
    call = link.call

    def interrupted(request: Any) -> Any:
        if when == "after":
            call(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(link, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.trainer.flush()
    monkeypatch.undo()
    for _ in range(3):
        job.step()
    assert job.is_right()
    assert job.mapped.holds()


def test_a_map_that_is_sent_again_after_an_interruption_leaves_no_doubt(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes it then that the worker reads its values in place, and each push says whether it does."""
    job.step()
    client = job.trainer.client
    call = client._links[0].call

    def interrupted(request: Any) -> Any:
        call(request)
        raise TimeoutError

    monkeypatch.setattr(client._links[0], "call", interrupted)
    with pytest.raises(TimeoutError):
        job.trainer.flush()
    monkeypatch.undo()
    monkeypatch.setattr(SyncExchange, "_map", lambda exchange: None)
    for _ in range(3):
        job.step()
        assert job.is_right()
    monkeypatch.undo()
    job.step()
    job.step()
    assert job.mapped.holds()
    assert job.is_right()


def test_an_interruption_while_parameters_move_leaves_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    views = [net.middle.weight.data]
    job = ServedJob("sync", lambda: net, RATE)
    train(job.model, job.optimizer, range(2), 0)
    views.clear()
    from_numpy, count = torch.from_numpy, [0]

    def interrupted(array: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return from_numpy(array)

    mapped = mapped_of(job.own)
    job.trainer.plan.watch.release()
    monkeypatch.setattr(torch, "from_numpy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mapped.place()
    monkeypatch.undo()
    train(job.model, job.optimizer, range(2, 6), 0)
    assert not mapped.is_attached
    assert differs(net, plain(6)) < 1e-6
    job.end()


def test_an_interruption_of_mapping_leaves_values_that_stay(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step()
    map_over = mapped_parameters._map_over

    def interrupted(*given: Any) -> None:
        map_over(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(mapped_parameters, "_map_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.trainer.flush()
    monkeypatch.undo()
    (own,) = job.mapped._ranges.values()
    assert not job.mapped.is_attached
    assert own.given is not None  # it is taken for the server's
    for _ in range(3):
        job.step()
    assert job.mapped.holds()
    assert job.is_right()


def test_a_second_interruption_does_not_leave_values_that_change(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step()
    (own,) = job.mapped._ranges.values()
    touch, count = own.touch, [0]

    def interrupted(pages: int | None = None) -> None:
        count[0] += 1
        if count[0] < 3:
            raise KeyboardInterrupt
        touch(pages)

    own.touch = interrupted  # type: ignore[method-assign]

    def fail(ticket: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(job.trainer.client, "wait", fail)
    with pytest.raises(TimeoutError):
        job.step()
    assert count[0] == 3
    assert not job.mapped.is_attached


def test_pages_that_are_locked_in_memory_are_written_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step()

    class Locked:
        def madvise(self, *_: Any) -> int:
            return -1

    monkeypatch.setattr(mapped_parameters, "_libc", Locked)
    job.mapped.copy_pages()
    for _ in range(4):
        job.step()
    assert job.is_right()


def test_values_that_a_failed_step_may_still_change_are_a_copy(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step()
    client = job.trainer.client
    wait = client.wait

    def interrupted(ticket: Any) -> Any:
        wait(ticket)
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.step()
    monkeypatch.undo()
    assert not job.mapped.is_attached
    job.count = 2
    assert job.is_right()
    job.step()
    assert job.mapped.holds()
    assert job.is_right()


def counting(own: Any, count: int) -> Any:
    """Returns a copy of the server's memory in which it has changed the values ``count`` times."""
    file = own._file.copy()
    file[-8:].view(np.int64)[0] = count
    return file


def test_values_of_two_steps_are_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was killed while it changed them never finishes."""
    monkeypatch.setattr(mapped_parameters, "_PATIENCE_S", 0.05)
    job.step()
    (own,) = job.mapped._ranges.values()
    own._file = counting(own, 1)
    with pytest.warns(RuntimeWarning, match="partly of one step and partly of the next"):
        job.mapped.detach()
    job.step()
    assert job.mapped.holds()
    assert job.is_right()


def test_a_copy_is_made_again_if_the_server_changed_the_values_meanwhile(job: Job) -> None:
    job.step()
    (own,) = job.mapped._ranges.values()
    touch, touched = own.touch, []
    own._file = file = counting(own, 0)

    def meanwhile(pages: int | None = None) -> None:
        touch(pages)
        touched.append(pages)
        file[-8:].view(np.int64)[0] += 2 if len(touched) == 1 else 0

    own.touch = meanwhile  # type: ignore[method-assign]
    job.mapped.detach()
    assert len(touched) == 2
    assert job.is_right()


def test_values_that_came_with_the_answer_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_parameters, "LEAST_MAPPED_BYTES", 1 << 40)
    made = Job()
    made.step()
    assert not made.mapped.is_attached
    monkeypatch.setattr(made.trainer.client, "pull", None)
    made.step()
    assert made.is_right()
    monkeypatch.undo()
    made.end()


def test_a_copy_waits_until_the_server_has_changed_the_values(job: Job) -> None:
    job.step()
    exchange = job.trainer._exchange
    assert isinstance(exchange, SyncExchange)
    assert job.mapped.holds()
    wanted = [p.detach() + 2 for p in job.net.dense()]
    table = DenseTable(DenseTableConfig("mlp", sum(p.numel() for p in wanted)))
    found: list[OfferedRow] = []
    table.lie_in(OfferedRow, found.append)
    (memory,) = found
    memory.row[:] = np.concatenate([p.numpy().reshape(-1) for p in wanted]) - 2
    job.mapped.attach({next(iter(job.mapped.given())): memory.place})

    def change() -> None:
        memory.row[:] += 1
        memory.end()

    memory.begin()
    memory.row[:] += 1
    threading.Timer(0.1, change).start()
    job.mapped.detach()
    assert all(torch.equal(p, value) for p, value in zip(job.net.dense(), wanted, strict=True))


# -- where there is no such memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["memory", "page map", "faults", "offer"])
def test_values_are_copied_where_memory_cannot_be_mapped(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotShared("this test has none.")

    if fails == "memory":
        monkeypatch.setattr(mapped_parameters, "open_memory", refuse)
    elif fails == "page map":
        monkeypatch.setattr(mapped_parameters._Range, "is_written", lambda own, pages: False)
    elif fails == "faults":
        monkeypatch.setattr(mapped_parameters, "_num_faults", lambda: 3)
    else:
        monkeypatch.setattr("fleet.ps.server.offered_row.make_memory", refuse)
    made = Job()
    for _ in range(4):
        made.step()
    assert not made.mapped.is_attached
    assert made.is_right()
    made.end()


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_group_without_gradients_here_takes_the_steps_of_others(
    is_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_mapped:
        monkeypatch.setattr(mapped_parameters, "LEAST_MAPPED_BYTES", 1 << 40)

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
            assert mapped_of(own).is_attached == is_mapped
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


def test_several_servers_and_small_models_have_copies() -> None:
    def work(own: Fleet, rank: int, net: Net, model: Any, optimizer: Any) -> Any:
        train(model, optimizer, range(4), rank)
        return copy.deepcopy(net), mapped_of(own).is_attached

    (net, is_mapped), _ = run_workers(work, num_servers=2)
    assert not is_mapped
    assert differs(net, plain(4, 0, 1)) < 1e-6
    small = ServedJob("sync", lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)), RATE)
    small.step()
    assert not mapped_of(small.own).is_attached
    small.end()


def test_memory_that_is_not_the_servers_is_refused(job: Job) -> None:
    good = {1: {"pid": os.getpid(), "fd": 0, "word": "0" * 32, "bytes": 1 << 20}}
    for wrong in ({}, {1: {**good[1], "bytes": 4096}}, {1: {**good[1], "bytes": "x"}}, good, {7: good[1]}):
        with pytest.raises(NotShared):
            job.mapped.attach(wrong)
        assert not job.mapped.is_attached
    job.step()
    assert job.is_right()


def test_a_server_refuses_to_offer_rows_and_other_workers(job: Job) -> None:
    client = job.trainer.client
    with pytest.raises(PSError, match="MAP takes a list of tables"):
        client.map_values(["x"])
    job.step()
    with pytest.raises(PSError, match="sparse"):
        client.map_values([0])
    with pytest.raises(PSError, match="does not exist"):
        client.map_values([99])
    job.step()
    assert job.is_right()
