"""Keeps the ports a node has chosen until its processes are about to start, and those of servers for the whole job.

Between the choice and the start another launcher on this machine could choose the same ports, or be handed one by the
kernel. A listener on each closes that gap, on one node as long as the plan takes, on several until all have met. A
parameter server gets a socket that is bound to its port from the launcher, which keeps it while the server restarts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from fleet._addresses import split_endpoint
from fleet.launch.plan.records import LaunchConfig, Peer, ProcessSpec


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
        host, port = spec.environment.get("POD_IP", ""), int(spec.environment.get("PADDLE_PORT") or 0)
        if spec.role != "server" or (host, port) not in self._sockets or not _is_address(host):
            return spec
        self._sockets.pop((host, port)).close()
        with contextlib.suppress(OSError):
            self._hold(host, port, listens=False)
        if (held := self._sockets.get((host, port))) is None:
            return spec  # taken in this moment: the server will say so
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
    listed = [split_endpoint(config.servers[i], "the endpoint list") for i in config.local_servers]
    return PortHold([*dict.fromkeys([*((peer.host, port) for port in ports if port), *listed])])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
