"""What a job of a fixed number of nodes agrees on: 000-05/06, node ranks, no split brain (reliability study 2.2)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from fleet.launch.membership.agreement import (
    Rules,
    absent_ranks,
    decide,
    next_world,
    rank_conflicts,
    rank_order,
)
from fleet.launch.membership.store import View
from fleet.launch.membership.world import (
    COMPLETE,
    DONE,
    FIXED,
    NODE_PREFIX,
    OVER,
    PROPOSED,
    READY,
    RUNNING,
    WAITING,
    WORLD_KEY,
    Node,
    Reason,
    World,
    read_nodes,
    read_world,
    to_json,
)
from fleet.launch.restarts import RestartRule

TWO = Rules(min_nodes=2, max_nodes=2, is_elastic=False, restarts=RestartRule())
FIRST = World(generation=0, state=OVER, nodes=(), peers=(), min_nodes=2, max_nodes=2)


def node(**fields: object) -> Node:
    return Node(**{"host": "10.0.0.1", **fields})  # type: ignore[arg-type]


def world(state: str, *names: str, **fields: object) -> World:
    made = {"generation": 1, "state": state, "nodes": names, "peers": tuple({} for _ in names)}
    return World(**{**made, "min_nodes": 2, "max_nodes": 2, **fields})  # type: ignore[arg-type]


def coming(nodes: dict[str, Node], now: World | None, rules: Rules = TWO, quiet_s: float = 0.0) -> World | None:
    return next_world(nodes, now, rules, quiet_s=quiet_s)


def test_waits_until_all_nodes_are_there() -> None:
    assert coming({"a": node()}, None) == FIRST, "nobody is in it"
    assert coming({"a": node()}, FIRST, quiet_s=1e9) is None


def test_proposes_fixes_and_completes() -> None:
    nodes = {"a": node(created=1, peer={"n": "a"}), "b": node(created=2, peer={"n": "b"})}
    proposed = coming(nodes, FIRST)
    assert proposed is not None
    assert (proposed.state, proposed.generation, proposed.nodes) == (PROPOSED, 1, ("a", "b"))
    assert proposed.peers == ({"n": "a"}, {"n": "b"})
    assert coming({**nodes, "a": node(phase=READY, generation=1)}, proposed) is None, "b has not agreed"
    ready = {name: node(phase=READY, generation=1) for name in nodes}
    fixed = coming(ready, proposed)
    assert fixed is not None
    assert fixed.state == FIXED
    done = {name: node(phase=DONE, generation=1) for name in nodes}
    assert coming({**done, "b": node(phase=RUNNING, generation=1)}, fixed) is None
    complete = coming(done, fixed)
    assert complete is not None
    assert complete.state == COMPLETE


def test_acknowledgement_of_an_older_generation_does_not_count() -> None:
    nodes = {"a": node(phase=READY, generation=3), "b": node(phase=READY, generation=2)}
    assert coming(nodes, world(PROPOSED, "a", "b", generation=3)) is None


def test_range_waits_for_quiet_then_goes_on_with_fewer() -> None:
    """000-21: MIN:MAX waits elastic_timeout after the last change."""
    rules = replace(TWO, max_nodes=3, quiet_s=30, is_elastic=True)
    first = replace(FIRST, max_nodes=3)
    nodes = {"a": node(created=1), "b": node(created=2)}
    assert coming(nodes, first, rules, 29.9) is None
    made = coming(nodes, first, rules, 30.0)
    assert made is not None
    assert made.nodes == ("a", "b")
    full = coming({**nodes, "c": node(created=3)}, first, rules, 0.0)
    assert full is not None
    assert full.nodes == ("a", "b", "c")


def test_member_gone_before_the_start_is_proposed_again_without_it() -> None:
    rules = replace(TWO, min_nodes=1, quiet_s=5, is_elastic=True)
    left = {"a": node(phase=READY, generation=1)}
    dropped = coming(left, world(PROPOSED, "a", "b", min_nodes=1), rules)
    assert dropped is not None
    again = coming(left, dropped, rules, 6)
    assert again is not None
    assert (again.generation, again.state, again.nodes) == (2, PROPOSED, ("a",))


def test_member_gone_while_running_ends_the_generation_and_is_named() -> None:
    now = world(FIXED, "a", "b", peers=({}, {"host": "10.0.0.9"}))
    over = coming({"a": node(phase=RUNNING, generation=1)}, now)
    assert over is not None
    assert over.state == OVER
    assert over.reason is not None
    assert (over.reason.kind, over.reason.restart) == ("lost", False)
    assert "10.0.0.9" in over.reason.text


def test_restart_waits_until_every_member_has_stopped() -> None:
    reason = Reason(kind="failed", code=7, node="a", text="", restart=True)
    now = world(OVER, "a", "b", reason=reason, restarts=1)  # who declares the end has counted it
    nodes = {"a": node(generation=1), "b": node(phase=RUNNING, generation=1)}
    assert coming(nodes, now, quiet_s=1e9) is None
    nodes["b"] = node(generation=1)
    again = coming(nodes, now)
    assert again is not None
    assert (again.generation, again.restarts) == (2, 1)


def test_a_new_job_under_the_same_id_counts_its_restarts_from_zero() -> None:
    nodes = {"a": node(), "b": node()}
    first = coming(nodes, world(COMPLETE, "x", "y", generation=5, restarts=3))
    assert first is not None
    again = coming(nodes, first)
    assert again is not None
    assert (again.generation, again.restarts) == (6, 0)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({"a": node(created=1), "b": node(created=2, serves=True)}, ["b", "a"]),
        ({"a": node(created=2), "b": node(created=1)}, ["b", "a"]),
        ({"a": node(created=1, rank=1), "b": node(created=2)}, ["b", "a"]),
        ({"a": node(created=1, serves=True), "b": node(created=2, rank=0)}, ["b", "a"]),
    ],
)
def test_rank_order(nodes: dict[str, Node], expected: list[str]) -> None:
    """C.5: an explicit rank wins, then the master's node, then the order of arrival."""
    assert rank_order(nodes, TWO) == expected


