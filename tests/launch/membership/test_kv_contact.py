"""Nodes that meet over a real key-value service, each in a thread: agreement, news, outcomes; the contact itself."""

from __future__ import annotations

import gc
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import FleetError, RendezvousError
from fleet.launch.membership.agreement import Rules
from fleet.launch.membership.engine import Engine, EngineSettings
from fleet.launch.membership.generation import Generation
from fleet.launch.membership.kv_client import KeyValueClient
from fleet.launch.membership.kv_service import KeyValueService
from fleet.launch.membership.meeting import KeyValueContact
from fleet.launch.membership.store import StoreLostError
from fleet.launch.membership.world import NODE_PREFIX, Node
from fleet.launch.plan.records import GroupResult, ProcessExit, ProcessSpec
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox
from fleet.launch.restarts import Outcome, RestartRule

SECRET = b"secret"


def fixed(num_nodes: int) -> Rules:
    """Rules of a job of a fixed number of nodes."""
    return Rules(min_nodes=num_nodes, max_nodes=num_nodes, is_elastic=False, restarts=RestartRule())


class Place:
    """A service and the nodes that met at it; all are closed at the end."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.service = KeyValueService(listener, SECRET, lambda *about: None)
        self.signals = SignalInbox()
        self.nodes: list[Engine] = []

    def node(
        self, name: str, rules: Rules, *, rank: int = -1, limit_s: float = 10.0, restarts: int = 0, serves: bool = False
    ) -> Engine:
        client = KeyValueClient(self.address, SECRET, ttl_s=2.0)
        client.connect()
        log = LaunchLog("CRITICAL")
        rules = replace(rules, restarts=RestartRule(limit=restarts))
        contact = KeyValueContact(
            client, prefix="/job/", key=NODE_PREFIX + name, service=None, log=log, signals=self.signals
        )
        node = Engine(
            contact,
            name=name,
            node=Node(host="127.0.0.1", rank=rank, serves=serves),
            settings=EngineSettings(rules=rules, grace_s=7.0, wait_limit_s=limit_s),
            log=log,
            signals=self.signals,
            secret=SECRET,
        )
        self.nodes.append(node)
        return node

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self.service.close()
        self.signals.__exit__(None, None, None)


def test_a_contact_whose_thread_has_ended_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> None:
        raise RecursionError("too deep")

    place = Place()
    contact = place.node("a", fixed(1))._store
    contact.view()
    monkeypatch.setattr(KeyValueClient, "wait", lose)
    node = place.node("b", fixed(1))
    contact = node._store
    assert select.select([contact], [], [], 60.0)[0]
    contact._thread.join(60)
    for call in (contact.view, node.close):
        with pytest.raises(FleetError, match="'rendezvous-watch' has ended.*too deep"):
            call()
    place.nodes.remove(node)
    place.close()


@pytest.fixture
def place() -> Iterator[Place]:
    one = Place()
    yield one
    one.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls at the same time and returns their results; an exception is a result."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def two(place: Place, restarts: int = 0) -> tuple[Engine, Engine]:
    rules = fixed(2)
    pair = place.node("a", rules, restarts=restarts), place.node("b", rules, restarts=restarts)
    together(lambda: pair[0].join({"p": 1}), lambda: pair[1].join({"p": 2}))
    return pair


def test_all_nodes_get_the_same_world(place: Place) -> None:
    rules = fixed(3)
    nodes = [place.node(name, rules) for name in "abc"]
    worlds: list[Generation] = together(*(lambda n=n, i=i: n.join({"n": i}) for i, n in enumerate(nodes)))
    assert worlds[0].peers == worlds[1].peers == worlds[2].peers
    assert sorted(world.node_rank for world in worlds) == [0, 1, 2]
    assert all(world.peers[world.node_rank] == {"n": i} for i, world in enumerate(worlds))
    assert [world.number for world in worlds] == [0, 0, 0]


@pytest.mark.parametrize("attempt", range(20))
def test_short_window_never_splits_the_world(place: Place, attempt: int) -> None:
    """Study 2.2 and 2.4: 3 nodes, 2:3, a window about as long as the gaps: 20 of 20 agree, none hangs."""
    rules = Rules(min_nodes=2, max_nodes=3, quiet_s=0.15)
    gap_s = 0.05 + 0.015 * attempt
    results: list[Any] = []

    def come(index: int) -> Any:
        time.sleep(gap_s * index)
        return place.node("abc"[index], rules, limit_s=1.5).join({"n": index})

    results = together(*(lambda i=i: come(i) for i in range(3)))
    started = [result for result in results if isinstance(result, Generation)]
    worlds = {len(result.peers) for result in started}
    assert len(worlds) == 1, results
    assert worlds == {len(started)}, "every member of the world started, and nobody else"
    assert all(isinstance(result, Generation | RendezvousError) for result in results)


def test_absent_nodes_are_named(place: Place) -> None:
    """003-36."""
    node = place.node("a", fixed(3), rank=1, limit_s=0.6)
    with pytest.raises(RendezvousError, match="absent node ranks: 0, 2"):
        node.join({})


def test_a_taken_rank_is_refused(place: Place) -> None:
    rules = fixed(2)
    one, other = place.node("a", rules, rank=0, limit_s=3), place.node("b", rules, rank=0, limit_s=6)
    first = threading.Thread(target=lambda: pytest.raises(RendezvousError, one.join, {}))
    first.start()
    time.sleep(0.3)
    with pytest.raises(RendezvousError, match="--rank 0 is held by another node"):
        other.join({})
    first.join()


def test_no_news_while_all_is_well(place: Place) -> None:
    one, other = two(place)
    time.sleep(0.3)
    assert one.take() is None
    assert other.take() is None


def fail(node: Engine, code: int, text: str = "") -> Outcome:
    """Lets a worker of a node end with ``code``."""
    spec = ProcessSpec(role="worker", index=0, local_index=0, command=("x",), environment={}, log_path=Path("log"))
    end = ProcessExit(spec=spec, pid=1, exit_code=code, signal_name=None, lifetime_s=1.0, ended_at=0.0)
    result = GroupResult(exit_code=code, first_failure=end)
    node.announce_end(result, text)
    return node.settle(result)


def held(node: Engine) -> Outcome:
    """What follows once the workers of a node were stopped because of another one."""
    return node.settle(GroupResult(exit_code=0, interrupted=True))


STOPPED = GroupResult(exit_code=143, stop_signal=15)


def test_failure_reaches_the_other_node_with_its_code(place: Place) -> None:
    one, other = two(place)
    fail(one, 23, "Worker 0 failed")
    assert _news(other) == ("stop", 0.3)
    reason = other._why()
    assert (reason.code, reason.text, reason.restart) == (23, "Worker 0 failed", False)
    assert held(other) == Outcome(23)


def test_a_signalled_stop_leaves_the_other_node_its_grace(place: Place) -> None:
    one, other = two(place)
    one.announce_end(STOPPED, "")
    assert _news(other) == ("stop", 7.0)
    assert held(other) == Outcome(143)


def test_of_two_failures_the_first_counts_on_both(place: Place) -> None:
    one, other = two(place)
    assert fail(one, 5, "first") == Outcome(5)
    assert fail(other, 6, "second") == Outcome(5)


def test_restart_gives_the_next_generation(place: Place) -> None:
    one, other = two(place, restarts=1)
    assert fail(other, 9, "dead").restart
    assert _news(one) == ("stop", 0.3)
    assert held(one).restart
    again = together(lambda: one.join({"p": 3}), lambda: other.join({"p": 4}))
    assert [world.restarts for world in again] == [1, 1]
    assert again[0].number == again[1].number > 0
    assert not fail(one, 9, "dead again").restart


def kill(node: Engine) -> None:
    """Ends a node as when its launcher is killed: no farewell, connections broken."""
    assert isinstance(node._store, KeyValueContact)
    node._store._client._closed = True
    for channel in list(node._store._client._channels.values()):
        channel.close()


def test_lost_node_is_noticed(place: Place) -> None:
    one, other = two(place)
    kill(other)
    began = time.monotonic()
    assert _news(one) == ("stop", 0.3)
    assert time.monotonic() - began < 4.0
    assert one._why().kind == "lost"
    assert held(one) == Outcome(1)


def test_lost_service_stops_the_node(place: Place) -> None:
    """Self-fencing: a node that is cut off ends its workers within its lease and a little."""
    one, _ = two(place)
    place.service.close()
    began = time.monotonic()
    assert _news(one) == ("stop", 0.3)
    assert time.monotonic() - began < 5.0
    assert "has not answered" in one._why().text
    assert held(one) == Outcome(1)


RANGE = Rules(min_nodes=1, max_nodes=3, quiet_s=0.5, restarts=RestartRule())


def elastic(place: Place) -> tuple[Engine, Engine]:
    """Two nodes of an elastic job; the first one is on the machine of the service."""
    pair = place.node("a", RANGE, serves=True), place.node("b", RANGE)
    together(lambda: pair[0].join({"host": "h"}), lambda: pair[1].join({"host": "h"}))
    return pair


def test_an_elastic_job_goes_on_without_a_lost_node_and_takes_another(place: Place) -> None:
    one, other = elastic(place)
    kill(other)
    assert _news(one)[0] == "stop"
    assert held(one) == Outcome(1, restart=True)
    alone = one.join({})
    assert (len(alone.peers), alone.node_rank, alone.restarts) == (1, 0, 0)
    third = place.node("c", RANGE)

    def stay() -> Generation:
        assert _news(one) == ("stop", 7.0)
        assert held(one).restart
        return one.join({})

    first, second = together(stay, lambda: third.join({}))
    assert (first.node_rank, second.node_rank, len(first.peers)) == (0, 1, 2)


def test_a_lost_service_ends_an_elastic_job(place: Place) -> None:
    """Nobody can tell who else goes on, so nobody does."""
    one, other = elastic(place)
    place.service.close()
    for node in (one, other):
        assert _news(node)[0] == "stop"
        assert held(node) == Outcome(1)
    with pytest.raises(StoreLostError, match=r"has not answered for \d+\.\d s"):
        one.join({})


def test_the_host_of_the_service_takes_the_job_along_when_it_is_told_to_stop(place: Place) -> None:
    one, other = elastic(place)
    one.announce_end(STOPPED, "")
    assert _news(other) == ("stop", 7.0)
    assert held(other) == Outcome(143)


def test_another_node_that_is_told_to_stop_leaves(place: Place) -> None:
    one, other = elastic(place)
    other.announce_end(STOPPED, "")
    assert other.settle(STOPPED) == Outcome(143)
    assert _news(one) == ("stop", 7.0)
    assert held(one).restart


def test_another_number_of_nodes_is_refused(place: Place) -> None:
    """Each launcher would wait for nodes that the others do not know of."""
    two(place)
    stale = place.node("c", fixed(3))
    with pytest.raises(RendezvousError, match=r"started for 3 nodes, but the job at 127.0.0.1:\d+ has 2. Start"):
        stale.join({})


def test_servers_may_end_when_all_workers_are_done(place: Place) -> None:
    one, other = two(place)
    one.workers_done()
    time.sleep(0.2)
    assert one.take() is None
    other.workers_done()
    assert _news(one)[0] == "servers"


DONE = GroupResult(exit_code=0)


def test_finish_waits_for_all(place: Place) -> None:
    one, other = two(place)
    done = threading.Thread(target=one.settle, args=(DONE,))
    done.start()
    time.sleep(0.3)
    assert done.is_alive()
    assert other.settle(DONE) == Outcome(0)
    done.join(5)
    assert not done.is_alive()


def test_finish_hears_of_a_failure(place: Place) -> None:
    one, other = two(place)
    reasons: list[Any] = []
    done = threading.Thread(target=lambda: reasons.append(one.settle(DONE)))
    done.start()
    fail(other, 4, "late")
    done.join(5)
    assert reasons[0] == Outcome(4)


def _news(node: Engine) -> tuple[str, float]:
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        event = node.take()
        if event is not None:
            return event.kind, event.grace_s
        time.sleep(0.01)
    raise AssertionError("no news")


def test_two_launchers_of_one_name_are_not_one_node(place: Place) -> None:
    """Issue 10, Low: both joined as the same node and started its workers."""
    rules = fixed(1)
    one, two = place.node("a", rules), place.node("a", rules)
    assert one.join({"p": 1}).node_rank == 0
    (refused,) = together(lambda: two.join({"p": 2}))
    assert isinstance(refused, RendezvousError)
    assert "Another launcher of this job has the pod id a" in str(refused)
    place.nodes.remove(two)
    two.close()
    assert one.take() is None, "the key of the first is still there"


def test_a_contact_that_is_closed_while_its_thread_connects_leaves_no_connection(place: Place) -> None:
    """The thread may open its connection when the session has ended already; a leak is a warning, hence an error."""
    log = LaunchLog("CRITICAL")
    gc.collect()
    gc.freeze()  # or each collection below walks all that the tests before have left
    for number in range(60):
        client = KeyValueClient(place.address, SECRET, ttl_s=2.0)
        client.connect()
        contact = KeyValueContact(
            client, prefix="/job/", key=f"k{number}", service=None, log=log, signals=place.signals
        )
        time.sleep(0.0001 * (number % 30))
        contact.close()
        del client, contact
        gc.collect()
