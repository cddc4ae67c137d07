"""How a worker comes to a connection: the endpoints in turn, and what ends all attempts."""

from __future__ import annotations

import pytest

from fleet.errors import PSError
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.client.connector import Connector, HelloRefused
from fleet.ps.wire.transport import ConnectionLost
from tests.fleet.ps.local_transport import LocalTransport
from tests.fleet.ps.service import SECRET, serving, silent


def test_the_endpoints_of_a_server_take_turns() -> None:
    config = ClientConfig(endpoints=["a:1"], standbys=["b:1"], secret=SECRET)
    connector = Connector(config, 0, 7, LocalTransport(), silent)
    tried = []
    for _ in range(3):
        tried.append(connector.endpoint)
        with pytest.raises(ConnectionLost, match=connector.endpoint):
            connector.connect(is_again=False)
    assert tried == ["a:1", "b:1", "a:1"]
    assert connector.name == "parameter server 0 (b:1)"


def test_a_server_of_another_job_refuses_for_good() -> None:
    with serving(job="ours") as service:
        config = ClientConfig(endpoints=[service.servers[0].endpoint], secret=SECRET, job="theirs")
        connector = Connector(config, 0, 7, service.transport, silent)
        with pytest.raises(HelloRefused, match="belongs to job 'theirs'"):
            connector.connect(is_again=False)
        with pytest.raises(PSError, match="belongs to job 'theirs'"):
            service.client(job="theirs", deadline_s=60.0)
