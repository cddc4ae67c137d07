"""Where the nodes of a job meet: one of them hosts the key-value service, the others find it.

The node that owns the master's address and binds its port first is the host; a second launcher on the same machine
finds the port taken and joins. Without ``--master`` this node opens the service on a free port and prints the command
for the others.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Mapping
from typing import Any

from fleet.errors import RendezvousError
from fleet.launch.membership.callers import Seldom, listen, most_connections
from fleet.launch.membership.kv_client import CONNECTIONS_OF_A_NODE, KeyValueClient, StoreLostError
from fleet.launch.membership.kv_contact import Rendezvous
from fleet.launch.membership.kv_service import MAX_CONNECTIONS, KeyValueService
from fleet.launch.membership.membership import Generation, Outcome, StoppedBySignalError
from fleet.launch.membership.world import Node, Reason, Rules
from fleet.launch.plan.addresses import join_endpoint, split_endpoint
from fleet.launch.plan.interfaces import reachable
from fleet.launch.plan.records import GroupResult, LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox

# A killed launcher is noticed by its broken connections, within about a second; this bounds a silent loss.
LEASE_S = 5.0
_RETRY_S = 0.2
_NOTICE_PERIOD_S = 5.0
_LINGER_S = 5.0
# Jobs of a fixed number of nodes wait ten times --elastic_timeout for absent ones, as in Paddle.
_FIXED_JOB_FACTOR = 10


class Meeting:
    """The membership of a node that met the others at a key-value service, which it may host itself."""

    def __init__(self, rendezvous: Rendezvous, service: KeyValueService | None, log: LaunchLog, signals: SignalInbox):
        self._rendezvous, self._service, self._log, self._signals = rendezvous, service, log, signals
        self._linger_s: float | None = 0.0  # nobody needs the service of a host that leaves before the start
        self._reason: Reason | None = None

    @property
    def news(self) -> Rendezvous:
        """What the other nodes want."""
        return self._rendezvous

    def join(self, peer: Mapping[str, Any]) -> Generation:
        """Returns the next generation once all its nodes agree on it; see :meth:`Rendezvous.join`."""
        return self._rendezvous.join(peer)

    def announce_end(self, result: GroupResult, failure: str) -> None:
        """Ends the generation on every node, unless another node did so first: then its reason stands."""
        if result.stop_signal is not None:
            text = f"The launcher of {self._rendezvous.place} was stopped by signal {result.stop_signal}."
            self._reason = self._rendezvous.stop(result.exit_code, text)
        else:
            self._reason = self._rendezvous.fail(result.exit_code, failure)

    def settle(self, result: GroupResult) -> Outcome:
        """Follows the reason that came first; after a success waits for the others."""
        reason, self._reason = self._reason, None
        self._linger_s = _LINGER_S
        if result.stop_signal is not None:
            return Outcome(result.exit_code)
        if reason is not None:
            return self._follow(reason)
        if result.interrupted:
            return self._follow(self._rendezvous.reason())
        try:
            reason = self._rendezvous.finish()
        except StoppedBySignalError as error:
            self._rendezvous.stop(error.exit_code, f"{error}")
            raise
        if reason is None:
            self._linger_s = None
            return Outcome(0)
        return self._follow(reason)

    def _follow(self, reason: Reason) -> Outcome:
        if reason.restart and reason.node != self._rendezvous.name:
            self._log.warning(f"Another node starts the workers again: {reason.text}")
        elif reason.node != self._rendezvous.name or reason.kind == "lost":
            self._log.error(f"Another node ended the job: {reason.text}")
        return Outcome(reason.code, reason.restart)

    def close(self) -> None:
        """Leaves the job; the host stays until the others have read how it ended."""
        self._rendezvous.close()
        if self._service is None:
            return
        began = time.monotonic()
        told = False
        num_signals = len(self._signals.received)
        while self._service.num_sessions() and len(self._signals.received) == num_signals:
            waited_s = time.monotonic() - began
            if self._linger_s is not None and waited_s > self._linger_s:
                break
            if waited_s > _NOTICE_PERIOD_S and not told:
                told = True
                self._log.info("This node's part is complete; other launchers still use its rendezvous service.")
            _pause(self._signals, 0.05)
        self._service.close()


def open_meeting(config: LaunchConfig, log: LaunchLog, signals: SignalInbox) -> tuple[Meeting, str]:
    """Hosts or finds the service and connects to it; returns the membership and the master's ip:port.

    Raises:
        RendezvousError: nobody could be reached at the master's address within the limit.
        LaunchError: the service refused this node, or a signal came.
    """
    assert config.host is not None
    master = None
    if config.master is not None:
        host, port = split_endpoint(config.master, "--master")
        master = reachable(host), port
    service, address, client = _host_or_find(config, master, log, signals)
    rules = Rules(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        quiet_s=config.elastic_timeout_s,
        sort_ip=config.sort_ip,
    )
    rendezvous = Rendezvous(
        client,
        name=config.pod_id,
        node=Node(host=config.host, rank=config.node_rank, serves=service is not None),
        rules=rules,
        max_restarts=config.group_restarts,
        grace_s=config.grace_s,
        wait_limit_s=_wait_limit_s(config),
        log=log,
        signals=signals,
    )
    return Meeting(rendezvous, service, log, signals), join_endpoint(*address)


def _wait_limit_s(config: LaunchConfig) -> float:
    return config.elastic_timeout_s * _FIXED_JOB_FACTOR


def _host_or_find(
    config: LaunchConfig, master: tuple[str, int] | None, log: LaunchLog, signals: SignalInbox
) -> tuple[KeyValueService | None, tuple[str, int], KeyValueClient]:
    secret = config.secret.encode()

    say = Seldom(log.warning)

    def refused(address: str, why: str) -> None:
        say(address.rpartition(":")[0], f"The rendezvous service refused {address}: {why}.")

    deadline = time.monotonic() + _wait_limit_s(config)
    noticed = time.monotonic()
    while True:
        listener = _listen(config, master)
        if listener is not None and config.max_nodes * CONNECTIONS_OF_A_NODE > most_connections(MAX_CONNECTIONS):
            listener.close()
            raise RendezvousError(_no_room(config))
        service = None if listener is None else KeyValueService(listener, secret, refused)
        address = master if listener is None else listener.getsockname()[:2]
        assert address is not None
        client = KeyValueClient(address, secret, prefix=f"/fleet/{config.job_id}/", ttl_s=LEASE_S)
        try:
            client.connect()
            return service, address, client
        except (OSError, StoreLostError) as error:
            client.close()
            if service is not None:
                service.close()
            now = time.monotonic()
            if now > deadline:
                raise RendezvousError(_nobody_there(config, address, error)) from error
            if now - noticed > _NOTICE_PERIOD_S:
                noticed = now
                log.info(f"Waiting peer start... nothing answers at {join_endpoint(*address)} yet ({error})")
        _pause(signals, _RETRY_S)
        if signals.received:
            raise StoppedBySignalError(f"Terminating with signal {signals.received[0]}", 128 + signals.received[0])


def _nobody_there(config: LaunchConfig, address: tuple[str, int], error: Exception) -> str:
    absent = ", ".join(str(rank) for rank in range(config.max_nodes) if rank != config.node_rank)
    return (
        f"--master {join_endpoint(*address)}: no launcher answered there within {_wait_limit_s(config):.0f} s "
        f"({error}); absent node ranks: {absent if config.node_rank >= 0 else 0}. Start the launcher on the node that "
        "has this address, or raise --elastic_timeout."
    )


def _no_room(config: LaunchConfig) -> str:
    most = most_connections(MAX_CONNECTIONS) // CONNECTIONS_OF_A_NODE
    return (
        f"The job has up to {config.max_nodes} nodes, and this node, where they meet, can hold the connections of "
        f"{most}: the limit of open files leaves no more, and {MAX_CONNECTIONS // CONNECTIONS_OF_A_NODE} is the most. "
        "Raise the limit (ulimit -n) here, or let the nodes meet on etcd."
    )


def _listen(config: LaunchConfig, master: tuple[str, int] | None) -> socket.socket | None:
    """Returns a listener at the master's address when this node can be the host, else None."""
    host = config.host or "127.0.0.1"
    if master is None:
        return listen(host, 0)
    try:
        return listen(*master)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        # The name of a service in a cluster is not an address of the pod behind it; the node of rank 0 is that pod.
        if config.node_rank == 0:
            with contextlib.suppress(OSError):
                return listen(host, master[1])
        return None


def _pause(signals: SignalInbox, seconds: float) -> None:
    """Waits; a signal to the launcher ends the wait and is left in ``signals.received``."""
    signals.wait(seconds)
    signals.take()
