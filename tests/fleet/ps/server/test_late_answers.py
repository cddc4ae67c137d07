"""Answers of sync pushes: the thread that applies a step sends all of them, and a worker that waits is looked after."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.errors import PSError
from fleet.ps.client import link as links
from fleet.ps.client.client import Client
from fleet.ps.client.link import Request
from fleet.ps.server import answers
from fleet.ps.server.answers import Answers
from fleet.ps.server.job_state import JobState
from fleet.ps.server.late_answers import LateAnswer, LateAnswers
from fleet.ps.wire.messages import Header, MessageFlag, Op, Status
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import SocketTransport
from tests.fleet.ps.service import gradient, in_threads, serving, until

ONES = np.ones(5, np.float32)


def job() -> JobState:
    return JobState(2, threading.Lock(), lease_s=60.0)


def noted(said: list[str], of: JobState, rank: int = 0, step: int = 1) -> LateAnswer:
    name = f"{rank} {step}"
    return LateAnswer(of.workers[rank], step, lambda: said.append(name), lambda: said.append(f"{name} waits"))


# -- the list ------------------------------------------------------------------------------------------------------


def test_an_answer_is_sent_once_when_its_step_is_due_and_keeps_the_lease_until_then() -> None:
    said: list[str] = []
    state = job()
    applied = 0
    late = LateAnswers(state, lambda step: step <= applied)
    first, second = noted(said, state), noted(said, state, 1, 2)
    assert late.add(first)
    assert late.add(second)
    assert [worker.busy for worker in state.workers] == [1, 1]
    first.beat()
    applied = 1
    late.send()
    first.beat()
    late.send()
    assert said == ["0 1 waits", "0 1"]
    assert [worker.busy for worker in state.workers] == [0, 1]
    assert state.workers[0].seen > 0
    assert first.is_over()
    assert not second.is_over(0.01)


def test_what_is_due_already_is_not_taken() -> None:
    state = job()
    late = LateAnswers(state, lambda step: step <= 1)
    assert not late.add(noted([], state))
    with state.changed:
        state.stop()
    assert not late.add(noted([], state, step=2))
    assert state.workers[0].busy == 0


def test_a_stop_sends_all_and_a_dropped_one_says_nothing_more() -> None:
    said: list[str] = []
    state = job()
    late = LateAnswers(state, lambda step: False)
    kept, dropped = noted(said, state, 0, 9), noted(said, state, 1, 9)
    for answer in (kept, dropped):
        late.add(answer)
    late.drop(dropped)
    late.drop(dropped)
    with state.changed:
        state.stop()
    late.send()
    dropped.send()
    assert said == ["0 9"]
    assert [worker.busy for worker in state.workers] == [0, 0]


# -- a job ---------------------------------------------------------------------------------------------------------


def pushed(client: Client, value: float = 1.0, **config: Any) -> np.ndarray:
    """Pushes a step; returns the dense values after it."""
    found = np.zeros(5, np.float32)

    def take(values: np.ndarray, start: int = 0) -> None:
        found[start : start + len(values)] = values

    client.wait(client.push({0: gradient([3, 4], value), 1: value * ONES}, out={1: take}, **config))
    return found


def threads_of_answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Op, threading.Thread, int]]:
    """Collects, for each answer to a push, the sending thread and the answered process."""
    sent: list[tuple[Op, threading.Thread, int]] = []
    real = Answers._send

    def send(self: Answers, peer: Any, header: Header, answer: Any) -> None:
        if header.op is Op.PUSH and answer.status is not Status.WAITING:
            sent.append((header.op, threading.current_thread(), header.client_id))
        real(self, peer, header, answer)

    monkeypatch.setattr(Answers, "_send", send)
    return sent


@pytest.mark.parametrize("shares", [True, False])
def test_one_thread_answers_all_where_no_worker_can_hold_it_up(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = threads_of_answers(monkeypatch)
    with serving(transport=SocketTransport(), num_workers=2, mode="sync") as service:
        clients = [service.client(rank, shares_memory=shares) for rank in range(2)]
        for step in range(1, 6):
            values: list[Any] = [None, None]

            def work(rank: int, of: list[Any] = values) -> None:
                of[rank] = pushed(clients[rank], 1.0 + 2 * rank)

            in_threads(lambda: work(0), lambda: work(1))
            assert (values[0] == -2.0 * step).all()  # the mean of 1 and 3, rate 1
            assert (values[1] == -2.0 * step).all()
        assert len({client for _, _, client in sent}) == 2
        by_step = [{thread for _, thread, _ in sent[i : i + 2]} for i in range(0, 10, 2)]
        assert [len(threads) for threads in by_step] == [1 if shares else 2] * 5


def test_a_worker_that_waits_is_told_for_whom_and_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BEAT_S", 0.05)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(links.Link, "_say_waiting", lambda self, fields: told.append(fields))
    with serving(num_workers=2, mode="sync", lease_s=0.5) as service:
        first, second = service.client(0), service.client(1, heartbeat=True)

        def late() -> None:
            until(lambda: len(told) > 25)  # more than two leases
            assert service.servers[0].state.job.workers[0].state == "active"
            pushed(second)

        in_threads(lambda: pushed(first), late)
        assert all(fields == {"place": "step 1", "waiting_for": [1]} for fields in told)
        assert service.servers[0].state.job.workers[0].busy == 0


def test_a_worker_that_dies_while_it_waits_holds_nobody_up() -> None:
    with serving(transport=SocketTransport(), num_workers=2, mode="sync") as service:
        first, second = (service.client(rank) for rank in range(2))
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(catch(lambda: pushed(first))), daemon=True)
        thread.start()
        job = service.servers[0].state.job
        until(lambda: job.workers[0].busy)
        first._links[0]._dead = PSError("killed")
        first._links[0]._connection.close()  # type: ignore[union-attr]
        until(lambda: not job.workers[0].busy)
        thread.join(20)
        assert "killed" in str(found[0])
        assert (pushed(second) == -1.0).all()
        again = service.client(0)
        assert (pushed(again, step=1) == -1.0).all()  # it is known: nothing is applied twice


def catch(act: Any) -> Any:
    try:
        return act()
    except PSError as error:
        return error


def test_a_line_that_is_cut_while_it_waits_is_answered_on_the_next_one() -> None:
    with serving(transport=SocketTransport(), num_workers=2, mode="sync") as service:
        first, second = (service.client(rank) for rank in range(2))
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(pushed(first)), daemon=True)
        thread.start()
        server = service.servers[0]
        until(lambda: server.state.job.workers[0].busy)
        server._hang_up()  # the worker connects anew, and sends its push again
        until(lambda: len(server._open) == 1 and server.state.job.workers[0].busy)
        assert (pushed(second) == -1.0).all()
        thread.join(20)
        assert (found[0] == -1.0).all()
        assert server.state.counts["duplicates"] >= 1


def test_a_server_that_stops_says_so_to_those_who_wait() -> None:
    with serving(transport=SocketTransport(), num_workers=2, mode="sync") as service:
        first, second = (service.client(rank) for rank in range(2))
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(catch(lambda: pushed(first))), daemon=True)
        thread.start()
        until(lambda: service.servers[0].state.job.workers[0].busy)
        second._all(Op.STOP)
        thread.join(20)
        assert "told to stop" in str(found[0])


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("shares", [True, False])
def test_a_worker_that_waits_goes_on_with_the_next_process_of_a_server_that_was_told_to_end(
    level: int, shares: bool, tmp_path: Path
) -> None:
    with serving(num_workers=2, mode="sync", folder=tmp_path, level=level) as service:
        first, second = (service.client(rank, shares_memory=shares) for rank in range(2))
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(catch(lambda: pushed(first))), daemon=True)
        thread.start()
        until(lambda: service.servers[0].state.job.held)
        service.servers[0].stop()  # as SIGTERM does
        service.start(0)
        assert (pushed(second) == -1.0).all()
        thread.join(20)
        assert (found[0] == -1.0).all(), found


def test_many_values_are_written_by_threads_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = threads_of_answers(monkeypatch)
    for limit, threads in ((4 * 5 * 2 + 1, 1), (4 * 5 * 2, 3)):  # five values for each of two other workers
        monkeypatch.setattr(answers, "SIDE_BY_SIDE_BYTES", limit)
        del sent[:]
        with serving(transport=SocketTransport(), num_workers=3, mode="sync") as service:
            clients = [service.client(rank) for rank in range(3)]
            in_threads(*(partial(pushed, client) for client in clients))
        assert len({thread for _, thread, _ in sent}) == threads


def test_a_process_that_was_replaced_while_it_waits_takes_no_rows_of_the_next_one() -> None:
    with serving(transport=SocketTransport(), num_workers=2, mode="sync") as service:
        first, second = (service.client(rank) for rank in range(2))
        first.watch([0])
        found: list[Any] = []

        def wait() -> None:
            found.append(catch(lambda: first.wait(first.push({0: gradient([1, 2])}, changed=lambda rows: None))))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        until(lambda: service.servers[0].state.job.workers[0].busy)
        successor = service.client(0, client_id=12345)
        assert successor.watch([0])[0]  # it reads all rows now, as they are before the step
        second.wait(second.push({0: gradient([3, 4])}))
        thread.join(20)
        assert "newer process" in str(found[0])
        assert successor.watch([0])[1][0][0].tolist() == [1, 2, 3, 4]


def test_an_answer_that_cannot_be_made_cuts_one_worker_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Answers._send
    failed: list[int] = []

    def send(self: Answers, peer: Any, header: Header, answer: Any) -> None:
        if header.op is Op.PUSH and peer.worker.rank == 0 and not failed:
            failed.append(1)
            raise RuntimeError("can't start new thread")
        real(self, peer, header, answer)

    monkeypatch.setattr(Answers, "_send", send)
    with serving(transport=SocketTransport(), num_workers=3, mode="sync") as service:
        clients = [service.client(rank) for rank in range(3)]
        found: list[Any] = []

        def is_busy(rank: int) -> int:
            return service.servers[0].state.job.workers[rank].busy

        threads = [threading.Thread(target=lambda c=c: found.append(pushed(c)), daemon=True) for c in clients[:2]]
        for rank, thread in enumerate(threads):
            thread.start()
            until(partial(is_busy, rank))
        assert (pushed(clients[2]) == -1.0).all()
        for thread in threads:
            thread.join(20)
        assert len(found) == 2
        assert all((values == -1.0).all() for values in found)
        assert failed


def test_a_large_answer_through_a_socket_gets_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = threads_of_answers(monkeypatch)
    monkeypatch.setattr(answers, "LEAST_BYTES", 0)  # the answers of these tables are small
    monkeypatch.setattr(Sealed, "takes_in_memory", lambda self, size: False)
    with serving(transport=SocketTransport(), num_workers=2, mode="sync") as service:
        first, second = (service.client(rank) for rank in range(2))
        for step in range(1, 4):
            in_threads(lambda: pushed(first), lambda: pushed(second))
            assert step == service.servers[0].state.visible_step
        assert all(len({thread for _, thread, _ in sent[i : i + 2]}) == 2 for i in (0, 2, 4))


def test_a_worker_that_speaks_before_its_answer_is_heard_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[Op, int]] = []
    real = Answers._send

    def send(self: Answers, peer: Any, header: Header, answer: Any) -> None:
        if answer.status is not Status.WAITING:
            order.append((header.op, peer.worker.rank if peer.worker else -1))
        real(self, peer, header, answer)

    with serving(transport=SocketTransport(), num_workers=2, mode="sync") as service:
        first, second = (service.client(rank) for rank in range(2))
        monkeypatch.setattr(Answers, "_send", send)
        link = first._links[0]
        push = Request(Op.PUSH, [], 0, step=1, flags=MessageFlag.VALUES, change=True)
        link.submit(push)
        until(lambda: service.servers[0].state.job.workers[0].busy)
        ping = Request(Op.PING, tag=link._next_tag)
        with link.lock:  # as no client does
            link._pending.append(ping)
            link._transmit(ping)
        time.sleep(0.1)
        assert order == []
        pushed(second)
        link.finish(ping)
        assert [op for op, rank in order if rank == 0] == [Op.PUSH, Op.PING]


def test_steps_are_the_same_whoever_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(answers_late: bool) -> list[bytes]:
        with monkeypatch.context() as patch:
            if not answers_late:
                patch.setattr(Answers, "_leave", lambda self, peer, header, answer: False)
            with serving(transport=SocketTransport(), num_workers=3, mode="sync") as service:
                clients = [service.client(rank) for rank in range(3)]
                found: list[list[bytes]] = [[], [], []]

                def work(rank: int) -> None:
                    for step in range(8 - 2 * rank):  # the later ones end earlier
                        found[rank].append(pushed(clients[rank], 0.1 * (rank + 1) * (step + 1)).tobytes())
                    clients[rank].barrier("end")

                in_threads(*(lambda rank=rank: work(rank) for rank in range(3)))
                return [value for each in found for value in each]

    assert run(True) == run(False)
