"""Columns of numbers and of lists, and the Parquet files that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: the data needs `pip install '.[parquet]'`, run in the clone.") from None

GROUP_ROWS = 50_000


class Lists(NamedTuple):
    """Lists of integers, one a row.

    Args:
        values: int64, those of all rows.
        offsets: int64 [rows + 1], where each row begins and the last one ends.
    """

    values: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def rows(self, kept: NDArray[np.bool_]) -> Lists:
        """Returns the lists of some rows."""
        lengths = np.diff(self.offsets)
        offsets = np.concatenate([[0], np.cumsum(lengths[kept])])
        return Lists(self.values[np.repeat(kept, lengths)], offsets)


Columns: TypeAlias = Mapping[str, NDArray[np.generic] | Lists]


def write_columns(path: Path, columns: Columns) -> None:
    """Writes a Parquet file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: _array(values) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), path, row_group_size=GROUP_ROWS)


def _array(values: NDArray[np.generic] | Lists) -> pa.Array:
    if isinstance(values, Lists):
        return pa.ListArray.from_arrays(pa.array(values.offsets.astype(np.int32)), pa.array(values.values))
    return pa.array(values)
