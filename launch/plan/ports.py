"""Ports of this node: free ones, or consecutive ones from a fixed first; and this node's own peer record."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import random
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from fleet.common.addresses import split_endpoint
from fleet.errors import LaunchError
from fleet.launch.plan.peers import Peer
from fleet.launch.plan.records import LaunchConfig, ProcessSpec

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
            # EADDRINUSE is 48 on macOS and 98 on Linux; 13 is EACCES, for a port below 1024.
            return error.errno not in (48, 98, 13)
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
    if config.nodes.static_peers:
        own = config.nodes.static_peers[config.nodes.rank]
        check_ports(own.host, (*own.ports, *own.server_ports))
        return own
    host = node_host(config)
    num_workers = 0 if config.servers.worker_endpoints else config.processes.num_workers
    num_servers = 0 if config.servers.endpoints else config.servers.num_ports
    listed = _check_listed(config)
    fixed = config.nodes.first_port is not None and num_servers + num_workers > 0
    if fixed:
        ports = fixed_ports(config.nodes.first_port or 0, num_servers + num_workers, host)
    else:
        ports = free_ports(num_servers + num_workers, host, config.nodes.port_range, listed)
    servers, workers = ports[:num_servers], ports[num_servers:]
    store, http = free_ports(2, host, config.nodes.port_range, {*ports, *listed})
    return Peer(
        name=config.pod.name,
        host=host,
        ports=workers,
        server_ports=servers,
        devices=config.processes.worker_devices,
        store_port=_own_or(config.nodes.store_port, workers[0] if fixed and workers else store, host),
        http_port=_own_or(config.servers.http_port, http, host),
        node_rank=config.nodes.rank,
    )


def _check_listed(config: LaunchConfig) -> set[int]:
    """Returns the ports of listed endpoints, after a look that this node's own are free."""
    own = [
        *(config.servers.endpoints[i] for i in config.servers.local_servers),
        *(config.servers.worker_endpoints[i] for i in config.servers.local_workers),
    ]
    for endpoint in own:
        address, port = split_endpoint(endpoint, "the endpoint list")
        check_ports(address, (port,))
    return {
        split_endpoint(endpoint, "the endpoint list")[1]
        for endpoint in (*config.servers.endpoints, *config.servers.worker_endpoints)
    }


def _own_or(fixed: int | None, free: int, host: str) -> int:
    if fixed is None:
        return free
    check_ports(host, (fixed,))
    return fixed


def node_host(config: LaunchConfig) -> str:
    """Returns the address of this node: 127.0.0.1 on a single one, else ``--host`` or the machine's."""
    return "127.0.0.1" if config.nodes.is_single else config.nodes.host or "127.0.0.1"


class PortHold:
    """Sockets on ports; leaving the ``with`` block closes them, :meth:`release` those that are not handed on."""

    def __init__(self, endpoints: Sequence[tuple[str, int]]) -> None:
        self._sockets: dict[tuple[str, int], socket.socket] = {}
        self._handed_on: set[tuple[str, int]] = set()
        for host, port in endpoints:
            # A name that is not an address here, or a port that is taken: the process will say so.
            with contextlib.suppress(OSError, UnicodeError):
                self._hold(host, port)

    def _hold(self, host: str, port: int, listens: bool = True) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, kind, protocol)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
            if listens:
                held.listen(1)
        except OSError:
            held.close()
            raise
        self._sockets[host, port] = held

    def __enter__(self) -> PortHold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handed_on.clear()
        self.release()

    def hand_on(self, spec: ProcessSpec) -> ProcessSpec:
        """Returns ``spec`` with a socket that is bound to the port that it serves on, if it is a server.

        The socket does not listen yet: a program that opens its PADDLE_PORT itself can do so, as servers do, with
        SO_REUSEADDR. A host that is a name is left to the server: it may have to listen elsewhere than where the name
        leads here.
        """
        host = spec.environment.get("POD_IP", "")
        port = int(spec.environment.get("PADDLE_PORT") or 0)
        if spec.role != "server" or (host, port) not in self._sockets or not _is_address(host):
            return spec
        self._sockets.pop((host, port)).close()
        with contextlib.suppress(OSError):
            self._hold(host, port, listens=False)
        if (held := self._sockets.get((host, port))) is None:
            # Another program has taken the port in this moment; the server names it when it listens.
            return spec
        self._handed_on.add((host, port))
        number = held.fileno()
        return replace(spec, environment={**spec.environment, "FLEET_PS_SOCKET": f"{number}"}, pass_fds=(number,))

    def release(self) -> None:
        """Frees the ports; no connection was ever accepted, so they can be listened on again at once."""
        for endpoint in self._sockets.keys() - self._handed_on:
            self._sockets.pop(endpoint).close()


def hold_ports(config: LaunchConfig, peer: Peer) -> PortHold:
    """Returns a hold on every port of ``peer`` that its own processes will listen on."""
    ports = [*peer.ports, *peer.server_ports, peer.store_port, peer.http_port]
    listed = [split_endpoint(config.servers.endpoints[i], "the endpoint list") for i in config.servers.local_servers]
    return PortHold([*dict.fromkeys([*((peer.host, port) for port in ports if port), *listed])])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
