"""Which server holds what: pure functions, the same on workers, servers and in files."""

from __future__ import annotations

import numpy as np

from fleet.errors import ConfigError
from fleet.ps.table.hash import NUM_RANGES, mix, range_of
from fleet.ps.table.layout import Int64s

ROUTINGS = ("range", "modulo")


def check_num_servers(num_servers: int) -> None:
    """Raises ConfigError unless ``num_servers`` is between 1 and 4096."""
    if not isinstance(num_servers, int) or isinstance(num_servers, bool) or not 1 <= num_servers <= NUM_RANGES:
        raise ConfigError(f"the number of servers is {num_servers!r}; it takes an integer from 1 to {NUM_RANGES}.")


def range_bounds(num_servers: int) -> list[int]:
    """Returns the first virtual range of each server, and 4096 at the end; the shares differ by at most one."""
    check_num_servers(num_servers)
    return [-(-NUM_RANGES * server // num_servers) for server in range(num_servers)] + [NUM_RANGES]


def servers_of_keys(keys: Int64s, num_servers: int, routing: str = "range") -> Int64s:
    """Returns the server, int64, of each key.

    Args:
        keys: int64 keys.
        num_servers: how many servers share the table.
        routing: ``"range"`` mixes the key's bits, so that any set of ids spreads evenly, and gives each server
            consecutive virtual ranges. ``"modulo"`` is the documented ``id % servers`` (the id as unsigned 64 bits).

    Example:
        >>> servers_of_keys(np.array([4, 5, 6]), 2, "modulo").tolist()
        [0, 1, 0]
    """
    check_num_servers(num_servers)
    if routing == "modulo":
        return (keys.astype(np.uint64) % np.uint64(num_servers)).astype(np.int64)
    if routing != "range":
        raise ConfigError(f"the routing {routing!r} does not exist; one of {list(ROUTINGS)}.")
    return range_of(mix(keys)) * num_servers // NUM_RANGES


def plan_dense_blocks(num_elements: int, num_servers: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of each server's elements: consecutive, none missing, all but the last alike.

    Example:
        >>> plan_dense_blocks(10, 3)
        [(0, 4), (4, 8), (8, 10)]
    """
    check_num_servers(num_servers)
    if num_elements < 0:
        raise ConfigError(f"the number of dense elements is {num_elements!r}; it must not be negative.")
    size = -(-num_elements // num_servers)
    return [(min(i * size, num_elements), min((i + 1) * size, num_elements)) for i in range(num_servers)]
