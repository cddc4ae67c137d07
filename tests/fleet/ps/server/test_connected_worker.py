"""What a server keeps of one connection, and where the answers on it lie."""

from __future__ import annotations

import numpy as np

from fleet.ps.server.connected_worker import Answer, ConnectedWorker
from fleet.ps.wire.messages import Header, MessageFlag, Op, Status, places_of_rows
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.shared_bodies import LEAST_BYTES, SharedBodies
from tests.fleet.ps.local_transport import LocalTransport

SIZE = LEAST_BYTES + 8


def connected() -> tuple[ConnectedWorker, SharedBodies]:
    network = LocalTransport()
    network.bind("x")
    server = Sealed(network.connect("x", 1.0), b"k", is_server=True)
    memory, place = SharedBodies.make()
    peer = ConnectedWorker(server)
    assert peer.share(place) is True
    return peer, memory


def test_gradients_are_kept_where_they_lie_if_the_worker_waits_for_its_step() -> None:
    peer, memory = connected()
    memory.write([bytes(SIZE)])
    body = peer.connection._memory.read(SIZE)  # type: ignore[union-attr]
    peer.in_memory = True
    waits = peer.kept_body(body, MessageFlag.VALUES)
    goes_on = peer.kept_body(body, MessageFlag.NONE)
    memory.write([b"\x07" * SIZE])  # the worker's next gradients
    assert bytes(waits) == b"\x07" * SIZE
    assert bytes(goes_on) == bytes(SIZE)


def test_a_body_that_came_by_the_socket_is_kept_and_not_filled_again() -> None:
    peer, _ = connected()
    body = peer.body(5)
    body[:] = b"abcde"
    kept = peer.kept_body(body, MessageFlag.NONE)
    peer.body(5)[:] = b"fghij"
    assert bytes(kept) == b"abcde"


def test_answers_with_rows_lie_in_memory() -> None:
    peer, memory = connected()
    (rows,) = peer.rows([(SIZE // 4, 1)])
    rows[:] = 3.0
    (start,), whole = places_of_rows([rows.size])
    assert (np.frombuffer(memory.read(whole), np.float32, rows.size, start) == 3.0).all()
    header = Header(Op.PULL, MessageFlag.NONE, 1, 0, 0, 1, Status.OK, 0, 1)
    assert peer.place_of(Answer(buffers=[bytes(SIZE)]), header) == MessageFlag.IN_MEMORY
    assert peer.place_of(Answer(buffers=[b"x"]), header) == MessageFlag.NONE


def test_memory_that_is_not_there_is_refused_with_the_reason() -> None:
    peer, _ = connected()
    said = peer.share({"pid": 1, "fd": 0, "word": "0" * 32})
    assert isinstance(said, str)
    assert said
