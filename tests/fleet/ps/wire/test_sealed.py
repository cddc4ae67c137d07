"""Messages on a proven connection: what arrives is what was sent, in order and once, or nothing does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fleet.ps.wire.messages import HEADER_BYTES, MessageError
from fleet.ps.wire.sealed import SMALL_BODY_BYTES, Sealed
from tests.fleet.ps.local_transport import LocalTransport

HEADER = bytes(range(HEADER_BYTES))


def pair(change: Callable[[bytes], bytes] = bytes) -> tuple[Sealed, Sealed]:
    network = LocalTransport()
    listener = network.bind("x")
    near, far = network.connect("x", 1.0), listener.accept()
    real = near.send
    near.send = lambda buffers, timeout_s=None: real([change(b"".join(map(bytes, buffers)))], timeout_s)
    return Sealed(near, b"k", is_server=False), Sealed(far, b"k", is_server=True)


def take(end: Sealed, size: int) -> bytes:
    body = memoryview(bytearray(size))
    header = bytes(end.receive_header(1, 1))
    end.receive_body(body, 1)
    assert header == HEADER
    return bytes(body)


@pytest.mark.parametrize("size", [0, 1, SMALL_BODY_BYTES, SMALL_BODY_BYTES + 1, 100_003])
def test_bodies_of_every_size_in_both_directions(size: int) -> None:
    body = np.random.default_rng(size).bytes(size)
    worker, server = pair()
    for sender, receiver in ((worker, server), (server, worker), (worker, server)):
        sender.send(HEADER, [body[: size // 3], memoryview(body)[size // 3 :]], 1)
        assert take(receiver, size) == body


@pytest.mark.parametrize("at", [0, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 31, HEADER_BYTES + 32, -1])
@pytest.mark.parametrize("size", [100, 10_000])
def test_a_changed_bit_is_found_wherever_it_is(at: int, size: int) -> None:
    def change(message: bytes) -> bytes:
        changed = bytearray(message)
        changed[at] ^= 0x10
        return bytes(changed)

    worker, server = pair(change)
    worker.send(HEADER, [bytes(size)], 1)
    server.receive_header(1, 1)
    with pytest.raises(MessageError, match="seal"):
        server.receive_body(memoryview(bytearray(size)), 1)


@pytest.mark.parametrize("kind", ["repeated", "left out", "sent back"])
def test_messages_are_taken_in_order_and_once(kind: str) -> None:
    def change(message: bytes) -> bytes:
        sent.append(message)
        first = len(sent) == 1
        return {"repeated": message * 2 if first else b"", "left out": b"" if first else message}.get(kind, message)

    sent: list[bytes] = []
    worker, server = pair(change)
    worker.send(HEADER, [b"body"], 1)
    if kind == "repeated":
        assert take(server, 4) == b"body"
    if kind == "sent back":
        server._connection.send(sent, 1)
        server = worker
    else:
        worker.send(HEADER, [b"body"], 1)
    with pytest.raises(MessageError, match="seal"):
        take(server, 4)
