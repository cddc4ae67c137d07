"""Who is in the job, agreed on by all its nodes: pure rules over the keys of a store.

Every node keeps one leased key ``node/ID``; one key ``world`` holds the current generation. Each change of ``world`` is
a compare-and-set, so all nodes see the same sequence of worlds, whoever writes them::

    (gather) -> proposed -> fixed -> complete
        ^          |          |
        |          v          v
        +------ a member   over (failed, lost or stopped)
        |       is gone       |
        +---------------------+ restart

A world is *fixed* only after every member has acknowledged exactly this generation; workers start only in a fixed world
that names the node. Two nodes can therefore never start with different ideas of the world.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fleet.launch.membership.kv_client import View

NODE_PREFIX = "node/"
WORLD_KEY = "world"
# Phases of a node. "waiting" and "ready" are before the start, the others belong to a fixed generation.
WAITING, READY, RUNNING, WORKERS_DONE, DONE = "waiting", "ready", "running", "workers_done", "done"
# A node of an elastic job that stops its workers and does not come back.
LEAVING = "leaving"
# States of the world.
PROPOSED, FIXED, OVER, COMPLETE = "proposed", "fixed", "over", "complete"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a world may be proposed: at ``max_nodes``, or at ``min_nodes`` once nothing changed for ``quiet_s``."""

    min_nodes: int
    max_nodes: int
    quiet_s: float = 30.0
    sort_ip: bool = False


