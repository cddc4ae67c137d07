"""What a job starts from is given whole and once, wherever worker 0 is killed meanwhile (D.1, D.7, 003-34)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet.errors import PSError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.client.link import Link, Request
from fleet.ps.embeddings.served_embedding import serve_embeddings
from fleet.ps.server.served_table import ServedSparse
from fleet.ps.table import ids
from fleet.ps.wire.messages import Op
from fleet.ps.worker.connection import TrainerConfig, WorkerConnection
from fleet.ps.worker.meetings import SAVE
from fleet.ps.worker.served_model import ServedModel
from fleet.ps.worker.table_plan import TablePlan, plan_tables
from fleet.ps.worker.trainer import Trainer
from tests.fleet.ps.service import Service, gradient, in_threads, rows, serving, silent

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

    return Trainer(ServedModel(WorkerConnection(plan, TrainerConfig(mode=mode), make)))


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
            found = tables_of(trainer.connection.client, plan)
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
        client, table = trainer.connection.client, plan.sparse[0].table_id
        client.wait(client.push({table: gradient(range(NUM_ROWS), 1.0, SIZES[plan.sparse[0].config.name])}))
        before = tables_of(client, plan)
        trainer.abandon()
        other = trainer_of(service, made(2)[1], client_id=8)
        other.open()
        after = tables_of(other.connection.client, plan)
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
        found = tables_of(trainer.connection.client, trainer.plan)
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


CAP_S = 20.0
together = partial(in_threads, timeout_s=CAP_S)


def start_workers(service: Service, states: tuple[Any, ...] = (None, None)) -> list[Trainer]:
    mode = service.configs[0].mode
    found = [
        trainer_of(service, made(rank)[1], rank, client_id=time.monotonic_ns() | 1, mode=mode)
        for rank in range(len(states))
    ]
    for trainer, state in zip(found, states, strict=True):
        if state is not None:
            trainer.load_state_dict(state)
    together(*(trainer.open for trainer in found))
    return found


def push(trainer: Trainer, key: int) -> None:
    words = next(part for part in trainer.plan.sparse if part.config.name == "words")
    trainer.connection.client.wait(trainer.connection.client.push({words.table_id: gradient([key], 1.0, 3)}))


def restart(service: Service, workers: list[Trainer]) -> None:
    """Ends every process and starts the servers again."""
    for trainer in workers:
        trainer.abandon()
    for index, server in enumerate(list(service.servers)):
        server.stop()
        service.start(index)


def test_a_restarted_worker_reads_rows_once_its_last_step_is_applied() -> None:
    """003-19: its earlier process pushed step 1 and died, and the other worker has not pushed it yet."""
    with serving(mode="sync", num_workers=2) as service:
        first, other = start_workers(service)
        table = next(part for part in first.plan.sparse if part.config.name == "words")
        module = table.modules[0]
        before = module(torch.tensor([4])).detach().clone()
        first.connection.client.push({table.table_id: gradient([4], 2.0, 3)})  # its answer waits for the other worker
        first.abandon()
        again = trainer_of(service, made(0)[1], 0, client_id=time.monotonic_ns() | 1, mode="sync")
        opening = threading.Thread(target=again.open)
        opening.start()
        opening.join(0.5)
        assert opening.is_alive()
        push(other, 4)
        opening.join(CAP_S)
        words = next(part for part in again.plan.sparse if part.config.name == "words").modules[0]
        assert not torch.equal(words(torch.tensor([4])), before)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_came_back_without_its_rows_is_not_trained_on(mode: str) -> None:
    """Also not by a worker that was started again, which has not known its tables."""
    with serving(2, mode=mode, num_workers=1) as service:
        (worker,) = start_workers(service, (None,))
        for key in range(16):  # rows of both servers
            push(worker, key)
        state = worker.state_dict()
        worker.abandon()
        service.servers[1].stop()
        service.start(1)
        for _ in range(2):
            with pytest.raises(PSError, match=r"server\(s\) \[1\] came back without tables.*from its last saved model"):
                start_workers(service, (state,))
        service.servers[0].stop()
        service.start(0)
        start_workers(service, (state,))  # new servers begin with what the worker has


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CAP_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def save_with_a_late_worker(service: Service, workers: list[Trainer], folder: Path) -> None:
    """Lets worker 0 come to the save first, and worker 1 push before it comes, too; both pushes must be saved."""
    early, late = workers
    saved = threading.Event()
    save = early.connection.client.save

    def noted(*arguments: Any, **settings: Any) -> int:
        saved.set()
        return save(*arguments, **settings)

    early.connection.client.save = noted  # type: ignore[method-assign]
    first = threading.Thread(target=early.tables.save, args=(str(folder), 0), daemon=True)
    first.start()
    session = service.servers[0].state.job
    until(lambda: saved.is_set() or any(name == SAVE for name, _ in list(session.arrived)))
    assert not saved.is_set(), "worker 0 saves before worker 1 has come"
    push(late, 19)
    late.tables.save(str(folder), 0)
    first.join(CAP_S)
    assert not first.is_alive()


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_save_after_a_restart_of_the_whole_job_waits_for_every_worker(
    mode: str, num_servers: int, checkpoint: bool, tmp_path: Path
) -> None:
    """The servers come back from their folders with the barriers they have passed; new processes count from there."""
    with serving(num_servers=num_servers, num_workers=2, folder=tmp_path / "state", mode=mode) as service:
        workers = start_workers(service)
        for round_ in range(2):
            for trainer in workers:
                push(trainer, round_)
            together(*(lambda own=own: own.tables.save(str(tmp_path / "first"), 0) for own in workers))
        states = tuple(trainer.state_dict() for trainer in workers) if checkpoint else (None, None)
        restart(service, workers)
        workers = start_workers(service, states)
        save_with_a_late_worker(service, workers, tmp_path / "second")
        read = workers[0].connection.client
        words = next(part.table_id for part in workers[0].plan.sparse if part.config.name == "words")
        before = rows(read, [19], words)
        read.alter(words, "clear")
        read.load(str(tmp_path / "second"))
        np.testing.assert_array_equal(rows(read, [19], words), before)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_save_is_whole_when_worker_0_dies_in_it_and_comes_back_without_a_checkpoint(
    mode: str, tmp_path: Path
) -> None:
    """D.8: it dies between two servers; the others make the save whole, and it comes to one of its own afterwards."""
    with serving(num_servers=2, num_workers=2, mode=mode) as service:
        first, second = start_workers(service)
        words = next(part.table_id for part in first.plan.sparse if part.config.name == "words")
        for trainer in (first, second):
            push(trainer, 3)
        ended = threading.Event()

        def save() -> None:
            second.tables.save(str(tmp_path / "one"), 0)
            ended.set()

        waiting = threading.Thread(target=save, daemon=True)
        waiting.start()
        dies_at(first, 1)
        with pytest.raises(Died):
            first.tables.save(str(tmp_path / "one"), 0)
        session = service.servers[0].state.job
        until(lambda: (SAVE, 2) in list(session.arrived))  # the other stands at the end of the save
        first.abandon()
        again = trainer_of(service, made(5)[1], client_id=11, mode=mode)
        again.open()
        assert not ended.is_set()
        before = rows(again.connection.client, range(20), words)
        push(again, 3)  # it trains its first batch once more
        two = str(tmp_path / "two")
        together(lambda: again.tables.save(two, 0), lambda: ended.wait(CAP_S) and second.tables.save(two, 0))
        waiting.join(CAP_S)
        assert ended.is_set()
        changed = rows(second.connection.client, range(20), words)
        assert (changed[3] != before[3]).all()
        for name, expected in (("one", before), ("two", changed)):
            together(*(lambda own=own, name=name: own.tables.load(str(tmp_path / name)) for own in (again, second)))
            np.testing.assert_array_equal(rows(second.connection.client, range(20), words), expected)


def test_a_save_is_whole_when_worker_0_dies_in_it_and_stays_away(tmp_path: Path) -> None:
    """D.8, D.10: the others go on when its lease has ended."""
    with serving(num_servers=2, num_workers=2) as service:
        first, second = start_workers(service)
        words = next(part.table_id for part in first.plan.sparse if part.config.name == "words")
        push(second, 3)
        dies_at(first, 1)
        together(
            lambda: ends(service, first.tables.save, str(tmp_path), 0), lambda: second.tables.save(str(tmp_path), 0)
        )
        before = rows(second.connection.client, range(20), words)
        push(second, 3)
        second.tables.load(str(tmp_path))
        np.testing.assert_array_equal(rows(second.connection.client, range(20), words), before)


def test_a_load_is_whole_when_worker_0_dies_in_it(tmp_path: Path) -> None:
    """D.8: no server goes on with other rows than those of the save."""
    with serving(num_servers=2, num_workers=2) as service:
        first, second = start_workers(service)
        words = next(part.table_id for part in first.plan.sparse if part.config.name == "words")
        together(*(lambda own=own: own.tables.save(str(tmp_path), 0) for own in (first, second)))
        before = rows(second.connection.client, range(20), words)
        for key in range(20):
            push(first, key)
        dies_at(first, 1)
        together(lambda: ends(service, first.tables.load, str(tmp_path)), lambda: second.tables.load(str(tmp_path)))
        np.testing.assert_array_equal(rows(second.connection.client, range(20), words), before)


def test_all_workers_get_the_reason_why_a_save_failed(tmp_path: Path) -> None:
    """D.8: nobody waits for a save that cannot be made; the next one works."""
    with serving(num_workers=2) as service:
        workers = start_workers(service)
        (tmp_path / "file").touch()
        reasons: list[str] = []
        for what in ("save", "load"):

            def fails(own: Trainer, what: str = what) -> None:
                with pytest.raises(PSError, match="parameter server 0") as caught:
                    own.tables.save(str(tmp_path / "file"), 0) if what == "save" else own.tables.load(
                        str(tmp_path / "absent")
                    )
                reasons.append(str(caught.value))

            together(*(lambda own=own: fails(own) for own in workers))
        assert len(reasons) == 4
        together(*(lambda own=own: own.tables.save(str(tmp_path / "good"), 0) for own in workers))


def test_a_server_waits_for_a_worker_that_waits_for_a_long_save(tmp_path: Path) -> None:
    """D.10: a save that takes longer than the lease does not make the others go on without the worker that asked."""
    with serving(num_workers=1) as service:
        (worker,) = start_workers(service, (None,))
        session = service.servers[0].state.job
        sparse = next(t for t in service.servers[0].state.tables.values() if isinstance(t, ServedSparse)).table
        expired: list[list[int]] = []
        blocks = sparse.blocks

        def long(*arguments: Any, **settings: Any) -> Any:
            with session.changed:
                expired.append(session.expire(time.monotonic() + 2 * session.lease_s))
            return blocks(*arguments, **settings)

        sparse.blocks = long  # type: ignore[method-assign]
        worker.tables.save(str(tmp_path), 0)
        assert expired == [[]]
        assert session.workers[0].busy == 0


def test_a_worker_with_a_checkpoint_repeats_what_the_others_have_passed(tmp_path: Path) -> None:
    """And where the servers are new, every worker counts from the servers' number, whatever its checkpoint says."""
    with serving(num_workers=2) as service:
        workers = start_workers(service)
        state = workers[0].state_dict()
        together(*(lambda own=own: own.tables.save(str(tmp_path / "one"), 0) for own in workers))
        workers[0].abandon()
        again = trainer_of(service, made(5)[1], client_id=11)
        again.load_state_dict(state)
        again.open()
        again.tables.save(str(tmp_path / "one"), 0)  # nobody is waited for: the others were here
        late = workers[1].state_dict()
        workers[1].abandon()
        again.abandon()
    with serving(num_workers=2) as service:
        fresh = start_workers(service, (None, late))
        together(*(lambda own=own: own.tables.save(str(tmp_path / "two"), 0) for own in fresh))


