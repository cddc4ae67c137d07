"""The key-value service: secret, bounds, leases, jobs apart (000-13; reliability study 5.3)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fleet.launch.membership import sealed_frames as _frames
from fleet.launch.membership.kv_client import StoreRefusedError
from fleet.launch.membership.kv_service import KeyValueService, ServiceState
from fleet.launch.membership.store import StoreLostError
from tests.helpers.job_keys import JobKeys

SECRET = b"0123456789abcdef"


class Served:
    """A service on a free loopback port, and what it refused."""

    def __init__(self, secret: bytes) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.refused: list[str] = []
        self.service = KeyValueService(listener, secret, lambda *about: self.refused.append(" ".join(about)))
        self.clients: list[JobKeys] = []

    def client(self, secret: bytes = SECRET, prefix: str = "/fleet/job/", ttl_s: float = 5.0) -> JobKeys:
        client = JobKeys(self.address, secret, prefix=prefix, ttl_s=ttl_s)
        self.clients.append(client)
        client.connect()
        return client


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served(SECRET)
    yield one
    for client in one.clients:
        client.close()
    one.service.close()


def test_reads_back_what_was_put(served: Served) -> None:
    client = served.client()
    client.put("a", {"x": [1, "two"]})
    assert client.read().values == {"a": {"x": [1, "two"]}}


def test_swap_succeeds_once(served: Served) -> None:
    one, two = served.client(), served.client()
    assert one.swap("world", None, 1)
    assert not two.swap("world", None, 2)
    text = two.read().texts["world"]
    assert two.swap("world", text, 3)
    assert not one.swap("world", text, 4)


def test_of_many_swaps_at_once_exactly_one_wins(served: Served) -> None:
    clients = [served.client() for _ in range(8)]
    won: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i, c=c: won.append(i) if c.swap("k", None, i) else None)
        for i, c in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_jobs_do_not_see_each_other(served: Served) -> None:
    """000-13: one master, several job ids."""
    one, two = served.client(prefix="/fleet/one/"), served.client(prefix="/fleet/two/")
    one.put("node/a", 1)
    assert two.read().values == {}


def test_wait_returns_at_once_on_a_change(served: Served) -> None:
    one, two = served.client(), served.client()
    revision = one.read().revision
    timer = threading.Timer(0.2, two.put, ("a", 1))
    began = time.monotonic()
    timer.start()
    view = one.wait(revision, 4.0)
    assert view.values == {"a": 1}
    assert time.monotonic() - began < 1.5
    timer.join()


def test_leased_key_goes_with_its_client(served: Served) -> None:
    one, two = served.client(), served.client()
    one.put("node/a", 1, leased=True)
    one.close()
    assert two.read().values == {}


def test_leased_key_goes_soon_after_the_connection_breaks(served: Served) -> None:
    one, two = served.client(ttl_s=30.0), served.client()
    one.put("node/a", 1, leased=True)
    one.client._channels["requests"].close()  # as when the launcher is killed: no farewell
    began = time.monotonic()
    while two.read().values and time.monotonic() - began < 5:
        time.sleep(0.02)
    assert two.read().values == {}
    assert time.monotonic() - began < 2.5


def test_silent_client_loses_its_lease() -> None:
    store = ServiceState()
    name = store.open_session(5.0, now=0.0)
    store.put("node/a", "1", name)
    store.expire(now=4.9)
    assert store.view("")["items"]
    store.expire(now=5.0)
    assert not store.view("")["items"]
    assert not store.touch(name, now=5.1)


def test_wrong_secret_is_refused_and_named(served: Served) -> None:
    """Issue text: takes only peers that know the job's secret."""
    with pytest.raises(StoreRefusedError, match="FLEET_JOB_SECRET"):
        served.client(secret=b"wrong")
    deadline = time.monotonic() + 2
    while not served.refused and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.refused[0].startswith("127.0.0.1:")


def test_missing_secret_is_refused(served: Served) -> None:
    with pytest.raises(StoreRefusedError):
        served.client(secret=b"")


def test_without_a_secret_only_clients_without_one_are_taken() -> None:
    open_service = Served(b"")
    try:
        open_service.client(secret=b"").put("a", 1)
        with pytest.raises(StoreRefusedError):
            open_service.client(secret=SECRET)
    finally:
        for client in open_service.clients:
            client.close()
        open_service.service.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", _frames.MAGIC + os.urandom(48), os.urandom(100_000)],
    ids=["zeros", "http", "magic", "noise"],
)
def test_strangers_are_cut_off_and_the_service_lives(served: Served, garbage: bytes) -> None:
    client = served.client()
    client.put("a", 1)
    with socket.create_connection(served.address, timeout=5) as sock:
        sock.recv(_frames.HELLO_BYTES)
        with contextlib.suppress(OSError):
            sock.sendall(garbage)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
    assert client.read().values == {"a": 1}


def test_no_reply_before_the_proof(served: Served) -> None:
    """Nothing but the greeting comes to one who has not proven the secret."""
    with socket.create_connection(served.address, timeout=0.5) as sock:
        assert len(sock.recv(4096)) == _frames.HELLO_BYTES
        sock.sendall(_frames.MAGIC + b"\0" * 20)
        with pytest.raises(TimeoutError):
            sock.recv(1)


def handshake(served: Served) -> tuple[socket.socket, _frames.Seals]:
    sock = socket.create_connection(served.address, timeout=5)
    nonce = sock.recv(_frames.HELLO_BYTES)[len(_frames.MAGIC) :]
    own = _frames.make_nonce()
    sock.sendall(_frames.MAGIC + own + _frames.proof(SECRET, b"client", nonce, own))
    assert sock.recv(_frames.PROOF_BYTES) == _frames.proof(SECRET, b"service", nonce, own)
    return sock, _frames.Seals(SECRET, nonce, own, is_service=False)


@pytest.mark.parametrize("kind", ["too long", "bad seal", "replay", "no json", "unknown"])
def test_bad_frames_end_the_connection(served: Served, kind: str) -> None:
    sock, seals = handshake(served)
    frame = seals.pack({"op": "session", "ttl_s": 5})
    if kind == "too long":
        frame = (_frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"\0" * 32
    elif kind == "bad seal":
        frame = frame[:10] + bytes([frame[10] ^ 1]) + frame[11:]
    elif kind == "no json":
        frame = (2).to_bytes(4, "big") + seals._seals._seal(b"c", 1, [b"{]"]) + b"{]"
    elif kind == "unknown":
        frame = seals.pack({"op": "rm -rf"})
    with sock:
        sock.sendall(frame)
        if kind == "replay":
            header = sock.recv(4)
            assert header
            sock.sendall(frame)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass  # ends: the service hangs up
    assert served.client().read().values == {}


def test_store_is_bounded() -> None:
    store = ServiceState()
    for i in range(63):
        store.put(f"k{i}", "x" * (1 << 20), None)
    with pytest.raises(_frames.WireError, match="full"):
        store.put("more", "x" * (1 << 20), None)
    store.put("k0", None, None)
    store.put("more", "x" * (1 << 20), None)


def test_client_gives_up_when_the_service_is_gone() -> None:
    gone = Served(SECRET)
    client = gone.client(ttl_s=0.5)
    gone.service.close()
    began = time.monotonic()
    with pytest.raises(StoreLostError, match="has not answered"):
        client.read()
    assert time.monotonic() - began < 3
    client.close()


def test_proxy_variables_are_not_used(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """001-08, requirement 8: a bogus proxy changes nothing."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    served.client().put("a", 1)
