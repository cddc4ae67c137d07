"""TLS between workers and parameter servers, by FLEET_PS_CERT, FLEET_PS_KEY and FLEET_PS_CA (decision 4)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError, PSError
from fleet.facade import Fleet
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.wire.transport import SocketTransport, TlsConnection
from fleet.ps_job.server_settings import read_server_tls, read_worker_tls
from tests.fleet.ps.service import SECRET, serving, silent
from tests.fleet.ps_job.test_server_job import make_adagrad, served, strategy
from tests.helpers.certificates import make_certificate
from tests.helpers.served import batches, run_job, train

FILES = {"FLEET_PS_CERT": "cert.pem", "FLEET_PS_KEY": "key.pem", "FLEET_PS_CA": "cert.pem"}


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    make_certificate(tmp_path)
    return {name: str(tmp_path / file) for name, file in FILES.items()}


@pytest.mark.slow
def test_a_job_trains_over_tls_as_without(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 4: the same losses, and every connection of the worker is encrypted."""
    made = strategy("sync")

    def work(own: Fleet, rank: int) -> tuple[list[float], set[type]]:
        model, optimizer = served(own, made, make_adagrad)
        losses = train(model, optimizer, batches(4, rank, 2))
        job: Any = own.session.server_job
        kinds = {type(link._connection._connection) for link in job.trainer.connection.client._links}
        own.stop_worker()
        return losses, kinds

    plain = run_job(work, num_servers=2, num_workers=2, strategy=made)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    encrypted = run_job(work, num_servers=2, num_workers=2, strategy=made)
    assert [losses for losses, _ in encrypted] == [losses for losses, _ in plain]
    assert {kind for _, kinds in encrypted for kind in kinds} == {TlsConnection}
    assert TlsConnection not in {kind for _, kinds in plain for kind in kinds}


def connect(endpoint: str, tls: Any, **settings: Any) -> None:
    config = ClientConfig(endpoints=[endpoint], rank=0, num_workers=1, heartbeat=False, secret=SECRET, **settings)
    client = Client(config, transport=SocketTransport(client_tls=tls), notify=silent)
    try:
        client.open()
    finally:
        client.close()


@pytest.mark.parametrize("fault", ["authority", "name", "plain server", "plain worker"])
def test_who_does_not_fit_is_told_at_once(fault: str, variables: dict[str, str], tmp_path: Path) -> None:
    """Decision 4: another authority, another name, or TLS on one side only; the reason comes before any deadline."""
    other = tmp_path / "other"
    other.mkdir()
    if fault == "name":
        make_certificate(tmp_path, "127.0.0.9")
    elif fault == "authority":
        make_certificate(other)
    server = None if fault == "plain server" else read_server_tls(Environment(variables))
    authority = str((other if fault == "authority" else tmp_path) / "cert.pem")
    worker = None if fault == "plain worker" else read_worker_tls(Environment({"FLEET_PS_CA": authority}))
    reason = {
        "authority": "not trusted: self.signed certificate",
        "name": "not trusted: IP address mismatch",
        "plain server": "does not speak TLS, but FLEET_PS_CA requires it",
        "plain worker": "its workers need FLEET_PS_CA",
    }[fault]
    with serving(transport=SocketTransport(server_tls=server, handshake_timeout_s=1.0)) as service:
        began = time.monotonic()
        with pytest.raises(PSError, match=reason):
            connect(service.servers[0].endpoint, worker, connect_timeout_s=0.5, deadline_s=1.0)
        assert time.monotonic() - began < 30
        assert service.servers[0].state.job.workers[0].state == "expected", "nobody was let in"


def test_wrong_files_and_halves_are_refused(variables: dict[str, str], tmp_path: Path) -> None:
    """003-13, decision 4: nothing is ignored, and no job runs in the clear that was meant not to."""
    empty = tmp_path / "empty.pem"
    empty.touch()
    for read, values, reason in (
        (read_server_tls, {"FLEET_PS_CERT": "nowhere.pem"}, "No such file"),
        (read_server_tls, {"FLEET_PS_CERT": str(empty)}, "take PEM files"),
        (read_server_tls, {"FLEET_PS_CERT": variables["FLEET_PS_CERT"]}, "and its key"),
        (read_server_tls, {"FLEET_PS_CA": variables["FLEET_PS_CA"]}, "FLEET_PS_CERT is not"),
        (read_server_tls, {"FLEET_PS_KEY": variables["FLEET_PS_KEY"]}, "FLEET_PS_CERT is not"),
        (read_worker_tls, {"FLEET_PS_CA": "nowhere.pem"}, "No such file"),
        (read_worker_tls, {"FLEET_PS_CA": str(empty)}, "takes a PEM file"),
        (read_worker_tls, {"FLEET_PS_CERT": variables["FLEET_PS_CERT"]}, "FLEET_PS_CA is not"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read(Environment(values))
    assert read_server_tls(Environment({})) is None
    assert read_worker_tls(Environment({})) is None


@pytest.mark.parametrize("together", [False, True])
def test_a_key_that_everybody_can_read_is_refused(together: bool, variables: dict[str, str], tmp_path: Path) -> None:
    """As ssh refuses it: any user of the machine could speak as the server."""
    if together:
        (tmp_path / "cert.pem").write_bytes((tmp_path / "cert.pem").read_bytes() + (tmp_path / "key.pem").read_bytes())
    name = "cert.pem" if together else "key.pem"
    environment = Environment({key: value for key, value in variables.items() if not (together and "KEY" in key)})
    for mode, is_good in ((0o600, True), (0o640, True), (0o644, False), (0o604, False), (0o620, False), (0o602, False)):
        (tmp_path / name).chmod(mode)
        if is_good:
            assert read_server_tls(environment) is not None
        else:
            with pytest.raises(ConfigError, match=f"chmod 600 .*{name}"):
                read_server_tls(environment)
