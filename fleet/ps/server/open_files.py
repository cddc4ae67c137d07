"""How many connections a server takes: as many as it is told, within the limit of open files."""

from __future__ import annotations

import resource
from contextlib import suppress

from fleet.errors import ConfigError

__all__ = ["USUAL_CONNECTIONS", "connections_allowed"]

USUAL_CONNECTIONS = 1024
RESERVED = 192  # newcomers, journal, snapshots, saves, metrics, libraries


def connections_allowed(asked: int | None) -> int:
    """Returns the cap on connections: what is asked for, or :data:`USUAL_CONNECTIONS` as far as the limit allows.

    The soft limit of this process is raised where it is too low, up to the hard one.

    Raises:
        ConfigError: the limit allows fewer than are asked for, or none.
    """
    wanted = USUAL_CONNECTIONS if asked is None else asked
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, wanted + RESERVED):
        raised = hard if _is_below(hard, wanted + RESERVED) else wanted + RESERVED
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _is_below(soft, wanted + RESERVED):
        return wanted
    room = soft - RESERVED
    if asked is not None or room < 1:
        raise ConfigError(
            f"parameter server: {wanted} connections are asked for (FLEET_PS_MAX_CONNECTIONS), and this process may "
            f"open {soft} files, of which {RESERVED} are for other things: {max(room, 0)} connections at most. Raise "
            f"the limit (ulimit -n {wanted + RESERVED}; LimitNOFILE of a service; --ulimit nofile of a container), or "
            "ask for fewer."
        )
    return room


def _is_below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed
