"""The address of a Redis, as a publisher and a reader take it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from fleet.errors import ConfigError


def check_database(origin: str, address: str) -> None:
    """Raises ConfigError for an impossible port, or a path without a database: the redis package would use database 0.

    Args:
        origin: the beginning of the message.
        address: ``redis://host:port/0``, ``rediss://`` or ``unix://``; the path of the last one is a socket.
    """
    parts = urlsplit(address)
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"/?|/[0-9]+", parts.path):
        raise ConfigError(
            f"{origin}: the address ends with {parts.path!r}, which is no database; write its number, such as "
            "redis://localhost:6379/0."
        )
    try:
        _ = parts.port  # urlsplit checks a port when it is read
    except ValueError:
        raise ConfigError(
            f"{origin}: the address {without_password(address)!r} has no port from 0 to 65535; write one, such as "
            "redis://localhost:6379/0."
        ) from None


def without_password(address: str) -> str:
    """Returns the address without user and password, for messages."""
    scheme, separator, rest = address.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
