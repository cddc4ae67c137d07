"""Hostile and broken peers: the server stays up, changes no row, and stays small (reliability 5.3)."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import threading
import time

import numpy as np
import pytest

from fleet.common.addresses import split_endpoint
from fleet.ps.wire.auth import GREETING_BYTES, prove_to_server
from fleet.ps.wire.messages import (
    HEADER_BYTES,
    Header,
    MessageFlag,
    Op,
    Status,
    TablePart,
    control_body,
    decode_control,
    decode_header,
    encode_header,
    encode_parts,
)
from fleet.ps.wire.transport import ConnectionLost, SocketTransport, TransferTimeout
from tests.fleet.ps.service import gradient, ids, rows, serving

SECRET = b"job secret"


@pytest.fixture
def service():
    with serving(
        transport=SocketTransport(), num_workers=2, secret=SECRET, handshake_timeout_s=0.5, transfer_timeout_s=0.5
    ) as service:
        client = service.client(0, secret=SECRET)
        client.wait(client.push({0: gradient(range(100))}))
        service.opened = []
        yield service
        for connection in service.opened:
            connection.close()
        assert (rows(client, range(100)) == -1).all(), "a row has changed"
        assert client.stat()[0]["tables"]["0"]["rows"] == 100
        client.wait(client.push({0: gradient(range(100))}))
        assert (rows(client, range(100)) == -2).all(), "the server no longer works"


def raw(service) -> socket.socket:
    return socket.create_connection(split_endpoint(service.servers[0].endpoint, "server"), 5)


def proven(service, rank=1):
    """A connection that has shown the secret and, unless rank is None, said hello."""
    endpoint = service.servers[0].endpoint
    service.opened.append(service.transport.connect(endpoint, 5.0))
    connection = prove_to_server(service.opened[-1], endpoint, SECRET, 5.0)
    if rank is not None:
        answer = ask(connection, Op.HELLO, control_body({"rank": rank, "channel": 0, "num_workers": 2}))
        assert answer[0].status is Status.OK
    return connection


def ask(connection, op, body=b"", **fields):
    header = Header(op, client_id=77, body_bytes=len(body), tag=3, **fields)
    connection.send(encode_header(header), [body])
    return answer_of(connection)


def answer_of(connection):
    answer = decode_header(connection.receive_header(5, 5))
    content = bytearray(answer.body_bytes)
    connection.receive_body(memoryview(content), 5)
    return answer, content


def closed(connection) -> bool:
    try:
        connection.receive_header(5, 5)
    except ConnectionLost:
        return True
    except TransferTimeout:
        return False
    return False


def test_random_bytes_before_the_proof(service):
    rng = random.Random(1)
    for size in [0, 1, 15, 64, 65, 1000, 100_000]:
        for _ in range(3):
            with raw(service) as sock:
                try:
                    sock.sendall(rng.randbytes(size))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
                except OSError:
                    pass


def test_without_the_secret_nothing_is_read(service):
    """A valid push after a wrong proof is not looked at."""
    body = b"".join(bytes(b) for b in encode_parts([part()]))
    with raw(service) as sock:
        assert len(sock.recv(GREETING_BYTES, socket.MSG_WAITALL)) == GREETING_BYTES
        name = service.servers[0].endpoint.encode()
        assert sock.recv(len(name), socket.MSG_WAITALL) == name
        sock.sendall(os.urandom(64))
        sock.sendall(encode_header(Header(Op.PUSH, client_id=5, seq=1, n_tables=1, body_bytes=len(body))) + body)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(4096) == b""


def part(n=3, table=0, dim=2):
    return TablePart(table, n, dim, np.arange(n, dtype=np.int64), np.ones((n, dim), np.float32))


def test_random_bytes_after_the_proof(service):
    rng = random.Random(2)
    for _ in range(40):
        connection = proven(service, rank=rng.choice([None, 1]))
        with contextlib.suppress(ConnectionLost):
            connection._connection.send([rng.randbytes(rng.choice([1, 43, 44, 45, 76, 500]))])
        connection.close()


def test_random_bytes_under_a_good_seal(service):
    rng = random.Random(5)
    for _ in range(40):
        connection = proven(service, rank=rng.choice([None, 1]))
        with contextlib.suppress(ConnectionLost):
            connection.send(rng.randbytes(HEADER_BYTES), [rng.randbytes(rng.choice([0, 1, 500]))])
        connection.close()


def test_every_operation_with_a_random_body_is_refused_or_closed(service):
    rng = random.Random(3)
    harmless = {Op.GOODBYE, Op.STOP, Op.PING, Op.STAT, Op.SNAPSHOT}
    for op in set(Op) - harmless:
        for n_tables in (1, 3):
            connection = proven(service)
            try:
                answer, _ = ask(connection, op, rng.randbytes(200), seq=10**9, step=1, n_tables=n_tables)
                assert answer.status in (Status.REFUSED, Status.FAILED)
            except ConnectionLost:
                pass
            connection.close()


def test_messages_with_a_damaged_field_change_nothing(service):
    rng = random.Random(4)
    body = bytearray(b"".join(bytes(b) for b in encode_parts([part(20), part(5, table=9)])))
    connection = proven(service)
    statuses = set()
    for _ in range(300):
        damaged = bytearray(body)
        for _ in range(rng.randint(0, 3)):
            damaged[rng.randrange(24)] = rng.randrange(256)
        answer, _ = ask(connection, Op.PUSH, damaged, seq=1, step=1, n_tables=2)
        statuses.add(answer.status)
    assert statuses == {Status.REFUSED}
    connection.close()


def test_each_wrong_request_is_refused_and_the_line_stays(service):
    connection = proven(service)
    good = b"".join(bytes(b) for b in encode_parts([part()]))
    cases = [
        (Op.PUSH, good, {"seq": 0, "n_tables": 1}, "number in the channel"),
        (Op.PUSH, b"".join(bytes(b) for b in encode_parts([part(table=8)])), {"seq": 1, "n_tables": 1}, "table 8"),
        (Op.PUSH, b"".join(bytes(b) for b in encode_parts([part(dim=3)])), {"seq": 1, "n_tables": 1}, "dim 2"),
        (Op.PUSH, good, {"seq": 1, "n_tables": 2}, "inside the head"),
        (Op.PUSH, good, {"seq": 1, "n_tables": 0}, "fill 0"),
        (
            Op.PUSH,
            b"".join(bytes(b) for b in encode_parts([TablePart(0, 2, 2, ids(1, 2))])),
            {"seq": 1, "n_tables": 1},
            "no rows",
        ),
        (Op.SET_DENSE, good, {"seq": 1, "n_tables": 1}, "dense tables only"),
        (Op.BARRIER, control_body({"name": 5}), {"step": 1}, "name"),
        (Op.BARRIER, control_body({"name": "x"}), {"step": 0}, "number from 1"),
        (Op.CREATE, control_body({"tables": {"x": {}}}), {}, "integers"),
        (Op.CREATE, control_body({"tables": {"70000": {}}}), {}, "65535"),
        (Op.CREATE, control_body({"tables": {"5": {"kind": "sparse"}}}), {}, "cannot be read"),
        (Op.CREATE, b"[1]", {}, "JSON object"),
        (Op.ALTER, control_body({"table": 0, "action": "learning_rate", "fields": {"value": "x"}}), {"seq": 1}, None),
        (Op.SAVE, control_body({"dir": "/"}), {}, "dirname"),
        (Op.LOAD, control_body({"dirname": "/nowhere"}), {}, None),
    ]
    for op, body, fields, word in cases:
        answer, content = ask(connection, op, body, **fields)
        assert answer.status is Status.REFUSED, op
        assert word is None or word in decode_control(content)["error"], (op, content)
    connection.close()


def test_a_hello_that_does_not_fit_is_refused(service):
    for fields in (
        {},
        {"rank": 5},
        {"rank": -1},
        {"rank": "0"},
        {"rank": True},
        {"channel": -1},
        {"channel": 1 << 20},
        {"num_workers": 3},
        {"job": "x"},
    ):
        connection = proven(service, rank=None)
        good = {"rank": 1, "channel": 0, "num_workers": 2}
        body = control_body({**good, **fields} if fields else {})
        answer, _ = ask(connection, Op.HELLO, body)
        assert answer.status is Status.REFUSED, fields
        connection.close()


def test_work_before_hello_closes_the_connection(service):
    connection = proven(service, rank=None)
    connection.send(encode_header(Header(Op.STOP, client_id=1)), [])
    assert closed(connection)


def test_another_client_id_than_that_of_the_hello_is_shut_out(service):
    connection = proven(service)
    header = Header(Op.PING, client_id=78)
    connection.send(encode_header(header), [])
    assert answer_of(connection)[0].status is Status.FENCED


@pytest.mark.parametrize("length", [(1 << 28) + 1, 0xFFFFFFFF])
def test_an_oversize_length_closes_and_allocates_nothing(service, length):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connection = proven(service)
    connection.send(encode_header(Header(Op.PUSH, client_id=77, seq=1, n_tables=1, body_bytes=length)), [])
    assert closed(connection)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_an_oversize_control_message_closes(service):
    connection = proven(service)
    connection.send(encode_header(Header(Op.CREATE, client_id=77, body_bytes=(1 << 20) + 1)), [])
    assert closed(connection)


def test_a_pull_larger_than_a_message_is_refused(service):
    connection = proven(service)
    body = b"".join(bytes(b) for b in encode_parts([TablePart(0, 40_000_0, 2, np.zeros(40_000_0, np.int64))]))
    object.__setattr__(service.servers[0].config, "max_body_bytes", 3_200_000 + 100)
    try:
        answer, content = ask(connection, Op.PULL, body, n_tables=1, flags=MessageFlag.ZEROS)
        assert answer.status is Status.REFUSED or len(content) <= 3_200_100
    finally:
        object.__setattr__(service.servers[0].config, "max_body_bytes", 1 << 28)
    connection.close()


def test_slow_newcomers_are_cut_and_do_not_keep_workers_out(service):
    """Slow loris: one byte now and then, before the proof and in the middle of a message."""
    slow = [raw(service) for _ in range(70)]  # more than the server lets in unproven
    begun = proven_or_wait(service)
    begun._connection.send([encode_header(Header(Op.PUSH, client_id=77, seq=1, n_tables=1, body_bytes=10_000))[:20]])
    began = time.monotonic()
    while time.monotonic() - began < 3:
        for sock in slow:
            with contextlib.suppress(OSError):
                sock.sendall(b"x")
        time.sleep(0.2)
    assert closed(begun)
    assert len(service.servers[0]._open) <= 2
    for sock in slow:
        sock.close()


def proven_or_wait(service):
    deadline = time.monotonic() + 10
    while True:
        try:
            return proven(service)
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_a_flood_of_connections_leaves_no_threads_behind(service):
    before = threading.active_count()
    for _ in range(5):
        sockets = [raw(service) for _ in range(100)]
        for sock in sockets:
            sock.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
