"""A server and its standby, at message level: what is promised, who serves, what a failover loses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fleet.ps.client.client import Client
from fleet.ps.client.fence import Fences
from fleet.ps.client.link import ClientConfig
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from tests.fleet.ps.local_transport import LocalTransport
from tests.fleet.ps.service import DENSE, SECRET, SPARSE, gradient, make_table, rows, silent, until

FIRST, SECOND = "127.0.0.1:9000", "127.0.0.1:9500"


class Duo:
    """One server and its standby on one transport."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.transport = LocalTransport()
        self.lines: list[str] = []
        common: dict[str, Any] = {"secret": SECRET, "level": 1, **config}
        self.configs = [
            ServerConfig(endpoint=FIRST, peer=SECOND, folder=folder / "first", **common),
            ServerConfig(endpoint=SECOND, peer=FIRST, folder=folder / "second", standby=True, **common),
        ]
        self.servers: list[Server | None] = [None, None]
        self.clients: list[Client] = []

    def start(self, place: int) -> Server:
        """Starts the server (0) or its standby (1)."""
        server = Server(self.configs[place], transport=self.transport, notify=self.lines.append, make_table=make_table)
        self.servers[place] = server
        server.start()
        return server

    def kill(self, place: int) -> None:
        """Ends one as kill -9 would: it says nothing to anybody, and its files stay as they are."""
        server = self.servers[place]
        assert server is not None
        self.servers[place] = None
        server.state.journal.tap = None
        self.transport.forget(self.configs[place].endpoint)
        server.stop()

    def client(self, rank: int = 0, **config: Any) -> Client:
        """Returns an open client with tables 0 and 1."""
        settings = {
            "deadline_s": 20.0,
            "answer_timeout_s": 10.0,
            "heartbeat": False,
            "retry_interval_s": 0.5,
            "start_timeout_s": 5.0,
            "secret": SECRET,
            "num_workers": self.configs[0].num_workers,
            **config,
        }
        client = Client(
            ClientConfig(endpoints=[FIRST], standbys=[SECOND], rank=rank, fences=Fences(), **settings),
            transport=self.transport,
            notify=silent,
        )
        self.clients.append(client)
        client.open()
        client.create_tables({0: SPARSE, 1: DENSE})
        return client

    def joined(self) -> bool:
        """Whether the standby can be promoted."""
        server = self.servers[1]
        assert server is not None
        return server._pair is not None and server._pair.follower is not None and server._pair.follower.joined

    def close(self) -> None:
        """Closes everything."""
        for client in self.clients:
            client.close()
        for server in self.servers:
            if server is not None:
                server.stop()


@contextmanager
def duo(folder: Path, **config: Any) -> Iterator[Duo]:
    """Yields a server whose standby has joined."""
    pair = Duo(folder, **config)
    try:
        pair.start(1)
        pair.start(0)
        until(pair.joined)
        yield pair
    finally:
        pair.close()


def test_failover(tmp_path: Path) -> None:
    """A standby takes over what its server promised, and gets what it had not promised from the worker."""
    with duo(tmp_path) as pair:
        client = pair.client()
        for _ in range(5):
            client.wait(client.push({0: gradient([1, 2])}))
        client.flush()
        before = rows(client, [1, 2])
        pair.kill(0)
        began = time.monotonic()
        client.wait(client.push({0: gradient([2, 3])}))
        took = time.monotonic() - began
        after = rows(client, [1, 2, 3])
        np.testing.assert_array_equal(after, np.stack([before[0], before[1] - 1, -np.ones(2, np.float32)]))
        assert took < 3, pair.lines
        assert client.welcomes()[0]["level"] == 3
