"""A server whose publisher a test drives by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fleet.ps.client.client import Client, Gradient
from fleet.ps.publishing.publication import Publication
from fleet.ps.publishing.publisher import Publisher
from fleet.ps.publishing.row_cut import published_tables
from fleet.ps.server.server import Server
from tests.fleet.ps.service import Service, ids

Rows = dict[str, dict[int, bytes]]


class PublishingService(Service):
    """Servers with publishers that publish when they are told."""

    def __init__(self, sink: Any, folder: Path, num_servers: int = 1, **config: Any) -> None:
        self.sink = sink
        self.options: dict[str, Any] = {}
        self.publishers: list[Publisher] = []
        self.lines: list[str] = []
        super().__init__(num_servers, folder=folder, **config)
        for index in range(num_servers):
            self.start(index)

    def start(self, index: int) -> Server:
        from fleet.ps.server import server as module

        plain = module.Server.start

        def start_publishing(server: Server, *arguments: Any) -> None:
            server.state.job.published.on = True
            plain(server, *arguments)

        module.Server.start = start_publishing
        try:
            server = super().start(index)
        finally:
            module.Server.start = plain
        publication = Publication(sink=self.sink, every_s=3600)
        publisher = Publisher(server.state, publication, server=index, notify=self.lines.append, **self.options)
        publisher.open()
        server._publisher = publisher  # for requests that need it; its thread does not run
        for before in self.publishers[index : index + 1]:
            before.stop()
        self.publishers[index : index + 1] = [publisher]
        return server

    def restart(self, index: int = 0) -> None:
        """Ends a server, which keeps no more than a kill would leave, and starts it with its folder."""
        self.servers[index].stop()
        self.start(index)

    def close(self) -> None:
        super().close()
        for publisher in self.publishers:
            publisher.stop()

    def publish(self) -> None:
        """Publishes until nothing is left, on every server."""
        for publisher in self.publishers:
            while not publisher.publish_once():
                pass

    def served(self) -> Rows:
        """Returns every row of every server now."""
        found: Rows = {}
        for server in self.servers:
            for served in published_tables(server.state, None).values():
                keys = served.table.keys()
                rows = served.table.pull(keys, create=False)
                table = found.setdefault(served.table.config.name, {})
                table.update({key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)})
        return found

    def push(self, client: Client, *keys: int, value: float = 1.0, step: bool = True) -> None:
        """Pushes one gradient for ``keys`` and waits until it is applied."""
        rows = np.full((len(keys), 2), value, np.float32)
        client.wait(client.push({0: Gradient(ids(*keys), rows)}))


@contextmanager
def publishing(sink: Any, folder: Path, num_servers: int = 1, **config: Any) -> Iterator[PublishingService]:
    """Yields servers that publish to ``sink`` when they are told; they are closed at the end."""
    service = PublishingService(sink, folder, num_servers, **config)
    try:
        yield service
    finally:
        service.close()
