"""``python -m fleet.ps switch``: what it says where it cannot switch; the switch itself is in test_standby_faults."""

from __future__ import annotations

import pytest

from fleet.errors import PSError
from fleet.ps.__main__ import main
from fleet.ps_job import server_line
from tests.fleet.ps.service import SECRET


def test_a_server_without_a_standby(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fleet.ps.server.server import Server
    from fleet.ps.server.server_config import ServerConfig

    server = Server(ServerConfig(secret=SECRET), notify=lambda line: None)
    server.start()
    try:
        monkeypatch.setenv("FLEET_JOB_SECRET", SECRET.decode())
        assert main(["switch", server.endpoint]) == 2
        assert "has no standby" in capsys.readouterr().err
        monkeypatch.setenv("FLEET_JOB_SECRET", "f" * 64)
        assert main(["switch", server.endpoint]) == 2
        assert "another job secret" in capsys.readouterr().err
    finally:
        server.stop()
    assert main(["switch", server.endpoint]) == 2
    assert "fleet.ps switch: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"]])
def test_calls(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["switch", *arguments]) == (0 if arguments == ["--help"] else 2)
    assert "usage: python -m fleet.ps switch" in "".join(capsys.readouterr())


def test_kernels_are_loaded_before_the_server_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes seconds in a new process, and a server hangs up on who is silent after the proof."""
    done: list[str] = []

    def connect(self: object, endpoint: str, timeout_s: float) -> None:
        done.append("connect")
        raise PSError("nobody is there")

    monkeypatch.setenv("FLEET_JOB_SECRET", SECRET.decode())
    monkeypatch.setattr(server_line, "load_kernels", done.append)
    monkeypatch.setattr(server_line.SocketTransport, "connect", connect)
    assert main(["switch", "127.0.0.1:1"]) == 2
    assert done == ["seal", "connect"]
