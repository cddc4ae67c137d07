"""Ports of this node: free ones, or consecutive ones from a fixed first; and this node's own peer record."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from fleet._addresses import split_endpoint
from fleet.errors import LaunchError
from fleet.launch.plan.records import LaunchConfig, Peer

_RANGE = (35100, 64000)
_random = random.SystemRandom()  # two launchers that start at once must not look at the same ports
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_free(host: str, port: int) -> bool:
    """Returns whether a listener could be opened at ``host:port`` now; a host of another machine counts as free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        return True
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            return error.errno not in (48, 98, 13)  # in use (macOS, Linux); not allowed
    return True


def free_ports(
    count: int, host: str, port_range: tuple[int, int] | None = None, taken: Iterable[int] = ()
) -> tuple[int, ...]:
    """Returns ``count`` distinct ports nobody listens on; raises LaunchError when the range has too few.

    Between this look and the child's listen another program could take a port. The kernel hands the ports of its
    ephemeral range to every outgoing connection, so ports outside of it come first.
    """
    first, last = port_range or _RANGE
    inside: list[int] = []
    outside: list[int] = []
    low, high = (1, 0) if port_range else _ephemeral_range()
    for port in {*range(first, last + 1)}.difference(taken):
        (inside if low <= port <= high else outside).append(port)
    found: list[int] = []
    for group in (outside, inside):
        _random.shuffle(group)
        found += itertools.islice((port for port in group if is_free(host, port)), count - len(found))
        if len(found) == count:
            return tuple(found)
    raise LaunchError(
        f"{count} free ports are needed on {host}, but the range {first}:{last} has {len(found)}. "
        "Set PORT_RANGE=first:last to a wider one."
    )


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = _EPHEMERAL.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def fixed_ports(first: int, count: int, host: str) -> tuple[int, ...]:
    """Returns ``count`` consecutive ports from ``first``; raises LaunchError naming the first one in use."""
    ports = tuple(range(first, first + count))
    check_ports(host, ports)
    return ports


def check_ports(host: str, ports: Iterable[int]) -> None:
    """Raises LaunchError for the first of ``ports`` that something on this machine already listens on."""
    for port in ports:
        if port > 65535:
            raise LaunchError(f"Port {port} on {host} does not exist; ports end at 65535. Lower the first port.")
        if not is_free(host, port):
            raise LaunchError(
                f"Port {port} on {host} is in use (or not allowed to this user). End the program that "
                "holds it, or choose another first port with --start_port or FLAGS_START_PORT."
            )


def make_peer(config: LaunchConfig) -> Peer:
    """Returns this node's record with ports chosen now; call it again for each start of the workers.

    Nodes that were listed beforehand keep the ports of the list; these are only checked.
    """
    if config.static_peers:
        own = config.static_peers[config.node_rank]
        check_ports(own.host, (*own.ports, *own.server_ports))
        return own
    host = node_host(config)
    num_workers = 0 if config.workers else config.nproc_per_node or 0
    num_servers = 0 if config.servers else config.server_ports
    listed = _check_listed(config)
    fixed = config.fixed_port is not None and num_servers + num_workers > 0
    if fixed:
        ports = fixed_ports(config.fixed_port or 0, num_servers + num_workers, host)
    else:
        ports = free_ports(num_servers + num_workers, host, config.port_range, listed)
    servers, workers = ports[:num_servers], ports[num_servers:]
    store, http = free_ports(2, host, config.port_range, {*ports, *listed})
    return Peer(
        name=config.pod_name,
        host=host,
        ports=workers,
        server_ports=servers,
        devices=config.worker_devices,
        store_port=_own_or(config.store_port, workers[0] if fixed and workers else store, host),
        http_port=_own_or(config.http_port, http, host),
        node_rank=config.node_rank,
    )


def _check_listed(config: LaunchConfig) -> set[int]:
    """Returns the ports of listed endpoints, after a look that this node's own are free."""
    own = [*(config.servers[i] for i in config.local_servers), *(config.workers[i] for i in config.local_workers)]
    for endpoint in own:
        address, port = split_endpoint(endpoint, "the endpoint list")
        check_ports(address, (port,))
    return {split_endpoint(endpoint, "the endpoint list")[1] for endpoint in (*config.servers, *config.workers)}


def _own_or(fixed: int | None, free: int, host: str) -> int:
    if fixed is None:
        return free
    check_ports(host, (fixed,))
    return fixed


def node_host(config: LaunchConfig) -> str:
    """Returns the address of this node: 127.0.0.1 on a single one, else ``--host`` or what the machine uses."""
    return "127.0.0.1" if config.is_single_node else config.host or "127.0.0.1"
