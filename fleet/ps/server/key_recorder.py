"""KeyRecorder: which ids have changed since a reader last took them; for workers with rows of their own and for
publishing.

[Note: What a reader has not confirmed is kept]
Changed ids collect per reader and table. :meth:`KeyRecorder.move` hands them out and holds them; they are dropped by
:meth:`~KeyRecorder.forget`, when the reader has them for certain, or become changed again by
:meth:`~KeyRecorder.put_back`. A snapshot captures both kinds, so after a restart a reader may be told of an id twice
and never too seldom.

[Note: Who is told of what]
An addition (geo) is noted for all other workers, always: it is in the journal, and so is noted again after a restart.
A push is noted for the workers that watch the table, also for its sender. Nothing keeps that they watch: the
question that a worker asks next begins it anew, and the answer says that the worker must read all rows once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
TOUCHED, GONE = -1, -2  # readers beside the workers' ranks: what publishing must send as rows, and as deleted
_LOOSE = 1 << 16


class _KeySet:
    """Distinct ids; arrays collect until they are as long as the merged ids, so an id is merged a few times only."""

    def __init__(self) -> None:
        self._arrays: list[Keys] = []
        self._merged = self._loose = 0

    def __len__(self) -> int:
        """The number of ids, repeated ones that are not merged yet included."""
        return self._merged + self._loose

    def add(self, keys: Keys) -> None:
        self._arrays.append(keys)
        self._loose += len(keys)
        if self._loose > max(_LOOSE, self._merged) or len(self._arrays) > _LOOSE:
            self.sorted()

    def sorted(self) -> Keys:
        if self._loose or len(self._arrays) > 1:
            keys = np.concatenate(self._arrays)
            keys.sort()  # np.unique takes four times as long for the ids of a step
            repeated = keys[1:] == keys[:-1]
            self._arrays = [np.delete(keys, np.flatnonzero(repeated)) if np.count_nonzero(repeated) else keys]
        self._merged = len(self._arrays[0]) if self._arrays else 0
        self._loose = 0
        return self._arrays[0] if self._arrays else np.empty(0, np.int64)


class KeyRecorder:
    """Keeps, per reader and table, the ids that have changed. The caller does the locking.

    A geo worker numbers its questions. The ids of an answer are kept until the next number comes, so an answer that was
    lost can be repeated, with the values of that moment.

    Example:
        >>> recorder = KeyRecorder()
        >>> recorder.mark([1], table_id=1, keys=np.array([5, 7]))
        >>> recorder.take(reader=1, table_id=1, number=1).tolist(), recorder.take(0, 1, 1).tolist()
        ([5, 7], [])
    """

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], _KeySet] = {}
        self._held: dict[tuple[int, int], _KeySet] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._watched: dict[int, dict[int, int]] = {}  # by table, the readers, each since which question
        self.takes = 0  # so far

    def watch(self, reader: int, table_id: int, number: int) -> bool:
        """Makes pushes to a table be noted for ``reader``; returns whether question ``number`` began that.

        What was noted before is dropped then: the reader must read all rows.
        """
        readers = self._watched.setdefault(table_id, {})
        if reader not in readers:
            self._omit((reader, table_id))
            readers[reader] = number
        return readers[reader] == number

    def end_watch(self, reader: int) -> None:
        """Notes no more pushes for ``reader``, which has left or is not heard."""
        for table_id in self.watched_by(reader):
            del self._watched[table_id][reader]
            self._omit((reader, table_id))
        self._watched = {table_id: readers for table_id, readers in self._watched.items() if readers}

    def _omit(self, place: tuple[int, int]) -> None:
        for kept in (self._pending, self._held, self._numbers):
            kept.pop(place, None)

    @property
    def is_watched(self) -> bool:
        """Whether anybody watches a table."""
        return bool(self._watched)

    def watching(self, table_id: int) -> list[int]:
        """Returns who watches a table."""
        return list(self._watched.get(table_id, ()))

    def watched_by(self, reader: int) -> list[int]:
        """Returns which tables ``reader`` watches."""
        return [table_id for table_id, readers in self._watched.items() if reader in readers]

    def mark(self, readers: Iterable[int], table_id: int, keys: Keys) -> None:
        """Notes for ``readers`` that ``keys`` have changed; the array is kept and must not change afterwards."""
        for reader in readers:
            self._pending.setdefault((reader, table_id), _KeySet()).add(keys)

    def take(self, reader: int, table_id: int, number: int) -> Keys:
        """Returns the sorted ids for question ``number`` of ``reader``; a new number confirms the one before."""
        place = (reader, table_id)
        self.takes += 1
        if self._numbers.get(place) != number:
            self._numbers[place] = number
            self._held[place] = self._pending.pop(place, _KeySet())
        return self._held[place].sorted()

    def move(self, reader: int, table_id: int) -> Keys:
        """Returns the sorted ids that changed since the last call; they are held with those of earlier calls."""
        keys = self._pending.pop((reader, table_id), _KeySet()).sorted()
        if len(keys):
            self._held.setdefault((reader, table_id), _KeySet()).add(keys)
        return keys

    def put_back(self, *readers: int) -> None:
        """Makes the ids held for ``readers`` changed again: the readers did not get them."""
        for place in [place for place in self._held if place[0] in readers]:
            self._pending.setdefault(place, _KeySet()).add(self._held.pop(place).sorted())

    def forget(self, *readers: int) -> None:
        """Drops the ids held for ``readers``: the readers have them."""
        for place in [place for place in self._held if place[0] in readers]:
            del self._held[place]

    def drop(self, *readers: int) -> None:
        """Drops everything that is kept for ``readers``."""
        self.put_back(*readers)
        for place in [place for place in self._pending if place[0] in readers]:
            del self._pending[place]

    def count(self, *readers: int) -> int:
        """Returns how many ids ``readers`` do not have for certain; an id may count several times."""
        return sum(
            len(keys)
            for places in (dict(self._pending), dict(self._held))
            for place, keys in places.items()
            if place[0] in readers
        )

    def capture(self) -> dict[tuple[int, int], Keys]:
        """Returns the ids each reader may not have yet, by (reader, table); not those of who watches a table."""
        captured = {}
        watched = {(reader, table_id) for table_id, readers in self._watched.items() for reader in readers}
        for place in {*self._pending, *self._held} - watched:
            found = [kept[place].sorted() for kept in (self._pending, self._held) if place in kept]
            keys = found[0] if len(found) == 1 else np.unique(np.concatenate(found))
            if len(keys):
                captured[place] = keys
        return captured

    def restore(self, captured: dict[tuple[int, int], Keys]) -> None:
        """Takes over what :meth:`capture` returned."""
        self._held.clear()
        self._numbers.clear()
        self._watched.clear()
        self._pending = {}
        for place, keys in captured.items():
            self._pending.setdefault(place, _KeySet()).add(keys)
