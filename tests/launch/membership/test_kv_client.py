"""The client's own behaviour: reconnecting, giving up, closing while it waits. The rest is in test_kv_service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fleet.launch.membership.kv_client import StoreRefusedError
from fleet.launch.membership.kv_service import KeyValueService
from fleet.launch.membership.store import StoreLostError
from tests.helpers.job_keys import JobKeys


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    service = KeyValueService(listener, b"s", lambda *about: None)
    yield listener.getsockname()
    service.close()


def test_a_broken_connection_is_opened_again_in_the_same_session(address: tuple[str, int]) -> None:
    client = JobKeys(address, b"s", prefix="p/", ttl_s=5)
    client.connect()
    client.put("k", 1, leased=True)
    for _ in range(3):
        client.client._channels["requests"].close()
        assert client.read().values == {"k": 1}
    client.close()


def test_close_wakes_a_waiting_thread(address: tuple[str, int]) -> None:
    client = JobKeys(address, b"s", prefix="p/", ttl_s=5)
    client.connect()
    ended: list[Exception] = []

    def wait() -> None:
        try:
            client.wait(10**9, 30)
        except StoreLostError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    client.close()
    thread.join(3)
    assert not thread.is_alive()
    assert ended


def test_expired_session_is_an_error_not_a_new_session(address: tuple[str, int]) -> None:
    """Self-fencing: one whose lease ran out must not go on as if nothing had happened."""
    client = JobKeys(address, b"s", prefix="p/", ttl_s=0.5)
    client.connect()
    client.put("k", 1, leased=True)
    time.sleep(0.9)
    with pytest.raises(StoreLostError, match="given this node up"):
        client.put("k", 2)
    client.close()


def test_stranger_is_no_service() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            with stranger.accept()[0] as sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        client = JobKeys(stranger.getsockname(), b"s", prefix="p/", ttl_s=1)
        with pytest.raises(StoreRefusedError, match="no Fleet rendezvous service"):
            client.connect()
        thread.join()
        client.close()
