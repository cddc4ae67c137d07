"""Nodes that meet on a real etcd, each in a thread: starts, ends, whose fault it was. No process is started."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from fleet.errors import RendezvousError
from fleet.launch.membership.agreement import Rules
from fleet.launch.membership.etcd_address import EtcdAddress
from fleet.launch.membership.generation import LeftJobError
from fleet.launch.membership.outage import ContactAnswer
from fleet.launch.membership.world import NODE_PREFIX, Node
from fleet.launch.plan.records import GroupResult, ProcessExit, ProcessSpec
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox
from fleet.launch.restarts import END, Outcome, RestartRule
from tests.helpers import etcd as helper
from tests.helpers.etcd import Etcd

pytestmark = pytest.mark.skipif(bool(helper.missing()), reason=helper.missing())
if not helper.missing():
    from fleet.launch.membership.engine import Engine, EngineSettings
    from fleet.launch.membership.etcd import EtcdStore
    from fleet.launch.membership.etcd_meeting import PORT_FIELD, EtcdContact

RULES = Rules(min_nodes=2, max_nodes=2, quiet_s=0.5)


class Place:
    """The nodes of one job; all are closed at the end."""

    def __init__(self, server: Etcd, folder: Path) -> None:
        self._server, self._folder, self._prefix = server, folder, f"/m{token_hex(8)}/"
        self.signals = SignalInbox()
        self.nodes: list[Engine] = []

    def node(
        self, name: str, rules: Rules = RULES, secret: bytes = b"", level: str = "CRITICAL", **settings: Any
    ) -> Engine:
        contact = EtcdContact(
            EtcdAddress(endpoints=(self._server.endpoint,)),
            prefix=self._prefix,
            key=NODE_PREFIX + name,
            ttl_s=6,
            is_outage=lambda: False,
        )
        contact.answer = ContactAnswer("127.0.0.1", b"", "a", contact.has_contact)
        contact.fields = {PORT_FIELD: contact.answer.port}
        one = Engine(
            contact,
            name=name,
            node=Node(host="127.0.0.1"),
            settings=EngineSettings(rules=rules, grace_s=7.0, **settings),
            log=LaunchLog(level),
            signals=self.signals,
            secret=secret,
        )
        self.nodes.append(one)
        return one

    def pair(self, rules: Rules = RULES, **settings: Any) -> tuple[Engine, Engine]:
        """Two nodes whose workers run."""
        two = self.node("a", rules, **settings), self.node("b", rules, **settings)
        self.join(*two)
        return two

    def join(self, *nodes: Engine) -> list[Any]:
        return together(*(lambda node=node: node.join({"name": node.name, "host": "127.0.0.1"}) for node in nodes))

    def failure(self, code: int, words: str = "") -> GroupResult:
        """A worker that ended with ``code`` and these last words."""
        log = self._folder / "workerlog.0"
        log.write_text(words)
        spec = ProcessSpec(role="worker", index=0, local_index=0, command=("x",), environment={}, log_path=log)
        end = ProcessExit(spec=spec, pid=1, exit_code=code, signal_name=None, lifetime_s=1.0, ended_at=0.0)
        return GroupResult(exit_code=code, first_failure=end)

    def keys(self) -> list[str]:
        """What etcd holds of the job."""
        store = EtcdStore(EtcdAddress(endpoints=(self._server.endpoint,)), timeout_s=5.0)
        try:
            return sorted(store.read(self._prefix).values)
        finally:
            store.close()

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self.signals.__exit__(None, None, None)


@pytest.fixture
def place(etcd: Etcd, tmp_path: Path) -> Iterator[Place]:
    one = Place(etcd, tmp_path)
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


def ends(node: Engine, result: GroupResult) -> Outcome:
    """Lets a node's workers end with ``result``."""
    if result.first_failure is not None or result.stop_signal is not None:
        node.announce_end(result, "Worker 0 was the first to fail.")
    return node.settle(result)


def held(node: Engine) -> Outcome:
    """Waits until a node is told to stop its workers, and stops them."""
    for _ in range(1000):
        if (event := node.take()) is not None and event.kind == "stop":
            return node.settle(GroupResult(exit_code=0, interrupted=True))
        threading.Event().wait(0.01)
    raise AssertionError("never told to stop")


