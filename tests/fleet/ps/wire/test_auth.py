"""What a stranger gets who passes on the handshake of a worker and a server (issue 10, High 1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fleet.errors import PSError
from fleet.ps.wire.messages import Header, Op, control_body, encode_header
from fleet.ps.wire.transport import SocketListener, SocketTransport
from tests.fleet.ps.service import gradient, rows, serving, until
from tests.helpers.relay import Relay


class OnThePath(SocketTransport):
    """Servers that are reached through a relay: at their address there, as when somebody has taken over the network."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def bind(self, endpoint: str) -> SocketListener:
        """Listens behind the relay."""
        listener = super().bind(endpoint)
        self._relay.target, listener.endpoint = listener.endpoint, self._relay.endpoint
        return listener


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.close()


HELLO = control_body({"rank": 1, "channel": 0, "num_workers": 2})
WORDS = {
    "stop": [encode_header(Header(Op.STOP, client_id=5))],
    "stop of a newcomer": [
        encode_header(Header(Op.HELLO, client_id=5, body_bytes=len(HELLO))) + HELLO,
        encode_header(Header(Op.STOP, client_id=5)),
    ],
    "stop with a seal": [encode_header(Header(Op.STOP, client_id=5)), bytes(32)],
}


@pytest.mark.parametrize("words", WORDS)
def test_a_relay_of_the_handshake_is_no_peer(words: str, relay: Relay) -> None:
    """It had the server stop, and could have pushed what it liked."""
    with serving(transport=OnThePath(relay), num_workers=2, transfer_timeout_s=0.5) as service:
        client = service.client(0, deadline_s=20.0)
        client.wait(client.push({0: gradient([1])}))
        proven = relay.targets[-1]
        proven.sendall(b"".join(WORDS[words]))
        until(lambda: not service.servers[0]._open, 15)
        assert not service.servers[0]._stopping.is_set()
        client.wait(client.push({0: gradient([1])}))
        assert len(relay.targets) > 1, "the worker came back on a connection of its own"
        assert rows(client, [1]).tolist() == [[-2, -2]]


@pytest.mark.parametrize("what", ["repeats", "changes", "answers"])
def test_what_a_relay_repeats_or_changes_is_not_taken(what: str, relay: Relay) -> None:
    """The worker finds its connection cut and sends again; each push counts once."""
    done: list[bytes] = []

    def once(data: bytes) -> bytes:
        if len(data) < 4000 or len(done) > 1:
            return data
        done.append(data)
        return data + data if what == "repeats" else data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]

    with serving(transport=OnThePath(relay), num_workers=1) as service:
        client = service.client(0, deadline_s=20.0, shares_memory=False)  # what is in memory no relay sees
        setattr(relay, "down" if what == "answers" else "up", once)
        for _ in range(3):
            client.wait(client.push({0: gradient(range(1000))}))
            assert (rows(client, range(1000)) == rows(client, [0])[0]).all()
        assert len(done) == 2
        assert (rows(client, range(1000)) == -3).all()


@pytest.mark.parametrize("renames", [False, True])
def test_a_squatter_that_passes_on_to_a_server_is_found_out(renames: bool) -> None:
    """It sits at an address that workers know, and the server is elsewhere: the proofs hold the address."""
    with serving(transport=SocketTransport()) as service:
        real = service.servers[0].endpoint.encode()
        squatter = Relay(service.servers[0].endpoint)
        squatter.down = lambda data: data.replace(real, squatter.endpoint.encode()) if renames else data
        fake: Any = type("Fake", (), {"endpoint": squatter.endpoint})
        service.servers.append(fake)
        service.servers.reverse()
        try:
            with pytest.raises(PSError, match="another job secret" if renames else "calls itself '127.0.0.1:"):
                service.client(0)
        finally:
            service.servers.remove(fake)
            squatter.close()
        assert service.servers[0].state.job.workers[0].state == "expected", "nobody was let in"
