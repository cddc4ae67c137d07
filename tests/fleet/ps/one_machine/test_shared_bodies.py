"""Bodies in shared memory: the same results as by the socket, nothing left behind, and the socket where it must be."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.one_machine.shared_bodies import LEAST_BYTES, ROOM_BYTES, NotShared, SharedBodies
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.wire.messages import HEADER_BYTES, MessageError, MessageFlag
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import SocketTransport
from tests.fleet.ps.local_transport import Fault, LocalTransport
from tests.fleet.ps.service import SGD, SPARSE, Service, gradient, ids, in_threads, rows, serving, until
from tests.fleet.ps.test_transport_contract import tls_contexts

ROOT = Path(__file__).parents[4]
SIZE = 4096  # of the dense table, in elements
TABLES: dict[int, SparseTableConfig | DenseTableConfig] = {0: SPARSE, 1: DenseTableConfig("mlp", SIZE, SGD)}
MARKED = bytes([0] * 6 + [MessageFlag.IN_MEMORY] + [0] * (HEADER_BYTES - 7))


def mapped() -> int:
    """How many of these memories this process has mapped or open."""
    gc.collect()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:fleet-ps-" in line for line in (*links, *maps))


def shares(client: Client) -> bool:
    connection = client._links[0]._connection
    return connection is not None and connection.takes_in_memory(LEAST_BYTES + 1)


def pair() -> tuple[Sealed, Sealed]:
    network = LocalTransport()
    listener = network.bind("x")
    near = network.connect("x", 1.0)
    worker, server = Sealed(near, b"k", is_server=False), Sealed(listener.accept(), b"k", is_server=True)
    assert server.accept_memory(worker.offer_memory()) is True
    worker.end_offer(accepted=True)
    return worker, server


# -- the memory ----------------------------------------------------------------------------------------------------


def test_what_one_end_writes_the_other_reads_in_both_directions() -> None:
    before = mapped()
    worker, place = SharedBodies.make()
    server = SharedBodies.open(place)
    worker.write([b"ab", memoryview(b"cde")])
    server.write([b"fgh"])
    assert bytes(server.read(5)) == b"abcde"
    assert bytes(worker.read(3)) == b"fgh"
    rows = np.frombuffer(server.place(LEAST_BYTES + 8), np.uint8, LEAST_BYTES, 8)
    rows[:] = 7
    server.write([bytes(8), memoryview(rows)])  # type: ignore[arg-type]
    assert bytes(worker.read(LEAST_BYTES + 8)) == bytes(8) + bytes([7]) * LEAST_BYTES
    with pytest.raises(NotShared, match="room"):
        server.read(ROOM_BYTES + 1)
    with pytest.raises(OSError, match="permitted"):
        os.ftruncate(place["fd"], 4096)  # it would end whoever reads behind the end
    assert os.fstat(place["fd"]).st_mode & 0o777 == 0o600
    worker.seal_off()
    with pytest.raises(NotShared):
        SharedBodies.open(place)
    del worker, server, rows
    assert mapped() == before


def test_a_server_opens_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr("fleet.ps.one_machine.shared_bodies.MOST_OPENED", 2)
    made = [SharedBodies.make() for _ in range(3)]
    opened = [SharedBodies.open(place) for _, place in made[:2]]
    with pytest.raises(NotShared, match="2 workers already"):
        SharedBodies.open(made[2][1])
    del opened
    gc.collect()
    assert SharedBodies.open(made[2][1])


def test_another_process_opens_it_and_a_killed_one_leaves_nothing() -> None:
    memory, place = SharedBodies.make()
    memory.write([b"from the worker"])
    code = (
        "import os, signal, sys; from fleet.ps.one_machine.shared_bodies import SharedBodies\n"
        f"m = SharedBodies.open({place!r}); m.write([bytes(m.read(15)).upper()]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert bytes(memory.read(15)) == b"FROM THE WORKER"  # the other end is gone, this one goes on
    assert not list(Path("/dev/shm").glob("*fleet-ps*"))


def refusals(monkeypatch: pytest.MonkeyPatch, what: str) -> dict[str, Any]:
    """Returns a place that cannot be opened: of another machine, user or kind."""
    memory, place = SharedBodies.make()
    monkeypatch.setattr("tests.fleet.ps.one_machine.test_shared_bodies.KEPT", memory)
    other = os.memfd_create("other")
    changes: dict[str, dict[str, Any]] = {
        "other machine": {"word": "0" * 32},
        "no such process": {"pid": 2**22 + 7},
        "other file": {"fd": other},
        "malformed word": {"word": "../../../../../etc/passwd"},
        "malformed number": {"fd": "3"},
    }
    if what == "other user":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if what == "not allowed":

        def refuse(*_: Any) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    return {**place, **changes.get(what, {})}


KEPT: Any = None
REFUSALS = ["other machine", "no such process", "other file", "malformed word", "malformed number", "other user",
            "not allowed"]  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_only_what_this_user_has_made_here_is_opened(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = refusals(monkeypatch, what)
    with pytest.raises(NotShared):
        SharedBodies.open(place)


# -- messages ------------------------------------------------------------------------------------------------------


def test_a_message_says_that_its_body_is_in_memory() -> None:
    worker, server = pair()
    worker.send(MARKED, [b"x" * 5000], 1)
    assert server.receive_header(1, 1) == MARKED
    body = server.body_in_memory(5000)
    assert body is not None
    server.receive_body(body, 1)
    assert body == b"x" * 5000
    worker.send(bytes(HEADER_BYTES), [b"y" * 5000], 1)  # by the stream, while the first is still read
    server.receive_header(1, 1)
    assert server.body_in_memory(5000) is None
    server.receive_body(memoryview(bytearray(5000)), 1)
    assert body == b"x" * 5000


def test_a_mark_that_was_set_on_the_way_is_found() -> None:
    worker, server = pair()
    real = worker._connection.send
    worker._connection.send = lambda buffers, timeout_s=None: real([MARKED, *buffers[1:2]], timeout_s)  # type: ignore[method-assign]
    worker.send(bytes(HEADER_BYTES), [b"y" * 100], 1)
    server.receive_header(1, 1)
    with pytest.raises(MessageError, match="seal"):
        server.receive_body(memoryview(bytearray(100)), 1)


def test_a_mark_without_memory_is_refused() -> None:
    worker, server = pair()
    worker.send(MARKED, [b"x" * 5000], 1)
    server._memory = None
    server.receive_header(1, 1)
    with pytest.raises(MessageError, match="do not share"):
        server.body_in_memory(5000)


# -- a job ---------------------------------------------------------------------------------------------------------


def trained(shares_memory: bool, mode: str, with_values: bool, **config: Any) -> list[bytes]:
    """Two workers take five steps of large bodies; returns what they had in the end.

    Worker 0 is two steps ahead where nothing waits for the values, so what it has pushed is held meanwhile.
    """
    made = np.random.default_rng(0)
    gradients = made.standard_normal((2, 5, SIZE)).astype(np.float32)
    values = {0: np.zeros(SIZE, np.float32), 1: np.zeros(SIZE, np.float32)}
    with serving(transport=SocketTransport(), num_workers=2, mode=mode, **config) as service:
        clients = [service.client(rank, tables=TABLES, shares_memory=shares_memory) for rank in range(2)]
        assert [shares(client) for client in clients] == [shares_memory] * 2

        def take(rank: int) -> Any:
            def keep(part: np.ndarray, start: int = 0) -> None:
                values[rank][start : start + len(part)] = part

            return {1: keep} if with_values else None

        def work(rank: int, steps: range) -> None:
            for step in steps:
                keys = range(step, 1000 + step)
                pushed = {0: gradient(keys, float(gradients[rank, step, 0])), 1: gradients[rank, step].copy()}
                clients[rank].wait(clients[rank].push(pushed, out=take(rank)))
                pushed[1][:] = np.nan  # the memory is the worker's again

        ahead = range(2) if mode == "sync" and not with_values else range(0)
        work(0, ahead)
        in_threads(lambda: work(0, range(len(ahead), 5)), lambda: work(1, range(5)))
        keys = ids(*range(1005))
        found = [client.wait(client.pull({0: keys, 1: None})) for client in clients]
        return [array.tobytes() for each in found for array in each.values()] + [v.tobytes() for v in values.values()]


@pytest.mark.parametrize(("mode", "with_values"), [("sync", True), ("sync", False), ("async", False)])
def test_the_results_are_those_of_the_socket(mode: str, with_values: bool) -> None:
    before = mapped()
    found, expected = (trained(on, mode, with_values) for on in (True, False))
    if mode == "sync":
        assert found == expected  # bit for bit; async applies in the order of arrival
    assert np.allclose(np.frombuffer(found[1], np.float32), np.frombuffer(expected[1], np.float32), atol=1e-5)
    assert mapped() == before


def test_a_cut_line_gets_new_memory_and_each_push_counts_once() -> None:
    network = LocalTransport()
    with serving(transport=network) as service:
        client = service.client(tables=TABLES, answer_timeout_s=0.5)
        for kind in ("cut", "cut_after", "cut"):
            network.faults.append(Fault("server", network.sent["server"] + 1, kind))  # type: ignore[arg-type]
            client.wait(client.push({0: gradient(range(1000)), 1: np.ones(SIZE, np.float32)}))
            assert shares(client)
        assert (rows(client, range(1000)) == -3).all()
        assert (client.wait(client.pull({1: None}))[1] == -3).all()


@pytest.mark.parametrize("what", ["no memfd", "no descriptors", "other machine", "not allowed"])
def test_where_it_cannot_be_the_socket_takes_all_and_one_line_says_so(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    lines: list[str] = []
    with serving() as service:
        if what == "no memfd":
            monkeypatch.delattr(os, "memfd_create")
        elif what == "no descriptors":
            monkeypatch.setattr(os, "memfd_create", refuse)
        elif what == "other machine":
            monkeypatch.setattr(os, "readlink", lambda path: "/usr/bin/true")
        else:
            monkeypatch.setattr(SharedBodies, "open", classmethod(refuse_to_open))
        client = Client(settings(service), transport=service.transport, notify=lines.append)
        service.clients.append(client)
        client.open()
        client.create_tables(TABLES)
        client._links[0]._hang_up()  # the next connection does not say it again
        client.wait(client.push({0: gradient(range(1000)), 1: np.ones(SIZE, np.float32)}))
        assert not shares(client)
        assert (rows(client, range(1000)) == -1).all()
    assert len([line for line in lines if "shares no memory" in line]) == 1, lines


def refuse_to_open(*_: Any) -> SharedBodies:
    raise NotShared("the server cannot open the worker's memory: Permission denied.")


def settings(service: Service) -> ClientConfig:
    return ClientConfig(
        endpoints=[service.servers[0].endpoint], secret=service.secret, heartbeat=False, start_timeout_s=5.0
    )


def test_nothing_is_offered_to_another_machine_by_tls_or_where_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(SharedBodies, "make", classmethod(lambda cls: made.append(1)))
    tls = SocketTransport(*tls_contexts(tmp_path))
    for transport, is_on, is_here in (
        (SocketTransport(), False, True),
        (SocketTransport(), True, False),
        (tls, True, True),
    ):
        with monkeypatch.context() as patch:
            if not is_here:
                patch.setattr("fleet.ps.wire.transport._is_here", lambda sock: False)
            with serving(transport=transport) as service:
                client = service.client(tables=TABLES, shares_memory=is_on)
                client.wait(client.push({1: np.ones(SIZE, np.float32)}))
                assert (client.wait(client.pull({1: None}))[1] == -1).all()
    assert not made


def test_a_body_without_room_goes_by_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.ps.wire.sealed.ROOM_BYTES", 4 * SIZE)  # the part's head does not fit
    with serving() as service:
        client = service.client(tables=TABLES)
        assert shares(client)
        client.wait(client.push({1: np.ones(SIZE, np.float32)}))
        assert client._links[0]._in_memory is None
        assert (client.wait(client.pull({1: None}))[1] == -1).all()


def test_a_second_large_request_does_not_overwrite_the_first() -> None:
    """Two requests may be in progress; the server has one of them in memory, and the other comes as bytes."""
    with serving() as service:
        client = service.client(tables=TABLES)
        tickets = [client.push({0: gradient(range(n, n + 1000), float(n + 1))}) for n in range(3)]
        for ticket in tickets:
            client.wait(ticket)
        expected = [-sum(n + 1 for n in range(3) if n <= key < n + 1000) for key in range(1002)]
        assert rows(client, range(1002))[:, 0].tolist() == expected


def test_after_the_end_no_process_has_it() -> None:
    before = mapped()
    with serving(transport=SocketTransport()) as service:
        client = service.client(tables=TABLES)
        client.wait(client.push({1: np.ones(SIZE, np.float32)}))
        assert mapped() > before
    del client, service
    until(lambda: mapped() == before, 10)


# -- gradients that are written where the body lies ------------------------------------------------------------------

TWO = {**TABLES, 2: DenseTableConfig("head", 1501, SGD)}


def test_gradients_of_a_push_are_written_where_its_body_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    with serving(transport=SocketTransport(), mode="sync") as service:
        client = service.client(tables=TWO)
        client.wait(client.set_dense({key: np.zeros(TWO[key].size, np.float32) for key in (1, 2)}))  # type: ignore[union-attr]
        memory = client._links[0]._connection._memory  # type: ignore[union-attr]
        assert memory is not None
        write = SharedBodies.write

        def counting(self: SharedBodies, buffers: Any) -> None:
            before = bytes(self._own[: sum(map(len, buffers))])
            write(self, buffers)
            after = bytes(self._own[: len(before)])
            copied.append(sum(a != b for a, b in zip(before, after, strict=True)))

        monkeypatch.setattr(SharedBodies, "write", counting)
        for step in (1, 2):
            with client.places([1, 2]) as places:
                for key, place in places.items():
                    place[:] = np.arange(len(place)) + key
                ticket = client.push({**places, 0: gradient([step])})
            client.wait(ticket)
            assert copied.pop(0) < 200  # the heads of the parts, and the row
            copied.clear()
        monkeypatch.undo()
        found = client.wait(client.pull({0: ids(1, 2), 1: None, 2: None}))
        assert found[0][:, 0].tolist() == [-1, -1]
        for key in (1, 2):
            np.testing.assert_array_equal(found[key], -2 * (np.arange(len(found[key]), dtype=np.float32) + key))


def test_nobody_else_writes_there_before_the_push(tmp_path: Path) -> None:
    """A thread that evaluates while another one trains: its question would lie at the same place."""
    asked = threading.Event()
    with serving(transport=SocketTransport(), mode="sync") as service:
        client = service.client(tables=TABLES)
        client.wait(client.set_dense({1: np.zeros(SIZE, np.float32)}))

        def evaluate() -> None:
            asked.set()
            client.wait(client.pull({0: np.arange(5000)}, wait_for_others=False))

        with client.places([1]) as places:
            places[1][:] = 1.0
            thread = threading.Thread(target=evaluate)
            thread.start()
            asked.wait()
            time.sleep(0.05)
            ticket = client.push(places)
        client.wait(ticket)
        thread.join()
        np.testing.assert_array_equal(client.wait(client.pull({1: None}))[1], np.full(SIZE, -1, np.float32))


def test_there_is_no_such_place_where_a_body_is_not_sent_from_it() -> None:
    with serving(transport=SocketTransport(), num_servers=2) as two, two.client(tables=TABLES).places([1]) as places:
        assert places == {}
    with serving(transport=SocketTransport(), num_workers=2) as service:
        for config in ({"shares_memory": False}, {"wire": "bfloat16"}):
            with service.client(tables=TABLES, **config).places([1]) as places:  # type: ignore[arg-type]
                assert places == {}
        client = service.client(1, tables=TABLES)
        with client.places([1]) as places:
            assert list(places) == [1]
            waiting = client.push(places)
        with client.places([1]) as places:
            assert places == {}  # what is not answered may be sent again from there
        client.wait(waiting)
