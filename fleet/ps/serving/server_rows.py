"""The rows that the servers of a running job have in memory, or their standbys: each lookup asks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet.common.addresses import join_endpoint, split_endpoint, split_list
from fleet.errors import ConfigError, PSError
from fleet.ps.serving.local_rows import Found, Position, check_table
from fleet.ps.serving.read_line import LIMIT_S, ReadAccess, ReadLine
from fleet.ps.table.layout import Int64s
from fleet.ps.table.partition import servers_of_keys
from fleet.ps.wire.messages import (
    Header,
    MessageError,
    MessageFlag,
    Op,
    TablePart,
    decode_control,
    decode_parts,
    encode_parts,
)
from fleet.ps.wire.row_form import wide_parts

SCHEME = "ps://"
_PIECE_BYTES = 32 << 20  # of the answer to one question
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class _Table:
    number: int
    dim: int
    routing: str
    num_servers: int


def read_endpoints(source: str) -> list[str]:
    """Returns the endpoints in ``ps://host:port,host:port``; raises ConfigError when they are none."""
    origin = f"fleet.ps.Reader({source!r})"
    endpoints = [join_endpoint(*split_endpoint(one, origin)) for one in split_list(source.removeprefix(SCHEME))]
    if not endpoints or len(set(endpoints)) < len(endpoints):
        raise ConfigError(
            f"{origin} takes an endpoint of every server of the job, each once, as in ps://10.0.0.7:36001,10.0.0.8:36001."
        )
    return endpoints