def test_start_and_end(place: Place) -> None:
    """004-03, 004-16: one world on all nodes; the job is complete when all are done, and for whoever comes late."""
    pair = place.node("a"), place.node("b")
    first, second = place.join(*pair)
    assert (first.number, first.peers) == (second.number, second.peers)
    assert sorted((first.node_rank, second.node_rank)) == [0, 1]
    assert [peer["contact_port"] > 0 for peer in first.peers] == [True, True]
    assert together(*(lambda node=node: node.settle(GroupResult(exit_code=0)) for node in pair)) == [Outcome(0)] * 2
    (late,) = place.join(place.node("c"))
    assert isinstance(late, LeftJobError)
    assert late.exit_code == 0


def test_own_failure_asks_the_scheduler_and_the_others_hold(place: Place) -> None:
    """004-06, G13: exit 101; the peer waits for the replacement and keeps its rank."""
    one, two = place.pair()
    rank = two.world.nodes.index("b") if two.world is not None else -1
    assert ends(one, place.failure(7)) == Outcome(101)
    assert held(two).restart
    place.nodes.remove(one)
    one.close()
    _, again = place.join(place.node("c"), two)
    assert (again.restarts, again.node_rank) == (0, rank)
    assert again.number >= 1  # more where the machine was too busy to keep a lease, and a proposal was made again


def test_another_level_ends_the_job_with_3(place: Place) -> None:
    """004-06."""
    one, two = place.pair(replace(RULES, restarts=RestartRule(fault=END)))
    assert ends(one, place.failure(7)) == Outcome(3)
    assert held(two) == Outcome(3)


def test_restart_in_place_up_to_the_limit(place: Place) -> None:
    """G13: the newer family; then the worker's own code on every node."""
    one, two = place.pair(replace(RULES, restarts=RestartRule(limit=1)))
    assert ends(one, place.failure(7)).restart
    assert held(two).restart
    generations = place.join(one, two)
    assert [g.restarts for g in generations] == [1, 1]
    assert generations[0].number == generations[1].number >= 1
    assert ends(two, place.failure(9)) == Outcome(9)
    assert held(one) == Outcome(9)


def test_leave_record(place: Place) -> None:
    """SIGTERM: the node says that it goes; in a range the others go on at once."""
    one, two = place.pair(replace(RULES, min_nodes=1, quiet_s=60.0))
    assert ends(one, GroupResult(exit_code=143, stop_signal=15)) == Outcome(143)
    outcome = held(two)
    assert outcome.restart
    place.nodes.remove(one)
    one.close()
    (again,) = place.join(two)
    assert len(again.peers) == 1
    assert again.number >= 1


def test_workers_that_saved_themselves_for_another_node_start_again(place: Place) -> None:
    """--preempt_grace stops the workers of all nodes with 75; only the launcher that was told to stop leaves."""
    one, two = place.pair()
    saved = GroupResult(exit_code=75, stop_signal=15, preempted=True)
    place.signals.received.append(15)
    assert ends(one, saved) == Outcome(75)
    place.signals.received.clear()
    assert ends(two, saved).restart


LOST_PEER = "RuntimeError: Connection closed by peer [10.0.0.9]:1234\n"


def test_a_victim_does_not_take_the_blame(place: Place) -> None:
    """004-04: the worker of a survivor fails because its peer is gone; its launcher must not exit."""
    one, two = place.pair()
    blamed: list[Outcome] = []
    victim = threading.Thread(target=lambda: blamed.append(ends(two, place.failure(1, LOST_PEER))))
    victim.start()
    place.nodes.remove(one)
    one.close()  # its node is gone
    victim.join(60)  # etcd may take long to answer while the disk is busy
    assert [outcome.restart for outcome in blamed] == [True]


@pytest.mark.slow
def test_who_looks_like_a_victim_of_nobody_is_to_blame(place: Place) -> None:
    """After a lease in which nobody was lost, the failure was the worker's own."""
    one, two = place.pair()
    assert ends(two, place.failure(1, LOST_PEER)) == Outcome(101)
    assert held(one).restart


def test_another_number_of_nodes_is_refused(place: Place) -> None:
    """004-12; with --force it is taken."""
    place.pair()
    (refused,) = place.join(place.node("c", replace(RULES, min_nodes=4, max_nodes=4)))
    assert isinstance(refused, RendezvousError)
    assert "started for 4 nodes, but the job on etcd has 2" in str(refused)
    assert "python -m fleet.elastic --elastic_server=HOST:PORT --job_id=" in str(refused)


