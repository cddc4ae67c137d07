"""Lookups on servers and their standbys: whose rows they give, what they leave alone, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.serving.read_line import ReadAccess
from fleet.ps.serving.server_rows import ServerRows, read_endpoints
from fleet.ps.table.layout import SparseTableConfig
from tests.fleet.ps.service import DENSE, SECRET, SGD, Service, gradient, ids, serving, until
from tests.fleet.ps.standby.test_pair import FIRST, SECOND, duo


@contextmanager
def reading(network: Any, *endpoints: str, job: str | None = None, wire: str = "float32") -> Iterator[ServerRows]:
    """Yields the rows of these servers."""
    access = ReadAccess(SECRET, network, job, wire)
    reader = ServerRows(f"ps://{','.join(endpoints)}", list(endpoints), access)
    try:
        yield reader
    finally:
        reader.close()


def endpoints_of(service: Service) -> list[str]:
    """Where the servers listen."""
    return [server.endpoint for server in service.servers]


def test_rows_of_all_servers_in_any_order() -> None:
    keys = np.concatenate([np.arange(-50, 50), [10**15]])
    with serving(3) as service:
        client = service.client()
        values = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)
        pushed = gradient(keys)
        pushed.rows = -values
        client.wait(client.push({0: pushed}))
        first, *rest = endpoints_of(service)
        with reading(service.transport, *rest, first) as reader:
            assert reader.dims == {"ads": 2}
            asked = np.array([7, 10**15, 7, 123456, -50, 7])
            found_rows, found = reader.lookup("ads", asked)
            assert found.tolist() == [True, True, True, False, True, True]
            expected = values[np.searchsorted(keys, asked[found])]
            assert np.array_equal(found_rows[found], expected)
            assert not found_rows[3].any()
            assert reader.lookup("ads", ids())[0].shape == (0, 2)
            positions = reader.positions
            assert sorted(positions) == [0, 1, 2]
            assert all(time.time() - one.pushed_at < 5 for one in positions.values())
            assert positions[0].watermark == service.servers[0].state.journal.last_lsn


def test_refusals() -> None:
    with serving(2, job="shop") as service:
        with reading(service.transport, *endpoints_of(service)) as reader:
            with pytest.raises(ConfigError, match="no such table.*none yet"):
                reader.lookup("ads", ids(1))
            service.client(job="shop")
            with pytest.raises(ConfigError, match="Did you mean 'ads'"):
                reader.lookup("adds", ids(1))
            with pytest.raises(ConfigError, match="no such table"):
                reader.lookup("mlp", ids(1))
        first, second = endpoints_of(service)
        for listed in ([first], [second]):
            with (
                pytest.raises(ConfigError, match="the job has 2 servers, and the list has"),
                reading(service.transport, *listed),
            ):
                pass
        with (
            pytest.raises(ConfigError, match="asks for job 'ads'; this is a server of job 'shop'"),
            reading(service.transport, first, second, job="ads"),
        ):
            pass
        with reading(service.transport, first, second, job="shop"):
            pass
        access = ReadAccess(b"another", service.transport)
        with pytest.raises(ConfigError, match="another job secret.*FLEET_JOB_SECRET"):
            ServerRows("ps://x", [first, second], access)


def test_servers_of_two_jobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(2) as service:
        strange, readers = service.configs[1], service.servers[1]._answers._readers
        monkeypatch.setattr(readers, "_config", type(strange)(secret=SECRET, index=1, job="b"))
        with (
            pytest.raises(ConfigError, match="job 'b', the others are of job ''"),
            reading(service.transport, *endpoints_of(service)),
        ):
            pass
        monkeypatch.setattr(readers, "_config", type(strange)(secret=SECRET, index=0))
        with (
            pytest.raises(ConfigError, match="both server 0, and not each other's standby"),
            reading(service.transport, *endpoints_of(service)),
        ):
            pass


def test_addresses() -> None:
    assert read_endpoints("ps://10.0.0.7:36001, [::1]:2") == ["10.0.0.7:36001", "[::1]:2"]
    for text in ("ps://", "ps://a:1,a:1"):
        with pytest.raises(ConfigError, match="each once"):
            read_endpoints(text)
    for text in ("ps://a", "ps://a:b", "ps://user@a:1"):
        with pytest.raises(ConfigError, match="host"):
            read_endpoints(text)


def test_a_server_that_comes_back_with_less_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are older than what this reader has got; another reader takes them."""
    monkeypatch.setattr("fleet.ps.serving.read_line.LIMIT_S", 0.5)
    with serving() as service:
        client = service.client()
        client.wait(client.push({0: gradient([1])}))
        with reading(service.transport, *endpoints_of(service)) as reader:
            assert reader.lookup("ads", ids(1))[0][0, 0] == -1
            service.servers[0].stop()
            service.start(0)  # it kept nothing
            service.client(client_id=5)
            with pytest.raises(PSError, match="the reader has seen those up to"):
                reader.lookup("ads", ids(1))
        with reading(service.transport, *endpoints_of(service)) as reader:
            assert not reader.lookup("ads", ids(1))[1].any()


