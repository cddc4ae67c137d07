"""The cap on connections: settable, checked against the limit of open files, and said (issue 10, Medium 10)."""

from __future__ import annotations

import resource

import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.server import server as _server
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import RESERVED, USUAL_CONNECTIONS, ServerConfig, connections_allowed
from fleet.ps.wire.transport import SocketTransport
from tests.fleet.ps.service import SECRET, make_table, serving

NEVER = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(found))

    def setrlimit(kind: int, pair: tuple[int, int]) -> None:
        assert pair[0] <= found[1] or found[1] == NEVER
        found[:] = pair

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    return found


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "allowed", "after"),
    [
        (1024, 4096, None, USUAL_CONNECTIONS, USUAL_CONNECTIONS + RESERVED),
        (1024, NEVER, 20_000, 20_000, 20_000 + RESERVED),
        (NEVER, NEVER, 20_000, 20_000, NEVER),
        (1024, 1024, None, 1024 - RESERVED, 1024),
        (1024, 1024, 800, 800, 1024),
        (256, 256, None, 256 - RESERVED, 256),
    ],
)
def test_what_the_limit_of_open_files_allows(
    soft: int, hard: int, asked: int | None, allowed: int, after: int, limits: list[int]
) -> None:
    limits[:] = [soft, hard]
    assert connections_allowed(asked) == allowed
    assert limits == [after, hard]


@pytest.mark.parametrize(("hard", "asked", "room"), [(4096, 5000, 4096 - RESERVED), (100, None, 0)])
def test_more_than_the_limit_allows_is_refused(hard: int, asked: int | None, room: int, limits: list[int]) -> None:
    limits[:] = [min(hard, 1024), hard]
    with pytest.raises(ConfigError, match=rf"{room} connections at most.*ulimit -n"):
        connections_allowed(asked)


def test_a_lower_cap_of_the_machine_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "connections_allowed", lambda asked: 800)
    lines: list[str] = []
    server = Server(ServerConfig(secret=SECRET), notify=lines.append, make_table=make_table)
    server.start()
    server.stop()
    assert lines[0] == "parameter server 0 takes 800 connections: this process may not open more files (ulimit -n)"


def test_who_finds_the_server_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was closed without a word, on both sides."""
    lines: list[str] = []
    monkeypatch.setattr("tests.fleet.ps.service.silent", lines.append)
    with serving(transport=SocketTransport(), max_connections=2, num_workers=4) as service:
        for rank in range(2):
            service.client(rank)
        for rank in (2, 3):
            with pytest.raises(PSError, match="reached its limit of connections. Raise its FLEET_PS_MAX_CONNECTIONS"):
                service.client(rank, deadline_s=0.5)
        (line,) = (line for line in lines if "turned away" in line)
        assert "2 connections are open, which is the limit; raise FLEET_PS_MAX_CONNECTIONS" in line
        service.clients[0].close()
        service.client(3, deadline_s=10.0)


def test_wrong_caps_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_connections is 0; it must be 1 or more"):
        ServerConfig(max_connections=0)
