"""A server and its standby, at message level: what is promised, who serves, what a failover loses."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.client.fence import Fences
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.standby.follower import Follower
from fleet.ps.standby.leader import Leader
from fleet.ps.standby.pair import Pair
from fleet.ps.wire.auth import prove_to_server
from fleet.ps.wire.messages import Header, Op, control_body, decode_control, decode_header, encode_header
from tests.fleet.ps.local_transport import LocalTransport
from tests.fleet.ps.service import DENSE, SECRET, SPARSE, gradient, in_threads, make_table, rows, silent, until

FIRST, SECOND = "127.0.0.1:9000", "127.0.0.1:9500"


def push_and_flush(client: Client) -> None:
    """Pushes -1 to row 1 and waits for the promise."""
    client.wait(client.push({0: gradient([1])}))
    client.flush()


def refuse_unless_probe(serve: Any) -> Any:
    """Returns a ``serve`` that tells where it stands and sends nothing."""

    def answer(line: Any, asked: dict[str, Any]) -> None:
        if not asked.get("probe"):
            raise PSError("cut by the test.")
        serve(line, asked)

    return answer


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

    def cut(self) -> None:
        """Breaks the line between the two for good."""

        def refuse(*_: Any) -> None:
            raise PSError("cut by the test.")

        leader = self.leader
        leader.serve = refuse  # type: ignore[method-assign]
        if leader._feed is not None:
            leader._feed.close("cut by the test")
        until(lambda: leader.lacks_standby)

    def epoch(self, place: int) -> int:
        """The epoch of one of the two."""
        return self.pair(place)._epoch.epoch

    def pair(self, place: int) -> Pair:
        """What one of the two has beside a server alone."""
        server = self.servers[place]
        assert server is not None
        assert server._pair is not None
        return server._pair

    @property
    def leader(self) -> Leader:
        """Of the first."""
        leader = self.pair(0).leader
        assert leader is not None
        return leader

    @property
    def follower(self) -> Follower:
        """Of the second."""
        follower = self.pair(1).follower
        assert follower is not None
        return follower

    def switch(self, place: int) -> dict[str, Any]:
        """Asks one of the two to hand over and returns its answer."""
        endpoint = self.configs[place].endpoint
        line = prove_to_server(self.transport.connect(endpoint, 5.0), endpoint, SECRET, 5.0)
        body = control_body({"switch": True})
        line.send(encode_header(Header(Op.FOLLOW, body_bytes=len(body))), [body], 5.0)
        header = decode_header(line.receive_header(5.0, 30.0))
        answer = memoryview(bytearray(header.body_bytes))
        line.receive_body(answer, 5.0)
        line.close()
        return dict(decode_control(answer))

    def follows(self, place: int) -> bool:
        """Whether one of the two has joined the other."""
        follower = self.pair(place).follower
        return follower is not None and follower.joined and not follower.promoted

    def follower_at(self, place: int) -> Follower:
        """Of one of the two."""
        follower = self.pair(place).follower
        assert follower is not None
        return follower

    def joined(self) -> bool:
        """Whether the standby can be promoted."""
        return self.follower.joined

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


def test_a_worker_that_asks_for_nothing_votes_at_once(tmp_path: Path) -> None:
    """It may be waiting for another server; the others' steps would wait for its next sign of life."""
    with duo(tmp_path, num_workers=2) as pair:
        idle, busy = pair.client(0, heartbeat=True), pair.client(1)
        pair.kill(0)
        began = time.monotonic()
        busy.wait(busy.push({0: gradient([1])}))
        assert time.monotonic() - began < 5  # a quarter of the lease is 15 s
        np.testing.assert_array_equal(rows(idle, [1])[:, 0], [-1])


def test_what_the_standby_lacks_is_not_promised(tmp_path: Path) -> None:
    """Changes that a standby has not confirmed stay with the worker, which sends them to the standby after all."""
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        pair.cut()
        for _ in range(3):
            client.wait(client.push({0: gradient([1, 4])}))
        link = client._links[0]
        assert len(link._replay) == 3  # unconfirmed
        pair.kill(0)
        np.testing.assert_array_equal(rows(client, [1, 4])[:, 0], [-4, -3])
        assert pair.epoch(1) == 3
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        assert not link._replay


def test_a_server_that_lost_its_standby_goes_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It promises again once the workers know its new epoch; a standby that comes back follows from there."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client()
        pair.kill(1)
        client.wait(client.push({0: gradient([1])}))
        until(lambda: pair.epoch(0) == 2)
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        assert any("goes on alone (epoch 2)" in line for line in pair.lines)
        pair.start(1)
        until(pair.joined)
        client.wait(client.push({0: gradient([1])}))
        pair.kill(0)
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-3])
        assert pair.epoch(1) == 4