class Died(Exception):
    """The end of a worker."""


def ends(service: Service, act: Callable[..., Any], *arguments: Any) -> None:
    """Does what kills worker 0, and ends its lease."""
    with pytest.raises(Died):
        act(*arguments)
    act.__self__._connection.client._links[0].call(Request(Op.PING))  # what it had sent would show that it lives
    for server in service.servers:
        session = server.state.job
        with session.changed:
            session.workers[0].state = "expired"
        server.state.settle()


def dies_at(trainer: Trainer, server: int) -> None:
    """Ends the worker before it sends what it asks for to this server."""
    submit = trainer.connection.client._links[server].submit

    def dying(request: Request) -> Request:
        if request.op in (Op.SAVE, Op.LOAD):
            raise Died
        return submit(request)

    trainer.connection.client._links[server].submit = dying  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_workers_with_checkpoints_go_on_with_servers_that_were_started_anew(mode: str, tmp_path: Path) -> None:
    """D.7: servers without a folder read a save; no pull waits for steps that they never had."""
    with serving(num_servers=2, num_workers=2, mode=mode) as service:
        workers = start_workers(service)
        for round_ in range(3):
            for trainer in workers:
                push(trainer, round_)
        together(*(lambda own=own: own.tables.save(str(tmp_path / "save"), 0) for own in workers))
        states = tuple(trainer.state_dict() for trainer in workers)
        assert [state["step"] for state in states] == [3, 3]
        words = next(part.table_id for part in workers[0].plan.sparse if part.config.name == "words")
        saved = rows(workers[0].connection.client, [0, 1, 2], words)
        for trainer in workers:
            trainer.abandon()
    with serving(num_servers=2, num_workers=2, mode=mode) as service:
        workers = start_workers(service, states)
        together(*(lambda own=own: own.tables.load(str(tmp_path / "save")) for own in workers))
        together(lambda: np.testing.assert_array_equal(rows(workers[1].connection.client, [0, 1, 2], words), saved))
        for trainer in workers:
            push(trainer, 0)
        together(*(lambda own=own: own.connection.flush() for own in workers))
        assert (rows(workers[0].connection.client, [0], words) != saved[:1]).all()
        save_with_a_late_worker(service, workers, tmp_path / "second")
