"""Where the nodes of a job meet: one of them hosts the key-value service, the others find it.

The node that owns the master's address and binds its port first is the host; a second launcher on the same machine
finds the port taken and joins. Without ``--master`` this node opens the service on a free port and prints the command
for the others. Each node then has one contact with the service.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Mapping
from typing import Any

from fleet.common.addresses import join_endpoint, split_endpoint
from fleet.common.own_thread import OwnThread
from fleet.errors import RendezvousError
from fleet.launch.membership.callers import Seldom, listen, most_connections
from fleet.launch.membership.engine import Engine, patience_s, read_settings
from fleet.launch.membership.generation import StoppedBySignalError
from fleet.launch.membership.kv_client import CONNECTIONS_OF_A_NODE, KeyValueClient
from fleet.launch.membership.kv_service import MAX_CONNECTIONS, KeyValueService
from fleet.launch.membership.store import StoreLostError, View
from fleet.launch.membership.world import NODE_PREFIX, Node, job_prefix
from fleet.launch.plan.interfaces import reachable
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox, Wakeup

_RETRY_S = 0.2
_NOTICE_PERIOD_S = 5.0
_FORGET_S = 1.0


def open_meeting(config: LaunchConfig, log: LaunchLog, signals: SignalInbox) -> tuple[Engine, str]:
    """Hosts or finds the service and connects to it; returns the membership and the master's ip:port.

    Raises:
        RendezvousError: nobody could be reached at the master's address within the limit.
        LaunchError: the service refused this node, or a signal came.
    """
    assert config.nodes.host is not None
    master = None
    if config.nodes.master is not None:
        host, port = split_endpoint(config.nodes.master, "--master")
        master = reachable(host), port
    service, client = _host_or_find(config, master, log, signals)
    contact = KeyValueContact(
        client,
        prefix=job_prefix(config.job_id),
        key=NODE_PREFIX + config.pod.id,
        service=service,
        log=log,
        signals=signals,
    )
    engine = Engine(
        contact,
        name=config.pod.id,
        node=Node(host=config.nodes.host, rank=config.nodes.rank, serves=service is not None),
        settings=read_settings(config),
        log=log,
        signals=signals,
        secret=config.pod.secret.encode(),
    )
    return engine, join_endpoint(*client.address)


def _host_or_find(
    config: LaunchConfig, master: tuple[str, int] | None, log: LaunchLog, signals: SignalInbox
) -> tuple[KeyValueService | None, KeyValueClient]:
    secret = config.pod.secret.encode()

    say = Seldom(log.warning)

    def refused(address: str, why: str) -> None:
        say(address.rpartition(":")[0], f"The rendezvous service refused {address}: {why}.")

    deadline = time.monotonic() + patience_s(config)
    noticed = time.monotonic()
    while True:
        listener, is_held_here = _listen(config, master)
        if listener is not None and config.nodes.max * CONNECTIONS_OF_A_NODE > most_connections(MAX_CONNECTIONS):
            listener.close()
            raise RendezvousError(_no_room(config))
        service = None if listener is None else KeyValueService(listener, secret, refused)
        address = master if listener is None else listener.getsockname()[:2]
        assert address is not None
        client = KeyValueClient(address, secret, ttl_s=config.elastic.ttl_s)
        try:
            client.connect()
            return service, client
        except (OSError, StoreLostError) as error:
            client.close()
            if service is not None:
                service.close()
            now = time.monotonic()
            if now > deadline:
                raise RendezvousError(_nobody_there(config, address, error, is_held_here)) from error
            if now - noticed > _NOTICE_PERIOD_S:
                noticed = now
                log.info(f"Waiting peer start... nothing answers at {join_endpoint(*address)} yet ({error})")
        signals.wait(_RETRY_S)
        signals.take()
        if signals.received:
            raise StoppedBySignalError(signals.received[0])


def _nobody_there(config: LaunchConfig, address: tuple[str, int], error: Exception, is_held_here: bool) -> str:
    if is_held_here:
        return (
            f"--master {join_endpoint(*address)}: another program of this machine holds that port, and does not answer "
            f"as a launcher of this job ({error}). Choose another port on every node, or stop that program."
        )
    absent = ", ".join(str(rank) for rank in range(config.nodes.max) if rank != config.nodes.rank)
    return (
        f"--master {join_endpoint(*address)}: no launcher answered there within {patience_s(config):.0f} s "
        f"({error}); absent node ranks: {absent if config.nodes.rank >= 0 else 0}. Start the launcher on the node that "
        "has this address, or raise --elastic_timeout."
    )


def _no_room(config: LaunchConfig) -> str:
    most = most_connections(MAX_CONNECTIONS) // CONNECTIONS_OF_A_NODE
    return (
        f"The job has up to {config.nodes.max} nodes, and this node, where they meet, can hold the connections of "
        f"{most}: the limit of open files leaves no more, and {MAX_CONNECTIONS // CONNECTIONS_OF_A_NODE} is the most. "
        "Raise the limit (ulimit -n) here, or let the nodes meet on etcd."
    )


def _listen(config: LaunchConfig, master: tuple[str, int] | None) -> tuple[socket.socket | None, bool]:
    """Returns a listener at the master's address when this node can be the host, and whether another holds it here."""
    host = config.nodes.host or "127.0.0.1"
    if master is None:
        return listen(host, 0), False
    try:
        return listen(*master), False
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None, True
        # The name of a service in a cluster is not an address of the pod behind it; the node of rank 0 is that pod.
        if config.nodes.rank == 0:
            with contextlib.suppress(OSError):
                return listen(host, master[1]), False
        return None, False


