"""Servers and clients in this process, for tests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from fleet.ps.client.client import Client, Gradient
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.embeddings.served_embedding import serve_embeddings
from fleet.ps.server.served_table import ServedDense, ServedSparse
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.table.dense_table import DenseTable, DenseTableConfig
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.table_spec import config_of_spec
from fleet.ps.worker.row_replicas import RowReplicas
from tests.fleet.ps.local_transport import LocalTransport
from tests.fleet.ps.reference_store import ReferenceGroup, ReferenceTable

SECRET = b"of the tests"
SGD = Rule("sgd", {"learning_rate": 1.0})
ZEROS = Initializer("constant", 0.0)
SPARSE = SparseTableConfig("ads", 2, SGD, initializer=ZEROS)
DENSE = DenseTableConfig("mlp", 5, SGD)


class _ServedReference(ServedSparse):
    group_of = ReferenceGroup  # type: ignore[assignment]


def make_table(spec: dict[str, Any]) -> ServedSparse | ServedDense:
    """A table of the numpy twins: no compilation."""
    config = config_of_spec(spec)
    if isinstance(config, DenseTableConfig):
        return ServedDense(DenseTable(config))
    return _ServedReference(ReferenceTable(config))


def silent(line: str) -> None:
    """Takes a line and says nothing."""


class Service:
    """Some servers on one transport, and clients of them; everything is closed at the end."""

    def __init__(self, num_servers: int = 1, transport: Any = None, **config: Any) -> None:
        self.transport = transport or LocalTransport()
        self.secret = config.setdefault("secret", SECRET)
        self.configs = [
            ServerConfig(endpoint=self._endpoint(index), index=index, **self._own(config, index))
            for index in range(num_servers)
        ]
        self.num_workers = self.configs[0].num_workers
        self.servers: list[Server] = []
        self.clients: list[Client] = []

    def _endpoint(self, index: int) -> str:
        return f"127.0.0.1:{9000 + index}" if isinstance(self.transport, LocalTransport) else "127.0.0.1:0"

    @staticmethod
    def _own(config: dict[str, Any], index: int) -> dict[str, Any]:
        folder = config.get("folder")
        return config if folder is None else {**config, "folder": folder / f"server-{index}"}

    def start(self, index: int) -> Server:
        """Starts server ``index``, again if it ran before."""
        server = Server(self.configs[index], transport=self.transport, notify=silent, make_table=make_table)
        server.start()
        if index < len(self.servers):
            self.servers[index] = server
        else:
            self.servers.append(server)
        return server

    def client(self, rank: int = 0, *, tables: Any = None, client_id: int | None = None, **config: Any) -> Client:
        """Returns a client of all servers, with tables 0 (sparse) and 1 (dense)."""
        settings = {
            "deadline_s": 10.0,
            "answer_timeout_s": 5.0,
            "heartbeat": False,
            "retry_interval_s": 0.5,
            "start_timeout_s": 5.0,
            "secret": self.secret,
            **config,
        }
        endpoints = [server.endpoint for server in self.servers]
        client = Client(
            ClientConfig(endpoints=endpoints, rank=rank, num_workers=self.num_workers, **settings),
            transport=self.transport,
            notify=silent,
            client_id=client_id,
        )
        self.clients.append(client)
        client.open()
        client.create_tables({0: SPARSE, 1: DENSE} if tables is None else tables)
        return client

    def close(self) -> None:
        """Closes clients, then servers."""
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.stop()


@contextmanager
def serving(num_servers: int = 1, **config: Any) -> Iterator[Service]:
    """Yields a running :class:`Service`."""
    service = Service(num_servers, **config)
    with ExitStack() as stack:
        stack.callback(service.close)
        for index in range(num_servers):
            service.start(index)
        yield service


def ids(*values: int) -> np.ndarray:
    """int64 ids."""
    return np.array(values, np.int64)


def gradient(keys: Sequence[int], value: float = 1.0, dim: int = 2) -> Gradient:
    """The same value for each id."""
    return Gradient(ids(*keys), np.full((len(keys), dim), value, np.float32))


def rows(client: Client, keys: Sequence[int], table: int = 0) -> np.ndarray:
    """The rows of ``keys`` now, whatever the other workers have done."""
    return client.wait(client.pull({table: ids(*keys)}, wait_for_others=False))[table]


def replica(client: Client, num_rows: int = 8, old_s: float = math.inf) -> tuple[RowReplicas, torch.Tensor]:
    """Rows of table 0 in a weight, which it returns too, and which held other values before."""
    weight = torch.full((num_rows, 2), 7.0)
    net = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(weight, freeze=False, sparse=True))
    serve_embeddings(net)
    net[0].read_weight()
    return RowReplicas(client, {0: net[0]}, old_s, lambda: None), weight


def in_threads(*actions: Callable[[], Any], timeout_s: float = 30) -> None:
    """Runs all at once and returns when all have; raises what one raised, and when one takes longer."""
    failures: list[BaseException] = []

    def guarded(action: Callable[[], Any]) -> None:
        try:
            action()
        except BaseException as error:  # reported below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "hangs"
    if failures:
        raise failures[0]


def until(predicate: Callable[[], Any], timeout_s: float = 30) -> None:
    """Returns once ``predicate`` holds."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, "does not happen"
        time.sleep(0.01)