@dataclass(frozen=True, kw_only=True)
class Node:
    """One launcher as it describes itself; ``peer`` is what the planner wants to know, passed through unread."""

    host: str
    rank: int = -1
    serves: bool = False  # hosts the service: comes first unless ranks were asked for
    phase: str = WAITING
    generation: int = 0  # the one it acknowledged or runs in
    peer: Mapping[str, Any] = field(default_factory=dict)
    created: int = 0  # not stored: when its key came
    proof: str = ""  # on etcd: see _record_proof


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a generation is over: ``kind`` failed, lost or stopped; the exit code that every launcher hands on.

    In an elastic job also ``left`` (a node was told to stop), ``joined`` (nodes came) and ``scaled``.
    """

    kind: str
    code: int
    node: str
    text: str
    restart: bool = False


@dataclass(frozen=True, kw_only=True)
class World:
    """One generation: its members in rank order, with what each published.

    ``min_nodes`` and ``max_nodes`` are what an elastic job wants now; 0 where the command line alone says it.
    """

    generation: int
    state: str
    nodes: tuple[str, ...]
    peers: tuple[Mapping[str, Any], ...]
    restarts: int = 0
    reason: Reason | None = None
    min_nodes: int = 0
    max_nodes: int = 0
    proof: str = ""  # on etcd: see _record_proof

    @property
    def is_active(self) -> bool:
        """Whether its members run, or may be about to."""
        return self.state in (PROPOSED, FIXED)


def to_json(record: Node | World) -> dict[str, Any]:
    """Returns ``record`` as JSON data."""
    data = asdict(record)
    data.pop("created", None)
    return data


def to_text(record: Node | World) -> str:
    """Returns ``record`` as it stands on etcd."""
    return json.dumps(to_json(record), sort_keys=True)


def read_nodes(view: View) -> dict[str, Node]:
    """Returns the nodes whose lease is alive, by id."""
    return {
        key[len(NODE_PREFIX) :]: replace(Node(**value), created=view.created[key])
        for key, value in view.values.items()
        if key.startswith(NODE_PREFIX)
    }


def read_world(view: View) -> World | None:
    """Returns the current world, or None before the first."""
    value = view.values.get(WORLD_KEY)
    if value is None:
        return None
    reason = value["reason"]
    return World(
        generation=value["generation"],
        state=value["state"],
        nodes=tuple(value["nodes"]),
        peers=tuple(value["peers"]),
        restarts=value["restarts"],
        reason=None if reason is None else Reason(**reason),
        min_nodes=value["min_nodes"],
        max_nodes=value["max_nodes"],
        proof=value["proof"],
    )


def next_world(nodes: Mapping[str, Node], world: World | None, rules: Rules, quiet_s: float) -> World | None:
    """Returns the world that should come next, or None while the present one stands; any node may then write it.

    Args:
        nodes: the nodes alive.
        world: the present world.
        rules: when a world may be proposed.
        quiet_s: for how long the set of nodes has not changed.
    """
    if world is not None and world.is_active:
        gone = [node for node in world.nodes if node not in nodes]
        if not gone:
            return _advance(nodes, world)
        if world.state == FIXED:
            return replace(world, state=OVER, reason=lost_reason(world, gone[0]))
    return _propose(nodes, world, rules, quiet_s)


def _advance(nodes: Mapping[str, Node], world: World) -> World | None:
    wanted = READY if world.state == PROPOSED else DONE
    if all(nodes[n].phase == wanted and nodes[n].generation == world.generation for n in world.nodes):
        return replace(world, state=FIXED if world.state == PROPOSED else COMPLETE)
    return None


def lost_reason(world: World, node: str) -> Reason:
    """Returns the reason of a generation that ``node`` is gone from."""
    index = world.nodes.index(node)
    host, pod = (world.peers[index].get(name, "unknown") for name in ("host", "name"))
    text = f"Node {index} of {len(world.nodes)} (host {host}, pod {pod}) is gone: its launcher gives no sign of life."
    return Reason(kind="lost", code=1, node=node, text=text)


def _propose(nodes: Mapping[str, Node], world: World | None, rules: Rules, quiet_s: float) -> World | None:
    if any(node.phase not in (WAITING, READY) for node in nodes.values()):
        return None  # a member of the last generation is still stopping its workers; it will come or leave
    candidates = {name: node for name, node in nodes.items() if name not in rank_conflicts(nodes)}
    if len(candidates) < rules.max_nodes and not (len(candidates) >= rules.min_nodes and quiet_s >= rules.quiet_s):
        return None
    chosen = rank_order(candidates, rules)
    restarted = world is not None and world.state == OVER and world.reason is not None and world.reason.restart
    reproposed = world is not None and world.state == PROPOSED
    restarts = 0 if world is None or not (restarted or reproposed) else world.restarts + restarted
    return World(
        generation=1 if world is None else world.generation + 1,
        state=PROPOSED,
        nodes=tuple(chosen),
        peers=tuple(candidates[name].peer for name in chosen),
        restarts=restarts,
    )


def rank_order(nodes: Mapping[str, Node], rules: Rules) -> list[str]:
    """Returns the ids of at most ``max_nodes`` nodes in rank order.

    A rank that was asked for wins; then the node that hosts the service, then the order of arrival, or of addresses
    with ``sort_ip``.
    """

    def arrival(name: str) -> tuple[bool, tuple[int, str] | int]:
        node = nodes[name]
        return not node.serves, _address_order(node.host) if rules.sort_ip else node.created

    asked = sorted((name for name in nodes if nodes[name].rank >= 0), key=lambda name: nodes[name].rank)
    others = sorted((name for name in nodes if nodes[name].rank < 0), key=arrival)
    chosen = (asked + others)[: rules.max_nodes]
    placed = {nodes[name].rank: name for name in chosen if 0 <= nodes[name].rank < len(chosen)}
    rest = iter([name for name in others + asked if name in chosen and name not in placed.values()])
    return [placed[slot] if slot in placed else next(rest) for slot in range(len(chosen))]


def _address_order(host: str) -> tuple[int, str]:
    try:
        return int(ipaddress.ip_address(host)), host
    except ValueError:
        return 1 << 128, host


def rank_conflicts(nodes: Mapping[str, Node]) -> list[str]:
    """Returns the nodes that ask for a rank which an earlier node asks for as well."""
    holder: dict[int, str] = {}
    late = []
    for name in sorted(nodes, key=lambda name: nodes[name].created):
        rank = nodes[name].rank
        if rank >= 0 and holder.setdefault(rank, name) != name:
            late.append(name)
    return late


def absent_ranks(nodes: Mapping[str, Node], rules: Rules) -> Sequence[int]:
    """Returns which of the node ranks 0 to ``max_nodes`` - 1 nobody holds or could be given yet."""
    taken = {node.rank for node in nodes.values() if 0 <= node.rank < rules.max_nodes}
    free = [rank for rank in range(rules.max_nodes) if rank not in taken]
    num_others = sum(1 for node in nodes.values() if node.rank < 0)
    return free[num_others:]
