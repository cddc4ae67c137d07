"""A shard that several server processes can serve, at message level: who serves, what a move and its failure leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.client.fence import Fences
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.standby.carried import Carried
from fleet.ps.standby.movable_shard import MovableShard
from fleet.ps.wire.auth import prove_to_server
from fleet.ps.wire.messages import Header, Op, control_body, decode_control, decode_header, encode_header
from tests.fleet.ps.local_transport import LocalTransport
from tests.fleet.ps.service import SECRET, SPARSE, gradient, make_table, rows, silent, until

PLACES = ("127.0.0.1:9000", "127.0.0.1:9500", "127.0.0.1:9900")


class Trio:
    """One shard and the three processes that can serve it, on one transport."""

    def __init__(self, folder: Path) -> None:
        self.transport = LocalTransport()
        self.folder = folder
        self.lines: list[str] = []
        self.servers: dict[int, Server] = {}
        self.clients: list[Client] = []

    def start(self, process: int) -> Server:
        """Starts a process; the shard is at the first one at first."""
        config = ServerConfig(
            endpoint=PLACES[process],
            places=tuple((place,) for place in PLACES),
            standby=process > 0,
            folder=self.folder / f"{process}",
            level=1,
            secret=SECRET,
            lease_s=1.0,
        )
        server = Server(config, transport=self.transport, notify=self.lines.append, make_table=make_table)
        self.servers[process] = server
        server.start()
        return server

    def kill(self, process: int) -> None:
        """Ends one as kill -9 would."""
        server = self.servers.pop(process)
        server.state.journal.tap = None
        self.transport.forget(PLACES[process])
        server.stop()

    def closed_client(self, **config: Any) -> Client:
        """Returns a client that is not open yet."""
        own = {"fences": Fences(), "deadline_s": 20.0, "retry_interval_s": 0.5, "start_timeout_s": 5.0, **config}
        places = [PLACES[1:]]
        settings = ClientConfig(endpoints=PLACES[:1], places=places, secret=SECRET, heartbeat=False, **own)
        client = Client(settings, transport=self.transport, notify=silent)
        self.clients.append(client)
        return client

    def client(self) -> Client:
        """Returns an open client with table 0."""
        client = self.closed_client()
        client.open()
        client.create_tables({0: SPARSE})
        return client

    def tell(self, process: int, fields: dict[str, Any]) -> dict[str, Any]:
        """Sends what the command sends; raises PSError where it is refused."""
        endpoint = PLACES[process]
        line = prove_to_server(self.transport.connect(endpoint, 5.0), endpoint, SECRET, 5.0)
        body = control_body(fields)
        line.send(encode_header(Header(Op.FOLLOW, body_bytes=len(body))), [body], 5.0)
        header = decode_header(line.receive_header(5.0, 30.0))
        answer = memoryview(bytearray(header.body_bytes))
        line.receive_body(answer, 5.0)
        line.close()
        found = dict(decode_control(answer))
        if header.step == Carried.REFUSED:
            raise PSError(found["error"])
        return found

    def where(self, process: int) -> dict[str, Any]:
        """Returns what a process says about the shard."""
        return self.tell(process, {"where": True})

    def shard(self, process: int) -> MovableShard:
        """Returns what a process has beside a server alone."""
        pair = self.servers[process]._pair
        assert isinstance(pair, MovableShard)
        return pair

    def follow(self, process: int, source: int) -> None:
        """Lets one process follow another, and waits until it has joined."""
        until(lambda: not self.where(process)["leaves"])
        self.tell(process, {"follow": PLACES[source]})
        until(lambda: self.where(process)["joined"])

    def close(self) -> None:
        """Closes everything."""
        for client in self.clients:
            client.close()
        for server in self.servers.values():
            server.stop()


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Trio]:
    """Three processes, of which the first serves."""
    processes = Trio(tmp_path)
    try:
        for process in range(3):
            processes.start(process)
        yield processes
    finally:
        processes.close()


def push(client: Client, times: int = 1) -> None:
    """Pushes -1 to row 1, ``times`` times."""
    for _ in range(times):
        client.wait(client.push({0: gradient([1])}))


def test_a_shard_goes_round(trio: Trio) -> None:
    """From process to process and back; the worker finds it, and every push counts once."""
    client = trio.client()
    for turn, (source, target) in enumerate([(0, 2), (2, 1), (1, 0), (0, 1)], 1):
        push(client, 3)
        trio.follow(target, source)
        push(client, 2)
        trio.tell(source, {"switch": True})
        push(client, 1)
        np.testing.assert_array_equal(rows(client, [1])[0], -6.0 * turn)
        until(lambda source=source: not trio.where(source)["leaves"])
        assert [trio.where(process)["leads"] for process in range(3)] == [process == target for process in range(3)]
    fresh = trio.client()  # knows of no move, and finds the shard
    np.testing.assert_array_equal(rows(fresh, [1])[0], -24.0)


def test_what_rests_keeps_nothing(trio: Trio, tmp_path: Path) -> None:
    push(trio.client())
    trio.follow(1, 0)
    trio.tell(0, {"switch": True})
    until(lambda: trio.shard(0).leader is None)
    assert not list((tmp_path / "0").glob("*snapshot*"))
    assert not (tmp_path / "0" / "journal").exists()


def test_orders_that_cannot_be_obeyed(trio: Trio) -> None:
    client = trio.client()
    with pytest.raises(PSError, match="serves shard 0"):
        trio.tell(0, {"follow": PLACES[1]})
    with pytest.raises(PSError, match=r"cannot come from '10.0.0.1:1': it is one of"):
        trio.tell(1, {"follow": "10.0.0.1:1"})
    with pytest.raises(PSError, match="has no standby that could take over"):
        trio.tell(0, {"switch": True})
    with pytest.raises(PSError, match="does not serve workers"):
        trio.tell(1, {"switch": True})
    push(client)
    np.testing.assert_array_equal(rows(client, [1])[0], -1.0)


def test_a_move_that_is_given_up(trio: Trio) -> None:
    """The process that followed drops what it has, and the one that serves goes on."""
    client = trio.client()
    push(client)
    trio.follow(2, 0)
    trio.tell(2, {"rest": True})
    push(client)
    assert trio.where(2)["follows"] == ""
    np.testing.assert_array_equal(rows(client, [1])[0], -2.0)
    client.flush()  # promised again without the one that followed


def test_nobody_who_follows_is_voted_in(trio: Trio) -> None:
    """A process that follows takes over when it is told to; the one that served is started again instead."""
    client = trio.client()
    push(client)
    client.flush()
    trio.follow(1, 0)
    trio.kill(0)
    impatient = trio.closed_client(fences=client.config.fences, deadline_s=1.0)
    with pytest.raises(PSError, match="did not answer for 1 s; .*(does not serve|nobody listens)"):
        impatient.open()
    assert not trio.where(1)["leads"]
    trio.start(0)
    push(client)
    np.testing.assert_array_equal(rows(client, [1])[0], -2.0)


def test_a_process_that_served_before_rests_after_its_restart(trio: Trio) -> None:
    client = trio.client()
    push(client)
    trio.follow(1, 0)
    trio.tell(0, {"switch": True})
    trio.kill(0)
    trio.start(0)
    assert not trio.where(0)["leads"]
    push(client)
    trio.kill(1)
    trio.start(1)
    assert trio.where(1)["leads"]
    push(client)
    np.testing.assert_array_equal(rows(client, [1])[0], -3.0)


def test_rows_that_are_gone_end_the_workers(trio: Trio, tmp_path: Path) -> None:
    """The process that served last has lost its folder: an old one must not pass for it."""
    client = trio.client()
    push(client)
    trio.follow(1, 0)
    trio.tell(0, {"switch": True})
    push(client)
    client.flush()
    for process in (0, 1, 2):
        trio.kill(process)
    for path in (tmp_path / "1", tmp_path / "0"):
        path.rename(path.with_name(f"{path.name}-gone"))
    for process in (1, 2, 0):
        trio.start(process)
    with pytest.raises(PSError, match="those rows were lost with the folder"):
        push(client)


def test_the_end_reaches_those_who_rest(trio: Trio) -> None:
    client = trio.client()
    push(client)
    client.goodbye()
    server = trio.servers[0]
    assert server.wait(10.0)
    server.end_standby()
    for process in (1, 2):
        assert not trio.servers[process].wait_for_turn()


def test_a_worker_that_knows_of_one_place(trio: Trio) -> None:
    config = ClientConfig(endpoints=PLACES[:1], secret=SECRET, heartbeat=False, start_timeout_s=5.0)
    stranger = Client(config, transport=trio.transport, notify=silent)
    trio.clients.append(stranger)
    with pytest.raises(PSError, match="knows of one endpoint alone.*FLEET_PS_SHARD_ENDPOINTS"):
        stranger.open()


def test_configs_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a shard that can move writes a journal of level 1"):
        ServerConfig(endpoint=PLACES[0], places=((PLACES[0],), (PLACES[1],)))
    with pytest.raises(ConfigError, match="and no standbys"):
        ClientConfig(endpoints=PLACES[:1], places=[PLACES[1:2]], standbys=PLACES[2:])
