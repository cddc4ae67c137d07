"""The address of a Redis, as a publisher and a reader take it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from fleet.errors import ConfigError

__all__ = ["check_database"]


def check_database(origin: str, address: str) -> None:
    """Raises ConfigError where the path names no database: the redis package would take database 0.

    Args:
        origin: what the message begins with.
        address: ``redis://host:port/0``, ``rediss://`` or ``unix://``; the path of the last one is a socket.
    """
    parts = urlsplit(address)
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"/?|/[0-9]+", parts.path):
        raise ConfigError(
            f"{origin}: the address ends with {parts.path!r}, which is no database; write its number, such as "
            "redis://localhost:6379/0."
        )
