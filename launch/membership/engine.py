"""The membership of a node in a job of several: it carries out the decisions of ``agreement``, over a store.

[Note: the protocol] The launchers of a job talk to each other through the records of a :class:`Store` alone: a key of
each node (its phase, and the generation it acknowledged), and ``world``, the record of the current generation. One
round, the same for fixed and elastic jobs and for both stores::

    publish(node: waiting)                                 join
    swap(world: proposed N+1, members in rank order)       the first to see enough nodes; one swap wins
    publish(node: ready, N+1)                              each member
    swap(world: fixed)                                     the first to see that all are ready
    publish(node: running, N+1); start the workers         each member, once it has read "fixed"
    ...
    publish(node: workers_done), publish(node: done)       each member whose workers ended with 0
    swap(world: complete)                                  the first to see that all are done

    swap(world: over, reason)                              a node that fails, is told to stop, or misses a member
    stop the workers, then publish(node: waiting)          each member, when the reason says restart; else exit

A node writes before it acts: it is ready before anybody may call the generation fixed, and the reason of an end is
written before its own workers are stopped. A view may be old, so nothing follows from a view but a swap
that compares, or the next wait. A node that may be given up by the others (``is_cut_off``) stops its workers first and
asks afterwards. Only the main thread runs this code, and it takes no lock; the store's threads wake it through
``fileno``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fleet.errors import RendezvousError
from fleet.launch.membership import agreement as _agreement
from fleet.launch.membership import world as _world
from fleet.launch.membership.agreement import Action, Rules, decide, wanted_text
from fleet.launch.membership.generation import Generation, LeftJobError, StoppedBySignalError, taken_name
from fleet.launch.membership.record_proof import RecordProofs
from fleet.launch.membership.store import Store, StoreLostError, View
from fleet.launch.membership.world import FIXED, NODE_PREFIX, OVER, WORLD_KEY, Node, Reason, World
from fleet.launch.plan.records import GroupResult, LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.report import looks_like_victim
from fleet.launch.processes.signals import SignalInbox
from fleet.launch.processes.supervisor import PeerEvent
from fleet.launch.restarts import RESTART_CODE, Outcome, RestartRule

_LOOK_S = 0.5
_FIRST_NOTICE_S, _LONGEST_NOTICE_S = 5.0, 60.0
_VICTIM_S = 1.0
_DECLARE_S = 2.0
_RETRY_S = 0.1
# Jobs of a fixed number of nodes wait ten times --elastic_timeout for absent ones, as in Paddle; so does every job for
# its store.
_PATIENCE = 10
_MOST_STRANGERS = 20
_LINGER_S = 5.0  # for the others to read how the job ended, on the node that hosts the store


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How one launcher takes part: the rules that all nodes share, and its own limits."""

    rules: Rules
    changes_np: bool = False  # --scale or --force: takes its own number of nodes into the record
    grace_s: float = 30.0
    wait_limit_s: float | None = None  # None: survivors wait without limit


def read_settings(config: LaunchConfig) -> EngineSettings:
    """Returns how a launcher with ``config`` takes part."""
    rules = Rules(
        min_nodes=config.nodes.min,
        max_nodes=config.nodes.max,
        quiet_s=config.elastic.timeout_s,
        sort_ip=config.nodes.sort_ip,
        is_elastic=config.elastic.is_elastic,
        restarts=RestartRule.of(config),
    )
    return EngineSettings(
        rules=rules,
        changes_np=config.elastic.force or config.elastic.scale > 0,
        grace_s=config.processes.grace_s,
        wait_limit_s=None if config.elastic.is_elastic else patience_s(config),
    )


def patience_s(config: LaunchConfig) -> float:
    """Returns how long absent nodes of a fixed job, and the store of every job, are waited for."""
    return config.elastic.timeout_s * _PATIENCE