def test_rank_order_by_address_is_numeric() -> None:
    """--sort_ip."""
    nodes = {name: node(host=f"10.0.0.{last}", created=i) for i, (name, last) in enumerate([("a", 10), ("b", 9)])}
    assert rank_order(nodes, replace(TWO, sort_ip=True)) == ["b", "a"]


def test_absent_ranks_and_conflicts() -> None:
    """003-36: which ranks are absent."""
    rules = replace(TWO, min_nodes=4, max_nodes=4)
    assert list(absent_ranks({"a": node(rank=2), "b": node()}, rules)) == [1, 3]
    assert rank_conflicts({"a": node(rank=1, created=1), "b": node(rank=1, created=2)}) == ["b"]


class FakeStore:
    """Compare-and-set over a dictionary, as the service does it."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.created: dict[str, int] = {}
        self.revision = 0

    def view(self) -> View:
        values = {key: json.loads(text) for key, text in self.texts.items()}
        return View(self.revision, values, dict(self.texts), dict(self.created))

    def put(self, key: str, record: Node | World | None) -> None:
        self.revision += 1
        if record is None:
            self.texts.pop(key, None)
            self.created.pop(key, None)
            return
        self.texts[key] = json.dumps(to_json(record), sort_keys=True)
        self.created.setdefault(key, self.revision)


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 200))])
def test_no_interleaving_splits_the_world(seed: int) -> None:
    """Split brain of the study: nodes act on stale views in any order, join late, vanish; worlds that start agree."""
    chance = random.Random(seed)
    store = FakeStore()
    rules = Rules(min_nodes=2, max_nodes=3, quiet_s=3, is_elastic=seed % 2 == 0, restarts=RestartRule())
    views: dict[str, View] = {}
    started: dict[int, set[tuple[str, ...]]] = {}
    running: dict[str, World] = {}
    for step in range(400):
        name = chance.choice("abc")
        if name not in views and step > chance.randrange(60):
            store.put(NODE_PREFIX + name, node())
            views[name] = store.view()
            continue
        if name not in views:
            continue
        if chance.random() < 0.01 and name not in running:
            store.put(NODE_PREFIX + name, None)
            del views[name]
            continue
        if chance.random() < 0.6:
            views[name] = store.view()
        view = views[name]
        nodes = read_nodes(view)
        action = decide(
            name, nodes, read_world(view), rules, quiet_s=chance.choice([0.0, 5.0]), joined=running.get(name)
        )
        if action.kind == "write" and store.texts.get(WORLD_KEY) == view.texts.get(WORLD_KEY):
            store.put(WORLD_KEY, action.world)
        elif action.kind == "acknowledge" and action.world is not None:
            store.put(NODE_PREFIX + name, node(phase=READY, generation=action.world.generation))
        elif action.kind == "enter" and action.world is not None:
            running[name] = action.world
            started.setdefault(action.world.generation, set()).add(action.world.nodes)
            store.put(NODE_PREFIX + name, node(phase=RUNNING, generation=action.world.generation))
        elif action.kind == "hold":
            store.put(NODE_PREFIX + name, node())
    assert all(len(worlds) == 1 for worlds in started.values())
    check_final(store, running)


def check_final(store: FakeStore, running: Mapping[str, World]) -> None:
    final = read_world(store.view())
    if final is not None and final.state == FIXED:
        phases = {name: read_nodes(store.view())[name].phase for name in final.nodes if name in running}
        late = {n for n in phases if running[n].generation != final.generation and phases[n] == RUNNING}
        assert not late, "a node of a fixed world runs in another"


def test_waiting_phase_is_the_default() -> None:
    assert node().phase == WAITING