class KeyValueContact(Wakeup):
    """Holds this node's key at the service; ``fileno`` is readable on news.

    A thread keeps the newest view; that it waits at the service is this node's sign of life. A service that is lost
    stays lost: it held the job's records in the memory of the launcher that hosted it.

    Args:
        client: connected to the service.
        prefix: stands before every key of the job, with a slash at its end.
        key: this node's key under the prefix.
        service: the service when this launcher hosts it.
    """

    def __init__(
        self,
        client: KeyValueClient,
        *,
        prefix: str,
        key: str,
        service: KeyValueService | None,
        log: LaunchLog,
        signals: SignalInbox,
    ) -> None:
        super().__init__()
        self._client = client
        self.prefix = prefix
        self._key = prefix + key
        self._service = service
        self._log = log
        self._signals = signals
        self.where = f"at {join_endpoint(*client.address)}"
        self.ttl_s = client.ttl_s
        self.forget_s = client.ttl_s + _FORGET_S
        self.fields: Mapping[str, Any] = {}
        self.has_claimed = self.is_taken = False
        self.is_lost = self.is_cut_off = False
        self._silence = ""
        self._view = client.read(prefix)
        self._closing = False
        self._thread = OwnThread(self._run, name="rendezvous-watch", say=log.error, then=self.notify)
        self._thread.start()

    def view(self) -> View:
        """Returns the newest view, however old."""
        self._thread.check()
        if self._service is not None:
            self._service.check()
        return self._view

    def fresh_view(self) -> View | None:
        """Returns a view read now; None once the service is lost."""
        try:
            return self._client.read(self.prefix)
        except StoreLostError as error:
            self._lose(error)
            return None

    def publish(self, text: str) -> None:
        """Sets this node's key, unless another launcher holds it."""
        try:
            if self.has_claimed:
                self._client.put(self._key, text, leased=True)
                return
            claimed = self._client.swap(self._key, None, text, leased=True)
            # A request is sent again when its connection broke, so the key may be there from the first time.
            self.has_claimed = claimed or self._client.read(self._key).texts.get("") == text
            self.is_taken = not self.has_claimed
        except StoreLostError as error:
            self._lose(error)

    def rejoin(self) -> None:
        """Changes nothing: a service that was lost stays lost."""

    def swap(self, key: str, old_text: str | None, text: str | None, *, ends: bool = False) -> bool:
        """Compare-and-set; False also once the service is lost. Nothing outlives the service, so ``ends`` is moot."""
        try:
            return self._client.swap(self.prefix + key, old_text, text)
        except StoreLostError as error:
            self._lose(error)
            return False

    def silence(self) -> str:
        """Returns how the service was lost; empty while it is there."""
        return self._silence

    def trusts_absence(self) -> bool:
        """Returns True: the service has known its nodes all the time."""
        return True

    def close(self, record: str | None = None, *, linger_s: float | None = 0.0) -> None:
        """Leaves the job: this node's key is gone when it returns. The host stays until the others have left."""
        with contextlib.suppress(StoreLostError):
            if record is not None and self.has_claimed and not self.is_lost:
                # The own key goes first: a launcher that then finds the record alone is the last, and takes it along.
                self._client.put(self._key, None)
                left = self._client.read(self.prefix).texts
                if list(left) == [record]:
                    self._client.swap(self.prefix + record, left[record], None)
        self._closing = True
        self._client.close()
        self._thread.join(5.0)
        self.close_pipe()
        if self._service is not None:
            self._linger(self._service, linger_s)
            self._service.close()

    def _linger(self, service: KeyValueService, limit_s: float | None) -> None:
        """Waits until the other launchers have left the service, at most ``limit_s``; a signal ends the wait."""
        began = time.monotonic()
        told = False
        num_signals = len(self._signals.received)
        while service.num_sessions() and len(self._signals.received) == num_signals:
            waited_s = time.monotonic() - began
            if limit_s is not None and waited_s > limit_s:
                break
            if waited_s > _NOTICE_PERIOD_S and not told:
                told = True
                self._log.info("This node's part is complete; other launchers still use its rendezvous service.")
            self._signals.wait(0.05)
            self._signals.take()

    def _run(self) -> None:
        while not self._closing:
            try:
                # The waiting request is this node's sign of life, sent four times within a lease.
                view = self._client.wait(self.prefix, self._view.revision, self.ttl_s / 4)
            except StoreLostError as error:
                self._lose(error)
                return
            if view.revision != self._view.revision:
                self._view = view
                self.notify()

    def _lose(self, error: StoreLostError) -> None:
        self._silence = self._silence or f"{error}"
        self.is_lost = self.is_cut_off = True
        self.notify()
