"""SaveChain: which saves an increment of a table continues, and the ids that it must name as deleted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from fleet.ps.table.layout import Int64s

MOST_DELETED = 1 << 24
_MOST_SAVES = 64


class SaveChain:
    """What the next increment of a table continues.

    An increment has what changed since the last save of mode 1 or 2, so it continues that one, and each whole save
    made since.

    Attributes:
        saves: ids of the saves that the next increment continues; none before the first one.
    """

    def __init__(self) -> None:
        self.saves: list[str] = []
        self._deleted: list[Int64s] = []
        self._meanwhile: list[Int64s] | None = None  # deleted since the save under way began

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Keeps apart, while it is open, the ids that are deleted: the save may have copied their rows before."""
        self._meanwhile = []
        try:
            yield
        finally:
            self._meanwhile = None

    @property
    def deleted(self) -> Int64s:
        """The ids that were deleted since the oldest of :attr:`saves`; some may have a row again."""
        self._deleted = [np.unique(np.concatenate(self._deleted))] if self._deleted else []
        return self._deleted[0] if self._deleted else np.empty(0, np.int64)

    def note_deleted(self, keys: Int64s) -> None:
        """Notes that rows are gone; of too many it forgets the saves: later saves need a new base."""
        if not len(keys):
            return
        if self._meanwhile is not None:
            self._meanwhile.append(np.array(keys, np.int64))
        if not self.saves:
            return
        self._deleted.append(np.array(keys, np.int64))
        if sum(map(len, self._deleted)) > MOST_DELETED and len(self.deleted) > MOST_DELETED // 2:
            self.begin([])

    def begin(self, saves: Sequence[str], deleted: Int64s | None = None) -> None:
        """Continues ``saves`` from here on."""
        self.saves = list(saves)
        self._deleted = [] if deleted is None or not len(deleted) else [deleted]

    def begin_with(self, save: str) -> None:
        """Continues ``save``, which ends now, and names in the next increment the ids that it missed the end of."""
        self.saves = [save]
        self._deleted = list(self._meanwhile or ())

    def add_whole(self, save: str) -> None:
        """Continues ``save``, too, which has every row."""
        if not self.saves:
            self.begin_with(save)
        self.saves = [*(one for one in self.saves if one != save), save][-_MOST_SAVES:]
