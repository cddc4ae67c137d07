"""RowBlock: some rows of a sparse table outside the table, as arrays, for files and iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleet.ps.table.layout import Float32s, Int64s

MAX_UNSEEN_DAYS = 65535
MAX_ROW_COUNT = 32767
Window = tuple[int, int, int]  # of a walk: sub-shard, first place, last place + 1
Select = npt.NDArray[np.bool_] | Int64s


@dataclass
class Statistics:
    """What an accessor keeps per row: float64 shows and clicks, float32 delta scores, uint32 feature slots."""

    shows: npt.NDArray[np.float64]
    clicks: npt.NDArray[np.float64]
    delta_scores: Float32s
    slots: npt.NDArray[np.uint32]

    def take(self, select: Select) -> Statistics:
        """Returns the rows that ``select`` picks."""
        return Statistics(self.shows[select], self.clicks[select], self.delta_scores[select], self.slots[select])


@dataclass
class RowBlock:
    """Rows in no particular order; all arrays have one element (or line) per row.

    Attributes:
        keys: int64.
        unseen_days: int64, days since the last push, at most 65535.
        counts: int64, pushes so far; exact while not admitted, at most 32767 afterwards.
        admitted: bool; a row that is not admitted yet has a count and nothing else.
        has_embedx: bool; False while the columns after the first do not exist.
        values: float32 [n, row_floats], weights then optimizer state.
        statistics: ``None`` without an accessor.
        stamp: the result of the caller's stamp when the block was copied; 0 without one.
        ranks: int64, when each row was pushed, see :mod:`fleet.ps.table.eviction`; ``None`` in a table without a limit.
    """

    keys: Int64s
    unseen_days: Int64s
    counts: Int64s
    admitted: npt.NDArray[np.bool_]
    has_embedx: npt.NDArray[np.bool_]
    values: Float32s
    statistics: Statistics | None = None
    stamp: int = 0
    ranks: Int64s | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, select: Select) -> RowBlock:
        """Returns the rows that ``select`` (a mask, or places) picks."""
        return RowBlock(
            self.keys[select],
            self.unseen_days[select],
            self.counts[select],
            self.admitted[select],
            self.has_embedx[select],
            self.values[select],
            None if self.statistics is None else self.statistics.take(select),
            self.stamp,
            None if self.ranks is None else self.ranks[select],
        )


def join_blocks(blocks: Sequence[RowBlock]) -> RowBlock:
    """Returns the rows of all blocks as one block with the stamp of the first."""
    if len(blocks) == 1:
        return blocks[0]
    kept = [block.statistics for block in blocks if block.statistics is not None]
    statistics = None
    if kept:
        statistics = Statistics(
            np.concatenate([part.shows for part in kept]),
            np.concatenate([part.clicks for part in kept]),
            np.concatenate([part.delta_scores for part in kept]),
            np.concatenate([part.slots for part in kept]),
        )
    return RowBlock(
        np.concatenate([block.keys for block in blocks]),
        np.concatenate([block.unseen_days for block in blocks]),
        np.concatenate([block.counts for block in blocks]),
        np.concatenate([block.admitted for block in blocks]),
        np.concatenate([block.has_embedx for block in blocks]),
        np.concatenate([block.values for block in blocks]),
        statistics,
        blocks[0].stamp,
        None if any(block.ranks is None for block in blocks) else np.concatenate([block.ranks for block in blocks]),
    )