def test_a_standby_that_was_given_up_is_not_promoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split brain: the workers know that the server went on without the standby, and the standby learns it."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client(deadline_s=2.0)
        pair.cut()
        until(lambda: pair.epoch(0) == 2)
        client.wait(client.push({0: gradient([1])}))
        client.flush()  # promised by the server alone
        pair.kill(0)
        with pytest.raises(PSError, match="did not answer.*(went on without it|nobody listens|given up)"):
            rows(client, [1])
        assert pair.epoch(1) == 1


def test_a_server_that_was_replaced_steps_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split brain: a server that no worker reached for a while hears that its standby leads, and serves nobody."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client()
        listener = pair.transport._listeners[FIRST]
        pair.transport.forget(FIRST)
        pair.cut()
        leader = pair.leader
        leader._hang_up()
        client.wait(client.push({0: gradient([1])}))
        assert pair.epoch(1) == 3
        until(lambda: leader.deposed)
        pair.transport._listeners[FIRST] = listener
        stranger = Fences()  # of a worker process that was started again
        link = client._links[0]
        link._connector.endpoint, link._connection = FIRST, None
        object.__setattr__(link._config, "fences", stranger)
        with pytest.raises(PSError, match="does not serve"):
            link._connect()
        until(lambda: pair.follows(0))


def test_every_worker_must_ask(tmp_path: Path) -> None:
    """One worker that lost the server promotes nothing while another may still use it."""
    with duo(tmp_path, num_workers=2) as pair:
        first, second = pair.client(0), pair.client(1)
        pair.kill(0)
        until(lambda: not pair.follower._line)
        reason = pair.follower.ask(0, 1)
        assert reason == {"standby": "workers [1] have not asked for it"}
        in_threads(
            lambda: first.wait(first.push({0: gradient([1])})), lambda: second.wait(second.push({0: gradient([1])}))
        )
        np.testing.assert_array_equal(rows(first, [1])[:, 0], [-2])


def test_rows_that_neither_has_are_said_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was alone and lost its folder comes back empty: the workers learn it without waiting."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client(deadline_s=60.0)
        pair.kill(1)
        until(lambda: pair.epoch(0) == 2)
        client.wait(client.push({0: gradient([1])}))
        pair.kill(0)
        shutil.rmtree(tmp_path / "first")
        shutil.rmtree(tmp_path / "second")
        pair.start(1)
        pair.start(0)
        with pytest.raises(
            PSError, match="workers have used rows of epoch 2; this server has epoch 1.*last saved model"
        ):
            rows(client, [1])


def test_workers_that_were_all_started_again_promote_nothing(tmp_path: Path) -> None:
    """None of them knows whether the server went on without its standby."""
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        client.close()
        pair.kill(0)
        with pytest.raises(PSError, match="did not answer for 1.5 s"):
            pair.client(deadline_s=1.5)
        assert pair.epoch(1) == 1


def test_a_load_reaches_the_standby(tmp_path: Path) -> None:
    """Rows that change without a record are with the standby before the worker has its answer."""
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        client.save(str(tmp_path / "saved"))
        client.wait(client.push({0: gradient([1])}))
        client.load(str(tmp_path / "saved"))
        pair.kill(0)
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-1])


@pytest.mark.parametrize("keeps_folder", [False, True])
def test_the_two_change_places(tmp_path: Path, keeps_folder: bool) -> None:
    """The one that was lost comes back as the standby of the other, and takes over from it in turn."""
    with duo(tmp_path, num_workers=2) as pair:
        clients = [pair.client(0), pair.client(1)]
        for turn in range(4):
            in_threads(*(partial(push_and_flush, client) for client in clients))
            leads, lost = (turn + 1) % 2, turn % 2
            pair.kill(lost)
            in_threads(*(partial(push_and_flush, client) for client in clients))
            np.testing.assert_array_equal(rows(clients[0], [1])[:, 0], [-4 * (turn + 1)])
            assert pair.epoch(leads) == 3 + 2 * turn
            if not keeps_folder:
                shutil.rmtree(pair.configs[lost].folder or tmp_path)
            pair.start(lost)
            assert pair.pair(lost).leader is None
            until(lambda lost=lost: pair.follower_at(lost).joined)  # type: ignore[misc]
        changed = 4 if keeps_folder else 2  # the second of the list follows anyway where it has nothing
        assert sum("is its standby from now on" in line for line in pair.lines) == changed