class ServerRows:
    """Rows of one job on its servers and standbys; nothing is cached, so every lookup gets the rows there now.

    Args:
        source: ``ps://`` and the endpoints, for messages.
        endpoints: at least one of every server number.
        access: the job's secret, and how to connect.
    """

    def __init__(self, source: str, endpoints: list[str], access: ReadAccess) -> None:
        self._label = f"fleet.ps.Reader({source!r})"
        self._lines: dict[int, ReadLine] = {}
        self._tables: dict[str, _Table] = {}
        with ExitStack() as stack:
            stack.callback(self.close)
            self._open(endpoints, access)
            self._learn([line.facts for line in self._lines.values()])
            stack.pop_all()

    @property
    def dims(self) -> Mapping[str, int]:
        """The columns of each table that the servers have now."""
        self._learn(self._ask())
        return {name: table.dim for name, table in self._tables.items()}

    @property
    def positions(self) -> dict[int, Position]:
        """How far the rows of each server are, by the process that answers for it."""
        facts = self._ask()
        now = time.time()
        return {
            int(one["index"]): Position(f"epoch {one['epoch']}", one["record"], one["step"], now - one["age_s"])
            for one in facts
        }

    def refresh(self) -> bool:
        """Returns False: a lookup gets the newest rows in any case. Raises PSError when a server is away."""
        self._ask()
        return False

    def lookup(self, table: str, keys: Int64s) -> Found:
        """Returns the rows of ``keys``, zeros for missing rows, and the mask of those found."""
        if not isinstance(table, str) or table not in self._tables:
            check_table(self._label, table, self.dims)
        chosen = self._tables[table]
        # Each id once, because requests repeat popular ones, and sorted, as _fetch needs them.
        distinct, places = np.unique(keys, return_inverse=True)
        rows = np.zeros((len(distinct), chosen.dim), np.float32)
        found = np.zeros(len(distinct), np.bool_)
        # In pieces: servers refuse bodies beyond a limit, and hold an answer in memory as a whole.
        piece = max(1, _PIECE_BYTES // (16 + 4 * chosen.dim))
        for start in range(0, len(distinct), piece):
            part = slice(start, start + piece)
            self._fetch(chosen, distinct[part], rows[part], found[part])
        places = places.reshape(-1)
        return rows[places], found[places]

    def close(self) -> None:
        """Closes the connections."""
        for line in self._lines.values():
            line.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _open(self, endpoints: list[str], access: ReadAccess) -> None:
        """Connects to a process of every server number; waits a while for those that are away."""
        waiting = {endpoint: ReadLine(access, endpoint) for endpoint in endpoints}
        began = time.monotonic()
        while True:
            reasons = []
            for endpoint, line in list(waiting.items()):
                try:
                    line.try_to_open()
                except ConfigError:
                    raise
                except (PSError, OSError) as error:
                    reasons.append(f"{error}")
                    continue
                del waiting[endpoint]
                self._take(endpoint, line)
            known = {other for line in self._lines.values() for other in line.others}
            if waiting.keys() <= known:
                return
            if time.monotonic() - began > LIMIT_S:
                missing = ", ".join(sorted(waiting.keys() - known))
                raise PSError(f"{self._label}: nothing can be read at {missing} for {LIMIT_S:g} s: {' '.join(reasons)}")
            time.sleep(_PAUSE_S)

    def _take(self, endpoint: str, line: ReadLine) -> None:
        """Keeps the first line of a number; raises ConfigError for endpoints of more than one job."""
        first = self._lines.setdefault(line.index, line)
        every = next(iter(self._lines.values()))
        if line.facts["job"] != every.facts["job"]:
            line.close()
            raise ConfigError(
                f"{self._label}: {endpoint} is a server of job {line.facts['job']!r}, the others are of job "
                f"{every.facts['job']!r}. List the servers of one job."
            )
        if first is not line:
            line.close()
            if endpoint not in first.others:
                raise ConfigError(
                    f"{self._label}: {endpoint} and another one are both server {line.index}, and not each other's "
                    "standby. List the servers of one job."
                )

    def _learn(self, facts: list[dict[str, Any]]) -> None:
        """Learns the tables that all servers have; raises ConfigError where the list of servers is not complete."""
        tables: dict[str, _Table] = {}
        for number, table in facts[0]["tables"].items():
            if all(number in one["tables"] for one in facts):
                tables[table["name"]] = _Table(int(number), table["dim"], table["routing"], table["num_servers"])
        for table in (table for one in facts for table in one["tables"].values()):
            missing = sorted(set(range(table["num_servers"])) - self._lines.keys())
            if missing or len(self._lines) > table["num_servers"]:
                raise ConfigError(
                    f"{self._label}: the job has {table['num_servers']} servers, and the list has those of number "
                    f"{sorted(self._lines)}. Give an endpoint of every one, its own or that of its standby."
                )
        self._tables = tables

    def _ask(self) -> list[dict[str, Any]]:
        """Returns the facts of each server, asked now."""
        answers: list[dict[str, Any]] = []

        def take(line: ReadLine, header: Header, body: memoryview) -> None:
            answers.append(decode_control(body))
            line.note_seen(int(answers[-1]["record"]))

        self._question(Op.STAT, {index: [] for index in self._lines}, take)
        return answers

    def _fetch(self, table: _Table, keys: Int64s, rows: Any, found: Any) -> None:
        """Writes the rows of ``keys``, which are sorted, and the mask of those found."""
        servers = servers_of_keys(keys, table.num_servers, table.routing)
        shares = {index: np.flatnonzero(servers == index) for index in range(table.num_servers)}
        parts = {
            index: [TablePart(table.number, len(places), table.dim, np.ascontiguousarray(keys[places]))]
            for index, places in shares.items()
            if len(places)
        }

        def take(line: ReadLine, header: Header, body: memoryview) -> None:
            half = bool(header.flags & MessageFlag.BFLOAT16)
            answered = wide_parts(decode_parts(body, header.n_tables, half))
            if len(answered) != 1 or answered[0].ids is None or answered[0].dim != table.dim:
                raise MessageError(f"{line.name}: the answer is not for the table that was asked for.")
            # Ids without a row are absent from the answer; the others may come in any order.
            places = np.searchsorted(keys, answered[0].ids)
            if not np.array_equal(keys[np.minimum(places, len(keys) - 1)], answered[0].ids):
                raise MessageError(f"{line.name}: the answer has ids that were not asked for.")
            rows[places] = answered[0].rows
            found[places] = True

        self._question(Op.PULL, parts, take)

    def _question(
        self, op: Op, parts: Mapping[int, list[TablePart]], take: Callable[[ReadLine, Header, memoryview], None]
    ) -> None:
        """Asks several servers at the same time."""
        asked = [(self._lines[index], encode_parts(own), len(own)) for index, own in sorted(parts.items())]
        with ExitStack() as stack:
            for line, _, _ in asked:
                stack.enter_context(line.lock)  # in the order of the servers, so that threads do not wait in a circle
            for line, buffers, count in asked:
                line.begin(op, buffers, count)
            failures = []
            for line, buffers, count in asked:
                try:
                    take(line, *line.finish(op, buffers, count))
                except PSError as error:  # the others' answers must be read, too
                    failures.append(error)
        if failures:
            raise failures[0]
