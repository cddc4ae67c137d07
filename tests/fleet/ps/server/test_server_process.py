"""run_server: where it listens, and when it ends."""

from __future__ import annotations

import threading

import pytest

from fleet.errors import ConfigError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_process import run_server
from tests.fleet.ps.local_transport import LocalTransport
from tests.fleet.ps.service import SECRET, silent


def test_run_server_says_where_it_listens_and_ends_with_the_workers(tmp_path):
    """001-04, 001-07."""
    transport, lines = LocalTransport(), []
    config = ServerConfig(endpoint="127.0.0.1:7000", num_workers=2, folder=tmp_path, secret=SECRET)
    settings = {"transport": transport, "notify": lines.append}
    thread = threading.Thread(target=run_server, args=(config,), kwargs=settings)
    thread.start()
    clients = [
        Client(
            ClientConfig(endpoints=["127.0.0.1:7000"], rank=rank, num_workers=2, secret=SECRET),
            transport=transport,
            notify=silent,
        )
        for rank in range(2)
    ]
    for client in clients:
        client.open()
    clients[0].snapshot()
    assert list(tmp_path.glob("snapshot-*"))
    for client in clients:
        client.goodbye()
    thread.join(10)
    assert not thread.is_alive()
    assert lines == ["parameter server 0 is listening on 127.0.0.1:7000"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("endpoint", ["0.0.0.0:0", "127.0.0.1:0"])
def test_no_secret_is_refused_before_anything_listens(endpoint):
    """Reliability 5.2; issue 10, High 3."""
    with pytest.raises(ConfigError, match="secret"):
        run_server(ServerConfig(endpoint=endpoint), notify=silent)
