"""Groups of tables behind the server: a message pulls or pushes the rows of all tables of one width at once.

[Note: Tables of one width]
A model may have hundreds of tables, and a call of Python for each would take longer than its rows. So a worker joins
the ids and gradients of tables of one width, with the same fields, in one part of a message (``TablePart.members``
says whose rows are where), and the server handles the part as it came: one check, one call of a kernel that goes
through the tables, one mean in sync mode, one part in the answer and in the journal. Nothing else knows groups: locks,
steps, limits, saves and figures are each table's own, and ``TablePart.each`` gives the part of one table where a row's
table matters. The tables that a worker names together may be others in each message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.ps.server.job_state import Refused
from fleet.ps.server.served_table import ServedSparse, ServedTable
from fleet.ps.wire.messages import TablePart

_MOST_GROUPS = 1 << 10  # a model names its tables in few ways


class ServedGroup:
    """Sparse tables whose rows come in one part of a message; each is a :class:`ServedSparse`.

    Raises:
        Refused: a table is dense, or has rows of another width or kind than the others.
    """

    def __init__(self, tables: Sequence[ServedTable]) -> None:
        sparse = [table for table in tables if isinstance(table, ServedSparse)]
        first = sparse[0] if sparse else None
        for table in tables:
            if first is None or not isinstance(table, ServedSparse) or _kind(table) != _kind(first):
                raise Refused(
                    f"table {table.table.config.name!r} is dense, or has rows of another width than "
                    f"{tables[0].table.config.name!r}: their rows do not come in one part of a message."
                )
        assert first is not None
        self._tables = sparse
        self._first = first
        self._limited = [(place, table) for place, table in enumerate(sparse) if table.is_limited]
        self._group = first.group_of([table.table for table in sparse])
        self.keeps_shows = first.keeps_shows

    def check(self, part: TablePart, change: bool) -> None:
        """Raises :class:`Refused` when ``part`` does not fit the tables."""
        self._first.check_form(part, change)
        if change and self._limited:
            sizes = np.diff(_ends(part), prepend=0)
            for place, table in self._limited:
                table.make_room(int(sizes[place]))

    def pull_shape(self, part: TablePart) -> tuple[int, int]:
        """Returns the shape of the rows that a pull of ``part`` gives."""
        return self._first.pull_shape(part)

    def pull(self, part: TablePart, out: NDArray[np.float32], drawn: bool) -> None:
        """Writes the rows of ``part`` to ``out``, as :meth:`ServedSparse.pull` does."""
        assert part.ids is not None
        self._group.pull(part.ids, _ends(part), out, drawn=drawn)

    def push(self, part: TablePart, lsn: int = 0) -> None:
        """Applies gradients, which are record ``lsn``; the caller asks for the victims then."""
        assert part.ids is not None
        assert part.rows is not None
        self._group.push(part.ids, _ends(part), part.rows, part.shows, part.clicks, part.slots, tick=lsn)

    def add(self, part: TablePart, lsn: int = 0) -> None:
        """Adds deltas, which are record ``lsn``; the caller asks for the victims then."""
        for table, own in zip(self._tables, part.each(), strict=True):
            table.add(own, lsn)

    def set_values(self, part: TablePart) -> None:
        """Not possible for rows: only loading sets them."""
        raise AssertionError("the request was checked")


class ServedGroups:
    """Finds what serves a part, among ``tables`` as they are now."""

    def __init__(self, tables: Mapping[int, ServedTable]) -> None:
        self.tables = tables
        self._groups: dict[tuple[int, ...], ServedGroup] = {}

    def find(self, part: TablePart) -> ServedTable | ServedGroup:
        """Returns the table of ``part``, or the group of its tables.

        Raises:
            Refused: one does not exist, or they make no group.
        """
        if part.members is None:
            return self.table(part.table_id)
        names = part.members.tables
        found = self._groups.get(names)
        if found is None:
            found = ServedGroup([self.table(table_id) for table_id in names])
            if len(self._groups) >= _MOST_GROUPS:
                self._groups.clear()
            self._groups[names] = found
        return found

    def table(self, table_id: int) -> ServedTable:
        """Returns a table; raises :class:`Refused` if it does not exist."""
        try:
            return self.tables[table_id]
        except KeyError:
            raise Refused(f"table {table_id} does not exist; known are {sorted(self.tables)}.") from None


def _kind(table: ServedSparse) -> tuple[int, int, bool]:
    return table.table.config.dim, table.table.layout.num_weights, table.keeps_shows


def _ends(part: TablePart) -> NDArray[np.int64]:
    assert part.members is not None
    return part.members.ends