def test_force_changes_the_number_of_nodes(place: Place) -> None:
    one, two = place.pair()
    three = place.node("c", replace(RULES, min_nodes=3, max_nodes=3), changes_np=True)
    results = together(
        lambda: three.join({"name": "c", "host": "127.0.0.1"}),
        *(lambda node=node: (held(node), node.join({"name": node.name}))[1] for node in (one, two)),
    )
    assert [(g.number, len(g.peers)) for g in results] == [(results[0].number, 3)] * 3
    assert results[0].node_rank == 2


def test_fixed_job_waits_for_a_limited_time_and_ends_with_a_lost_node(place: Place) -> None:
    """--nnodes=2 --master etcd://ip:port: not elastic."""
    fixed = replace(RULES, is_elastic=False, restarts=RestartRule())
    (absent,) = place.join(place.node("x", fixed, wait_limit_s=0.5))
    assert isinstance(absent, RendezvousError)
    assert "Not every node came within 0 s" in str(absent) or "within 1 s" in str(absent)
    place.nodes.pop().close()
    assert place.keys() == [], "nothing refuses the next start with another number of nodes"
    one, two = place.pair(fixed)
    place.nodes.remove(one)
    one.close()
    assert held(two) == Outcome(1)


def test_a_launcher_with_another_secret_joins_nothing(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """Issue 10, Medium 9: one joined as rank 0. Its records count for nobody, and it is told why."""
    pair = [place.node(name, secret=b"secret", level="WARNING") for name in "ab"]
    place.join(*pair)
    strangers = [place.node(name, secret=secret) for name, secret in (("s", b"other"), ("n", b""))]
    for stranger in strangers:
        stranger._store.forget_s = 1  # it gives up after a second, instead of the time of a lease and 5 s
    for refused in place.join(*strangers):
        assert isinstance(refused, RendezvousError)
        assert "belongs to launchers with another secret, on 127.0.0.1. Set FLEET_JOB_SECRET" in str(refused)
    for node in pair:
        assert node.take() is None
        assert node.world is not None
        assert set(node.world.nodes) == {"a", "b"}
    rule = "from 127.0.0.1, is ignored: it is not sealed with this job's secret (FLEET_JOB_SECRET)"
    assert capfd.readouterr().err.count(rule) == 2, "once by each"


def test_a_forged_record_stops_nobody_and_is_written_over(place: Place) -> None:
    one, two = place.node("a", secret=b"secret"), place.node("b", secret=b"secret")
    place.join(one, two)
    store = EtcdStore(EtcdAddress(endpoints=(place._server.endpoint,)), timeout_s=5.0)
    try:
        forged = json.dumps({**json.loads(store.read(place._prefix).texts["world"]), "state": "over", "generation": 9})
        for text in (forged, "{", '{"min_nodes": "x"}', json.dumps([1])):
            store.put(f"{place._prefix}world", text)
            store.put(f"{place._prefix}node/x", text)
            for _ in range(500):
                assert one.take() is None
                assert two.take() is None
                threading.Event().wait(0.01)
                if store.read(place._prefix).texts["world"] != text:
                    break
            else:
                raise AssertionError("never written over")
    finally:
        store.close()


def test_what_launchers_with_another_secret_left_behind_is_taken_over(place: Place) -> None:
    old = place.node("a", replace(RULES, min_nodes=1, max_nodes=1), secret=b"old")
    place.join(old)
    assert ends(old, GroupResult(exit_code=0)) == Outcome(0)
    place.nodes.remove(old)
    old.close()
    (first, second) = place.join(place.node("b", secret=b"new"), place.node("c", secret=b"new"))
    assert (len(first.peers), first.number) == (2, second.number)


def test_two_launchers_of_one_name_are_not_one_node(place: Place) -> None:
    """Issue 10, Low: both joined as the same node and started its workers."""
    rules = replace(RULES, min_nodes=1, max_nodes=1)
    one = place.node("a", rules)
    place.join(one)
    (refused,) = place.join(place.node("a", rules))
    assert isinstance(refused, RendezvousError)
    assert "Another launcher of this job has the pod id a" in str(refused)
    place.nodes.pop().close()
    assert one.take() is None
    assert place.keys() == ["node/a", "world"]