def test_a_server_hands_over_and_follows(tmp_path: Path) -> None:
    """Back and forth while two workers push: no push is lost or applied twice, and no step waits long."""
    with duo(tmp_path, num_workers=2, lease_s=1.0) as pair:
        clients = [pair.client(0), pair.client(1)]
        stop = threading.Event()
        steps = [0, 0]
        longest = [0.0, 0.0]

        def train(rank: int) -> None:
            while not stop.is_set():
                began = time.monotonic()
                clients[rank].wait(clients[rank].push({0: gradient([1])}))
                longest[rank] = max(longest[rank], time.monotonic() - began)
                steps[rank] += 1

        with ThreadPoolExecutor() as pool:
            running = [pool.submit(train, rank) for rank in (0, 1)]
            try:
                for turn in range(4):
                    leads, other = turn % 2, (turn + 1) % 2
                    before = sum(steps)
                    until(lambda before=before: sum(steps) > before + 20)  # type: ignore[misc]
                    assert pair.switch(leads) == {"leads": pair.configs[other].endpoint}
                    assert pair.epoch(other) == 3 + 2 * turn
                    until(lambda leads=leads: pair.follows(leads))  # type: ignore[misc]
                    assert pair.switch(leads)["error"].endswith(f"{pair.configs[other].endpoint} does.")
            finally:
                stop.set()
            for future in running:
                future.result()
        np.testing.assert_array_equal(rows(clients[0], [1])[:, 0], [-sum(steps)])
        assert max(longest) < 5


def test_a_worker_that_was_started_again_finds_the_one_that_leads(tmp_path: Path) -> None:
    """It asks the first of the list, which is the standby now."""
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        pair.kill(0)
        client.wait(client.push({0: gradient([1])}))
        pair.start(0)
        until(lambda: pair.follower_at(0).joined)
        client.close()
        client = pair.client()
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-2])
        pair.kill(1)
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-2])
        assert pair.epoch(0) == 5


def test_the_one_that_leads_leads_again_after_its_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked its standby meanwhile; with the standby away for good it goes on alone, and the worker follows."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    monkeypatch.setattr("fleet.ps.standby.pair._PATIENCE_S", 0.5)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client()
        pair.kill(0)
        client.wait(client.push({0: gradient([1])}))
        pair.start(0)
        until(lambda: pair.follower_at(0).joined)
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        for place in (0, 1):
            pair.kill(place)
        pair.start(1)
        until(lambda: pair.epoch(1) == 4)
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-3])


def test_a_server_that_comes_back_after_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It found that its standby leads and never joined: nobody is left to follow."""
    monkeypatch.setattr("fleet.ps.standby.pair._REJOIN_S", 0.3)
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        pair.kill(0)
        client.wait(client.push({0: gradient([1])}))
        leader = pair.pair(1).leader
        assert leader is not None
        leader.serve = refuse_unless_probe(leader.serve)  # type: ignore[method-assign]
        server = pair.start(0)
        client.goodbye()
        pair.kill(1)
        assert not server.wait_for_turn()


def test_a_promoted_standby_restarts_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it took over is in its own folder."""
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    monkeypatch.setattr("fleet.ps.standby.pair._PATIENCE_S", 0.5)
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        pair.kill(0)
        client.wait(client.push({0: gradient([1])}))
        pair.kill(1)
        pair.start(1)
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-2])


def test_a_worker_without_the_list_is_refused(tmp_path: Path) -> None:
    """It would not find the standby."""
    with duo(tmp_path) as pair:
        client = Client(
            ClientConfig(endpoints=[FIRST], secret=SECRET, heartbeat=False), transport=pair.transport, notify=silent
        )
        pair.clients.append(client)
        with pytest.raises(PSError, match="knows of one endpoint alone.*FLEET_PS_STANDBY_ENDPOINTS"):
            client.open()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"peer": FIRST}, "they are two"),
        ({"peer": SECOND, "folder": None, "level": None}, "FLEET_PS_FOLDER"),
        ({"peer": SECOND, "level": 2}, "journal of level 1"),
        ({"standby": True}, "they are two"),
    ],
)
def test_wrong_pairs(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    """A pair needs a folder, level 1 and two endpoints."""
    with pytest.raises(ConfigError, match=text):
        ServerConfig(**{"endpoint": FIRST, "folder": tmp_path, "level": 1, **fields})


def test_a_job_that_ends_right_after_a_switch(tmp_path: Path) -> None:
    """The one that was replaced does not follow yet; it ends at once all the same."""
    with duo(tmp_path) as pair:
        client = pair.client()
        push_and_flush(client)
        pair.switch(0)
        push_and_flush(client)
        old, new = pair.servers
        assert old is not None
        assert new is not None
        client.goodbye()
        assert new.wait(30)
        new.end_standby()
        assert old.wait(30)
        began = time.monotonic()
        assert old.still_leads() or not old.wait_for_turn()
        assert time.monotonic() - began < 4
