"""What a node on etcd does next, as tables: no etcd, no clock, no process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.launch.membership.agreement import (
    Rules,
    blamed_reason,
    census,
    decide,
    elastic_order,
    first_world,
    next_world,
    own_node,
    wanted_text,
)
from fleet.launch.membership.store import View
from fleet.launch.membership.world import (
    COMPLETE,
    DONE,
    FIXED,
    LEAVING,
    OVER,
    PROPOSED,
    READY,
    RUNNING,
    WAITING,
    WORKERS_DONE,
    Node,
    Reason,
    World,
    read_world,
    to_json,
)
from fleet.launch.restarts import RestartRule

TWO = Rules(min_nodes=2, max_nodes=2)
RANGE = Rules(min_nodes=2, max_nodes=4, quiet_s=5.0)
PEER = {"host": "10.0.0.9", "name": "pod"}


def nodes(**phases: str) -> dict[str, Node]:
    """Nodes a=WAITING, b="ready 3" in the order in which they came."""
    found = {}
    for i, (name, text) in enumerate(phases.items()):
        phase, _, generation = text.partition(" ")
        found[name] = Node(host=name, phase=phase, generation=int(generation or 0), created=i, peer=PEER)
    return found


def world(state: str, *members: str, generation: int = 3, np: tuple[int, int] = (2, 2), **fields: Any) -> World:
    peers = tuple(PEER for _ in members)
    made = World(generation=generation, state=state, nodes=members, peers=peers, min_nodes=np[0], max_nodes=np[1])
    return replace(made, **fields)


def over(kind: str, node: str = "", restart: bool = True, code: int = 0) -> dict[str, Any]:
    return {"reason": Reason(kind=kind, code=code, node=node, text="because", restart=restart)}


def step(
    found: dict[str, Node], now: World | None, rules: Rules = TWO, quiet_s: float = 0.0, **more: Any
) -> World | None:
    return next_world(found, now, rules, quiet_s=quiet_s, **more)


def test_first_launcher_writes_what_the_job_wants() -> None:
    made = step(nodes(a=WAITING), None, RANGE)
    assert made is not None
    assert (made.state, made.nodes, made.min_nodes, made.max_nodes) == (OVER, (), 2, 4)


def test_record_comes_back_from_json_as_it_was() -> None:
    now = world(OVER, "a", "b", np=(2, 4), restarts=2, **over("lost", "b"))
    view = View(1, {"world": to_json(now)}, {}, {})
    assert read_world(view) == now


@pytest.mark.parametrize(
    ("found", "np", "quiet_s", "chosen"),
    [
        (nodes(a=WAITING), (2, 2), 99.0, None),  # 004-03: exactly np
        (nodes(a=WAITING, b=WAITING), (2, 2), 0.0, ("a", "b")),
        (nodes(a=WAITING, b=WAITING, c=WAITING), (2, 2), 0.0, ("a", "b")),
        (nodes(a=WAITING, b=WAITING), (2, 4), 4.9, None),
        (nodes(a=WAITING, b=WAITING), (2, 4), 5.0, ("a", "b")),
        (nodes(a=WAITING, b=WAITING, c=WAITING, d=WAITING), (2, 4), 0.0, ("a", "b", "c", "d")),
        (nodes(a=WAITING, b="running 3"), (1, 1), 99.0, None),  # b has not stopped its workers yet
        (nodes(a=WAITING, b="leaving 3"), (1, 1), 99.0, None),
    ],
)
def test_when_a_generation_is_proposed(
    found: dict[str, Node], np: tuple[int, int], quiet_s: float, chosen: tuple[str, ...] | None
) -> None:
    made = step(found, world(OVER, np=np), RANGE, quiet_s)
    assert (made.nodes if made is not None else None) == chosen
    if made is not None:
        assert (made.state, made.generation) == (PROPOSED, 4)


@pytest.mark.parametrize(
    ("reason", "rules", "at_once"),
    [
        (over("left", "c"), RANGE, True),  # a leave record: nobody else is expected
        (over("joined"), RANGE, True),
        (over("lost", "c"), RANGE, True),  # a replacement had the time of a lease to come
        (over("failed", "c"), RANGE, False),  # its scheduler brings it back
        (over("failed", "c"), replace(RANGE, restarts=RestartRule()), True),  # it would have come back itself by now
    ],
)
def test_a_range_waits_only_for_what_a_scheduler_brings_back(
    reason: dict[str, Any], rules: Rules, at_once: bool
) -> None:
    found = nodes(a=WAITING, b=WAITING)
    now = world(OVER, "a", "b", "c", np=(2, 4), **reason)
    assert (step(found, now, rules) is not None) is at_once
    assert step(found, now, rules, quiet_s=5.0) is not None


def test_members_that_still_stop_their_workers_are_waited_for() -> None:
    found = nodes(a=WAITING, b=WAITING, c="running 3")
    for reason in (over("scaled"), over("joined"), over("lost", "d")):
        now = world(OVER, "a", "b", "c", "d", np=(2, 4), **reason)
        assert step(found, now, RANGE, quiet_s=99.0) is None
        assert step({**found, "c": replace(found["c"], phase=WAITING)}, now, RANGE) is not None


def test_every_member_acknowledges_before_a_generation_is_fixed() -> None:
    now = world(PROPOSED, "a", "b")
    assert step(nodes(a="ready 3", b=WAITING), now) is None
    assert step(nodes(a="ready 3", b="ready 2"), now) is None
    made = step(nodes(a="ready 3", b="ready 3"), now)
    assert made is not None
    assert (made.state, made.generation) == (FIXED, 3)


@pytest.mark.parametrize(
    ("own", "seen", "phase"),
    [
        ("ready 3", "waiting", WAITING),
        ("ready 3", "ready 2", WAITING),
        ("ready 3", "ready 3", READY),
        ("waiting", "running 2", WAITING),
        ("done 3", "running 3", DONE),
    ],
)
def test_an_acknowledgement_counts_once_it_is_written(own: str, seen: str, phase: str) -> None:
    """004-03: else who fixes a generation before its own key says "ready" looks as if it had come back."""
    node, found = nodes(a=own)["a"], nodes(a=seen)["a"]
    assert own_node(node, replace(found, created=7)) == replace(node, phase=phase, created=7)


@pytest.mark.parametrize("found", [nodes(a="ready 3"), nodes(a="ready 3", b="leaving 3")])
def test_a_proposal_whose_member_is_gone_is_dropped(found: dict[str, Node]) -> None:
    made = step(found, world(PROPOSED, "a", "b"))
    assert made is not None
    assert (made.state, made.reason is not None and made.reason.restart) == (OVER, True)


def test_a_proposal_that_was_scaled_away_is_dropped() -> None:
    made = step(nodes(a="ready 3", b="ready 3"), world(PROPOSED, "a", "b", np=(4, 4)))
    assert made is not None
    assert made.state == OVER


@pytest.mark.parametrize(
    ("found", "trusts", "kind"),
    [
        (nodes(a="running 3"), True, "lost"),  # 004-04
        (nodes(a="running 3"), False, None),  # etcd came back just now; b may still come back
        (nodes(a="running 3", b=WAITING), True, "lost"),  # b had been cut off
        (nodes(a="running 3", b="leaving 3"), True, "lost"),
        (nodes(a="running 3", b="ready 3"), True, None),  # it is about to start
        (nodes(a="running 3", b="done 3"), True, None),
    ],
)
def test_when_a_member_counts_as_lost(found: dict[str, Node], trusts: bool, kind: str | None) -> None:
    made = step(found, world(FIXED, "a", "b"), trusts_absence=trusts)
    assert (made.reason.kind if made is not None and made.reason is not None else None) == kind
    if made is not None and made.reason is not None:
        assert made.reason.restart
        fixed_job = step(found, world(FIXED, "a", "b"), replace(TWO, is_elastic=False))
        assert fixed_job is not None
        assert fixed_job.reason is not None
        assert not fixed_job.reason.restart, "a job of a fixed number of nodes ends"


@pytest.mark.parametrize(
    ("np", "found", "quiet_s", "kind"),
    [
        ((4, 4), nodes(a="running 3", b="running 3"), 0.0, "scaled"),  # 004-09
        ((1, 1), nodes(a="running 3", b="running 3"), 0.0, "scaled"),  # 004-11
        ((2, 2), nodes(a="running 3", b="running 3"), 99.0, None),  # 004-13
        ((2, 2), nodes(a="running 3", b="running 3", c=WAITING), 99.0, None),  # a spare
        ((2, 3), nodes(a="running 3", b="running 3", c=WAITING), 0.0, "joined"),
        ((2, 4), nodes(a="running 3", b="running 3", c=WAITING), 0.0, None),
        ((2, 4), nodes(a="running 3", b="running 3", c=WAITING), 5.0, "joined"),
        ((2, 3), nodes(a="running 3", b="workers_done 3", c=WAITING), 0.0, None),  # the end is near
        ((4, 4), nodes(a="running 3", b="done 3"), 0.0, None),
    ],
)
def test_when_the_number_of_nodes_changes(
    np: tuple[int, int], found: dict[str, Node], quiet_s: float, kind: str | None
) -> None:
    made = step(found, world(FIXED, "a", "b", np=np), RANGE, quiet_s)
    assert (made.reason.kind if made is not None and made.reason is not None else None) == kind


def test_complete_when_every_member_is_done() -> None:
    """004-16."""
    now = world(FIXED, "a", "b")
    assert step(nodes(a="done 3", b="workers_done 3"), now) is None
    made = step(nodes(a="done 3", b="done 3"), now)
    assert made is not None
    assert made.state == COMPLETE
    assert step(nodes(c=WAITING), made) is None, "a late joiner changes nothing"
    again = step(nodes(c=WAITING), made, replace(TWO, is_elastic=False))
    assert again is not None
    assert again.state == OVER, "a job of a fixed number of nodes is started again"


def test_a_job_that_ended_for_good_starts_anew_once_its_nodes_have_left() -> None:
    now = world(OVER, "a", "b", restarts=2, **over("failed", "a", restart=False, code=7))
    assert step(nodes(a="running 3", c=WAITING), now) is None
    made = step(nodes(c=WAITING), now)
    assert made == first_world(TWO, 3)
    assert made.restarts == 0


@pytest.mark.parametrize(
    ("before", "now", "np", "expected"),
    [
        (("a", "b", "c"), "abc", 3, "abc"),
        (("a", "b", "c"), "acx", 3, "axc"),  # 004-05: the replacement takes the free rank
        (("a", "b"), "abxy", 4, "abxy"),  # 004-10: those who come are appended
        (("a", "b", "c", "d"), "acd", 3, "adc"),  # the hole goes to the tail
        (("a", "b", "c", "d"), "abcd", 2, "ab"),  # 004-11
        (("a", "b", "c"), "cx", 2, "cx"),
        (("a", "b", "c"), "bxy", 3, "xby"),
    ],
)
def test_survivors_keep_their_ranks(before: tuple[str, ...], now: str, np: int, expected: str) -> None:
    found = nodes(**dict.fromkeys(now, WAITING))
    order = elastic_order(found, world(OVER, *before, np=(1, np)), TWO)
    assert "".join(order) == expected


def test_asked_ranks_win() -> None:
    found = nodes(a=WAITING, b=WAITING)
    found["b"] = replace(found["b"], rank=0)
    assert elastic_order(found, world(OVER, "a", "b"), TWO) == ["b", "a"]


def test_survivors_keep_their_ranks_beside_one_that_asks() -> None:
    """004-05: b asks for rank 1; the survivor d keeps rank 3, and who came takes the place that is left."""
    found = nodes(**dict.fromkeys("xdab", WAITING))
    found["b"] = replace(found["b"], rank=1)
    assert elastic_order(found, world(OVER, "a", "b", "c", "d", np=(1, 4)), TWO) == ["a", "b", "x", "d"]
    assert elastic_order(found, world(OVER, "b", "a", "c", "d", np=(1, 4)), TWO)[1] == "b"


def test_the_nodes_behind_the_new_end_leave() -> None:
    """004-11, 004-17: pods ask for their index; the operator deletes the last ones."""
    found = nodes(**dict.fromkeys("cba", WAITING))
    found = {name: replace(node, rank="abc".index(name)) for name, node in found.items()}
    assert elastic_order(found, world(OVER, "c", "b", "a", np=(2, 2)), TWO) == ["a", "b"]


def action(
    own: str, now: World | None, joined: World | None = None, others: str = RUNNING, **more: Any
) -> tuple[str, int]:
    found = nodes(a=own, b=f"{others} 3")
    made = decide("a", found, now, TWO, quiet_s=0.0, joined=joined, **more)
    return made.kind, made.code


def test_what_a_waiting_node_does() -> None:
    joined = world(FIXED, "a", "b", generation=2)
    assert action(WAITING, None, others=WAITING) == ("write", 0)
    assert action(WAITING, world(PROPOSED, "a", "b"), others=WAITING) == ("acknowledge", 0)
    assert action("ready 3", world(PROPOSED, "a", "b"), others=WAITING) == ("wait", 0)
    assert action("ready 3", world(FIXED, "a", "b")) == ("enter", 0)
    assert action(WAITING, world(FIXED, "b", "c"), others=RUNNING)[0] == "write", "c is gone"
    assert action(WAITING, world(COMPLETE, "x", "y")) == ("leave", 0)
    dropped = world(FIXED, "b", np=(1, 1))
    assert action(WAITING, dropped, joined, was_scaled=True) == ("leave", 0)
    assert action(WAITING, dropped, joined) == ("wait", 0), "a spare"
    ended = world(OVER, "a", "b", generation=2, **over("failed", "b", restart=False, code=9))
    assert action(WAITING, ended, joined) == ("leave", 9)


def test_what_a_running_node_does() -> None:
    joined = world(FIXED, "a", "b")
    assert action("running 3", joined, joined) == ("wait", 0)
    assert action("running 3", world(OVER, "a", "b", **over("scaled")), joined) == ("hold", 0)
    assert action("running 3", world(FIXED, "b", "c", generation=5), joined, trusts_absence=False) == ("hold", 0)
    assert action("done 3", world(COMPLETE, "a", "b"), joined) == ("complete", 0)


def test_a_record_that_etcd_lost_is_written_again() -> None:
    """An etcd that came back empty, or with an older record, does not stop a healthy job."""
    joined = world(FIXED, "a", "b")
    for lost in (None, world(FIXED, "x", generation=1)):
        made = decide("a", nodes(a="running 3", b="running 3"), lost, TWO, quiet_s=0.0, joined=joined)
        assert (made.kind, made.world) == ("write", joined)
        made = decide("a", nodes(a=WAITING), lost, TWO, quiet_s=0.0, joined=joined)
        assert made.world is not None
        assert (made.world.state, made.world.generation, made.world.nodes) == (OVER, 3, ("a", "b"))


def test_what_a_waiting_node_waits_for_is_said() -> None:
    text = census(nodes(a=WAITING, b="running 3"), world(OVER, np=(2, 4)), RANGE)
    assert text == "1 of 2:4 nodes wait here (a); still stopping their workers: b"
    assert "the job runs on b" in census(nodes(a=WAITING, b="running 3"), world(FIXED, "b"), RANGE)
    assert wanted_text(world(OVER, np=(3, 3))) == "3"


class Cluster:
    """Nodes that act on one store in any order; each keeps to what ``decide`` says."""

    def __init__(self, names: str, rules: Rules) -> None:
        self.rules, self.world = rules, None
        self.nodes = nodes(**dict.fromkeys(names, WAITING))
        self.joined: dict[str, World] = {}
        self.started: dict[int, dict[str, World]] = {}

    def act(self, name: str) -> None:
        made = decide(name, self.nodes, self.world, self.rules, quiet_s=9.0, joined=self.joined.get(name))
        own = self.nodes[name]
        if made.kind == "write":
            self.world = made.world
        elif made.kind == "acknowledge" and made.world is not None:
            self.nodes[name] = replace(own, phase=READY, generation=made.world.generation)
        elif made.kind == "enter" and made.world is not None:
            self.joined[name] = made.world
            self.started.setdefault(made.world.generation, {})[name] = made.world
            self.nodes[name] = replace(own, phase=RUNNING, generation=made.world.generation)
        elif made.kind == "hold":
            self.nodes[name] = replace(own, phase=WAITING)

    def change(self, what: int, name: str) -> None:
        """Kills a node, starts one, or scales the job."""
        if what == 0 and name in self.nodes and len(self.nodes) > 1:
            del self.nodes[name]
        elif what == 1 and name not in self.nodes:
            self.nodes[name] = Node(host=name, phase=WAITING, created=100 + len(self.nodes), peer=PEER)
            self.joined.pop(name, None)
        elif what == 2 and self.world is not None and self.world.state != COMPLETE:
            size = 1 + ord(name) % 3
            self.world = replace(self.world, min_nodes=size, max_nodes=size)


MOVES = st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd")), max_size=60)


@settings(max_examples=60, deadline=None)
@given(MOVES)
def test_no_two_nodes_ever_start_with_different_worlds(moves: list[tuple[int, str]]) -> None:
    """Whatever happens in whatever order; and once it is quiet, everybody who should run does (004-03)."""
    cluster = Cluster("abc", RANGE)
    for what, name in moves:
        if what < 3:
            cluster.change(what, name)
        elif name in cluster.nodes:
            cluster.act(name)
    for started in cluster.started.values():
        assert len({(one.nodes, one.generation) for one in started.values()}) == 1
    for _ in range(12):
        for name in "abcd":
            if name in cluster.nodes:
                cluster.act(name)
    now = cluster.world
    assert now is not None
    if len(cluster.nodes) >= now.min_nodes:
        assert now.state == FIXED
        assert all(cluster.nodes[name].phase == RUNNING for name in now.nodes)
        assert len(now.nodes) == min(len(cluster.nodes), now.max_nodes)
    for unused in (DONE, WORKERS_DONE, LEAVING):
        assert unused not in {node.phase for node in cluster.nodes.values()}


@pytest.mark.parametrize(
    ("leaves", "end"),
    [(False, "is gone: its launcher gives no sign of life."), (True, "leaves the job.")],
)
def test_a_survivor_names_the_node_it_lost(leaves: bool, end: str) -> None:
    reason = blamed_reason(world(FIXED, "a", "b"), "b", leaves=leaves)
    assert reason.text == f"Node 1 of 2 (host 10.0.0.9, pod pod) {end}"
    assert (reason.kind, reason.restart) == ("lost", True)
