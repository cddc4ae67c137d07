"""The network interface at which the other nodes reach this one: gloo and NCCL are told its name.

Left to itself gloo takes the address of the host's own name. Debian and Ubuntu map that name to 127.0.1.1, where no
other node can reach it.
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from fleet.common.addresses import means_itself

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40 if struct.calcsize("P") == 8 else 32
_MAX_ADDRESSES = 1024
_NAME_BYTES, _ADDRESS_AT = 16, 20  # struct ifreq: the name, then a sockaddr_in with the address behind 4 bytes
_IPV6 = Path("/proc/net/if_inet6")
# Reserved for documentation (RFC 5737), so that it lies behind the default route.
_SOMEWHERE = "192.0.2.1"


def interfaces() -> dict[str, str]:
    """Returns the interface of each address of this machine; empty where the system does not say (off Linux)."""
    if not sys.platform.startswith("linux"):
        return {}
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        found.update(_ipv4_interfaces())
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _IPV6.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found[f"{ipaddress.IPv6Address(int(digits, 16))}"] = name
    return found


def _ipv4_interfaces() -> dict[str, str]:
    import fcntl

    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    where, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        used = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", size, where)))[0]
    found = {}
    for at in range(0, used, _IFREQ_BYTES):
        name = buffer[at : at + _NAME_BYTES].tobytes().split(b"\0")[0].decode(errors="replace")
        found[socket.inet_ntoa(buffer[at + _ADDRESS_AT : at + _ADDRESS_AT + 4].tobytes())] = name.partition(":")[0]
    return found


def address_towards(host: str, port: int = 9) -> str | None:
    """Returns the address from which this machine reaches ``host``; None when there is no way.

    Connecting a datagram socket sends nothing; it only makes the kernel choose a source address.
    """
    # UnicodeError: the text is no host name, for example because a part of it is too long.
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def own_address() -> str:
    """Returns the address this machine uses towards others: its default route's, else its first one.

    127.0.0.1 when it has no other.
    """
    found = address_towards(_SOMEWHERE)
    if found is not None and not means_itself(found):
        return found
    others = (a for a in interfaces() if not means_itself(a) and not ipaddress.ip_address(a).is_link_local)
    return next(others, "127.0.0.1")


def interface_to(own: str, others: Iterable[str]) -> str | None:
    """Returns the interface through which the nodes at ``others`` reach this one, at ``own``; None: it cannot be told.

    ``own`` may be a name or an address, or empty where it is not known. A name that leads to loopback only here says
    nothing; the way to the others does then.
    """
    known = interfaces()
    others = list(others)
    if all(means_itself(host) for host in (own, *others) if host):
        return known.get("127.0.0.1")
    candidates = [*_addresses(own), *(address_towards(host) for host in others), own_address()]
    return next((known[c] for c in candidates if c in known and not means_itself(c)), None)


def reachable(host: str) -> str:
    """Returns ``host``; this machine's own address for a name that leads to loopback, which it does only here."""
    found = _addresses(host)
    return own_address() if found and all(map(means_itself, found)) and not means_itself(host) else host


def _addresses(host: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)] if host else []
    except (OSError, UnicodeError):
        return []
