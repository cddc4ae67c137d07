"""The members of the job, agreed on by all its nodes: pure functions from a view of the store to a node's next action.

Every node keeps one leased key ``node/ID``; one key ``world`` holds the current generation. Each change of ``world`` is
a compare-and-set, so all nodes see the same sequence of worlds, and any node may write the next::

    over (nobody yet) -> proposed -> fixed -> complete
        ^                   |          |
        |     a member is   |          |  failed, lost, stopped; in an elastic job also left, joined, scaled
        +------- gone ------+----------+

A world is *fixed* only after every member has acknowledged exactly this generation; workers start only in a fixed world
that names the node. Two nodes can therefore never start with different ideas of the world.

States of a node, from this (Fleet's names)::

    WAIT      phase waiting or ready: until the record is fixed and names the node
    RUN       phase running; then workers_done and done
    HOLD      the generation is over with ``restart``: workers are stopped, then WAIT
    RESTART   its own worker failed: exit 101 for a scheduler, or WAIT again in place
    COMPLETE  every member is done

A job of a fixed number of nodes follows the same rules with ``is_elastic`` False: a node that is lost ends it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.launch.membership import world as _world
from fleet.launch.membership.world import COMPLETE, FIXED, OVER, PROPOSED, Node, Reason, World
from fleet.launch.restarts import IN_PLACE, SCHEDULER, RestartRule

_STOPPING = (_world.RUNNING, _world.WORKERS_DONE, _world.DONE, _world.LEAVING)
_FINISHING = (_world.WORKERS_DONE, _world.DONE)
_CAME_BACK = (_world.WAITING,)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The job as the command line describes it; the number of nodes counts only until the record holds one.

    A world is proposed at ``max_nodes``, or at ``min_nodes`` once nothing changed for ``quiet_s``. ``is_elastic`` is
    False for a job of a fixed number of nodes: a lost node ends it.
    """

    min_nodes: int
    max_nodes: int
    quiet_s: float = 30.0
    sort_ip: bool = False
    is_elastic: bool = True
    restarts: RestartRule = RestartRule(fault=SCHEDULER)


@dataclass(frozen=True, kw_only=True)
class Action:
    """The next action of a node: ``write`` the world, ``acknowledge`` or ``enter`` it, ``hold``, ``leave`` or ``wait``.

    To ``leave`` is to exit with ``code``; ``complete`` is the end of a generation whose every node is done.
    """

    kind: str
    world: World | None = None
    text: str = ""
    code: int = 0


def first_world(rules: Rules, generation: int = 0) -> World:
    """Returns the record of a job that has not started: nobody is in it, and it says how many nodes are wanted."""
    return World(
        generation=generation,
        state=OVER,
        nodes=(),
        peers=(),
        min_nodes=rules.min_nodes,
        max_nodes=rules.max_nodes,
    )


def decide(
    name: str,
    nodes: Mapping[str, Node],
    world: World | None,
    rules: Rules,
    *,
    quiet_s: float,
    joined: World | None = None,
    trusts_absence: bool = True,
    was_scaled: bool = False,
) -> Action:
    """Returns the next action of node ``name``.

    Args:
        name: this node.
        nodes: the nodes whose lease is alive.
        world: the record; None before the first one.
        rules: the settings of this launcher.
        quiet_s: for how long the set of nodes has not changed.
        joined: the generation this node runs in or ran in last; None before the first.
        trusts_absence: False soon after the store was out of reach: nodes may not have come back yet.
        was_scaled: the generation this node ran in ended because the job was scaled.
    """
    own = nodes.get(name)
    waits = own is None or own.phase in (_world.WAITING, _world.READY)
    number = 0 if joined is None else joined.generation
    if joined is not None and (world is None or world.generation < number):
        # The store has lost the record, or came back with an older one: the record that this node ran in is newer.
        return Action(kind="write", world=replace(joined, state=OVER, reason=None) if waits else joined)
    coming = next_world(nodes, world, rules, quiet_s=quiet_s, trusts_absence=trusts_absence)
    if coming is not None:
        return Action(kind="write", world=coming)
    assert world is not None
    if not waits:
        return _while_running(world, number)
    if world.state == COMPLETE and rules.is_elastic:
        return Action(kind="leave", text="The job is complete; nothing is left to do.")
    return _while_waiting(name, own, world, number, was_scaled)


def _while_running(world: World, joined: int) -> Action:
    if world.generation != joined or world.state == OVER:
        return Action(kind="hold", world=world)
    return Action(kind="complete" if world.state == COMPLETE else "wait", world=world)


