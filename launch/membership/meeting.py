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

from fleet.common.addresses import join_endpoint, split_endpoint
from fleet.errors import RendezvousError
from fleet.launch.membership.callers import Seldom, listen, most_connections
from fleet.launch.membership.engine import Engine, patience_s, read_settings
from fleet.launch.membership.generation import StoppedBySignalError
from fleet.launch.membership.kv_client import CONNECTIONS_OF_A_NODE, KeyValueClient
from fleet.launch.membership.kv_contact import KeyValueContact
from fleet.launch.membership.kv_service import MAX_CONNECTIONS, KeyValueService
from fleet.launch.membership.store import StoreLostError
from fleet.launch.membership.world import NODE_PREFIX, Node, job_prefix
from fleet.launch.plan.interfaces import reachable
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox

_RETRY_S = 0.2
_NOTICE_PERIOD_S = 5.0


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
