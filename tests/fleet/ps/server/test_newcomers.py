"""Strangers who fill the places of newcomers, or the log (issue 10, Medium 7)."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from fleet.common.addresses import split_endpoint
from fleet.ps.server.newcomers import INTERVAL_S, MAX_ADDRESSES, Complaints, Newcomers, host_of
from fleet.ps.server.server import MAX_UNPROVEN
from fleet.ps.wire.transport import SocketTransport
from tests.fleet.ps.service import gradient, rows, serving, until
from tests.fleet.ps.test_transport_contract import tls_contexts


class Peer:
    """What a connection shows of itself."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


def test_the_oldest_of_the_busiest_address_gives_way() -> None:
    newcomers, peers = Newcomers(), [Peer(f"10.0.0.{host}:{port}") for host, port in [(1, 1), (2, 1), (2, 2), (3, 1)]]
    assert newcomers.evict() is None
    for peer in peers:
        newcomers.add(peer)  # type: ignore[arg-type]
    assert newcomers.evict() is peers[1]
    assert newcomers.evict() is peers[0]
    newcomers.discard(peers[2])  # type: ignore[arg-type]
    assert len(newcomers) == 1
    assert [host_of(peer) for peer in ("[::1]:5", "10.0.0.1:5", "unix")] == ["[::1]", "10.0.0.1", "unix"]


def test_one_line_a_minute_for_each_address() -> None:
    lines: list[str] = []
    now = [0.0]
    complaints = Complaints(lines.append, lambda: now[0])
    for _ in range(1000):
        complaints.say("a", "line a")
    complaints.say("b", "line b")
    now[0] = INTERVAL_S
    complaints.say("a", "line a")
    now[0] = 2 * INTERVAL_S
    complaints.say("a", "line a")
    assert lines == ["line a", "line b", "line a (999 more like it since the last line)", "line a"]
    for number in range(10 * MAX_ADDRESSES):
        complaints.say(f"{number}", "x")
    assert len(lines) <= 5 + MAX_ADDRESSES
    assert lines[-1] == "x Lines about further addresses are left out for a minute."
    assert len(complaints._said) <= MAX_ADDRESSES + 1
    now[0] = 4 * INTERVAL_S
    complaints.say("late", "line late")
    assert lines[-1] == "line late"


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_an_attacker_that_returns_keeps_nobody_out(kind: str, tmp_path: Any) -> None:
    """It held all 64 places: 128 sockets, each replaced as soon as it was cut, kept workers out for ever."""
    tls = SocketTransport(*tls_contexts(tmp_path)) if kind == "tls" else SocketTransport()
    stop, attempts = threading.Event(), []

    def attack(endpoint: tuple[str, int]) -> None:
        sockets: list[socket.socket] = []
        while not stop.is_set():
            for sock in sockets[:-128] if len(sockets) >= 256 else []:
                sock.close()
                sockets.remove(sock)
            sockets.append(socket.create_connection(endpoint, 5))
            attempts.append(1)
            time.sleep(0.005)
        for sock in sockets:
            sock.close()

    with serving(transport=tls, num_workers=2) as service:
        server = service.servers[0]
        first = service.client(0)
        thread = threading.Thread(target=attack, args=(split_endpoint(server.endpoint, "server"),), daemon=True)
        thread.start()
        try:
            until(lambda: len(attempts) > 200)
            for connection in [*first._links]:
                connection._connection.close()  # type: ignore[union-attr]
            first.wait(first.push({0: gradient([1])}))
            second = service.client(1)
            assert rows(second, [1]).tolist() == [[-1, -1]]
            assert len(server._newcomers) <= MAX_UNPROVEN
            until(lambda: len(server._open) <= MAX_UNPROVEN + 2)
        finally:
            stop.set()
            thread.join(10)