def _while_waiting(name: str, own: Node | None, world: World, joined: int, was_scaled: bool) -> Action:
    if world.state == OVER and world.generation == joined and world.reason is not None and not world.reason.restart:
        return Action(kind="leave", text=world.reason.text, code=world.reason.code)
    if world.state == FIXED and world.generation > joined:
        if name in world.nodes:
            return Action(kind="enter", world=world)
        if was_scaled and len(world.nodes) >= world.max_nodes:
            nodes_text = "1 node" if len(world.nodes) == 1 else f"{len(world.nodes)} nodes"
            text = f"The job was scaled to {nodes_text} and goes on without this one."
            return Action(kind="leave", text=text)
    if world.state == PROPOSED and name in world.nodes and world.generation > joined:
        done = own is not None and (own.phase, own.generation) == (_world.READY, world.generation)
        return Action(kind="wait" if done else "acknowledge", world=world)
    return Action(kind="wait", world=world)


def next_world(
    nodes: Mapping[str, Node],
    world: World | None,
    rules: Rules,
    *,
    quiet_s: float,
    trusts_absence: bool = True,
) -> World | None:
    """Returns the record that should come next, or None while the present one stands; any node may write it."""
    if world is None:
        return first_world(rules)
    if world.state == COMPLETE:
        # Whoever comes late to an elastic job hears that it is complete; a fixed job is simply started again.
        return (
            None if rules.is_elastic or any(n in nodes for n in world.nodes) else first_world(rules, world.generation)
        )
    if world.state == OVER:
        return _after_the_end(nodes, world, rules, quiet_s)
    gone = [node for node in world.nodes if _is_gone(nodes.get(node), world, trusts_absence)]
    if world.state == PROPOSED:
        return _proposed(nodes, world, rules, gone)
    if gone:
        return replace(world, state=OVER, reason=lost_reason(world, gone[0], restart=rules.is_elastic))
    if all(nodes[n].phase == _world.DONE for n in world.nodes if n in nodes) and trusts_absence:
        return replace(world, state=COMPLETE)
    kind = _wanted_change(nodes, world, rules, quiet_s) if rules.is_elastic else ""
    if kind:
        text = f"The job goes on with another number of nodes: it wants {wanted_text(world)}, {len(world.nodes)} run."
        return replace(world, state=OVER, reason=Reason(kind=kind, code=0, node="", text=text, restart=True))
    return None


def _is_gone(node: Node | None, world: World, trusts_absence: bool) -> bool:
    if node is None:
        return trusts_absence
    # A member that waits again had lost its lease, stopped its workers and come back.
    return node.phase == _world.LEAVING or (world.state == FIXED and node.phase in _CAME_BACK)


def _proposed(nodes: Mapping[str, Node], world: World, rules: Rules, gone: list[str]) -> World | None:
    # A job may be scaled while a proposal stands, which then has the wrong size.
    unfit = not world.min_nodes <= len(world.nodes) <= world.max_nodes
    if gone or unfit:
        reason = lost_reason(world, gone[0], restart=True) if gone else None
        return replace(world, state=OVER, reason=reason)
    if all(
        n in nodes and (nodes[n].phase, nodes[n].generation) == (_world.READY, world.generation) for n in world.nodes
    ):
        return replace(world, state=FIXED, reason=None)
    return None


def lost_reason(world: World, node: str, *, restart: bool) -> Reason:
    """Returns the reason of a generation that lost ``node``."""
    index = world.nodes.index(node)
    host, pod = (world.peers[index].get(name, "unknown") for name in ("host", "name"))
    text = f"Node {index} of {len(world.nodes)} (host {host}, pod {pod}) is gone: its launcher gives no sign of life."
    return Reason(kind="lost", code=1, node=node, text=text, restart=restart)


def blamed_reason(world: World, node: str, *, leaves: bool) -> Reason:
    """Returns why workers stopped whose peer on ``node`` is gone, or ``leaves`` because its launcher was told to."""
    lost = lost_reason(world, node, restart=True)
    return replace(lost, text=lost.text.partition(" is gone:")[0] + " leaves the job.") if leaves else lost


def _wanted_change(nodes: Mapping[str, Node], world: World, rules: Rules, quiet_s: float) -> str:
    """Returns "scaled" or "joined" when the number of nodes that run has to change, else an empty text."""
    if any(nodes[n].phase in _FINISHING for n in world.nodes if n in nodes):
        # The job is about to end; its workers are not stopped for another number of nodes any more.
        return ""
    size = len(world.nodes)
    if not world.min_nodes <= size <= world.max_nodes:
        return "scaled"
    waiting = [n for n, node in nodes.items() if n not in world.nodes and node.phase == _world.WAITING]
    if size < world.max_nodes and waiting and (size + len(waiting) >= world.max_nodes or quiet_s >= rules.quiet_s):
        return "joined"
    return ""


