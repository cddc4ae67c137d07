"""One suite for every transport: what the server and the client rely on holds for sockets and for the test double."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.wire.auth import AuthenticationError, check_secret, prove_to_server, prove_to_worker
from fleet.ps.wire.transport import (
    Acceptor,
    Connection,
    ConnectionLost,
    SocketTransport,
    TransferTimeout,
    stays_here,
)
from tests.fleet.ps.local_transport import Fault, LocalTransport
from tests.helpers.certificates import make_certificate

KINDS = ["tcp", "unix", "tls", "local"]


@pytest.fixture(params=KINDS)
def seam(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[object, Acceptor]]:
    transport: object
    if request.param == "local":
        transport, endpoint = LocalTransport(), "anywhere"
    elif request.param == "unix":
        transport, endpoint = SocketTransport(), f"unix:{tmp_path}/s"
    elif request.param == "tls":
        transport, endpoint = SocketTransport(*tls_contexts(tmp_path)), "127.0.0.1:0"
    else:
        transport, endpoint = SocketTransport(), "127.0.0.1:0"
    listener = transport.bind(endpoint)  # type: ignore[attr-defined]
    yield transport, listener
    listener.close()


def tls_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    make_certificate(folder)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(folder / "cert.pem")
    return server, client


def serve(listener: Acceptor, action: Callable[[Connection], object]) -> threading.Thread:
    def run() -> None:
        connection = listener.accept()
        try:
            action(connection)
        except PSError:
            pass
        finally:
            connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def take(connection: Connection, size: int, **limits: float) -> bytes:
    data = bytearray(size)
    connection.receive(memoryview(data), **limits)
    return bytes(data)


def test_bytes_arrive_whole_and_in_order(seam):
    transport, listener = seam
    large = np.random.default_rng(0).integers(0, 255, 3_000_000, dtype=np.uint8)

    def echo(connection: Connection) -> None:
        connection.send([take(connection, 5 + large.nbytes)])

    thread = serve(listener, echo)
    connection = transport.connect(listener.endpoint, 5.0)
    connection.send([b"ab", b"", memoryview(b"cde"), memoryview(large)])
    assert take(connection, 5) == b"abcde"
    assert take(connection, large.nbytes, timeout_s=20.0) == large.tobytes()
    thread.join(5)
    connection.close()


def test_many_small_buffers_make_one_message(seam):
    transport, listener = seam
    thread = serve(listener, lambda c: c.send([bytes([i % 256]) for i in range(3000)]))
    connection = transport.connect(listener.endpoint, 5.0)
    assert take(connection, 3000, timeout_s=10.0) == bytes(i % 256 for i in range(3000))
    thread.join(5)
    connection.close()


def test_the_end_of_the_stream_is_connection_lost(seam):
    transport, listener = seam
    thread = serve(listener, lambda c: c.send([b"abc"]))
    connection = transport.connect(listener.endpoint, 5.0)
    with pytest.raises(ConnectionLost):
        take(connection, 4, timeout_s=5.0)
    thread.join(5)
    connection.close()


def test_a_silent_peer_is_a_timeout(seam):
    transport, listener = seam
    done = threading.Event()
    thread = serve(listener, lambda c: (c.send([b"x"]), done.wait(10)))
    connection = transport.connect(listener.endpoint, 5.0)
    assert take(connection, 1, idle_s=5.0) == b"x"
    began = time.monotonic()
    with pytest.raises(TransferTimeout):
        take(connection, 1, idle_s=0.2)
    assert time.monotonic() - began < 4
    done.set()
    thread.join(5)
    connection.close()


def test_a_slow_sender_is_cut_by_the_limit_of_the_whole_message(seam):
    transport, listener = seam
    outcome: list[type] = []

    def read(connection: Connection) -> None:
        try:
            take(connection, 48, timeout_s=0.5, idle_s=20.0)
        except PSError as error:
            outcome.append(type(error))

    thread = serve(listener, read)
    connection = transport.connect(listener.endpoint, 5.0)
    began = time.monotonic()
    while thread.is_alive() and time.monotonic() - began < 15:
        try:
            connection.send([b"x"])
        except ConnectionLost:
            break
        time.sleep(0.3)
    thread.join(5)
    assert outcome == [TransferTimeout]
    assert time.monotonic() - began < 8
    connection.close()


def test_close_wakes_a_blocked_receive(seam):
    transport, listener = seam
    received: list[type] = []
    opened: list[Connection] = []

    def read(connection: Connection) -> None:
        take(connection, 1)
        opened.append(connection)
        try:
            take(connection, 1)
        except PSError as error:
            received.append(type(error))

    thread = serve(listener, read)
    connection = transport.connect(listener.endpoint, 5.0)
    connection.send([b"x"])
    while not opened:
        time.sleep(0.01)
    time.sleep(0.05)
    opened[0].close()
    thread.join(5)
    assert received == [ConnectionLost]
    connection.close()


def test_closing_the_listener_ends_accept_and_refuses_newcomers(seam):
    transport, listener = seam
    ended: list[bool] = []

    def run() -> None:
        try:
            listener.accept()
        except ConnectionLost:
            ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.05)
    listener.close()
    thread.join(5)
    assert ended == [True]
    with pytest.raises(ConnectionLost):
        transport.connect(listener.endpoint, 1.0)


@pytest.mark.parametrize(
    ("servers", "workers", "good"),
    [(b"s", b"s", True), (b"s", b"t", False), (b"s", b"", False), (b"", b"s", False)],
)
def test_both_sides_prove_the_secret(seam, servers, workers, good):
    """Reliability 5.3: a wrong or missing secret closes the connection."""
    transport, listener = seam
    verdict: list[bool] = []

    def answer(connection: Connection) -> None:
        try:
            prove_to_worker(connection, listener.endpoint, servers, 5.0)
            verdict.append(True)
        except AuthenticationError:
            verdict.append(False)

    thread = serve(listener, answer)
    connection = transport.connect(listener.endpoint, 5.0)
    if good:
        prove_to_server(connection, listener.endpoint, workers, 5.0)
    else:
        with pytest.raises(AuthenticationError):
            prove_to_server(connection, listener.endpoint, workers, 5.0)
    thread.join(5)
    assert verdict == [good]
    connection.close()


def test_a_server_that_does_not_know_the_secret_is_found_out(seam):
    transport, listener = seam
    name = listener.endpoint.encode()
    greeting = b"FLEET-PS-AUTH-2\0" + bytes(32) + len(name).to_bytes(2, "big") + name
    thread = serve(listener, lambda c: (c.send([greeting]), take(c, 64), c.send([bytes(32)])))
    connection = transport.connect(listener.endpoint, 5.0)
    with pytest.raises(AuthenticationError, match="does not know"):
        prove_to_server(connection, listener.endpoint, b"secret", 5.0)
    thread.join(5)
    connection.close()


def test_every_address_needs_a_secret():
    """Issue 10, High 3: loopback belongs to every user of the machine."""
    away, here = ("0.0.0.0:1", "10.0.0.5:80", "[::]:3", "example.org:1"), ("127.3.3.3:1", "[::1]:1", "localhost:1")
    for endpoint in (*away, *here, "unix:/x"):
        assert stays_here(endpoint) == (endpoint not in away)
        for missing in (None, b""):
            with pytest.raises(ConfigError, match="without a job secret"):
                check_secret(endpoint, missing)
        assert check_secret(endpoint, b"x") == b"x"


@pytest.mark.parametrize("endpoint", ["", "x", "x:", ":1", "x:99999", "x:-1", "x:1a"])
def test_a_malformed_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigError, match="host:port"):
        SocketTransport().bind(endpoint)


def test_a_taken_port_is_named():
    listener = SocketTransport().bind("127.0.0.1:0")
    with pytest.raises(PSError, match="free port"):
        SocketTransport().bind(listener.endpoint)
    listener.close()


def test_a_killed_servers_unix_path_is_taken_over_but_not_a_file(tmp_path):
    import socket

    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    listener = SocketTransport().bind(f"unix:{path}")
    assert path.stat().st_mode & 0o777 == 0o600
    listener.close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(PSError):
        SocketTransport().bind(f"unix:{path}")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("kind", ["drop", "cut", "cut_after", "delay"])
def test_the_faults_of_the_double(kind):
    transport = LocalTransport()
    transport.faults.append(Fault("client", 2, kind, delay_s=0.1))
    listener = transport.bind("x")
    connection = transport.connect("x", 1.0)
    server = listener.accept()
    connection.send([b"a"])
    if kind.startswith("cut"):
        with pytest.raises(ConnectionLost):
            connection.send([b"b"])
    else:
        connection.send([b"b"])
    assert take(server, 1) == b"a"
    if kind in ("cut_after", "delay"):
        assert take(server, 1) == b"b"
    elif kind == "drop":
        with pytest.raises(TransferTimeout):
            take(server, 1, idle_s=0.05)
    if kind.startswith("cut"):
        with pytest.raises(ConnectionLost):
            take(server, 1)