def test_a_server_with_a_journal_comes_back(tmp_path: Path) -> None:
    with serving(folder=tmp_path) as service:
        client = service.client()
        client.wait(client.push({0: gradient([1])}))
        with reading(service.transport, *endpoints_of(service)) as reader:
            for value in (-1, -1):
                assert reader.lookup("ads", ids(1))[0][0, 0] == value
                service.servers[0].stop()
                service.start(0)


def test_another_job_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as service:
        client = service.client()
        with reading(service.transport, *endpoints_of(service)) as reader:
            reader.lookup("ads", ids(1))
            service.servers[0].stop()
            service.start(0)
            client = service.client(tables={0: SparseTableConfig("ads", 3, SGD), 1: DENSE}, client_id=5)
            client.wait(client.push({0: gradient([1], dim=3)}))
            with pytest.raises(PSError, match="another server is there now.*Make a new Reader"):
                reader.lookup("ads", ids(1))


@pytest.mark.parametrize("listed", [FIRST, SECOND])
def test_a_standby_answers_as_well(tmp_path: Path, listed: str) -> None:
    with duo(tmp_path) as pair:
        client = pair.client()
        with reading(pair.transport, listed) as reader:
            until(lambda: reader.dims == {"ads": 2})
            client.wait(client.push({0: gradient([1])}))
            client.flush()
            until(lambda: reader.lookup("ads", ids(1))[1].all())
            assert reader.lookup("ads", ids(1))[0][0, 0] == -1
            position = reader.positions[0]
            assert position.history == "epoch 1"
            assert position.watermark == pair.leader._journal.last_lsn
            assert time.time() - position.pushed_at < 5


@pytest.mark.parametrize("listed", [[FIRST], [SECOND], [FIRST, SECOND]])
def test_a_lost_primary(tmp_path: Path, listed: list[str]) -> None:
    """The standby answers before anybody has promoted it, and afterwards."""
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        with reading(pair.transport, *listed) as reader:
            assert reader.lookup("ads", ids(1))[0][0, 0] == -1
            pair.kill(0)
            began = time.monotonic()
            assert reader.lookup("ads", ids(1))[0][0, 0] == -1
            assert time.monotonic() - began < 5
            client.wait(client.push({0: gradient([1])}))
            assert reader.lookup("ads", ids(1))[0][0, 0] == -2
            assert reader.positions[0].history == "epoch 3"


def test_a_lost_standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server answers, once it is certain that nobody else serves."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        with reading(pair.transport, SECOND) as reader:
            until(lambda: reader.lookup("ads", ids(1))[1].all())
            pair.kill(1)
            client.wait(client.push({0: gradient([1])}))
            until(lambda: pair.epoch(0) == 2)
            client.wait(client.push({0: gradient([1])}))
            assert reader.lookup("ads", ids(1))[0][0, 0] == -3


