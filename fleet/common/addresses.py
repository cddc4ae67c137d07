"""Endpoints and addresses as users write them: split, checked and joined."""

from __future__ import annotations

import ipaddress
from collections import Counter

from fleet.errors import ConfigError


def split_endpoint(text: str, source: str, default_port: int | None = None, lowest_port: int = 1) -> tuple[str, int]:
    """Returns host and port of ``host:port`` or ``[ipv6]:port``; ``source`` names the flag or variable in the error.

    Raises:
        ConfigError: ``text`` is anything else, or the port is not ``lowest_port`` to 65535.

    Example:
        >>> split_endpoint("[::1]:6170", "PADDLE_MASTER")
        ('::1', 6170)
    """
    host, colon, port = text.strip().rpartition(":")
    if text.strip().endswith("]") or not colon:
        # The last colon lies inside an IPv6 address in brackets, or there is no colon: no port was given.
        host, port = text.strip(), ""
    host = host.removeprefix("[").removesuffix("]")
    if not port and default_port is not None and host:
        return host, default_port
    # isdecimal() alone accepts digits of other scripts; int() of a long text would take quadratic time.
    digits = port.isascii() and port.isdecimal() and len(port) < 6
    if not host or not digits or not lowest_port <= int(port) < 65536:
        raise ConfigError(
            f"{source} has {text!r:.200}; it takes host:port with a port from {lowest_port} to 65535, as in "
            "10.0.0.1:6070."
        )
    if any(c.isspace() or c in "/@," for c in host):
        raise ConfigError(f"{source} has {text!r:.200}; {host!r:.200} is not a host name or an address.")
    return host, int(port)


def join_endpoint(host: str, port: int) -> str:
    """Returns ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_list(text: str | None) -> list[str]:
    """Returns the parts between commas, stripped; an absent text gives an empty list."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def check_distinct(items: list[str], source: str) -> None:
    """Raises ConfigError when an item occurs twice."""
    for item, count in Counter(items).items():
        if count > 1:
            raise ConfigError(f"{source} names {item!r} twice; each must differ.")


def is_loopback(host: str) -> bool:
    """Returns whether ``host`` is a loopback name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def means_itself(host: str) -> bool:
    """Returns whether ``host`` names the machine that resolves it: loopback, 0.0.0.0 or ``::``."""
    try:
        return is_loopback(host) or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def split_master(text: str, source: str) -> tuple[str, str]:
    """Returns scheme ("http" or "etcd") and ``host:port`` of a ``--master`` value; several etcd hosts may be listed."""
    scheme, mark, rest = text.strip().partition("://")
    if not mark:
        scheme, rest = "http", text.strip()
    if scheme not in ("http", "etcd"):
        raise ConfigError(f"{source} is {hide_user(text)!r}; it takes ip:port, http://ip:port or etcd://ip:port.")
    user, at, hosts = rest.rstrip("/").rpartition("@")
    if at and scheme == "http":
        raise ConfigError(f"{source} is {hide_user(text)!r}; the meeting point takes no user name.")
    listed = split_list(hosts)
    if not listed or (scheme == "http" and len(listed) > 1):
        raise ConfigError(f"{source} is {hide_user(text)!r}; it takes one ip:port.")
    joined = ",".join(join_endpoint(*split_endpoint(item, source)) for item in listed)
    return scheme, f"{user}{at}{joined}"


def hide_user(text: str) -> str:
    """Returns an address without the user name and password it may hold."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        scheme, rest = "", text
    _, at, hosts = rest.rpartition("@")
    return f"{scheme}{mark}***@{hosts}" if at else text