class Engine:
    """This node's part in a job; it is also the news that supervision listens to.

    Args:
        store: the standing contact with the store; its key is that of ``name``.
        name: unique name of this node.
        node: the record that this node publishes.
        settings: how this launcher takes part.
        secret: the job's secret; empty: the nodes share no secret.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        node: Node,
        settings: EngineSettings,
        log: LaunchLog,
        signals: SignalInbox,
        secret: bytes = b"",
    ) -> None:
        self._proofs = RecordProofs(secret, store.prefix)
        self._strangers = set[str]()
        self._store = store
        self.name = name
        self._settings = settings
        self._node = replace(node, is_elastic=settings.rules.is_elastic)
        self._rules = settings.rules
        self._log = log
        self._signals = signals
        self.world: World | None = None  # the generation this node runs in, or ran in last
        self._members: tuple[frozenset[str], float] = (frozenset(), time.monotonic())
        self._reason: Reason | None = None
        self._was_scaled = self._is_admitted = self._was_stopped = False
        self._silence = ""
        # Nobody needs the store of a host that leaves before the start; later it stays for the others to read the end.
        self._linger_s: float | None = 0.0

    @property
    def news(self) -> Engine:
        """The wishes of the other nodes."""
        return self

    # -- meeting ------------------------------------------------------------------------------------------------

    def join(self, peer: Mapping[str, Any]) -> Generation:
        """Publishes ``peer`` and returns the next generation once every node of it has acknowledged it.

        Raises:
            LeftJobError: the job is complete, over, or was scaled to nodes without this one.
            RendezvousError: the number of nodes is not the job's, or a fixed job's nodes stayed away.
            StoppedBySignalError: a signal came; ``exit_code`` is 128 + its number.
            StoreLostError: the store is gone for good.
        """
        # No worker runs here now, so having been cut off has no consequence for the next generation.
        self._store.rejoin()
        self._publish(phase=_world.WAITING, peer={**peer, **self._store.fields})
        began = time.monotonic()
        next_notice = began + _FIRST_NOTICE_S
        self._log.opening("Waiting peer start...", room=2)
        while True:
            if self._store.is_lost:
                raise StoreLostError(self._store.silence())
            self._admit()
            action = self._step()
            if action.kind == "enter":
                assert action.world is not None
                return self._enter(action.world)
            if action.kind == "leave":
                self._linger_s = None if action.code == 0 else _LINGER_S
                raise LeftJobError(action.text, action.code)
            now = time.monotonic()
            if now >= next_notice:
                next_notice = now + min(max(now - began, _FIRST_NOTICE_S), _LONGEST_NOTICE_S)
                self._log.info(f"Waiting peer start... {self._waits_for()}")
            self._check_limits(now - began)
            self._wait_for_news()

    def _admit(self) -> None:
        """Checks this launcher's number of nodes against the job's; ``--scale`` and ``--force`` change the job's."""
        if self._is_admitted or self._store.silence():
            return
        view = self._view()
        world, nodes = _world.read_world(view), _world.read_nodes(view)
        ended = world is not None and world.reason is not None and not world.reason.restart
        if world is None or world.state == _world.COMPLETE or (ended and not any(n in nodes for n in world.nodes)):
            # No job runs yet, so this launcher sets the number of nodes itself.
            return
        own = (self._rules.min_nodes, self._rules.max_nodes)
        if own == (world.min_nodes, world.max_nodes):
            self._is_admitted = True
            return
        asked = wanted_text(replace(world, min_nodes=own[0], max_nodes=own[1]))
        change = f"; or change the job with {self._scale_command(asked)}"
        if not self._settings.changes_np:
            raise RendezvousError(
                f"This node was started for {asked} nodes, but the job {self._store.where} has {wanted_text(world)}. "
                f"Start it with that number{change if self._rules.is_elastic else ''}."
            )
        if self._swap(view, replace(world, min_nodes=own[0], max_nodes=own[1])):
            self._is_admitted = True
            self._log.info(f"The job had {wanted_text(world)} nodes and has {asked} from now on.")

    def _scale_command(self, wanted: str) -> str:
        where = self._store.where
        job_id = self._store.prefix.strip("/").rpartition("/")[2]
        flag = f"--master={where.removeprefix('at ')}" if where.startswith("at ") else "--elastic_server=HOST:PORT"
        return f"python -m fleet.elastic {flag} --job_id={job_id} --np={wanted} scale"

    def _step(self) -> Action:
        """Carries out the next action of this node, and returns it."""
        self._watch_silence()
        view = self._view()
        self._name_strangers(view)
        if not self._store.has_claimed or self._is_held_by_strangers(view):
            return Action(kind="wait")
        nodes, world = _world.read_nodes(view), _world.read_world(view)
        # The quiet time, after which a job starts below its largest number of nodes, begins anew with each change.
        if frozenset(nodes) != self._members[0]:
            self._members = (frozenset(nodes), time.monotonic())
        if self.name in nodes:
            nodes[self.name] = _agreement.own_node(self._node, nodes[self.name])
        action = decide(
            self.name,
            nodes,
            world,
            self._rules,
            quiet_s=time.monotonic() - self._members[1],
            joined=self.world,
            trusts_absence=self._store.trusts_absence(),
            was_scaled=self._was_scaled,
        )
        if action.kind == "write" and action.world is not None:
            # While the store is silent a swap would hold the main thread, which could not stop the workers in time.
            if not self._silence:
                self._swap(view, action.world)
        elif action.kind == "acknowledge" and action.world is not None:
            self._publish(phase=_world.READY, generation=action.world.generation)
        return action

    def _enter(self, world: World) -> Generation:
        self.world = world
        self._was_scaled = False
        self._is_admitted = True
        self._publish(phase=_world.RUNNING, generation=world.generation)
        return Generation(world.generation - 1, world.peers, world.nodes.index(self.name), world.restarts)

    def _waits_for(self) -> str:
        view = self._view()
        limit_s = self._settings.wait_limit_s
        until = "this node waits " + ("without limit" if limit_s is None else f"for {limit_s:.0f} s")
        nodes, world = _world.read_nodes(view), _world.read_world(view)
        num_waiting = sum(node.phase == _world.WAITING for node in nodes.values())
        least = self._rules.min_nodes if world is None else world.min_nodes
        if self._rules.is_elastic and num_waiting == len(nodes) >= least:
            left_s = max(0.0, self._rules.quiet_s - (time.monotonic() - self._members[1]))
            until = f"the job starts with them unless another node joins within {left_s:.0f} s"
        return f"{self._store.silence() or _agreement.census(nodes, world, self._rules)}; {until}"

    def _check_limits(self, waited_s: float) -> None:
        if self._store.is_taken:
            raise RendezvousError(taken_name(self.name))
        view = self._view()
        limit_s = self._settings.wait_limit_s
        # Until then the key of a launcher that was killed may still hold the rank or the name.
        is_forgotten = waited_s > self._store.forget_s
        if is_forgotten and self.name in _agreement.rank_conflicts(_world.read_nodes(view)):
            raise RendezvousError(f"--rank {self._node.rank} is held by another node of this job. Give each its own.")
        if is_forgotten and self._is_held_by_strangers(view):
            raise RendezvousError(
                f"The job of this name {self._store.where} belongs to launchers with another secret, on "
                f"{', '.join(sorted(self._strangers))}. Set FLEET_JOB_SECRET to the same value on every node, or on "
                "none, or choose another --job_id."
            )
        if limit_s is None or waited_s <= limit_s:
            return
        world = _world.read_world(view)
        if world is not None and world.state == FIXED:
            raise RendezvousError(
                f"The job already runs with its {len(world.nodes)} nodes, and none has left within {limit_s:.0f} s. "
                "Choose another --job_id for another job."
            )
        raise RendezvousError(
            f"Not every node came within {limit_s:.0f} s: {self._waits_for()}. Start the launcher on the absent "
            "nodes, with the same --master and --job_id, or raise --elastic_timeout."
        )

    # -- while the workers run: PeerNews ------------------------------------------------------------------------

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there may be news."""
        return self._store.fileno()

    def take(self) -> PeerEvent | None:
        """Returns "stop" when this generation is over or this node is cut off, "servers" when all workers are done."""
        self._store.drain()
        if self._store.is_cut_off:
            return PeerEvent("stop")
        action = self._step()
        if action.kind == "hold":
            reason = None if action.world is None else action.world.reason
            # Healthy workers get the user's grace. After a failure they hang in exchanges, and waiting helps nobody.
            is_calm = reason is not None and reason.kind in ("left", "stopped", "joined", "scaled")
            return PeerEvent("stop", self._settings.grace_s) if is_calm else PeerEvent("stop")
        nodes = _world.read_nodes(self._view())
        world = self.world
        over = (_world.WORKERS_DONE, _world.DONE)
        if world is not None and all(n in nodes and nodes[n].phase in over for n in world.nodes):
            return PeerEvent("servers")
        return None

    def workers_done(self) -> None:
        """Publishes that every worker of this node has exited with 0."""
        self._publish(phase=_world.WORKERS_DONE)

    # -- the end of a generation --------------------------------------------------------------------------------

    def announce_end(self, result: GroupResult, failure: str) -> None:
        """Ends the generation on every node, unless another node did so first: then its reason stands."""
        if self._is_told_to_stop(result):
            self._was_stopped = True
            # With its host the store goes, and without the store the other nodes cannot agree to go on.
            goes_on = self._rules.is_elastic and not self._node.serves
            kind = "left" if goes_on else "stopped"
            text = f"The launcher of {self._place} was stopped by signal {result.stop_signal}."
            reason = Reason(kind=kind, code=result.exit_code, node=self.name, text=text, restart=goes_on)
        elif self._may_be_victim(result) and (other := self._other_reason(_VICTIM_S)) is not None:
            reason = other
        elif self._may_be_victim(result):
            reason = Reason(kind="victim", code=result.exit_code, node=self.name, text=failure, restart=True)
        else:
            reason = self._failure(result.exit_code, failure)
        self._reason = self._declare_over(reason)
        # The others see "leaving" at once; a node that only goes is lost to them when its lease ends.
        if self._was_stopped or self._asks_scheduler(self._reason):
            self._publish(phase=_world.LEAVING)

    def _is_told_to_stop(self, result: GroupResult) -> bool:
        """Returns whether this launcher was; workers also save themselves and stop when another node's was."""
        is_echo = result.preempted and self._rules.is_elastic and not self._signals.received
        return result.stop_signal is not None and not is_echo

    @property
    def _place(self) -> str:
        return f"pod {self._node.peer.get('name', self.name)} on {self._node.host}"

    def _failure(self, code: int, text: str) -> Reason:
        assert self.world is not None
        outcome = self._rules.restarts.of_generation(code, self.world.restarts)
        return Reason(kind="failed", code=outcome.exit_code, node=self.name, text=text, restart=outcome.restart)

    def _may_be_victim(self, result: GroupResult) -> bool:
        """Returns whether the failure looks like the loss of a peer on another node: then that node is to blame."""
        first = result.first_failure
        world = self.world
        if world is None or len(world.nodes) == 1 or not self._rules.is_elastic:
            return False
        return result.preempted or (first is not None and looks_like_victim(first, result.log_start_bytes))

    def _other_reason(self, limit_s: float) -> Reason | None:
        """Returns the reason that another node gave for the end of this generation, waiting ``limit_s`` for it."""
        deadline = time.monotonic() + limit_s
        while True:
            world = _world.read_world(self._view())
            if world is not None and self._is_over(world) and world.reason is not None:
                return world.reason
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def _is_over(self, world: World) -> bool:
        return self.world is not None and world.generation == self.world.generation and world.state == OVER

    def _declare_over(self, reason: Reason) -> Reason:
        deadline = time.monotonic() + _DECLARE_S
        while time.monotonic() < deadline:
            view = self._fresh_view()
            world = None if view is None else _world.read_world(view)
            if self._store.is_lost:
                return reason
            if view is None or world is None:
                time.sleep(_RETRY_S)
                continue
            if self._is_over(world) and world.reason is not None:
                return world.reason
            if self.world is None or world.generation != self.world.generation or world.state != FIXED:
                return reason
            if self._swap(view, self._ended(world, reason)):
                return reason
        # The store does not answer: the end of this node's lease will tell the others.
        return reason

    def _ended(self, world: World, reason: Reason) -> World:
        """Returns ``world`` as it ends; a restart after a failure is counted in it, so that every node counts alike."""
        counts = reason.kind == "failed" and self._rules.restarts.counts(reason.restart)
        return replace(world, state=OVER, reason=reason, restarts=world.restarts + counts)

    def settle(self, result: GroupResult) -> Outcome:
        """Follows the reason that came first; after a success waits for the others."""
        reason = self._reason
        self._reason = None
        self._linger_s = _LINGER_S
        # A signal to this launcher decides for this node, whatever the reason says to the others.
        if self._was_stopped:
            return Outcome(result.exit_code)
        if reason is not None and reason.kind == "victim" and reason.node == self.name:
            reason = self._resolve_victim(reason)
        if reason is not None:
            return self._follow(reason)
        if result.interrupted:
            return self._follow(self._why())
        try:
            return self._finish()
        except StoppedBySignalError as error:
            stopped = GroupResult(exit_code=error.exit_code, stop_signal=error.exit_code - 128)
            self.announce_end(stopped, "")
            raise

    def _finish(self) -> Outcome:
        self._publish(phase=_world.DONE)
        while not self._store.is_lost:
            action = self._step()
            if action.kind == "complete":
                self._linger_s = None
                return Outcome(0)
            if action.kind == "hold":
                break
            self._wait_for_news()
        return self._follow(self._why())

    def _resolve_victim(self, reason: Reason) -> Reason:
        """Waits until the node that is to blame is gone; when all are still there, this node's worker is to blame."""
        assert self.world is not None
        # The key of a node that is gone stays for the rest of its lease.
        limit_s = self._store.ttl_s + 2
        self._log.info(f"The workers stopped as they do when another node is gone; it is known within {limit_s} s.")
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            nodes = _world.read_nodes(self._view())
            suspects = [n for n in self.world.nodes if n not in nodes or nodes[n].phase == _world.LEAVING]
            if suspects:
                return _agreement.blamed_reason(self.world, suspects[0], leaves=suspects[0] in nodes)
            if self._store.silence():
                return self._cut_off()
            self._wait_for_news()
        failure = self._failure(reason.code, reason.text)
        view = self._fresh_view()
        world = None if view is None else _world.read_world(view)
        if view is not None and world is not None and self._is_over(world):
            self._swap(view, self._ended(world, failure))
        if self._asks_scheduler(failure):
            self._publish(phase=_world.LEAVING)
        return failure

    def _asks_scheduler(self, reason: Reason) -> bool:
        return reason.kind == "failed" and reason.node == self.name and reason.code == RESTART_CODE

    def _why(self) -> Reason:
        """Returns why this generation is over, after "stop" has come."""
        # A fresh read from a silent store would hold the main thread up, which has workers to stop.
        view = self._view() if self._store.silence() else self._fresh_view() or self._view()
        world = _world.read_world(view)
        if world is not None and self._is_over(world) and world.reason is not None:
            return world.reason
        return self._cut_off()

    def _cut_off(self) -> Reason:
        text = self._store.silence() or "The other nodes went on without this one."
        restart = self._rules.is_elastic and not self._store.is_lost
        return Reason(kind="lost", code=1, node=self.name, text=text, restart=restart)

    def _follow(self, reason: Reason) -> Outcome:
        if self._asks_scheduler(reason):
            self._log.error(f"This launcher exits with {RESTART_CODE}, so that its scheduler starts it again.")
            return Outcome(RESTART_CODE)
        self._was_scaled = reason.kind == "scaled"
        if reason.restart:
            self._log.warning(f"The workers of this node were stopped and will start again: {reason.text}")
        elif reason.node != self.name:
            self._log.error(f"Another node ended the job: {reason.text}")
        elif reason.kind == "lost":
            again = "If other nodes go on, start" if self._rules.is_elastic else "Start"
            self._log.error(f"This node left the job: {reason.text} {again} this launcher again once they can meet.")
        return Outcome(reason.code, reason.restart)

    def close(self) -> None:
        """Leaves the job; the last node takes its record along when it is told to stop, or a fixed job never ran."""
        record = None
        try:
            world = _world.read_world(self._view())
            takes_record = self._was_stopped or (world is not None and not self._rules.is_elastic and not world.nodes)
            record = WORLD_KEY if takes_record and (world is None or world.state != _world.COMPLETE) else None
        finally:
            self._store.close(record, linger_s=self._linger_s)

    # -- the store ----------------------------------------------------------------------------------------------

    def _view(self) -> View:
        return self._proofs.checked(self._store.view())

    def _fresh_view(self) -> View | None:
        view = self._store.fresh_view()
        return None if view is None else self._proofs.checked(view)

    def _name_strangers(self, view: View) -> None:
        """Says once of each host that its records of this job do not count."""
        for host in {*view.unproved.values()} - self._strangers:
            if len(self._strangers) < _MOST_STRANGERS:
                self._strangers.add(host)
                self._log.warning(
                    f"A record of this job {self._store.where}, from {host}, is ignored: it is not sealed with this "
                    "job's secret (FLEET_JOB_SECRET)."
                )

    def _is_held_by_strangers(self, view: View) -> bool:
        """Returns whether living launchers with another secret hold this job's record; a dead job's may be taken over.

        Who has been in a generation knows the record, and writes it again.
        """
        nodes = [key for key in view.unproved if key.startswith(NODE_PREFIX)]
        return self.world is None and WORLD_KEY in view.unproved and bool(nodes)

    def _swap(self, view: View, world: World) -> bool:
        ends = world.state == _world.COMPLETE or (world.reason is not None and not world.reason.restart)
        return self._store.swap(WORLD_KEY, view.texts.get(WORLD_KEY), self._proofs.text(WORLD_KEY, world), ends=ends)

    def _publish(self, **changes: Any) -> None:
        self._node = replace(self._node, **changes)
        self._store.publish(self._proofs.text(NODE_PREFIX + self.name, self._node))

    def _watch_silence(self) -> None:
        silence = self._store.silence()
        if bool(silence) != bool(self._silence):
            if silence and not self._store.is_lost:
                self._log.warning(f"{silence} The workers go on as long as that is safe.")
            else:
                self._log.info(f"The store {self._store.where} answers again.")
        self._silence = silence

    def _wait_for_news(self) -> None:
        """Returns at the next news, or soon after; raises StoppedBySignalError on a signal."""
        self._signals.wait(_LOOK_S, self._store)
        self._store.drain()
        if signals := self._signals.take():
            self._was_stopped = True
            raise StoppedBySignalError(signals[0])
