"""Waiting for servers prints what Fleet prints (001-05)."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from fleet.errors import PSError
from fleet.ps.client.connecting import wait_for_servers
from fleet.ps.wire.transport import ConnectionLost, SocketTransport
from tests.fleet.ps.local_transport import LocalTransport
from tests.fleet.ps.service import silent


def greet_at(transport, endpoint, word=b"x", pause_s=0.0):
    listener = transport.bind(endpoint)

    def greet():
        with contextlib.suppress(ConnectionLost):
            while True:
                connection = listener.accept()
                time.sleep(pause_s)
                if word:
                    connection.send([word])
                connection.close()

    threading.Thread(target=greet, daemon=True).start()
    return listener


def test_a_port_that_takes_connections_is_no_server_yet():
    """Issue 10, High 1: the launcher holds the port until the server comes, which then greets those that wait."""
    transport = SocketTransport()
    held = transport.bind("127.0.0.1:0")
    with pytest.raises(PSError, match="did not come"):
        wait_for_servers([held.endpoint], transport, notify=silent, timeout_s=0.3)
    began = time.monotonic()
    thread = threading.Thread(target=wait_for_servers, args=([held.endpoint], transport), kwargs={"notify": silent})
    thread.start()
    time.sleep(0.5)
    for _ in range(2):  # the connection that gave up is there, too
        connection = held.accept()
        with contextlib.suppress(ConnectionLost):
            connection.send([b"x"])
        connection.close()
    thread.join(10)
    assert not thread.is_alive()
    assert time.monotonic() - began < 5
    held.close()


def test_a_server_that_hangs_up_without_a_word_is_left_to_connecting():
    """It awaits TLS: connecting says so, waiting would never end."""
    transport = LocalTransport()
    greet_at(transport, "a:1", b"", 0.1)
    wait_for_servers(["a:1"], transport, notify=silent, timeout_s=5)


def test_waiting_for_absent_servers_prints_fleets_lines():
    """001-05: the two lines, the list shrinks, and it goes on by itself."""
    transport, lines = LocalTransport(), []
    greet_at(transport, "a:1")

    def come_later():
        time.sleep(0.5)
        greet_at(transport, "b:2")
        time.sleep(0.5)
        greet_at(transport, "c:3")

    thread = threading.Thread(target=come_later)
    thread.start()
    wait_for_servers(["a:1", "b:2", "c:3"], transport, notify=lines.append, interval_s=0.3, timeout_s=10)
    thread.join()
    assert lines[:2] == ["server not ready, wait 0.3 sec to retry...", "not ready endpoints:['b:2', 'c:3']"]
    assert lines[-1] == "not ready endpoints:['c:3']"
    with pytest.raises(PSError, match=r"\['d:4'\]"):
        wait_for_servers(["a:1", "d:4"], transport, notify=lines.append, timeout_s=0.1)


def test_the_lines_at_the_default_interval():
    """001-05: the exact words of the seed."""
    lines = []
    with pytest.raises(PSError):
        wait_for_servers(["127.0.0.1:4001"], LocalTransport(), notify=lines.append, timeout_s=0.1)
    assert lines == ["server not ready, wait 3 sec to retry...", "not ready endpoints:['127.0.0.1:4001']"]