def _after_the_end(nodes: Mapping[str, Node], world: World, rules: Rules, quiet_s: float) -> World | None:
    if world.reason is not None and not world.reason.restart:
        # Over for good. Once its nodes have left, a launcher that comes starts the job from scratch.
        return None if any(n in nodes for n in world.nodes) else first_world(rules, world.generation)
    if any(node.phase in _STOPPING for node in nodes.values()):
        # A node still stops its workers. It will wait again or leave; only then it is known who can be a member.
        return None
    conflicts = rank_conflicts(nodes)
    candidates = {name: node for name, node in nodes.items() if name not in conflicts}
    count = len(candidates)
    if count < world.max_nodes:
        enough = count >= world.min_nodes
        if not (enough and (quiet_s >= rules.quiet_s or _nobody_is_awaited(world, rules))):
            return None
    chosen = elastic_order(candidates, world, rules)
    return replace(
        world,
        generation=world.generation + 1,
        state=PROPOSED,
        nodes=tuple(chosen),
        peers=tuple(candidates[name].peer for name in chosen),
        reason=None,
    )


def _nobody_is_awaited(world: World, rules: Rules) -> bool:
    """Returns whether a range need not wait for more nodes: all members that live are back, as nobody still stops.

    A replacement of a lost node has had a lease's time to come. One that its scheduler starts again is waited for.
    """
    if world.reason is None or not world.nodes:
        return False
    return world.reason.kind != "failed" or rules.restarts.fault == IN_PLACE


def own_node(node: Node, seen: Node) -> Node:
    """Returns this node as its own decisions see it; ``seen`` is its key on the store, which may lag behind.

    A change that is still to be written is already true, but an acknowledgement counts once it is there: to the others
    a member that waits in a fixed generation has come back from a loss.
    """
    acknowledged = (seen.phase, seen.generation) == (node.phase, node.generation)
    phase = _world.WAITING if node.phase == _world.READY and not acknowledged else node.phase
    return replace(node, phase=phase, created=seen.created)


def elastic_order(candidates: Mapping[str, Node], world: World, rules: Rules) -> list[str]:
    """Returns the ids of at most ``max_nodes`` nodes in rank order; those that ran before keep their places.

    A rank that was asked for wins. A place that is free goes to a survivor from behind the new end first, then to those
    who came, in their order.
    """
    order = replace(rules, max_nodes=world.max_nodes)
    if not world.nodes:
        return rank_order(candidates, order)
    size = min(len(candidates), world.max_nodes)
    asked = sorted((n for n in candidates if candidates[n].rank >= 0), key=lambda name: candidates[name].rank)
    survivors = [name for name in world.nodes if name in candidates and name not in asked]
    known = {*asked, *survivors}
    newcomers = rank_order({n: node for n, node in candidates.items() if n not in known}, order)
    chosen = [*asked, *survivors, *newcomers][:size]
    kept = {candidates[name].rank: name for name in asked if name in chosen and candidates[name].rank < size}
    for index, name in enumerate(world.nodes[:size]):
        if name in chosen and name not in asked:
            kept.setdefault(index, name)
    rest = iter([name for name in chosen if name not in kept.values()])
    return [kept[index] if index in kept else next(rest) for index in range(size)]


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


def wanted_text(world: World) -> str:
    """Returns how many nodes the job wants, ``N`` or ``MIN:MAX``."""
    low, high = world.min_nodes, world.max_nodes
    return f"{low}" if low == high else f"{low}:{high}"


def census(nodes: Mapping[str, Node], world: World | None, rules: Rules) -> str:
    """Returns the sentence of the log about the nodes that a waiting node waits for."""
    here = sorted(node.host for node in nodes.values() if node.phase in (_world.WAITING, _world.READY))
    busy = sorted(node.host for node in nodes.values() if node.phase in _STOPPING)
    wanted = "?" if world is None else wanted_text(world)
    text = f"{len(here)} of {wanted} nodes wait here ({', '.join(here)})"
    if busy and world is not None and world.state == FIXED:
        return f"{text}; the job runs on {', '.join(busy)}"
    if busy:
        return f"{text}; still stopping their workers: {', '.join(busy)}"
    absent = () if rules.is_elastic else absent_ranks(nodes, rules)
    return f"{text}; absent node ranks: {', '.join(map(str, absent))}" if absent else text