def test_a_standby_that_was_given_up_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server went on alone, and the reader has seen what it did then."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    monkeypatch.setattr("fleet.ps.serving.read_line.LIMIT_S", 1.0)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        pair.cut()
        until(lambda: pair.epoch(0) == 2)
        client.wait(client.push({0: gradient([1])}))
        with reading(pair.transport, FIRST) as reader:
            assert reader.lookup("ads", ids(1))[0][0, 0] == -2
            pair.kill(0)
            with pytest.raises(PSError, match="the reader has seen"):
                reader.lookup("ads", ids(1))
        with reading(pair.transport, SECOND) as reader:  # it has seen nothing yet
            assert reader.lookup("ads", ids(1))[0][0, 0] == -1


def test_a_stale_standby_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It still answers where there is nobody else; its age says what its rows are worth."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    monkeypatch.setattr("fleet.ps.serving.read_line.STALE_S", 1.0)
    monkeypatch.setattr("fleet.ps.serving.read_line._LOOK_S", 0.1)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        with reading(pair.transport, SECOND) as reader, reading(pair.transport, SECOND) as late:
            until(lambda: reader.lookup("ads", ids(1))[1].all())
            late.lookup("ads", ids(1))
            pair.cut()
            until(lambda: pair.epoch(0) == 2)
            client.wait(client.push({0: gradient([1])}))
            until(lambda: reader.lookup("ads", ids(1))[0][0, 0] == -2)
            pair.kill(0)
            until(lambda: late.positions[0].pushed_at < time.time() - 1.0)
            assert late.lookup("ads", ids(1))[0][0, 0] == -1


def test_a_switch(tmp_path: Path) -> None:
    """Values never go back while the two change places under a worker that pushes."""
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        stop = threading.Event()
        seen: list[float] = []

        def look() -> None:
            with reading(pair.transport, FIRST) as reader:
                while not stop.is_set():
                    seen.append(float(reader.lookup("ads", ids(1))[0][0, 0]))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        until(lambda: bool(seen))
        _push(client, 20)
        pair.switch(0)
        _push(client, 20)
        until(lambda: seen[-1] == -41)
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
        assert seen == sorted(seen, reverse=True)


def _push(client: Any, times: int) -> None:
    for _ in range(times):
        client.wait(client.push({0: gradient([1])}))


def test_an_interrupted_lookup_does_not_answer_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between a question and its answer: the next lookup must not take that answer for its own."""
    with serving(2) as service:
        client = service.client()
        client.wait(client.push({0: gradient(range(40))}))
        with reading(service.transport, *endpoints_of(service)) as reader:
            line = reader._lines[0]
            with monkeypatch.context() as patch:

                def interrupt(*_: object) -> None:
                    raise KeyboardInterrupt

                patch.setattr(line, "finish", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    reader.lookup("ads", np.arange(40))
            got, found = reader.lookup("ads", np.arange(20, 45))
            assert found.tolist() == [True] * 20 + [False] * 5
            assert (got[:20] == -1).all()


def test_a_server_that_was_replaced_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know that it was, because the other one is away; it has as many records, and other ones."""
    monkeypatch.setattr("fleet.ps.standby.pair._PATIENCE_S", 0.2)
    monkeypatch.setattr("fleet.ps.serving.read_line.LIMIT_S", 1.0)
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        pair.cut()
        _push(client, 3)
        pair.kill(0)
        _push(client, 3)
        with reading(pair.transport, SECOND) as reader:
            assert reader.lookup("ads", ids(1))[0][0, 0] == -7
            record = reader._lines[0]._record
            pair.kill(1)
            server = pair.start(0)
            until(lambda: pair.pair(0).leader is not None)
            with server.state.journal.lock:
                server.state.journal.last_lsn = max(server.state.journal.last_lsn, record)
            with pytest.raises(PSError, match="it was replaced: it has epoch 1, the reader has seen 3"):
                reader.lookup("ads", ids(1))
