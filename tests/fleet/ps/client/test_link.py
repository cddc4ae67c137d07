"""A worker's line to a server when it is cut at awkward moments, or silent (PS design 3, D.10)."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from fleet.errors import PSError
from fleet.ps.client.link import Request
from fleet.ps.wire.messages import MessageFlag, Op
from fleet.ps.wire.transport import SocketTransport
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import SPARSE, gradient, rows, serving, until


@pytest.mark.slow
def test_the_heartbeat_connects_anew():
    """PS design 3: a cut while a worker computes for long; in sync mode the others would step without its gradient."""
    with serving(num_workers=2, lease_s=1.0) as service:
        service.client(0, heartbeat=True)
        server = service.servers[0]
        worker, *_ = server.state.job.workers
        for connection in list(server._open):
            connection.close()
        until(lambda: not server._open)
        until(lambda: server._open)
        assert worker.state == "active"


class _InterruptedOnce:
    """A transport whose connections send half of the next large message, and then comes Ctrl-C."""

    def __init__(self, inner):
        self._inner, self.bind, self.armed = inner, inner.bind, False

    def connect(self, endpoint, timeout_s):
        connection = self._inner.connect(endpoint, timeout_s)
        real = connection.send

        def send(buffers, timeout_s=None):
            whole = b"".join(bytes(buffer) for buffer in buffers)
            if self.armed and len(whole) > 4000:
                self.armed = False
                real([whole[: len(whole) // 2]], timeout_s)
                raise KeyboardInterrupt
            real(buffers, timeout_s)

        connection.send = send
        return connection


def test_servers_in_another_order_are_refused():
    """PS design 3: or the rows of an id would be on one server for some workers and on another for others."""
    with serving(2, num_workers=2) as service:
        service.client(0, tables={0: SPARSE})
        service.servers.reverse()
        with pytest.raises(PSError, match=r"parameter server 0 \(.*\) is number 1\..*same order"):
            service.client(1, tables={0: SPARSE})


def test_ctrl_c_in_the_middle_of_a_message_does_not_spoil_the_next():
    """PS design 3: in a notebook training goes on; the rest of the cut push must not be read from what follows."""
    transport = _InterruptedOnce(SocketTransport())
    with serving(transport=transport) as service:
        client = service.client(shares_memory=False)  # its large messages go by the socket
        keys = range(1000)
        transport.armed = True
        with pytest.raises(KeyboardInterrupt):
            client.push({0: gradient(keys)})
        client.wait(client.push({0: gradient(keys)}, step=2))
        assert (rows(client, keys) == -2).all()


def test_a_silent_server_is_given_up_at_the_deadline(monkeypatch):
    """A server that is stopped: not the limit of an answer and then the deadline, one after the other."""
    monkeypatch.setattr("fleet.ps.client.connector._LEAST_LIMIT_S", 0.1)
    with serving() as service:
        client = service.client(deadline_s=0.2, answer_timeout_s=3600.0)
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "drop"))
        service.transport.forget(service.servers[0].endpoint)
        with pytest.raises(PSError, match=r"did not answer for 0\.2 s"):
            rows(client, [1])


@pytest.mark.slow
def test_a_worker_that_comes_during_a_save_is_told_to_wait(monkeypatch):
    monkeypatch.setattr("fleet.ps.server.operations.BEAT_S", 0.02)
    with serving() as service:
        snapshots = service.servers[0].state.snapshots
        snapshots.acquire()
        timer = threading.Timer(2.5, snapshots.release)
        timer.start()
        client = service.client(answer_timeout_s=0.5, deadline_s=0.6)
        timer.join()
        assert set(client.tables) == {0, 1}


@pytest.mark.slow
def test_a_worker_that_said_goodbye_is_not_taken_back_while_another_server_is_away():
    """PS design 3: its lease thread would connect anew, and a server of one worker would wait for it for ever."""
    with serving(2, lease_s=1.0) as service:
        client = service.client(heartbeat=True, deadline_s=2.5)
        first, second = service.servers
        worker = first.state.job.workers[0]
        service.transport.forget(second.endpoint)
        for connection in list(second._open):
            connection.close()

        def leave():
            with suppress(PSError):
                client.goodbye()

        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        until(lambda: worker.state == "gone")
        for connection in list(first._open):
            connection.close()
        time.sleep(1.5)  # the lease thread wakes eight times a second
        assert worker.state == "gone"
        client.close()


def test_the_body_is_all_of_its_buffers() -> None:
    assert Request(Op.PUSH, [b"ab", memoryview(b"cde")]).body_bytes == 5
    assert Request(Op.PING).body_bytes == 0


@pytest.mark.parametrize(
    ("op", "flags", "asks"),
    [
        (Op.PULL, MessageFlag.NONE, True),
        (Op.WATCH, MessageFlag.NONE, True),
        (Op.PUSH, MessageFlag.VALUES, True),
        (Op.PUSH, MessageFlag.NONE, False),
    ],
)
def test_answers_with_rows_may_be_large(op: Op, flags: int, asks: bool) -> None:
    assert Request(op, flags=flags).asks_rows == asks
