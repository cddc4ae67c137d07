"""GeoRecorder: which rows the other workers have changed since a worker last asked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["GeoRecorder"]

_MERGE_AT = 64

Keys = NDArray[np.int64]


class GeoRecorder:
    """Keeps, per worker and table, the ids that others added to.

    A worker numbers its questions. The ids of one answer are kept until the next number comes, so that an answer
    which was lost on its way is given again, with the values of that moment. The caller does the locking.

    Example:
        >>> recorder = GeoRecorder(2)
        >>> recorder.mark(rank=0, table_id=1, keys=np.array([5, 7]))
        >>> recorder.take(rank=1, table_id=1, number=1).tolist(), recorder.take(0, 1, 1).tolist()
        ([5, 7], [])
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pending: dict[tuple[int, int], list[Keys]] = {}
        self._answered: dict[tuple[int, int], tuple[int, Keys]] = {}

    def mark(self, rank: int, table_id: int, keys: Keys) -> None:
        """Notes that worker ``rank`` changed ``keys``; the array is kept and must not change afterwards."""
        for other in range(self._num_workers):
            if other == rank:
                continue
            lists = self._pending.setdefault((other, table_id), [])
            lists.append(keys)
            if len(lists) >= _MERGE_AT:
                lists[:] = [np.unique(np.concatenate(lists))]

    def take(self, rank: int, table_id: int, number: int) -> Keys:
        """Returns the sorted ids for question ``number`` of worker ``rank``."""
        place = (rank, table_id)
        answered = self._answered.get(place)
        if answered is not None and answered[0] == number:
            return answered[1]
        lists = self._pending.pop(place, [])
        keys = np.unique(np.concatenate(lists)) if lists else np.empty(0, np.int64)
        self._answered[place] = (number, keys)
        return keys

    def capture(self) -> dict[tuple[int, int], Keys]:
        """Returns the ids each worker may not have yet, by (rank, table)."""
        captured = {}
        for place in {*self._pending, *self._answered}:
            lists = [*self._pending.get(place, [])]
            if place in self._answered:
                lists.append(self._answered[place][1])
            keys = np.unique(np.concatenate(lists)) if lists else np.empty(0, np.int64)
            if len(keys):
                captured[place] = keys
        return captured

    def restore(self, captured: dict[tuple[int, int], Keys]) -> None:
        """Takes over what :meth:`capture` returned."""
        self._answered.clear()
        self._pending = {place: [keys] for place, keys in captured.items()}
