"""The answer of ``python -m fleet estimate --table ...``: memory of a server, disk, and servers for a rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.estimate.measured_server import MeasuredServer, measure_server
from fleet.estimate.planned_tables import PlannedTable
from fleet.ps.server.server_config import ServerConfig

_MB = 1_000_000
_FREE = 0.2  # of a server's memory: indexes grow a part at a time, messages, the page cache
_BUSY = 0.7  # of a server's cores at most, so that requests do not queue
_MOST_SERVERS = 100_000


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What is asked of the servers.

    Attributes:
        servers: how many there are; ``None``: as many as memory and rate need.
        server_memory: bytes of memory of one; ``None`` does not limit them.
        server_cores: cores of one.
        rate: samples a second that all workers train; ``None`` asks for memory alone.
        ids_per_sample: distinct ids that a sample adds to a batch, over all tables.
        samples_per_step: samples in a worker's batch.
    """

    servers: int | None = None
    server_memory: int | None = None
    server_cores: int = 4
    rate: float | None = None
    ids_per_sample: float | None = None
    samples_per_step: int = 256

    def __post_init__(self) -> None:
        for name in ("servers", "server_memory", "server_cores", "rate", "ids_per_sample", "samples_per_step"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: it takes a number above 0.")
        if (self.rate is None) != (self.ids_per_sample is None):
            raise ConfigError("--rate and --ids-per-sample belong together: samples a second, and distinct ids of one.")


def report(tables: Sequence[PlannedTable], demand: Demand) -> str:
    """Measures a server of these tables on this machine and returns the text of the estimate.

    Raises:
        ConfigError: limits of a table do not fit its rows, or no number of servers has the memory.
        PSError: the server that is measured did not start.
    """
    guess = demand.servers or 1
    asked = demand.rate is not None and demand.ids_per_sample is not None
    message = None
    if asked:
        assert demand.ids_per_sample is not None
        message = max(1, round(demand.samples_per_step * demand.ids_per_sample / guess))
    measured = measure_server([table.config for table in tables], message)
    by_memory = servers_for_memory(tables, demand, measured.process_bytes)
    by_rate, line = _servers_for_rate(tables, demand, measured)
    servers = demand.servers or max(by_memory or 1, by_rate or 1)
    lines = memory_lines(tables, servers, measured)
    lines.append(f"\nA server process was measured here for {measured.took_s:.0f} s.")
    if demand.server_memory is not None:
        lines.append(
            f"Memory: {by_memory} servers of {demand.server_memory / 1e9:g} GB, of which {_FREE:.0%} stay free."
        )
    return "\n".join([*lines, *line])


def memory_lines(tables: Sequence[PlannedTable], servers: int, measured: MeasuredServer) -> list[str]:
    """Returns the table of bytes on one of ``servers``."""
    title = f"Tables on one of {servers} server{'s' * (servers > 1)}, in MB of a million bytes"
    head = (
        f"{'':16}{'rows':>14}{'bytes a row':>13}{'rows, MB':>11}{'index':>9}{'memory':>10}{'on disk':>10}{'save':>10}"
    )
    lines = [title, "", head]
    memory = kept = 0
    for table in tables:
        size = table.on_server(servers)
        memory += size.memory_bytes
        kept += table.saved_bytes(servers, in_snapshot=True)
        each = (size.row_bytes, size.index_bytes, size.memory_bytes, size.disk_bytes, table.saved_bytes(servers))
        shown = "".join(f"{value / _MB:>{width}.0f}" for value, width in zip(each, (11, 9, 10, 10, 10), strict=True))
        lines.append(f"{table.config.name:16}{size.rows:>14,}{table.row_bytes:>13}{shown}")
    total = (memory + measured.process_bytes) / _MB
    journal = ServerConfig(secret=b"-").snapshot_bytes
    disk = (2 * (kept + journal)) / _MB
    lines.append(f"{'process':16}{'':>14}{'':>13}{'':>11}{'':>9}{measured.process_bytes / _MB:>10.0f}")
    lines.append(f"{'server':16}{'':>14}{'':>13}{'':>11}{'':>9}{total:>10.0f}")
    lines.append(f"\nWith FLEET_PS_FOLDER: up to {disk:.0f} MB of snapshots and journal on its disk.")
    return lines


def servers_for_memory(tables: Sequence[PlannedTable], demand: Demand, process_bytes: int) -> int | None:
    """Returns the fewest servers whose memory holds the tables; ``None`` where it is not limited.

    Raises:
        ConfigError: no number of servers does.
    """
    if demand.server_memory is None:
        return None
    room = (1 - _FREE) * demand.server_memory

    def fits(servers: int) -> bool:
        return process_bytes + sum(table.on_server(servers).memory_bytes for table in tables) <= room

    if not fits(_MOST_SERVERS):
        raise ConfigError(
            f"--server-memory {demand.server_memory / 1e9:g}: a server process without rows takes "
            f"{process_bytes / 1e9:.2f} GB, and {_FREE:.0%} of the memory stay free. Give servers more "
            "memory, or tables limits."
        )
    low, high = 0, _MOST_SERVERS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _servers_for_rate(
    tables: Sequence[PlannedTable], demand: Demand, measured: MeasuredServer
) -> tuple[int | None, list[str]]:
    if measured.ids_per_s is None or demand.rate is None or demand.ids_per_sample is None:
        return None, []
    ids = demand.rate * demand.ids_per_sample
    cores = ids / measured.ids_per_s
    servers = max(1, math.ceil(cores / (_BUSY * demand.server_cores)))
    dim = sum(table.config.dim for table in tables) / len(tables)
    lines = [
        f"Rate: a core of this machine pulls and pushes {measured.ids_per_s / 1e6:.2f} million ids a second, rows in "
        "memory and no journal.",
        f"{demand.rate:,.0f} samples/s of {demand.ids_per_sample:g} ids are {ids / 1e6:.2f} million: {cores:.2f} "
        f"cores, so {servers} server{'s' * (servers > 1)} of {demand.server_cores} cores that are busy to {_BUSY:.0%}.",
        f"Network of all servers: {ids * (8 + 8 + 4 * dim) / _MB:.0f} MB/s in, {ids * 4 * dim / _MB:.0f} MB/s out, "
        f"without dense parameters; journal {ids * (8 + 4 * dim) / _MB:.0f} MB/s.",
    ]
    return servers, lines
