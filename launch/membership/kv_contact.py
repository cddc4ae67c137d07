"""A launcher's part in the agreement on the job's nodes: it publishes this node, acknowledges worlds, carries outcomes.

The rules are in ``_world``, the store behind ``_kv_client``. A thread keeps the newest view of the store, and with it
this node's lease; everything else happens in the launcher's main thread, woken through a descriptor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fleet.errors import RendezvousError
from fleet.launch.membership import world as _world
from fleet.launch.membership.kv_client import KeyValueClient, StoreLostError, View
from fleet.launch.membership.membership import Generation, StoppedBySignalError, taken_name
from fleet.launch.membership.world import Node, Reason, Rules, World
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox
from fleet.launch.processes.supervisor import PeerEvent

_NOTICE_PERIOD_S = 5.0
_LOOK_S = 0.5


class ViewWatch:
    """Keeps the newest view of the store in a thread, this node's heartbeat; ``fileno`` is readable on news."""

    def __init__(self, client: KeyValueClient) -> None:
        self._client = client
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._lock = threading.Lock()
        self._view = client.read()
        self._error: StoreLostError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rendezvous-watch", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._read_fd

    def drain(self) -> None:
        """Makes ``fileno`` unreadable until the next news."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_fd, 4096):
                pass

    def view(self) -> View:
        """Returns the newest view; raises StoreLostError once the service cannot be reached any more."""
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._view

    def close(self) -> None:
        """Ends the thread; the client must be closed already."""
        self._closing = True
        self._thread.join(5.0)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _run(self) -> None:
        revision = self._view.revision
        while not self._closing:
            try:
                view = self._client.wait(revision, self._client.ttl_s / 3)
            except StoreLostError as error:
                with self._lock:
                    self._error = error
                self._notify()
                return
            if view.revision != revision:
                revision = view.revision
                with self._lock:
                    self._view = view
                self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write_fd, b"!")


class Rendezvous:
    """This node's membership in the job; also the news that supervision listens to (``PeerNews``).

    Args:
        client: connected to the store of this job.
        name: unique name of this node.
        node: what this node publishes.
        rules: when a world may be proposed.
        max_restarts: how often failed workers start a new generation.
        grace_s: how long processes have to end when another node's launcher was told to stop.
        wait_limit_s: how long to wait for absent nodes; None waits without limit.
    """

    def __init__(
        self,
        client: KeyValueClient,
        *,
        name: str,
        node: Node,
        rules: Rules,
        max_restarts: int,
        grace_s: float,
        wait_limit_s: float | None,
        log: LaunchLog,
        signals: SignalInbox,
    ) -> None:
        self._client, self.name, self._node, self._rules = client, name, node, rules
        self._max_restarts, self._wait_limit_s = max_restarts, wait_limit_s
        self._log, self._signals, self._grace_s = log, signals, grace_s
        self._watch = ViewWatch(client)
        self._generation = 0
        self._members: tuple[frozenset[str], float] = (frozenset(), time.monotonic())
        self._lost: StoreLostError | None = None
        self._is_claimed = False

    @property
    def place(self) -> str:
        """This node as messages call it: its pod and address."""
        return f"pod {self._node.peer.get('name', self.name)} on {self._node.host}"

    # -- meeting ------------------------------------------------------------------------------------------------

    def join(self, peer: Mapping[str, Any]) -> Generation:
        """Publishes ``peer`` and returns the next generation once every node of it has acknowledged it.

        Raises:
            RendezvousError: nodes were still absent after the limit; names them.
            StoppedBySignalError: a signal came; ``exit_code`` is 128 + its number.
            StoreLostError: the service is gone.
        """
        self._node = replace(self._node, phase=_world.WAITING, generation=self._generation, peer=peer)
        if not self._is_claimed:
            self._claim_name()
        self._publish(self._node)
        began = noticed = time.monotonic()
        self._log.opening("Waiting peer start...", room=2)
        while True:
            view = self._watch.view()
            world = self._step(view)
            if world is not None and self._is_ours(world):
                return self._enter(world)
            now = time.monotonic()
            if now - noticed >= _NOTICE_PERIOD_S:
                noticed = now
                self._log.info(f"Waiting peer start... {self._census(view)}")
            if self._wait_limit_s is not None and now - began > self._wait_limit_s:
                raise RendezvousError(self._absence(view))
            self._check_rank(view, began, now)
            self._wait_for_news()

    def _claim_name(self) -> None:
        """Raises RendezvousError when another launcher has this one's key: both would take themselves for one node."""
        key, value = _world.NODE_PREFIX + self.name, _world.to_json(self._node)
        if not self._client.swap(key, None, value, leased=True) and self._client.read().values.get(key) != value:
            raise RendezvousError(taken_name(self.name))
        self._is_claimed = True

    def _step(self, view: View) -> World | None:
        """Does what this node has to do in ``view``; returns the world as it then stands."""
        nodes, world = _world.read_nodes(view), _world.read_world(view)
        members = frozenset(nodes)
        if members != self._members[0]:
            self._members = (members, time.monotonic())
        coming = _world.next_world(nodes, world, self._rules, time.monotonic() - self._members[1])
        if coming is not None:
            return coming if self._swap(view, coming) else None
        if world is not None and world.state == _world.PROPOSED and self.name in world.nodes:
            self._acknowledge(nodes, world)
        return world

    def _acknowledge(self, nodes: Mapping[str, Node], world: World) -> None:
        own = nodes.get(self.name)
        if world.generation <= self._generation:
            return  # an old view of the generation we are in
        if own is not None and (own.phase, own.generation) != (_world.READY, world.generation):
            self._publish(replace(self._node, phase=_world.READY, generation=world.generation))

    def _is_ours(self, world: World) -> bool:
        return world.state == _world.FIXED and self.name in world.nodes and world.generation > self._generation

    def _enter(self, world: World) -> Generation:
        self._generation = world.generation
        self._set_phase(_world.RUNNING)
        return Generation(world.generation - 1, world.peers, world.nodes.index(self.name), world.restarts)

    def _check_rank(self, view: View, began: float, now: float) -> None:
        # A node that was replaced keeps its rank until its lease ends, so the conflict must outlast a lease.
        if now - began > self._client.ttl_s + 1 and self.name in _world.rank_conflicts(_world.read_nodes(view)):
            raise RendezvousError(f"--rank {self._node.rank} is held by another node of this job. Give each its own.")

    def _census(self, view: View) -> str:
        nodes = _world.read_nodes(view)
        absent = _world.absent_ranks(nodes, self._rules)
        here = ", ".join(sorted(node.host for node in nodes.values()))
        text = f"{len(nodes)} of {self._rules.max_nodes} nodes are here ({here})"
        return f"{text}; absent node ranks: {', '.join(map(str, absent))}" if absent else text

    def _absence(self, view: View) -> str:
        world = _world.read_world(view)
        if world is not None and world.state == _world.FIXED:
            return (
                f"The job already runs with its {len(world.nodes)} nodes, and none has left within "
                f"{self._wait_limit_s:.0f} s. Choose another --job_id for another job."
            )
        return (
            f"Not every node came within {self._wait_limit_s:.0f} s: {self._census(view)}. Start the launcher on the "
            "absent nodes, with the same --master and --job_id, or raise --elastic_timeout."
        )

    # -- while the workers run: PeerNews ------------------------------------------------------------------------

    def fileno(self) -> int:
        """Returns a descriptor that is readable when the store has changed."""
        return self._watch.fileno()

    def take(self) -> PeerEvent | None:
        """Returns "stop" when this generation is over, "servers" when every node's workers are done, else None."""
        self._watch.drain()
        try:
            view = self._watch.view()
            world = self._step(view) or _world.read_world(view)
        except StoreLostError as error:
            self._lost = error
            return PeerEvent("stop")
        if world is None or world.generation != self._generation or world.state == _world.OVER:
            is_stop = world is not None and world.reason is not None and world.reason.kind == "stopped"
            return PeerEvent("stop", self._grace_s) if is_stop else PeerEvent("stop")
        nodes = _world.read_nodes(view)
        over = (_world.WORKERS_DONE, _world.DONE)
        if all(node in nodes and nodes[node].phase in over for node in world.nodes):
            return PeerEvent("servers")
        return None

    def workers_done(self) -> None:
        """Publishes that every worker of this node has exited with 0."""
        with contextlib.suppress(StoreLostError):  # take() reports it
            self._set_phase(_world.WORKERS_DONE)

    # -- the end of a generation --------------------------------------------------------------------------------

    def fail(self, code: int, text: str) -> Reason:
        """Declares the generation over because of this node's process; returns the reason that came first."""
        restarts = self._restarts()
        reason = Reason(kind="failed", code=code, node=self.name, text=text, restart=restarts < self._max_restarts)
        return self._declare_over(reason)

    def stop(self, code: int, text: str) -> Reason:
        """Declares the generation over because this launcher was told to stop."""
        return self._declare_over(Reason(kind="stopped", code=code, node=self.name, text=text))

    def reason(self) -> Reason:
        """Returns why the generation is over, after "stop" has come."""
        if self._lost is not None:
            return Reason(kind="lost", code=1, node=self.name, text=f"{self._lost}")
        try:
            world = _world.read_world(self._client.read())
        except StoreLostError as error:
            return Reason(kind="lost", code=1, node=self.name, text=f"{error}")
        if world is not None and world.generation == self._generation and world.reason is not None:
            return world.reason
        return Reason(kind="lost", code=1, node=self.name, text="The other nodes went on without this one.")

    def finish(self) -> Reason | None:
        """Publishes that this node is done and waits for the others; returns None when all are, or why it is over.

        Raises StoppedBySignalError when a signal comes meanwhile.
        """
        try:
            self._set_phase(_world.DONE)
            while True:
                view = self._watch.view()
                world = self._step(view) or _world.read_world(view)
                if world is None or world.generation != self._generation or world.state == _world.OVER:
                    return self.reason()
                if world.state == _world.COMPLETE:
                    return None
                self._wait_for_news()
        except StoreLostError as error:
            return Reason(kind="lost", code=1, node=self.name, text=f"{error}")

    def close(self) -> None:
        """Leaves the job: this node's key is gone when it returns."""
        self._client.close()
        self._watch.close()

    # -- the store ----------------------------------------------------------------------------------------------

    def _declare_over(self, reason: Reason) -> Reason:
        try:
            while True:
                view = self._client.read()
                world = _world.read_world(view)
                if world is None or world.generation != self._generation or world.state != _world.FIXED:
                    return self.reason() if world is not None and world.state == _world.OVER else reason
                if self._swap(view, replace(world, state=_world.OVER, reason=reason)):
                    return reason
        except StoreLostError:
            return reason

    def _restarts(self) -> int:
        try:
            world = _world.read_world(self._client.read())
        except StoreLostError:
            return self._max_restarts
        return world.restarts if world is not None else 0

    def _swap(self, view: View, world: World) -> bool:
        return self._client.swap(_world.WORLD_KEY, view.texts.get(_world.WORLD_KEY), _world.to_json(world))

    def _set_phase(self, phase: str) -> None:
        self._publish(replace(self._node, phase=phase, generation=self._generation))

    def _publish(self, node: Node) -> None:
        self._node = node
        self._client.put(_world.NODE_PREFIX + self.name, _world.to_json(node), leased=True)

    def _wait_for_news(self) -> None:
        """Returns at the next change of the store, or soon after; raises StoppedBySignalError on a signal."""
        self._signals.wait(_LOOK_S, self._watch)
        self._watch.drain()
        if signals := self._signals.take():
            raise StoppedBySignalError(f"Terminating with signal {signals[0]}", 128 + signals[0])
