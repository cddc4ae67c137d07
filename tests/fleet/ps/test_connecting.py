"""Waiting for servers prints what Fleet prints (001-05)."""

from __future__ import annotations

import threading
import time

import pytest

from fleet.errors import PSError
from fleet.ps._connecting import wait_for_servers
from fleet.ps._local import LocalTransport


def test_waiting_for_absent_servers_prints_fleets_lines():
    """001-05: the two lines, the list shrinks, and it goes on by itself."""
    transport, lines = LocalTransport(), []
    transport.bind("a:1")

    def come_later():
        time.sleep(0.5)
        transport.bind("b:2")
        time.sleep(0.5)
        transport.bind("c:3")

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
