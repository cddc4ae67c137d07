"""Messages on a proven connection: what arrives is what was sent, in order and once, or nothing does; and the digest of
large bodies against its formula, however a body is cut into buffers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import numpy as np
import pytest

from fleet.ps.one_machine.shared_bodies import LEAST_BYTES
from fleet.ps.table.kernels.seal import LANES
from fleet.ps.wire.messages import HEADER_BYTES, MessageError, MessageFlag, places_of_rows
from fleet.ps.wire.sealed import JOINED_BYTES, SMALL_BODY_BYTES, BodyDigest, Sealed
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


KEY = b"k" * 32


def formula(body: bytes) -> bytes:
    key = [*zip(*[iter(hashlib.shake_256(KEY).digest(8 * (LANES + 1)))] * 8, strict=True)]
    keys = [int.from_bytes(bytes(lane), "little") for lane in key]
    body += bytes(-len(body) % 8)
    found = b""
    for start in range(0, len(body), 8 * LANES):
        block = body[start : start + 8 * LANES]
        for shift in (0, 1):
            total = 0
            for lane in range(len(block) // 8):
                low, high = (int.from_bytes(block[8 * lane + at : 8 * lane + at + 4], "little") for at in (0, 4))
                own = keys[lane + shift]
                total += ((low + own) % 2**32) * ((high + (own >> 32)) % 2**32)
            found += (total % 2**64).to_bytes(8, "little")
    return found


@pytest.mark.parametrize("size", [1, 7, 8, 4095, 4096, 4097, 20_003, JOINED_BYTES, JOINED_BYTES + 1, 300_004])
def test_the_digest_is_that_of_the_formula_for_every_cut(size: int) -> None:
    rng = random.Random(size)
    body = rng.randbytes(size)
    expected = formula(body)
    digest = BodyDigest(KEY)
    digest([rng.randbytes(size)], size)  # nothing of the body before is left
    for _ in range(5):
        cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.choice([0, 3, 20])))})
        parts = [bytearray(body[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert digest(parts, size) == expected


def test_each_bit_and_each_place_counts() -> None:
    body = random.Random(0).randbytes(12_288)
    digest = BodyDigest(KEY)
    digests = {bytes(digest([body], len(body))), bytes(BodyDigest(b"other")([body], len(body)))}
    for at in range(0, len(body), 97):
        changed = bytearray(body)
        changed[at] ^= 1 << at % 8
        digests.add(bytes(digest([changed], len(body))))
    digests.add(bytes(digest([body[4096:8192] + body[:4096] + body[8192:]], len(body))))
    digests.add(bytes(digest([body[8:16] + body[:8] + body[16:]], len(body))))
    assert len(digests) == 4 + len(range(0, len(body), 97))


# -- memory of a connection ----------------------------------------------------------------------------------------

SIZE = LEAST_BYTES + 8
MARKED = HEADER[:6] + bytes([MessageFlag.IN_MEMORY]) + HEADER[7:]


def sharing() -> tuple[Sealed, Sealed]:
    worker, server = pair()
    assert server.accept_memory(worker.offer_memory()) is True
    worker.end_offer(accepted=True)
    return worker, server


def body_of(server: Sealed, size: int) -> memoryview:
    server.receive_header(1, 1)
    body = server.body(size)
    server.receive_body(body, 1)
    return body


def test_gradients_are_kept_where_they_lie_if_the_worker_waits_for_its_step() -> None:
    worker, server = sharing()
    worker.send(MARKED, [bytes(SIZE)], 1)
    body = body_of(server, SIZE)
    waits = server.kept_body(body, stays=True)
    goes_on = server.kept_body(body, stays=False)
    worker.send(MARKED, [b"\x07" * SIZE], 1)  # the worker's next gradients
    assert bytes(waits) == b"\x07" * SIZE
    assert bytes(goes_on) == bytes(SIZE)


def test_a_body_that_came_by_the_socket_is_kept_and_not_filled_again() -> None:
    worker, server = pair()
    worker.send(HEADER, [b"abcde"], 1)
    kept = server.kept_body(body_of(server, 5), stays=False)
    worker.send(HEADER, [b"fghij"], 1)
    assert bytes(body_of(server, 5)) == b"fghij"
    assert bytes(kept) == b"abcde"


def test_answers_with_rows_lie_in_memory() -> None:
    worker, server = sharing()
    (rows,) = server.rows([(SIZE // 4, 1)])
    rows[:] = 3.0
    (start,), whole = places_of_rows([rows.size])
    assert worker._memory is not None
    assert (np.frombuffer(worker._memory.read(whole), np.float32, rows.size, start) == 3.0).all()
    assert server.takes_in_memory(SIZE)
    assert not server.takes_in_memory(1)


def test_memory_that_is_not_there_is_refused_with_the_reason() -> None:
    _, server = sharing()
    said = server.accept_memory({"pid": 1, "fd": 0, "word": "0" * 32})
    assert isinstance(said, str)
    assert said
